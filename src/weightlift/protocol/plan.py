"""Geometry: which part of which tensor lies where in which bucket. A pure function of manifest, capacity and alignment.

Owns: `Piece`, `Bucket`, `Plan`. Must not know: torch, memory, who packs or unpacks.
Both sides derive the plan from the same three values, so boundaries never travel and cannot disagree.

Rules: pieces lie in manifest order at offsets that are multiples of the alignment; a bucket is filled to the end, so a tensor may be
cut wherever a bucket ends. A cut follows rows of the first axis; a row larger than a bucket is cut along the next axis, and so on, so
that every piece is one slice `tensor[prefix][start:stop]`: a view, for any strides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Final, NamedTuple

from weightlift.errors import ConfigError
from weightlift.protocol.manifest import ITEM_BYTES, Entry, Manifest

__all__ = ["ALIGNMENT", "Bucket", "Piece", "Plan"]

ALIGNMENT: Final = 64
"""Bytes. A cache line, and a multiple of every element size."""


class Piece(NamedTuple):
    """`tensor[prefix][start:stop]` of the entry, at `offset` in its bucket. A whole tensor has prefix () and `whole` set."""

    entry: int
    prefix: tuple[int, ...]
    start: int
    stop: int
    offset: int
    nbytes: int
    whole: bool


class Bucket(NamedTuple):
    """What one slot carries. `nbytes` is the end of the last piece."""

    number: int
    pieces: tuple[Piece, ...]
    nbytes: int


class Plan:
    """All buckets of one version.

    Args:
        manifest: what to send.
        capacity: bytes of one bucket; at least one element of every dtype in the manifest.
        alignment: bytes; every piece starts at a multiple of it.
    """

    __slots__ = ("alignment", "buckets", "capacity", "manifest")

    def __init__(self, manifest: Manifest, *, capacity: int, alignment: int = ALIGNMENT) -> None:
        widest = max(ITEM_BYTES[entry.dtype] for entry in manifest.entries)
        if capacity < widest:
            raise ConfigError(f"a bucket must hold at least one element of {widest} bytes, got a capacity of {capacity}")
        if alignment < 1 or alignment % widest:
            raise ConfigError(f"alignment must be a multiple of {widest} bytes, got {alignment}")
        self.manifest = manifest
        self.capacity = capacity
        self.alignment = alignment
        self.buckets: tuple[Bucket, ...] = tuple(_fill(manifest, capacity, alignment))

    def __len__(self) -> int:
        return len(self.buckets)

    def names(self, bucket: int) -> str:
        """The tensors of a bucket, for a message: `layers.0.q` or `layers.0.q .. layers.1.k`."""
        pieces = self.buckets[bucket].pieces
        first = self.manifest.entries[pieces[0].entry].name
        last = self.manifest.entries[pieces[-1].entry].name
        return first if first == last else f"{first} .. {last}"


def _fill(manifest: Manifest, capacity: int, alignment: int) -> Iterator[Bucket]:
    """Yield the buckets in order."""
    number, end, pieces = 0, 0, list[Piece]()
    for position, entry in enumerate(manifest.entries):
        if entry.alias_of or not entry.elements:
            continue
        for prefix, start, stop, row_bytes in _rows(entry, capacity):
            while start < stop:
                offset = -(-end // alignment) * alignment
                fit = min((capacity - offset) // row_bytes, stop - start)
                if fit <= 0:
                    yield Bucket(number, tuple(pieces), end)
                    number, end, pieces = number + 1, 0, []
                    continue
                nbytes = fit * row_bytes
                pieces.append(Piece(position, prefix, start, start + fit, offset, nbytes, nbytes == entry.nbytes))
                start, end = start + fit, offset + nbytes
    if pieces:
        yield Bucket(number, tuple(pieces), end)


def _rows(entry: Entry, capacity: int) -> Iterator[tuple[tuple[int, ...], int, int, int]]:
    """(prefix, start, stop, bytes of a row) such that one row fits into an empty bucket, in row-major order."""
    item, shape = ITEM_BYTES[entry.dtype], entry.shape or (1,)
    axis = 0
    while item * math.prod(shape[axis + 1 :]) > capacity:
        axis += 1
    row_bytes = item * math.prod(shape[axis + 1 :])
    for prefix in itertools.product(*map(range, shape[:axis])):
        yield prefix, 0, shape[axis], row_bytes
