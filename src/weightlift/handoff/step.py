"""A colocated step, arrow by arrow: the order of phases.py, done with a trainer's offload, an engine, a barrier and a ledger.

Owns: which call belongs to which arrow, and what is booked after it. Must not know: representations, how an engine is reached. The
caller says when; this object says whether, does it, and writes it down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, TypeVar

import torch

from weightlift.errors import TornWeights, WeightliftError
from weightlift.handoff.barrier import Barrier
from weightlift.handoff.ledger import Ledger
from weightlift.handoff.phases import StepEvent, StepOrder, StepStage
from weightlift.handoff.sleep import SleepLevel

__all__ = ["ColocatedStep", "EngineControl", "release_cached_memory"]

_T = TypeVar("_T")


_LEAVING: Final = frozenset({StepStage.SYNCED, StepStage.OFFLOADED, StepStage.SETTLED, StepStage.MET})


class EngineControl(Protocol):
    """The engines of this step, as the trainer reaches them. Each call returns when it is done, on all of them."""

    def sleep(self, level: SleepLevel) -> None:
        """Release the KV cache; offload or discard the weights."""

    def wake_weights(self) -> None:
        """Device memory for the weights."""

    def wake_kv_cache(self) -> None:
        """Device memory for the KV cache."""


class Movable(Protocol):
    """A trainer's memory; Offload is one."""

    @property
    def offloaded(self) -> bool:
        """Whether it is on the host."""

    @property
    def host_bytes(self) -> int:
        """Bytes on the host now."""

    def offload(self) -> int:
        """To the host; returns the bytes."""

    def load(self) -> int:
        """Back."""


def release_cached_memory() -> None:
    """Give cached blocks back to the device: the light release. Never a full collection: it costs time here and frees nothing."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class ColocatedStep:
    """The hand-over of one rank.

    Args:
        offload: of this rank's trainer. barrier: of all ranks on these devices. ledger: of this rank.
        engine: on the rank that reaches the engines; None on the others, which move with it.
        level: how deep the engine sleeps while the trainer trains.
        barrier_s: how long a rank waits for the others before the KV cache wakes.
    """

    def __init__(
        self,
        offload: Movable,
        barrier: Barrier,
        ledger: Ledger,
        engine: EngineControl | None,
        *,
        level: SleepLevel = SleepLevel.DISCARD,
        barrier_s: float = 60.0,
    ) -> None:
        self._offload = offload
        self._barrier = barrier
        self._engine = engine
        self._level = level
        self._barrier_s = barrier_s
        self.ledger = ledger
        self.order = StepOrder()
        self._asleep = SleepLevel.DISCARD  # what an engine was built with is never served

    def _arrow(self, event: StepEvent, action: Callable[[], _T]) -> _T:
        """Check, do, move, book."""
        self.order.check(event)
        result = action()
        self.order.on(event)
        self.ledger.book(event.name.lower(), host_bytes=self._offload.host_bytes)
        return result

    def wake_weights(self) -> None:
        """The trainer's temporaries go, the engine's weights get memory."""
        self._arrow(StepEvent.RELEASE, release_cached_memory)
        event = StepEvent.WAKE_EMPTY if self._asleep is SleepLevel.DISCARD else StepEvent.WAKE_WEIGHTS
        self._arrow(event, lambda: None if self._engine is None else self._engine.wake_weights())

    def publish(self, publish: Callable[[], _T]) -> _T:
        """A sync. If it tears the engine, the order knows: the KV cache stays asleep until one commits."""
        try:
            return self._arrow(StepEvent.PUBLISH, publish)
        except WeightliftError as error:
            if self.order.stage in (StepStage.HOLDING, StepStage.EMPTY) and _may_have_torn(error):
                self.order.on(StepEvent.TORN)
            raise

    def reuse(self) -> None:
        """No sync: the engine wakes with the weights that it had. OutOfOrder if they were discarded."""
        self.wake_weights()
        self._arrow(StepEvent.REUSE, lambda: None)
        self.wake_kv_cache()

    def wake_kv_cache(self) -> None:
        """The trainer leaves, every rank says that its memory is free, the KV cache wakes.

        After a failure it may be called again: it goes on where it stopped.
        """
        if self.order.stage not in _LEAVING:
            self.order.check(StepEvent.WAKE_KV)
        failure: BaseException | None = None
        try:
            if self.order.stage is StepStage.SYNCED:
                self._arrow(StepEvent.OFFLOAD, self._offload.offload)
            if self.order.stage is StepStage.OFFLOADED:
                self._arrow(StepEvent.SETTLE, _settle)
        except Exception as error:  # the others are waiting at the barrier: they learn why this rank does not come
            failure = error
        if failure is not None:
            self._barrier.meet(self._barrier_s, failure=failure)
        if self.order.stage is StepStage.SETTLED:
            self._arrow(StepEvent.MEET, lambda: self._barrier.meet(self._barrier_s))
        self._arrow(StepEvent.WAKE_KV, lambda: None if self._engine is None else self._engine.wake_kv_cache())

    def back_to_training(self) -> None:
        """The engine sleeps, every rank knows it, the trainer comes back. May be called again after a failure, as wake_kv_cache."""
        failure: BaseException | None = None
        if self.order.stage is not StepStage.EVICTED:
            shared = StepStage.EVICTED is self.order.check(StepEvent.SLEEP)  # elsewhere no rank has left, and none waits
            try:
                self._arrow(StepEvent.SLEEP, lambda: None if self._engine is None else self._engine.sleep(self._level))
                self._asleep = self._level
            except Exception as error:  # the others are waiting at the barrier: they learn why this rank does not come
                if not shared:
                    raise
                failure = error
        if failure is not None or self.order.stage is StepStage.EVICTED:
            self._barrier.meet(self._barrier_s, failure=failure)
            self._arrow(StepEvent.LOAD, self._load)

    def _load(self) -> None:
        if self._offload.offloaded:
            self._offload.load()


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    release_cached_memory()


def _may_have_torn(error: WeightliftError) -> bool:
    """Whether an engine may hold a mixture after a failed sync: unless the report says that all still serve something."""
    if isinstance(error, TornWeights) or error.report is None:
        return True
    return any(version is None for version in error.report.replicas.values())
