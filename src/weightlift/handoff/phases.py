"""The order of a colocated step: trainer and engine take turns on the same devices. Pure: a table, and one object that obeys it.

Owns: stages, events, the table, the one error for an illegal order. Must not know: torch, processes, how anything is done.

    engine asleep -> trainer step -> light cache release -> wake weights -> publish -> offload trainer -> device sync and light
    release
                  -> cross-rank barrier -> wake KV cache -> generate -> sleep engine -> load trainer

What an arrow does may fail: then the stage stays what it was, and what is legal there may be tried again. Nothing goes on by
itself: a KV cache is never woken in a `finally`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from weightlift.errors import OutOfOrder

__all__ = ["STEP_LAW", "StepEvent", "StepOrder", "StepStage"]


class StepStage(enum.Enum):
    """Where a colocated step stands."""

    TRAINING = "the engine is asleep, the trainer has the devices"
    RELEASED = "the trainer's temporaries are given back"
    HOLDING = "the engine's weights are awake and hold a whole version"
    EMPTY = "the engine's weights are awake and hold nothing: they were discarded, or a sync failed"
    SYNCED = "the engine holds the version that may be generated with"
    OFFLOADED = "the trainer's parameters, gradients and optimizer state are on the host"
    SETTLED = "devices synchronised, caches released: the memory is really free"
    MET = "every rank said so"
    GENERATING = "the KV cache is awake"
    EVICTED = "the engine is asleep, the trainer still on the host"


class StepEvent(enum.Enum):
    """What is done next, and by whom."""

    RELEASE = "trainer: release cached blocks, without a full collection"
    WAKE_WEIGHTS = "engine: weights back into device memory"
    WAKE_EMPTY = "engine: device memory for weights that were discarded"
    PUBLISH = "trainer and engine: a sync that committed"
    TORN = "trainer and engine: a sync that failed after its first byte"
    REUSE = "nobody: the old version is generated with once more"
    OFFLOAD = "trainer: parameters, gradients, optimizer state to the host"
    SETTLE = "trainer: device synchronised, cached blocks released"
    MEET = "all ranks: roll call"
    WAKE_KV = "engine: KV cache"
    SLEEP = "engine: KV cache released, weights offloaded or discarded"
    LOAD = "trainer: back onto the device"


_S, _E = StepStage, StepEvent

STEP_LAW: Final[Mapping[StepStage, Mapping[StepEvent, StepStage]]] = {
    _S.TRAINING: {_E.RELEASE: _S.RELEASED},
    _S.RELEASED: {_E.RELEASE: _S.RELEASED, _E.WAKE_WEIGHTS: _S.HOLDING, _E.WAKE_EMPTY: _S.EMPTY},
    _S.HOLDING: {_E.PUBLISH: _S.SYNCED, _E.TORN: _S.EMPTY, _E.REUSE: _S.SYNCED, _E.SLEEP: _S.TRAINING},
    _S.EMPTY: {_E.PUBLISH: _S.SYNCED, _E.TORN: _S.EMPTY, _E.SLEEP: _S.TRAINING},
    _S.SYNCED: {_E.OFFLOAD: _S.OFFLOADED, _E.SLEEP: _S.TRAINING},
    _S.OFFLOADED: {_E.SETTLE: _S.SETTLED, _E.SLEEP: _S.EVICTED},
    _S.SETTLED: {_E.MEET: _S.MET, _E.SLEEP: _S.EVICTED},
    _S.MET: {_E.WAKE_KV: _S.GENERATING, _E.SLEEP: _S.EVICTED},
    _S.GENERATING: {_E.SLEEP: _S.EVICTED},
    _S.EVICTED: {_E.LOAD: _S.TRAINING},
}

_NEED: Final[Mapping[StepEvent, str]] = {
    _E.WAKE_KV: "the KV cache wakes after every rank has offloaded and met: a leader that is early runs another rank out of memory",
    _E.PUBLISH: "the engine's weights must be awake: a sync into weights that are asleep has nowhere to go",
    _E.MEET: "ranks meet when their memory is really free: offload, then settle, first",
    _E.LOAD: "the trainer comes back when the engine is asleep",
    _E.REUSE: "the engine's weights were discarded: only a full sync makes them whole",
    _E.OFFLOAD: "the trainer's parameters are the source of the sync: they leave after it has committed",
}


class StepOrder:
    """Where one step stands on this rank; every rank has its own and moves it alike."""

    __slots__ = ("stage",)

    def __init__(self, stage: StepStage = StepStage.TRAINING) -> None:
        self.stage = stage

    def check(self, event: StepEvent) -> StepStage:
        """The stage that an event leads to; OutOfOrder if it is not legal now. Nothing changes."""
        row = STEP_LAW[self.stage]
        if event not in row:
            legal = ", ".join(e.name for e in row)
            raise OutOfOrder(
                f"{event.name} is not possible now: {self.stage.name} ({self.stage.value})",
                remedy=f"{_NEED.get(event, 'see docs/handoff.md for the order')}; possible now: {legal}.",
            )
        return row[event]

    def on(self, event: StepEvent) -> None:
        """An event happened; call it after what it stands for has succeeded."""
        self.stage = self.check(event)
