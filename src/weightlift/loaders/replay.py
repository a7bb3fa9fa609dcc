"""From a recording to a plan: what each module of the engine is made of, and which of it can be replayed as plain copies.

Owns: `LoadPlan`, the proof that every element of every parameter is covered and that every sent tensor is used, where a sent tensor
lies whole inside a parameter. Must not know: vLLM, live tensors, buckets.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy
import torch

from weightlift.errors import DtypeMismatch, DuplicateParameter, ManifestError, MissingParameter, UnexpectedParameter
from weightlift.loaders.match import CastPolicy, cast_allowed, listed
from weightlift.loaders.recording import Box, Geometry, Recording, SliceCopy
from weightlift.protocol.manifest import Manifest

__all__ = ["LoadPlan", "ModulePlan", "check_used", "checkpoint_names", "where_whole"]

_PAIRS = 1 << 24  # how many pairs of boxes are compared at once


@dataclasses.dataclass(frozen=True, slots=True)
class ModulePlan:
    """What one module (by its path in the engine) is made of.

    names: sent names, in the order of the manifest. whole: sent name -> (parameter, view that is the whole sent tensor) for each
    place it goes to; None where something is cut or computed, so that the module has to go through the engine's own loader.
    """

    path: str
    names: tuple[str, ...]
    whole: Mapping[str, tuple[tuple[str, Geometry], ...]] | None


@dataclasses.dataclass(frozen=True, slots=True)
class LoadPlan:
    """One epoch of an engine: valid for one manifest and one set of parameters.

    modules: every module that is fed. copies: how many slice copies were recorded.
    """

    manifest: Manifest
    modules: tuple[ModulePlan, ...]
    copies: int

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        recording: Recording,
        parameters: Mapping[str, torch.Tensor],
        *,
        optional: Collection[str] = (),
        elsewhere: bool = False,
        cast: CastPolicy = "lossless",
    ) -> LoadPlan:
        """Prove a recording complete.

        parameters: of the engine's twin, on meta. optional: parameters and buffers that no checkpoint need have. elsewhere: whether
        a sent tensor may belong to another rank of the engine. cast: what may happen to a dtype on the way.

        Raises: DtypeMismatch; UnexpectedParameter for a sent tensor that the engine ignores; MissingParameter for a parameter that is
        not filled, or not completely; ManifestError where an element is filled twice.
        """
        names = checkpoint_names(manifest)
        by_checkpoint = {checkpoint: wire for wire, checkpoint in names.items()}
        if not elsewhere:
            check_used(manifest, names, recording.used, parameters)
        for source, sent, held in recording.casts:
            if not cast_allowed(sent, held, cast):
                raise DtypeMismatch(
                    f"{by_checkpoint[source]} is sent as {sent}, the engine holds {held}, and cast={cast!r} does not allow it",
                    tensor=by_checkpoint[source],
                )
        by_target: dict[str, list[SliceCopy]] = {}
        for copy in recording.copies:
            by_target.setdefault(copy.target, []).append(copy)
        _check_complete(recording, by_target, parameters, optional, by_checkpoint, manifest)
        return cls(manifest, tuple(_modules(manifest, recording, by_target, by_checkpoint, parameters)), len(recording.copies))


def checkpoint_names(manifest: Manifest) -> dict[str, str]:
    """Wire name -> the name that the engine's loader knows: a `.base_layer` segment, which LoRA wrappers add, is dropped.

    DuplicateParameter if two names become one.
    """
    names = {entry.name: entry.name.replace(".base_layer.", ".", 1) for entry in manifest.entries}
    counted = collections.Counter(names.values())
    twice = next((name for name, count in counted.items() if count > 1), None)
    if twice is not None:
        raise DuplicateParameter(f"{twice} is sent with and without .base_layer", tensor=twice)
    return names


def check_used(manifest: Manifest, names: Mapping[str, str], used: frozenset[str], parameters: Mapping[str, object]) -> None:
    """UnexpectedParameter for a sent tensor whose checkpoint name is not among the used ones."""
    # An alias that the engine ignores loses nothing: its bytes are used under the other name, or that one is missed here.
    unused = [e.name for e in manifest.entries if not e.alias_of and e.elements and names[e.name] not in used]
    reached = {e.alias_of for e in manifest.entries if e.alias_of and names[e.name] in used}
    unknown = [name for name in unused if name not in reached]
    if unknown:
        raise UnexpectedParameter(
            f"{len(unknown)} of {manifest.tensors} sent tensors are not taken by the engine's loader: {listed(unknown, parameters)}",
            tensor=unknown[0],
        )


def _check_complete(
    recording: Recording,
    by_target: Mapping[str, list[SliceCopy]],
    parameters: Mapping[str, torch.Tensor],
    optional: Collection[str],
    by_checkpoint: Mapping[str, str],
    manifest: Manifest,
) -> None:
    missing, partly = [], []
    for name, parameter in parameters.items():
        copies = by_target.get(name, [])
        if name in recording.computed or not parameter.numel():
            continue  # what is computed cannot be counted; that its module is fed at all is all there is to see
        if not copies:
            missing += [name] if name not in optional else []
            continue
        _check_once(name, copies, parameter, by_checkpoint)
        if sum(copy.into.elements for copy in copies) + recording.constants.get(name, 0) < parameter.numel():
            partly.append(name)
    if missing or partly:
        wrong = missing or partly
        how = "not sent" if missing else "sent in part only"
        raise MissingParameter(
            f"{len(wrong)} of the engine's {len(parameters)} parameters are {how}: {listed(wrong, manifest.by_name)}",
            tensor=wrong[0],
        )


def _check_once(name: str, copies: list[SliceCopy], parameter: torch.Tensor, by_checkpoint: Mapping[str, str]) -> None:
    """No element is written twice."""
    twice = _overlapping([copy.into.box(parameter) for copy in copies])
    if twice is None:
        twice = _counted(copies, parameter)
    if twice >= 0:
        source = by_checkpoint[copies[twice].source]
        raise ManifestError(f"the engine's loader writes part of {name} twice, once from {source}", tensor=source)


def _overlapping(boxes: Sequence[Box | None]) -> int | None:
    """The first box that meets another one, -1 if there is none; None if one of them is no box."""
    if None in boxes:
        return None
    known = [box for box in boxes if box is not None]
    starts, stops = (numpy.array(side).reshape(len(known), -1) for side in zip(*known, strict=True))
    step = max(1, _PAIRS // len(known))
    for at in range(0, len(known), step):
        low = numpy.maximum(starts[at : at + step, None], starts[None])
        high = numpy.minimum(stops[at : at + step, None], stops[None])
        meets = (low < high).all(axis=-1).sum(axis=1) > 1
        if meets.any():
            return at + int(numpy.argmax(meets))
    return -1


def _counted(copies: Sequence[SliceCopy], parameter: torch.Tensor) -> int:
    """The first copy that writes an element again, -1 if there is none; a byte for every element of the parameter is counted in."""
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    written = torch.zeros(last + 1, dtype=torch.bool)
    for number, copy in enumerate(copies):
        seen = written.as_strided(copy.into.shape, copy.into.strides, copy.into.offset)
        if bool(seen.any()):
            return number
        seen.fill_(True)
    return -1


def _modules(
    manifest: Manifest,
    recording: Recording,
    by_target: Mapping[str, list[SliceCopy]],
    by_checkpoint: Mapping[str, str],
    parameters: Mapping[str, torch.Tensor],
) -> Iterable[ModulePlan]:
    order = {entry.name: number for number, entry in enumerate(manifest.entries)}
    fed: dict[str, set[str]] = {}
    for target, sources in recording.feeds().items():
        fed.setdefault(_module_of(target), set()).update(by_checkpoint[source] for source in sources)
    computed = {_module_of(target) for target in recording.computed}
    targets: dict[str, list[str]] = {}
    for target in by_target:
        targets.setdefault(_module_of(target), []).append(target)
    for path, names in fed.items():
        places: dict[str, list[tuple[str, Geometry]]] = {name: [] for name in names}
        plain = path not in computed
        for target in targets.get(path, ()):
            for copy in by_target[target]:
                name = by_checkpoint[copy.source]
                into = where_whole(copy, manifest.by_name[name].shape)
                plain = plain and into is not None and parameters[target].storage_offset() == 0
                if into is not None:
                    places[name].append((target, into))
        whole = {name: tuple(found) for name, found in places.items()} if plain else None
        yield ModulePlan(path, tuple(sorted(names, key=order.__getitem__)), whole)


def where_whole(copy: SliceCopy, shape: tuple[int, ...]) -> Geometry | None:
    """The view inside the parameter that has the sent tensor's shape, if the copy moves all of it; None otherwise."""
    strides = _contiguous(shape)
    if copy.out_of.elements != Geometry(0, shape, strides).elements or copy.out_of.offset:
        return None
    if copy.out_of.shape == shape and copy.out_of.strides == strides:
        return copy.into
    # A transposed copy: find the axes of the sent tensor among those of the view.
    axes = []
    for size, stride in zip(shape, strides, strict=True):
        found = [a for a, pair in enumerate(zip(copy.out_of.shape, copy.out_of.strides, strict=True)) if pair == (size, stride)]
        axes.append(next((axis for axis in found if axis not in axes), -1))
    if -1 in axes or len(axes) != len(copy.out_of.shape):
        return None
    return Geometry(copy.into.offset, shape, tuple(copy.into.strides[axis] for axis in axes))


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]
