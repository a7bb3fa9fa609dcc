"""Comparing what is sent with what an engine holds: the completeness proof before any byte.

Owns: `Destinations`, `CastPolicy`, the matching rules and their errors. Must not know: buckets, copies.

    sent        held            rule
    name        name            same shape; same dtype, or a cast that the policy allows
    alias       same memory     one write serves both
    alias       own memory      the target's bytes are written twice
    -           tied to a sent  covered by that one
    -           declared tie    the tied name's bytes are written here too
    two names   same memory     refused: two tensors cannot live in one storage
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

import torch

from weightlift.copies import check_storage
from weightlift.errors import (
    ConfigError,
    DtypeMismatch,
    ManifestError,
    MissingParameter,
    ShapeMismatch,
    UnexpectedParameter,
)
from weightlift.modules import aliases
from weightlift.protocol.manifest import Entry, Manifest, near_matches
from weightlift.tensors import dtype_name

__all__ = ["CastPolicy", "Destinations", "cast_allowed", "listed", "match"]

CastPolicy: TypeAlias = Literal["never", "lossless", "float"]
"""never: dtypes must be equal. lossless: every value survives (bfloat16 -> float32). float: between any floating-point dtypes, rounding
included. An integer is never cast to or from anything."""

_LOSSLESS = {
    "float64": {"float32", "bfloat16", "float16"},
    "float32": {"bfloat16", "float16"},
}
_FLOATS = {"float64", "float32", "bfloat16", "float16"}
_MOST_NAMES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Destinations:
    """An engine's tensors by name, in any order.

    tensors: name -> live tensor, tied ones under each of their names.
    ties: name -> name whose bytes it must get although it is stored apart and may not be sent.
    optional: names that need not be sent.
    """

    tensors: Mapping[str, torch.Tensor]
    ties: Mapping[str, str] = dataclasses.field(default_factory=dict)
    optional: frozenset[str] = frozenset()


def match(manifest: Manifest, own: Destinations, cast: CastPolicy) -> dict[str, list[torch.Tensor]]:
    """Name of each sent tensor with bytes -> the live tensors that they are written to.

    Raises: UnexpectedParameter, MissingParameter, ShapeMismatch, DtypeMismatch, ManifestError; names are listed with near matches.
    """
    if cast not in ("never", "lossless", "float"):
        raise ConfigError(f"cast must be never, lossless or float, got {cast!r}")
    _check_unexpected(manifest, own)
    for entry in manifest.entries:
        if entry.name in own.tensors:
            _check_tensor(entry, own.tensors[entry.name], cast)
    shared = aliases(own.tensors.items())
    into: dict[str, list[torch.Tensor]] = {}
    writer: dict[str, str] = {}  # storage (its first name) -> the sent tensor that fills it
    for name, sender in _wanted(manifest, own):
        storage = shared.get(name, name)
        earlier = writer.setdefault(storage, sender)
        if earlier != sender:
            raise ManifestError(
                f"{sender} and {earlier} are sent as two tensors, but the engine holds them in one storage",
                tensor=name,
                remedy="tie them in the trainer, or untie them in the engine.",
            )
        targets = into.setdefault(sender, [])
        if all(target is not own.tensors[storage] for target in targets):
            targets.append(own.tensors[storage])
    _check_missing(manifest, own, {shared.get(name, name) for name in writer}, shared)
    _check_overlap(into)
    return into


def _wanted(manifest: Manifest, own: Destinations) -> Iterable[tuple[str, str]]:
    """(own name, sent tensor with bytes) pairs: sent names, aliases, and declared ties that are not sent themselves."""
    for entry in manifest.entries:
        if entry.name in own.tensors:
            yield entry.name, entry.alias_of or entry.name
    for name, target in own.ties.items():
        tied = manifest.by_name.get(target)
        if name not in manifest.by_name and name in own.tensors and tied is not None:
            yield name, tied.alias_of or tied.name


def _check_unexpected(manifest: Manifest, own: Destinations) -> None:
    # An alias without a destination loses nothing: its bytes arrive under the name that it is an alias of.
    unknown = [e.name for e in manifest.entries if e.name not in own.tensors and not e.alias_of]
    if unknown:
        raise UnexpectedParameter(
            f"{len(unknown)} of {manifest.tensors} sent tensors are not in the engine: {listed(unknown, own.tensors)}",
            tensor=unknown[0],
        )


def _check_missing(manifest: Manifest, own: Destinations, written: set[str], shared: Mapping[str, str]) -> None:
    missing = [n for n in own.tensors if shared.get(n, n) not in written and n not in own.optional]
    if missing:
        raise MissingParameter(
            f"{len(missing)} of the engine's {len(own.tensors)} tensors are not sent: {listed(missing, manifest.by_name)}",
            tensor=missing[0],
        )


def _check_overlap(into: Mapping[str, list[torch.Tensor]]) -> None:
    """Two destinations in one storage must not share bytes. Strided ones may interleave, so only contiguous ones can be judged here."""
    ranges: dict[int, list[tuple[int, int, str]]] = {}
    for name, targets in into.items():
        for target in targets:
            if target.numel() and target.is_contiguous():
                start = int(target.storage_offset()) * target.element_size()
                end = start + target.numel() * target.element_size()
                ranges.setdefault(target.untyped_storage()._cdata, []).append((start, end, name))
    for taken in ranges.values():
        taken.sort()
        for (_, end, name), (start, _, other) in itertools.pairwise(taken):
            if start < end and name != other:
                raise ManifestError(
                    f"the engine holds {other} and {name} in overlapping memory, but they are sent as two tensors", tensor=other
                )


def _check_tensor(entry: Entry, tensor: torch.Tensor, cast: CastPolicy) -> None:
    try:
        # A copy into a tensor without storage would "succeed" and install nothing.
        check_storage(tensor)
    except RuntimeError as error:
        raise ManifestError(f"the engine's {entry.name} cannot be written: {error}", tensor=entry.name) from error
    if tensor.is_conj() or tensor.is_neg():
        raise ManifestError(
            f"the engine's {entry.name} is a lazy view: its memory holds other values than it shows", tensor=entry.name
        )
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ManifestError(f"the engine's {entry.name} is an expanded view: its elements share memory", tensor=entry.name)
    if tuple(tensor.shape) != entry.shape:
        raise ShapeMismatch(
            f"{entry.name} is sent with shape {list(entry.shape)}, the engine holds {list(tensor.shape)}",
            tensor=entry.name,
        )
    held = dtype_name(tensor.dtype)
    if not cast_allowed(entry.dtype, held, cast):
        raise DtypeMismatch(
            f"{entry.name} is sent as {entry.dtype}, the engine holds {held}, and cast={cast!r} does not allow it",
            tensor=entry.name,
        )


def cast_allowed(sent: str, held: str, cast: CastPolicy) -> bool:
    """Whether a tensor of one dtype may be written to one of another."""
    allowed = {
        "never": False,
        "lossless": sent in _LOSSLESS.get(held, ()),
        "float": {held, sent} <= _FLOATS,
    }
    return sent == held or allowed[cast]


def listed(names: list[str], candidates: Iterable[str]) -> str:
    """The first of some names, each with what it may have been meant to be."""
    pool = list(candidates)
    shown = []
    for name in names[:_MOST_NAMES]:
        near = near_matches(name, pool)
        shown.append(f"{name} (near: {', '.join(near)})" if near else name)
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(shown) + more
