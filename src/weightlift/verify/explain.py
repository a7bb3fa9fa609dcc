"""Why do trainer and engine differ? Compares two sets of tensors by name and says for each one what happened to it.

Owns: the kinds of differences and how they are told apart. Must not know: where the tensors come from.

    missing      the engine has no tensor of that name
    unexpected   the trainer has no tensor of that name
    stale        the engine holds an earlier version's values (needs the history of digests)
    swapped      the engine holds another tensor's values
    transposed   the engine holds the values with its axes in another order
    cast         the engine holds the values rounded through another dtype
    shape        another shape, and none of the above
    values       the same shape and dtype, other values: how many, the first, the largest difference
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, Final

import numpy
import torch

from weightlift.protocol.manifest import near_matches
from weightlift.verify.snapshot import History, full_digest

__all__ = ["Finding", "explain"]

_ROUNDED_BY: Final = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32)
_MOST_AXES: Final = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One difference. `kind` as in the table above."""

    name: str
    kind: str
    detail: str


def explain(
    trainer: Mapping[str, torch.Tensor], engine: Mapping[str, torch.Tensor], history: History | None = None
) -> list[Finding]:
    """All differences, in the trainer's order, then what only the engine has. Empty: they hold the same bytes under the same names."""
    known = _Known(trainer, history or {})
    found = [finding for name in trainer if (finding := _one(name, trainer[name], engine, known)) is not None]
    for name in engine:
        if name not in trainer:
            near = near_matches(name, trainer)
            hint = f"; near: {', '.join(near)}" if near else ""
            found.append(Finding(name, "unexpected", f"the trainer has no such tensor{hint}"))
    return found


class _Known:
    """The trainer's values by digest, now and in earlier versions."""

    def __init__(self, trainer: Mapping[str, torch.Tensor], history: History) -> None:
        self.history = history
        self.now: dict[tuple[Any, ...], list[str]] = {}
        for name, tensor in trainer.items():
            self.now.setdefault(_identity(tensor), []).append(name)

    def versions(self, name: str, digest: str) -> list[int]:
        """The versions in which the tensor had this digest."""
        return sorted(version for version, digests in self.history.items() if digests.get(name) == digest)


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    return full_digest(tensor), tensor.dtype, tuple(tensor.shape)


def _one(name: str, mine: torch.Tensor, engine: Mapping[str, torch.Tensor], known: _Known) -> Finding | None:
    theirs = engine.get(name)
    if theirs is None:
        near = near_matches(name, engine)
        return Finding(name, "missing", f"the engine has no such tensor{'; near: ' + ', '.join(near) if near else ''}")
    identity = _identity(theirs)
    if identity == _identity(mine):
        return None
    for detect in (_stale, _swapped, _transposed, _cast):
        finding = detect(name, mine, theirs, known, identity)
        if finding is not None:
            return finding
    if mine.shape != theirs.shape:
        detail = f"{list(theirs.shape)} in the engine, {list(mine.shape)} in the trainer"
        return Finding(name, "shape", detail + _padding(mine, theirs))
    return Finding(name, "values", _values(mine, theirs))


def _stale(name: str, mine: torch.Tensor, theirs: torch.Tensor, known: _Known, identity: tuple[Any, ...]) -> Finding | None:
    versions = known.versions(name, identity[0])
    if not versions or mine.shape != theirs.shape:
        return None
    newest = max(known.history)
    later = [version for version in known.history if version > versions[-1]]
    if not later:
        return Finding(
            name, "stale", f"holds the values of version {versions[-1]}; the trainer has changed since and did not publish"
        )
    return Finding(name, "stale", f"stale since version {min(later)}: holds the values of version {versions[-1]}, not of {newest}")


def _swapped(name: str, mine: torch.Tensor, theirs: torch.Tensor, known: _Known, identity: tuple[Any, ...]) -> Finding | None:
    others = [other for other in known.now.get(identity, ()) if other != name]
    # Of constant tensors (biases that are all 0) it cannot be told.
    constant = theirs.numel() < 2 or bool((theirs.flatten()[1:] == theirs.flatten()[:-1]).all())
    return Finding(name, "swapped", f"holds the values of {others[0]}") if others and not constant else None


def _transposed(name: str, mine: torch.Tensor, theirs: torch.Tensor, known: _Known, identity: tuple[Any, ...]) -> Finding | None:
    if not 2 <= mine.dim() <= _MOST_AXES or mine.dim() != theirs.dim() or mine.dtype != theirs.dtype:
        return None
    for axes in itertools.permutations(range(mine.dim())):
        if list(axes) == sorted(axes) or tuple(mine.shape[i] for i in axes) != tuple(theirs.shape):
            continue
        if _same(mine.permute(axes), theirs):
            return Finding(name, "transposed", f"holds the values with axes in the order {list(axes)}")
    return None


def _cast(name: str, mine: torch.Tensor, theirs: torch.Tensor, known: _Known, identity: tuple[Any, ...]) -> Finding | None:
    if mine.shape != theirs.shape or not (mine.is_floating_point() and theirs.is_floating_point()):
        return None
    if mine.dtype != theirs.dtype and _same(mine.to(theirs.dtype), theirs):
        lossless = _same(theirs.to(mine.dtype), mine)
        loss = "every value survives" if lossless else "values were rounded"
        return Finding(name, "cast", f"{_dtype(mine)} in the trainer, {_dtype(theirs)} in the engine: {loss}")
    for dtype in _ROUNDED_BY:
        if _same(mine.to(dtype).to(theirs.dtype), theirs):
            return Finding(name, "cast", f"{_dtype(theirs)} in the engine, but rounded to {_dtype(mine.to(dtype))} on the way")
    return None


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.equal(one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8)))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _padding(mine: torch.Tensor, theirs: torch.Tensor) -> str:
    """Whether one is the other with rows added at the end, as a padded vocabulary is."""
    if mine.dim() != theirs.dim() or not mine.dim() or mine.shape[1:] != theirs.shape[1:] or mine.dtype != theirs.dtype:
        return ""
    rows = min(len(mine), len(theirs))
    return f"; the first {rows} rows are equal: padding?" if _same(mine[:rows], theirs[:rows]) else ""


def _values(mine: torch.Tensor, theirs: torch.Tensor) -> str:
    """How two tensors of one shape differ."""
    if mine.dtype != theirs.dtype:
        return f"{_dtype(theirs)} in the engine, {_dtype(mine)} in the trainer, and other values"
    wide = torch.float64 if mine.is_floating_point() else torch.int64
    one, other = (tensor.flatten() if tensor.is_complex() else tensor.flatten().to(wide) for tensor in (mine, theirs))
    differ = (one != other) & ~((one != one) & (other != other))
    if not bool(differ.any()):
        return "the same numbers in other bits (negative zero, or another NaN)"
    first = int(differ.nonzero()[0])
    index = [int(i) for i in numpy.unravel_index(first, tuple(mine.shape))] if mine.shape else []
    text = f"{int(differ.sum())} of {mine.numel()} elements differ"
    text += f", first {index or 'the scalar'}: {one[first].item()} in the trainer, {other[first].item()} in the engine"
    return text + f"; largest difference {(one - other).abs().nan_to_num(float('inf')).max().item():.3g}" + _hints(other)


def _hints(theirs: torch.Tensor) -> str:
    if bool((theirs != theirs).all()):
        return "; the engine's is NaN throughout: never written?"
    return "; the engine's is 0 throughout: never written?" if not bool(theirs.any()) else ""
