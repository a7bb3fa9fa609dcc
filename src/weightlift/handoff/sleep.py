"""An engine's memory while it does not generate: what is offloaded, what is discarded, what comes back from where.

Owns: `EngineMemory`, which engines implement, `Sleeper`, which makes it safe, and `ModuleMemory` for engines that are a torch
module. Must not know: phases, trainers, how a sync works.

    AWAKE --sleep(1)--> weights on the host, KV cache released   --wake_weights--> whole again, serves what it served
    AWAKE --sleep(2)--> weights discarded, KV cache released     --wake_weights--> memory without content: refuses to generate
                                                                                    until a full sync has committed
    a KV cache is empty whenever it wakes

What a sync does not send (buffers that no checkpoint has, scales of a KV cache) is kept on the host through a discard, and put
back.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import torch

from weightlift.errors import ConfigError, OutOfOrder
from weightlift.handoff.storages import storage_bytes, to_host
from weightlift.loaders.base import Loader
from weightlift.modules import transient_buffers, walk
from weightlift.protocol.plan import Bucket, Plan
from weightlift.tensors import Witnessed

__all__ = ["EngineMemory", "ModuleMemory", "Serving", "SleepLevel", "Sleeper"]


class SleepLevel(enum.IntEnum):
    """How deep; the numbers are those that engines use."""

    OFFLOAD = 1
    DISCARD = 2


class EngineMemory(Protocol):
    """What an engine can do with its memory. The calls come in legal orders only (Sleeper), from one thread."""

    def release_kv_cache(self) -> None:
        """Give the KV cache's memory back. Returns when it is free, not when that was asked for."""

    def allocate_kv_cache(self) -> None:
        """Take memory for an empty KV cache."""

    def offload_weights(self) -> None:
        """Weights to the host."""

    def discard_weights(self) -> None:
        """Drop the weights; keep on the host what a sync does not send."""

    def allocate_weights(self) -> None:
        """Memory for the weights, at the level that they were put to sleep: their content, or none, and what was kept."""


class Serving(Protocol):
    """What a sleeper needs of a Subscriber."""

    def discard(self) -> None:
        """The weights are about to be given away."""

    def ensure_serving(self) -> int:
        """The version that may be generated with; raises if there is none."""


class Sleeper:
    """An engine's memory and its subscriber, kept in step.

    Args:
        memory: the engine's. subscriber: whose loader is `loader(...)` of this sleeper; None until `attach`.

    Raises OutOfOrder for what cannot be done in the present state; nothing has changed then.
    """

    def __init__(self, memory: EngineMemory, subscriber: Serving | None = None) -> None:
        self._memory = memory
        self._subscriber = subscriber
        self._weights: SleepLevel | None = None
        self._kv = True

    def attach(self, subscriber: Serving) -> Sleeper:
        """Name the subscriber whose weights these are."""
        self._subscriber = subscriber
        return self

    @property
    def weights_awake(self) -> bool:
        """Whether the weights have device memory."""
        return self._weights is None

    @property
    def kv_awake(self) -> bool:
        """Whether the KV cache has device memory."""
        return self._kv

    def loader(self, inner: Loader) -> Loader:
        """The engine's loader, which refuses a sync while the weights are asleep: before any byte."""
        return _AwakeLoader(self, inner)

    def sleep(self, level: SleepLevel | int) -> None:
        """Release the KV cache, and offload or discard the weights."""
        try:
            level = SleepLevel(level)
        except ValueError:
            raise ConfigError(f"level must be 1 (offload) or 2 (discard), got {level!r}") from None
        if self._weights is not None:
            raise OutOfOrder(f"the engine's weights are asleep already (level {self._weights:d})")
        if self._kv:
            self._memory.release_kv_cache()
            self._kv = False
        if level is SleepLevel.DISCARD:
            if self._subscriber is not None:
                self._subscriber.discard()  # first: from here on nothing may be generated, whatever comes next
            self._memory.discard_weights()
        else:
            self._memory.offload_weights()
        self._weights = level

    def wake_weights(self) -> None:
        """Give the weights device memory. After level 2 they are empty: `ensure_ready` refuses until a full sync."""
        if self._weights is None:
            return  # a second call of the same wake-up does no harm
        self._memory.allocate_weights()
        self._weights = None

    def wake_kv_cache(self) -> None:
        """Give the KV cache device memory; OutOfOrder while the weights are asleep or not whole."""
        if self._kv:
            return
        if self._weights is not None:
            raise OutOfOrder("the KV cache cannot wake before the weights", remedy="wake the weights and sync them first.")
        if self._subscriber is not None:
            self._subscriber.ensure_serving()
        self._memory.allocate_kv_cache()
        self._kv = True

    def ensure_ready(self) -> int:
        """The version to generate with; OutOfOrder while anything is asleep, TornWeights or LocalProtocolError as of ensure_serving."""
        if self._weights is not None or not self._kv:
            what = "weights" if self._weights is not None else "KV cache"
            raise OutOfOrder(f"the engine cannot generate: its {what} {'are' if what == 'weights' else 'is'} asleep")
        return -1 if self._subscriber is None else self._subscriber.ensure_serving()


