"""What a version consists of: names, dtypes, shapes, aliases, and a digest of all that.

Owns: `Entry`, `Manifest`, dtype names and sizes, near-match hints. Must not know: torch, values of tensors, where they live.
A manifest is static structure: it is made once, sent once to each peer, and named by its 16-byte digest from then on.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
import xxhash

from weightlift.errors import ConfigError, DuplicateParameter, ManifestError

__all__ = ["ITEM_BYTES", "Entry", "Manifest", "canonical_dtype", "near_matches"]

ITEM_BYTES: Final[Mapping[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Every dtype that can travel, with the bytes of one element."""

_DTYPE_ALIASES: Final[Mapping[str, str]] = {
    "bf16": "bfloat16",
    "half": "float16",
    "fp16": "float16",
    "float": "float32",
    "fp32": "float32",
    "double": "float64",
    "fp64": "float64",
    "char": "int8",
    "byte": "uint8",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def canonical_dtype(name: str) -> str:
    """The wire name of a dtype: "torch.float32", "fp32" and "float32" are all "float32". ConfigError if unknown."""
    short = str(name).removeprefix("torch.").lower()
    short = _DTYPE_ALIASES.get(short, short)
    if short not in ITEM_BYTES:
        raise ConfigError(f"dtype must be one of {', '.join(ITEM_BYTES)}, got {name!r}")
    return short


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One name on the wire. `alias_of` names the entry whose bytes this one shares; an alias carries no bytes of its own."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    alias_of: str = ""

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a 0-dim tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the logical tensor, also for an alias."""
        return self.elements * ITEM_BYTES[self.dtype]


class Manifest:
    """An ordered, checked list of entries.

    Args:
        entries: in the order in which the tensors travel.

    Raises:
        DuplicateParameter: a name occurs twice.
        ManifestError: no entry, an unknown dtype, a negative size, or an alias without its target.
    """

    __slots__ = ("by_name", "digest", "entries", "total_bytes")

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries: tuple[Entry, ...] = tuple(entries)
        self.by_name: dict[str, Entry] = {}
        self.total_bytes = 0
        for entry in self.entries:
            self._add(entry)
        if not self.entries:
            raise ManifestError("the source yields no tensor", remedy="a sync of nothing is refused; check the source.")
        for entry in self.entries:
            if entry.alias_of:
                self._check_alias(entry)
        self.digest: bytes = xxhash.xxh3_128_digest(msgspec.msgpack.encode(self.entries))
        """16 bytes over all entries, in order."""

    def _add(self, entry: Entry) -> None:
        if not entry.name:
            raise ManifestError("a tensor has an empty name")
        if entry.name in self.by_name:
            raise DuplicateParameter(f"{entry.name} occurs twice in the manifest", tensor=entry.name)
        if entry.dtype not in ITEM_BYTES:
            raise ManifestError(f"{entry.name} has dtype {entry.dtype!r}, which cannot travel", tensor=entry.name)
        if any(size < 0 for size in entry.shape):
            raise ManifestError(f"{entry.name} has shape {list(entry.shape)}", tensor=entry.name)
        self.by_name[entry.name] = entry
        if not entry.alias_of:
            self.total_bytes += entry.nbytes

    def _check_alias(self, entry: Entry) -> None:
        target = self.by_name.get(entry.alias_of)
        if target is None or target.alias_of:
            raise ManifestError(f"{entry.name} is an alias of {entry.alias_of}, which is not sent", tensor=entry.name)
        if (target.dtype, target.shape) != (entry.dtype, entry.shape):
            raise ManifestError(f"{entry.name} is an alias of {entry.alias_of}, with another dtype or shape", tensor=entry.name)

    @property
    def tensors(self) -> int:
        """Number of names, aliases included."""
        return len(self.entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Manifest({self.tensors} tensors, {self.total_bytes} bytes, {self.digest.hex()[:12]})"


def near_matches(name: str, candidates: Iterable[str], *, most: int = 3) -> list[str]:
    """The names most like `name`, best first; names that end alike come before names that merely look alike."""
    pool = list(candidates)
    suffix = ".".join(name.split(".")[-2:])
    alike = [other for other in pool if other != name and other.endswith(suffix)][:most]
    # difflib is quadratic; a model has many thousand names, and only the first few are shown.
    return alike or difflib.get_close_matches(name, pool[:2000], n=most, cutoff=0.6)
