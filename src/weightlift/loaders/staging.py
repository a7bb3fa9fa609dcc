"""Whole tensors out of pieces, for engines that take nothing less: assembled in memory of their own, handed over in groups.

Owns: the memory, which groups are complete, how much is in flight. Must not know: what a group is for, who takes it.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from weightlift.copies import CopyList, uses
from weightlift.errors import LoaderError
from weightlift.protocol.manifest import Entry
from weightlift.protocol.plan import Piece
from weightlift.tensors import bucket_view, tensor_view, torch_dtype

__all__ = ["FLUSH_BYTES", "Staging"]

FLUSH_BYTES: Final = 32 * 2**20
"""Complete groups are handed over when they are this many bytes together: calling an engine's loader costs a walk over its
parameters, which small modules should share."""


class Staging:
    """The tensors of one round that are not copied straight into the engine.

    Args:
        entries: by name. groups: group -> the names that it needs all at once; a name may be in several groups.
        device: where they are assembled. take: called with complete groups, {group: {name: tensor}}; may keep nothing.
    """

    def __init__(
        self,
        entries: Mapping[str, Entry],
        groups: Mapping[str, Sequence[str]],
        device: torch.device,
        take: Callable[[Mapping[str, Mapping[str, torch.Tensor]]], None],
    ) -> None:
        self._entries = dict(entries)
        self._groups = {group: tuple(names) for group, names in groups.items()}
        self._device = device
        self._take = take
        self._of: dict[str, list[str]] = {}
        for group, names in self._groups.items():
            for name in names:
                self._of.setdefault(name, []).append(group)
        self._free: dict[int, list[torch.Tensor]] = {}
        self._held: dict[str, torch.Tensor] = {}
        self._reset()

    def _reset(self) -> None:
        self._held.clear()
        self._left = {name: self._entries[name].nbytes for name in self._of}
        self._open = {group: sum(self._left[name] > 0 for name in names) for group, names in self._groups.items()}
        self._users = {name: len(groups) for name, groups in self._of.items()}
        self._coming = collections.Counter(self._entries[name].nbytes for name in self._of)
        self._ready: list[str] = [group for group, count in self._open.items() if not count]
        self._ready_bytes = 0
        self.peak_bytes = 0

    def begin(self) -> None:
        """A round begins."""
        self._reset()

    @property
    def groups(self) -> tuple[str, ...]:
        """All groups."""
        return tuple(self._groups)

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def put(self, entry: Entry, piece: Piece, memory: torch.Tensor) -> torch.Tensor | None:
        """Copy a piece out of a bucket; the whole tensor when it is complete, else None."""
        tensor = self._held.get(entry.name)
        if tensor is None:
            tensor = self._held[entry.name] = self._allocate(entry)
        CopyList([(tensor_view(tensor, piece), bucket_view(memory, entry, piece))]).run()
        self._left[entry.name] -= piece.nbytes
        if self._left[entry.name]:
            return None
        for group in self._of[entry.name]:
            self._open[group] -= 1
            if not self._open[group]:
                self._ready.append(group)
                self._ready_bytes += sum(self._entries[name].nbytes for name in self._groups[group])
        return tensor

    def flush(self, *, at_least: int = FLUSH_BYTES) -> None:
        """Hand the complete groups over, if they are `at_least` so many bytes."""
        if not self._ready or self._ready_bytes < at_least:
            return
        groups, self._ready, self._ready_bytes = self._ready, [], 0
        for group in groups:
            for name in self._groups[group]:
                if not self._entries[name].nbytes:
                    self._held.setdefault(name, self._allocate(self._entries[name]))
        self._take({group: {name: self._held[name] for name in self._groups[group]} for group in groups})
        for group in groups:
            for name in self._groups[group]:
                self._users[name] -= 1
                if not self._users[name]:
                    self._recycle(name)

    def finish(self) -> None:
        """Hand over what is left; LoaderError if a tensor is not complete."""
        incomplete = [name for name, left in self._left.items() if left]
        if incomplete:
            raise LoaderError(f"{len(incomplete)} tensors did not arrive completely", tensor=incomplete[0])
        self.flush(at_least=0)

    def clear(self) -> None:
        """Give all memory back."""
        self._held.clear()
        self._free.clear()

    def _allocate(self, entry: Entry) -> torch.Tensor:
        # Touching new memory costs more than copying into it: layers are alike, so the next one gets the last one's.
        self._coming[entry.nbytes] -= 1
        free = self._free.get(entry.nbytes)
        flat = free.pop() if free else torch.empty(entry.nbytes, dtype=torch.uint8, device=self._device)
        held = sum(tensor.nbytes for tensor in self._held.values()) + entry.nbytes
        self.peak_bytes = max(self.peak_bytes, held + sum(size * len(some) for size, some in self._free.items()))
        return flat.view(torch_dtype(entry.dtype)).view(entry.shape)

    def _recycle(self, name: str) -> None:
        tensor = self._held.pop(name)
        flat = tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor
        del tensor
        free = self._free.setdefault(flat.numel(), [])
        if flat.numel() and len(free) < self._coming[flat.numel()] and uses(flat) == 1:  # not kept by whoever took it
            free.append(flat)
