"""The `lanes` digest: sums of mixed words, in few launches on any device.

Owns: the arithmetic, and running many tensors at once. Must not know: which elements are looked at. What it computes is described in
digests.py, which calls it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Final

import torch

__all__ = ["GOLDEN", "MASK", "Lanes", "fold", "mix"]

_M1: Final = 0xBF58476D1CE4E5B9
_M2: Final = 0x94D049BB133111EB
GOLDEN: Final = 0x9E3779B97F4A7C15
MASK: Final = (1 << 64) - 1
_CHUNK_WORDS: Final = 1 << 20
_BATCH_WORDS: Final = 1 << 23
"""Words that are mixed in one go, 64 MiB: a launch costs more than the words of a small tensor, and memory is short."""


def mix(word: int) -> int:
    """The finaliser of splitmix64, on an int below 2^64."""
    word = ((word ^ (word >> 30)) * _M1) & MASK
    word = ((word ^ (word >> 27)) * _M2) & MASK
    return word ^ (word >> 31)


def fold(sums: Iterable[int], nbytes: int) -> int:
    """The digest of `nbytes` bytes from the sums of their chunks, in order."""
    state = nbytes
    for value in sums:
        state = mix((state * GOLDEN + (value & MASK)) & MASK)
    return mix(state ^ nbytes)


class Lanes:
    """Takes runs of bytes; `sums` gives, for each, the sums of its chunks."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[torch.device, int], list[tuple[int, torch.Tensor]]] = {}
        self._words = 0
        self._done: list[tuple[list[int], torch.Tensor]] = []
        self._chunks: list[list[int]] = []
        self._count = 0

    def add(self, flat: torch.Tensor) -> None:
        """A run: uint8, 1-D, on any device. It must stay as it is until `sums`."""
        mine: list[int] = []
        for words in _chunks(flat):
            mine.append(self._count)
            key = words.device, words.numel()
            waiting = self._waiting.setdefault(key, [])
            waiting.append((self._count, words))
            self._count += 1
            self._words += words.numel()
            if len(waiting) * words.numel() >= _BATCH_WORDS:
                self._run(key)
        if self._words >= 4 * _BATCH_WORDS:
            self._run_all()
        self._chunks.append(mine)

    def sums(self) -> list[list[int]]:
        """One list for each run, in the order of `add`; one transfer from each device."""
        self._run_all()
        found = dict[int, int]()
        for device in {sums.device for _, sums in self._done}:
            some = [(numbers, sums) for numbers, sums in self._done if sums.device == device]
            values = torch.cat([sums for _, sums in some]).tolist()
            found.update(zip((number for numbers, _ in some for number in numbers), values, strict=True))
        return [[found[number] for number in mine] for mine in self._chunks]

    def _run_all(self) -> None:
        for key in list(self._waiting):
            self._run(key)

    def _run(self, key: tuple[torch.device, int]) -> None:
        numbers, runs = zip(*self._waiting.pop(key), strict=True)
        words = torch.stack(runs)
        self._words -= words.numel()
        words += _keys(words.device)[: words.shape[1]]
        self._done.append((list(numbers), _mix_all(words).sum(dim=1)))


def _chunks(flat: torch.Tensor) -> list[torch.Tensor]:
    """The words of a run, chunk by chunk; a last word of fewer than 8 bytes is padded with zeros, in a chunk of its own."""
    whole = flat.numel() // 8 * 8
    if whole == flat.numel() <= 8 * _CHUNK_WORDS and not flat.storage_offset() % 8:
        return [flat.view(torch.int64)] if whole else []
    parts = [flat[:whole].clone() if flat.storage_offset() % 8 else flat[:whole]] if whole else []
    if whole != flat.numel():
        tail = torch.zeros(8, dtype=torch.uint8, device=flat.device)
        tail[: flat.numel() - whole] = flat[whole:]
        parts.append(tail)
    return [words for part in parts for words in torch.split(part.view(torch.int64), _CHUNK_WORDS)]


def _mix_all(words: torch.Tensor) -> torch.Tensor:
    """`mix` of every word, in place. int64 wraps on every device; >> keeps the sign, so the bits that come in are masked off."""
    for shift, factor in ((30, _M1), (27, _M2), (31, 0)):
        words ^= (words >> shift) & ((1 << (64 - shift)) - 1)
        if factor:
            words *= _signed(factor)
    return words


@functools.lru_cache(maxsize=16)
def _keys(device: torch.device) -> torch.Tensor:
    """key[i] of every position in a chunk."""
    return _mix_all(torch.arange(1, _CHUNK_WORDS + 1, dtype=torch.int64, device=device) * _signed(GOLDEN))


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    return value - (1 << 64) if value >> 63 else value
