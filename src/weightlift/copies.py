"""Copies that are planned once and run many times.

Owns: `CopyList`, which kernel does which copy, how many hold a piece of memory. Must not know: pieces, buckets, who owns the two sides.
Used by the packer (tensors into a bucket) and by in-place loaders (a bucket into tensors).

On the CPU a contiguous copy without a cast goes through `memmove`: one thread, no interpreter lock, no OpenMP team. torch's own
copy wakes a team of threads for every tensor of more than 32 Ki elements, in trainer and engine at the same time; on a machine
whose cores are busy with the other process that costs more than it saves (docs/benchmarks/shm.md). All other copies go out as one
`torch._foreach_copy_`: strided ones, casts, devices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Final

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["CopyList", "check_storage", "uses"]

_memmove: Final = ctypes.memmove


class CopyList:
    """An ordered list of copies. The tensors are kept alive; their storage must not move while the list is in use.

    Args:
        pairs: (into, out of), equal shapes; dtypes may differ, which casts.
        live: whether `into` are an engine's tensors, whose autograd graphs have to notice; memory of a bucket has none.
    """

    __slots__ = ("_into", "_keep", "_moved", "_moves", "_out_of")

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], *, live: bool = False) -> None:
        self._keep = list(pairs)
        self._moves: list[tuple[int, int, int]] = []
        self._moved: list[torch.Tensor] = []  # memmove does not tell autograd
        self._into: list[torch.Tensor] = []
        self._out_of: list[torch.Tensor] = []
        for into, out_of in self._keep:
            for tensor in (into, out_of):
                check_storage(tensor)
            if _plain(into, out_of):
                if live and not into.is_inference():
                    self._moved.append(into)
                self._move(into.data_ptr(), out_of.data_ptr(), into.numel() * into.element_size())
            else:
                self._into.append(into)
                self._out_of.append(out_of)

    def _move(self, into: int, out_of: int, nbytes: int) -> None:
        """Add a move; one that continues the last on both sides is joined with it."""
        if self._moves:
            last_into, last_out_of, last_bytes = self._moves[-1]
            if (last_into + last_bytes, last_out_of + last_bytes) == (into, out_of):
                self._moves[-1] = (last_into, last_out_of, last_bytes + nbytes)
                return
        self._moves.append((into, out_of, nbytes))

    @torch.no_grad()
    def run(self) -> None:
        """Do all copies."""
        for into, out_of, nbytes in self._moves:
            _memmove(into, out_of, nbytes)
        if self._moved:
            torch.autograd.graph.increment_version(self._moved)
        if self._into:
            torch._foreach_copy_(self._into, self._out_of)


def uses(memory: torch.Tensor) -> int:
    """How many tensors, arrays and exports refer to the storage of `memory` now."""
    return torch._C._storage_Use_Count(memory.untyped_storage()._cdata) - 1  # the storage that is asked refers to it, too


def check_storage(tensor: torch.Tensor) -> None:
    """RuntimeError for a tensor whose elements are not simply in its own memory.

    A tensor whose storage was freed (sharded trainers resize it to 0) still has a shape; an address into it must not be used. A
    wrapper (a DTensor, a quantised subclass) has the address 0, or memory that means something else.
    """
    wrapped = bool(is_traceable_wrapper_subclass(tensor))
    if wrapped:
        raise RuntimeError(f"a {type(tensor).__name__} is not a plain whole tensor")
    if tensor.device.type == "meta" and tensor.numel():
        raise RuntimeError(f"a tensor of shape {list(tensor.shape)} has no storage (device meta)")
    if tensor.numel() and tensor.device.type == "cpu":
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
        if tensor.untyped_storage().nbytes() < needed:
            raise RuntimeError(f"a tensor of shape {list(tensor.shape)} has no storage: it was freed")


def _plain(into: torch.Tensor, out_of: torch.Tensor) -> bool:
    """Whether a copy is the same bytes in the same order, in host memory."""
    return (
        into.device.type == "cpu"
        and out_of.device.type == "cpu"
        and into.dtype == out_of.dtype
        and into.is_contiguous()
        and out_of.is_contiguous()
        and not out_of.is_neg()
        and not out_of.is_conj()
    )
