"""Which elements of a tensor each rank of a device mesh holds: arithmetic on shapes, the same on every rank.

Owns: boxes, and the sharding rules that trainers use. Must not know: torch, process groups, what is gathered.

A shard is a box: one contiguous range for each axis. Cutting an axis of n elements over w ranks gives every rank ceil(n / w) of
them until none are left (torch.chunk), so the last ranks may hold fewer, or nothing. Several mesh dimensions may cut the same axis:
each cuts what the ones before left, the strided ones (FSDP on top of tensor parallelism, which physically comes first) last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

__all__ = ["Box", "Cut", "box_of", "chunk", "elements", "extent"]

Box: TypeAlias = tuple[tuple[int, int], ...]
"""[start, stop) for each axis."""


class Cut(NamedTuple):
    """A mesh dimension cuts a tensor along `axis`; `last`: after all others that cut the same axis."""

    axis: int
    last: bool = False


_NOTHING: Final = (0, 0)


def chunk(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """Part `index` of the range [start, stop), cut as torch.chunk does; an empty range where nothing is left."""
    size = -(-(stop - start) // parts)
    low, high = start + index * size, min(start + (index + 1) * size, stop)
    return (low, high) if low < high else _NOTHING


def box_of(shape: Sequence[int], mesh: Sequence[int], cuts: Sequence[Cut | None], at: Sequence[int]) -> Box:
    """What the rank at coordinate `at` holds of a tensor.

    Args:
        shape: of the whole tensor. mesh: size of each mesh dimension.
        cuts: for each mesh dimension, how it cuts; None where it holds copies. at: coordinate in each mesh dimension.
    """
    box = [(0, size) for size in shape]
    order = sorted((i for i, cut in enumerate(cuts) if cut is not None), key=lambda i: _is_last(cuts[i]))
    for i in order:
        cut = cuts[i]
        assert cut is not None, "only dimensions that cut are in the order"
        box[cut.axis] = chunk(*box[cut.axis], mesh[i], at[i])
    return tuple(box)


def _is_last(cut: Cut | None) -> bool:
    return cut is not None and cut.last


def extent(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def elements(box: Box) -> int:
    """The number of elements in a box."""
    return math.prod(extent(box))
