"""Memory that is booked on the simulated device as it moves, so that a run on a machine without a GPU has a real budget to break.

Owns: the two places where a run books: a trainer's offload and an engine's memory. Must not know: steps. On a real device nothing
is
booked: the allocator counts.
"""

from __future__ import annotations

import torch

from weightlift.handoff import ModuleMemory, Offload, SimulatedDevice

__all__ = ["BookedMemory", "BookedOffload"]


class BookedMemory(ModuleMemory):
    """An engine's memory. What does not fit is refused before it is allocated."""

    def __init__(self, module: torch.nn.Module, kv_bytes: int, device: SimulatedDevice | None) -> None:
        super().__init__(module, kv_bytes=kv_bytes)
        self._device = device
        self._whole_bytes = self.weight_bytes()

    def _hold(self, what: str, nbytes: int) -> None:
        if self._device is not None:
            self._device.hold(what, nbytes)

    def release_kv_cache(self) -> None:
        """See EngineMemory."""
        super().release_kv_cache()
        self._hold("kv_cache", 0)

    def allocate_kv_cache(self) -> None:
        """See EngineMemory."""
        self._hold("kv_cache", self.kv_bytes)
        super().allocate_kv_cache()

    def offload_weights(self) -> None:
        """See EngineMemory."""
        super().offload_weights()
        self._hold("weights", 0)

    def discard_weights(self) -> None:
        """See EngineMemory."""
        super().discard_weights()
        self._hold("weights", 0)

    def allocate_weights(self) -> None:
        """See EngineMemory."""
        self._hold("weights", self._whole_bytes)
        super().allocate_weights()


class BookedOffload:
    """A trainer's offload that books what is resident; `book` is called when a step has made more of it (optimizer state)."""

    def __init__(self, inner: Offload, device: SimulatedDevice | None) -> None:
        self._inner = inner
        self._device = device
        self.book()

    def book(self) -> None:
        """Hold what is resident now."""
        if self._device is not None:
            self._device.hold("trainer", self._inner.resident_bytes())

    @property
    def offloaded(self) -> bool:
        """Whether the memory is on the host now."""
        return self._inner.offloaded

    @property
    def host_bytes(self) -> int:
        """Bytes on the host now."""
        return self._inner.host_bytes

    def offload(self) -> int:
        """To the host."""
        count = self._inner.offload()
        self.book()
        return count

    def load(self) -> int:
        """Back; refused before it is allocated if it does not fit."""
        if self._device is not None:
            self._device.hold("trainer", self._inner.host_bytes)
        return self._inner.load()