class _AwakeLoader:
    """A loader in front of a loader."""

    def __init__(self, sleeper: Sleeper, inner: Loader) -> None:
        self._sleeper = sleeper
        self._inner = inner
        self.caches_views = getattr(inner, "caches_views", False)

    def prepare(self, plan: Plan) -> None:
        if not self._sleeper.weights_awake:
            raise OutOfOrder(
                "a sync was announced while this engine's weights are asleep",
                remedy="wake the weights (not the KV cache) before publish.",
            )
        self._inner.prepare(plan)

    def live(self) -> Mapping[str, Sequence[torch.Tensor | Witnessed]]:
        return self._inner.live()

    def install(self, bucket: Bucket, memory: torch.Tensor) -> None:
        self._inner.install(bucket, memory)

    def finish(self) -> None:
        self._inner.finish()

    def commit(self, version: int) -> None:
        self._inner.commit(version)

    def abort(self) -> None:
        self._inner.abort()


_KEEP_NOTHING: Final[Mapping[str, torch.Tensor]] = {}


class ModuleMemory:
    """The memory of an engine that is a torch module (Hugging Face `generate`), without a KV cache between requests.

    Args:
        module: its parameters and persistent buffers are what a sync sends. kv_bytes: what a KV cache would take, for a ledger.
        keep: tensors outside of the module that live in discarded memory, by name (scales, for example).
    """

    def __init__(self, module: torch.nn.Module, *, kv_bytes: int = 0, keep: Mapping[str, torch.Tensor] = _KEEP_NOTHING) -> None:
        self._module = module
        self._keep = dict(keep)
        self._kept: dict[str, torch.Tensor] = {}
        self._storages: list[tuple[torch.UntypedStorage, int, torch.Tensor | None]] = []
        self.kv_bytes = kv_bytes
        self.kv_resident = kv_bytes

    def weight_bytes(self) -> int:
        """Bytes of weights that are resident now."""
        return sum(storage.nbytes() for storage in self._all())

    def _all(self) -> list[torch.UntypedStorage]:
        found = dict[int, torch.UntypedStorage]()
        for slot in walk(self._module):
            storage = slot.tensor.untyped_storage()
            found.setdefault(storage._cdata, storage)
        return list(found.values())

    def release_kv_cache(self) -> None:
        """See EngineMemory."""
        self.kv_resident = 0

    def allocate_kv_cache(self) -> None:
        """See EngineMemory."""
        self.kv_resident = self.kv_bytes

    def offload_weights(self) -> None:
        """See EngineMemory."""
        self._storages = [(storage, storage.nbytes(), to_host(storage)) for storage in self._all()]
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies are only queued: their sources may go when they are done
        self._shrink()

    def discard_weights(self) -> None:
        """See EngineMemory."""
        sent = {storage._cdata for storage in self._all()}
        for name, tensor in self._unsent():
            if tensor.untyped_storage()._cdata in sent:
                self._kept[name] = tensor.to("cpu", copy=True)
        self._storages = [(storage, storage.nbytes(), None) for storage in self._all()]
        self._shrink()

    def _unsent(self) -> list[tuple[str, torch.Tensor]]:
        return [*self._keep.items(), *transient_buffers(self._module)]

    def _shrink(self) -> None:
        for storage, _, _ in self._storages:
            storage.resize_(0)

    @torch.no_grad()
    def allocate_weights(self) -> None:
        """See EngineMemory. Memory without content is filled with NaN bytes: a tensor that no sync fills is found, not trusted."""
        for storage, nbytes, host in self._storages:
            storage.resize_(nbytes)
            memory = storage_bytes(storage)
            if host is None:
                memory.fill_(0xFF)
            else:
                memory.copy_(host)
        self._storages = []
        for name, tensor in self._unsent():
            if name in self._kept:
                tensor.copy_(self._kept.pop(name))
