"""Digests of logical tensors: 8 bytes that both sides compute over what they hold themselves.

Owns: the two algorithms, which elements are looked at, reading a tensor in row-major order whatever its strides. Must not know: frames,
plans, who compares.

A digest is taken over the bytes of a tensor's elements in row-major order, in one dtype, so strides, devices and padding do not matter.

    xxh3    the 64-bit xxh3 of those bytes. One pass in one thread; for tensors in host memory.
    lanes   for devices, where a serial hash cannot run: every 8-byte word w at position i of a chunk becomes mix(w + key[i]),
            the words of a chunk are added modulo 2^64, the chunks are folded in order (2^20 elements are cut into chunks of at most
            2^20 words; a last word of fewer than 8 bytes is padded with zeros and is a chunk of its own). `mix` is the finaliser of
            splitmix64 (Steele, Lea, Flood 2014), a bijection in which every bit of w reaches every bit of the sum: two flipped sign
            bits do not cancel, and swapped words do not, because each position has its own key. key[i] is mix of i, times a constant.
            The same few elementwise kernels give the same 8 bytes on every device. The number of bytes is folded in at the end.

Neither is meant to stop an attacker who can choose weights: they find faults.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal, TypeAlias

import torch
import xxhash

from weightlift.verify.lanes import GOLDEN, MASK, Lanes, fold, mix

__all__ = ["DIGEST_BYTES", "Algorithm", "Probe", "Probes", "Scope", "Span", "digests", "span"]

Algorithm: TypeAlias = Literal["xxh3", "lanes"]
Scope: TypeAlias = Literal["off", "sample", "full"]
Span: TypeAlias = tuple[int, int]
"""Elements [start, stop) of a tensor in row-major order."""

DIGEST_BYTES: Final = 8
SAMPLE_ELEMENTS: Final = 256
"""Elements of the run that a sample of one tensor is."""
CHUNK_ELEMENTS: Final = 1 << 20
"""Tensors are read in pieces of this size. Part of what `lanes` means."""


def span(count: int, scope: Scope, version: int) -> Span:
    """Which elements of a tensor of `count` are looked at for a version.

    sample: one run, which moves with the version, so that in the long run every element gets its turn.
    """
    if scope == "off":
        return (0, 0)
    if scope == "full" or count <= SAMPLE_ELEMENTS:
        return (0, count)
    # Mixed, not counted up: whoever publishes every tenth version must not see the same run each time.
    run = mix((version * GOLDEN + count) & MASK) % -(-count // SAMPLE_ELEMENTS)
    return (run * SAMPLE_ELEMENTS, min((run + 1) * SAMPLE_ELEMENTS, count))


class Probe:
    """One tensor as a sequence of elements in one dtype, to be looked at in round after round while its storage stays where it is."""

    __slots__ = ("_bytes", "_via", "count", "dtype", "memory", "tensor")

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype, *, via: torch.dtype | None = None) -> None:
        """`via`: the dtype that the elements were rounded to on their way from the tensor's dtype to `dtype`."""
        self.tensor = tensor.detach()
        self.dtype = dtype
        self.count = tensor.numel()
        self._via = dtype if via is None else via
        plain = {tensor.dtype, self._via} == {dtype} and tensor.is_contiguous() and not _lazy(tensor) and self.count
        # Made once: for many small tensors, making the views costs ten times the hashing.
        self._bytes = _flat(self.tensor).view(torch.uint8) if plain else None
        self.memory = _memory_of(self._bytes) if self._bytes is not None and tensor.device.type == "cpu" else None

    def xxh3(self, where: Span) -> bytes:
        """The xxh3 of the span's bytes."""
        if self.memory is not None:
            item = self.dtype.itemsize
            return xxhash.xxh3_64_digest(self.memory[where[0] * item : where[1] * item])
        state = xxhash.xxh3_64()
        for run in self.runs(where):
            host = run.cpu()
            state.update(_memory_of(host))
        return state.digest()

    def runs(self, where: Span) -> Iterator[torch.Tensor]:
        """The bytes of the span's elements, cast, in pieces: extra memory stays within one piece."""
        item = self.dtype.itemsize
        for at in range(*where, CHUNK_ELEMENTS):
            stop = min(at + CHUNK_ELEMENTS, where[1])
            yield self.elements(at, stop).view(torch.uint8) if self._bytes is None else self._bytes[at * item : stop * item]

    def elements(self, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) in row-major order, cast, 1-D and contiguous; a view where that is possible."""
        tensor = self.tensor
        if _lazy(tensor):
            tensor = tensor.resolve_neg().resolve_conj()
        if tensor.is_contiguous():
            run = _flat(tensor)[start:stop]
        elif (start, stop) == (0, self.count):
            run = _flat(tensor.contiguous())
        else:
            run = tensor[torch.unravel_index(torch.arange(start, stop, device=tensor.device), tensor.shape)]
        return run.to(self._via).to(self.dtype)


def _memory_of(flat: torch.Tensor) -> memoryview:
    """The memory of a 1-D uint8 tensor in host memory, valid as long as the tensor and its storage are.

    Not through numpy: that would mark the storage as shared, and a trainer whose weights were looked at once could never be offloaded.
    """
    if not flat.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr()))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor in one dimension. Not `view(-1)`: that keeps the odd stride which a dimension of size 1 may have."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _lazy(tensor: torch.Tensor) -> bool:
    """Whether the memory holds something else than the values: their negatives, or their conjugates."""
    return tensor.is_neg() or tensor.is_conj()


class Probes:
    """Probes in one order, to be read round after round."""

    def __init__(self, probes: Iterable[Probe]) -> None:
        self._probes = list(probes)
        sizes: dict[tuple[int, int], int] = {}
        self._plain: list[tuple[memoryview, int]] | None = []
        for probe in self._probes:
            size = sizes.setdefault((probe.count, probe.dtype.itemsize), len(sizes))
            if probe.memory is None:
                self._plain = None
                break
            self._plain.append((probe.memory, size))
        self._sizes = list(sizes)

    def digests(self, algorithm: Algorithm, scope: Scope, version: int) -> bytes:
        """The digests of all, 8 bytes each, joined."""
        if algorithm == "lanes":
            return _lanes(self._probes, scope, version)
        if self._plain is None:
            return b"".join([probe.xxh3(span(probe.count, scope, version)) for probe in self._probes])
        # Of 20,000 tensors there are few sizes: a third of a microsecond for each tensor, and most of it is the hash.
        cuts = [slice(*(element * item for element in span(count, scope, version))) for count, item in self._sizes]
        digest = xxhash.xxh3_64_digest
        return b"".join([digest(memory[cuts[size]]) for memory, size in self._plain])


def digests(probes: Iterable[Probe], algorithm: Algorithm, scope: Scope, version: int) -> bytes:
    """The digests of some probes, once."""
    return Probes(probes).digests(algorithm, scope, version)


def _lanes(probes: Sequence[Probe], scope: Scope, version: int) -> bytes:
    lanes, sizes = Lanes(), list[tuple[int, int]]()  # of each probe: how many runs, how many bytes
    for probe in probes:
        runs = list(probe.runs(span(probe.count, scope, version)))
        for run in runs:
            lanes.add(run)
        sizes.append((len(runs), sum(run.numel() for run in runs)))
    sums = iter(lanes.sums())
    found = (fold((value for _ in range(count) for value in next(sums)), nbytes) for count, nbytes in sizes)
    return b"".join(digest.to_bytes(DIGEST_BYTES, "big") for digest in found)
