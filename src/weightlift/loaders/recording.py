"""What an engine's own `load_weights` does with each incoming tensor, watched once on tensors without memory.

Owns: `record`, the dispatch mode behind it, and its result: which slice of which incoming tensor goes to which slice of which
parameter, and which parameters get something that is not a slice. Must not know: vLLM, buckets, live tensors.

The engine's loader is called once with incoming tensors on the meta device, into a twin of the model on the meta device. Every
`aten.copy_` into a parameter is looked at: if the source is a view of an incoming tensor, the two views (offset, shape, strides) are
one line of the plan. What a loader computes instead (a cast, a concatenation, a dequantisation) leaves a trail: the names of the
incoming tensors that went into it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightlift.errors import ManifestError, ShapeMismatch, UnexpectedParameter
from weightlift.protocol.manifest import near_matches
from weightlift.tensors import dtype_name

__all__ = ["Box", "Geometry", "Recording", "SliceCopy", "record"]


Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""(starts, stops), one of each per axis."""


class Geometry(NamedTuple):
    """A view: offset, shape and strides, in elements of the storage."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """How a tensor looks at its storage."""
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def elements(self) -> int:
        """How many elements are seen."""
        return functools.reduce(lambda a, b: a * b, self.shape, 1)

    def box(self, parameter: torch.Tensor) -> Box | None:
        """(starts, stops) of this view in the parameter's own axes; None if it is not a box of them."""
        strides = parameter.stride()
        sizes = {stride: axis for axis, stride in enumerate(strides) if parameter.shape[axis] > 1}
        lengths = [1] * parameter.ndim
        for size, stride in zip(self.shape, self.strides, strict=True):
            if size > 1 and stride not in sizes:
                return None
            if size > 1:
                lengths[sizes[stride]] = size
        starts, rest = [0] * parameter.ndim, self.offset
        for axis in sorted(sizes.values(), key=lambda axis: -strides[axis]):
            starts[axis], rest = divmod(rest, strides[axis])
        stops = [start + length for start, length in zip(starts, lengths, strict=True)]
        inside = all(stop <= size for stop, size in zip(stops, parameter.shape, strict=True))
        return (tuple(starts), tuple(stops)) if inside and not rest else None


@dataclasses.dataclass(frozen=True, slots=True)
class SliceCopy:
    """One copy: `source` (an incoming name) seen as `out_of`, into `target` (a parameter of the twin) seen as `into`."""

    source: str
    out_of: Geometry
    target: str
    into: Geometry


@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
    """What one call of `load_weights` does.

    copies: in order. computed: parameter -> incoming names whose values reach it in another way than by a slice, or under another
    write. constants: parameter -> how many of its elements are set to a constant (padding), and not after something was copied to them.
    casts: (incoming name, its dtype, the parameter's) where they differ. used: incoming names that reach any parameter.
    """

    copies: tuple[SliceCopy, ...]
    computed: Mapping[str, frozenset[str]]
    constants: Mapping[str, int]
    casts: tuple[tuple[str, str, str], ...]
    used: frozenset[str]

    def feeds(self) -> dict[str, set[str]]:
        """Parameter -> the incoming names that it is made of."""
        found: dict[str, set[str]] = {name: set(names) for name, names in self.computed.items()}
        for copy in self.copies:
            found.setdefault(copy.target, set()).add(copy.source)
        return found


def record(
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    incoming: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
) -> Recording:
    """Call `load` with all incoming tensors (on meta, contiguous) and watch what reaches the parameters (on meta).

    Raises: UnexpectedParameter or ShapeMismatch, with the name of the tensor that the loader choked on; ManifestError otherwise.
    """
    mode = _Watch(incoming, parameters)
    reading = ""

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal reading
        for name, tensor in incoming.items():
            reading = name
            yield name, tensor
        reading = ""  # a loader that gathers everything first: what it raises afterwards may be about any of them

    try:
        with torch.no_grad(), mode:
            load(stream())
    except ManifestError:
        raise
    except Exception as error:
        raise _refusal(error, reading, incoming, parameters) from error
    return mode.result()


def _refusal(error: Exception, reading: str, incoming: Mapping[str, Any], parameters: Mapping[str, Any]) -> ManifestError:
    """A loader that raises on a tensor does not know its name, or does not like its shape."""
    said = f"{type(error).__name__}: {error}"
    unknown = isinstance(error, KeyError | AttributeError) or "no module or parameter" in str(error)
    name = reading
    if not name and isinstance(error, KeyError) and error.args[:1] and error.args[0] in incoming:
        name = error.args[0]
    if not name:
        return ManifestError(f"the engine's loader failed after it had taken all {len(incoming)} tensors: {said}")
    what = f"the engine's loader refused {name}: {said}"
    if any(text in str(error) for text in _NO_VALUES):
        return ManifestError(f"{what}; it reads values while it loads, which no recording can follow", tensor=name)
    if unknown:
        near = near_matches(name, [*parameters])
        hint = f"; near: {', '.join(near)}" if near else ""
        return UnexpectedParameter(what + hint, tensor=name)
    shape = list(incoming[name].shape)
    if isinstance(error, AssertionError | RuntimeError | IndexError | ValueError):
        return ShapeMismatch(f"{what} (it is sent with shape {shape})", tensor=name)
    return ManifestError(what, tensor=name)


_NO_VALUES: Final = ("meta tensor", "Meta tensor", "meta device")
"""What torch says to those who ask a tensor without memory for its values."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows incoming tensors, by storage, through whatever a loader does."""

    def __init__(self, incoming: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Storages are kept alive: an address that is used again would be taken for another tensor.
        self._keep: list[torch.UntypedStorage] = []
        self._incoming = {self._storage(tensor): name for name, tensor in incoming.items()}
        self._targets = {self._storage(tensor): name for name, tensor in parameters.items()}
        self._trail: dict[int, frozenset[str]] = {key: frozenset({name}) for key, name in self._incoming.items()}
        self._parameters = parameters
        self._sent = {name: tensor.dtype for name, tensor in incoming.items()}
        self._cast_of = dict(self._incoming)  # storage -> the incoming name that it has the values of, in whatever dtype
        self._copies: list[SliceCopy] = []
        self._computed: dict[str, set[str]] = {}
        self._constants: dict[str, int] = {}
        self._casts: list[tuple[str, str, str]] = []

    def _storage(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        self._keep.append(storage)
        return int(storage._cdata)

    def result(self) -> Recording:
        used = {copy.source for copy in self._copies}.union(*self._computed.values())
        return Recording(
            tuple(self._copies),
            {name: frozenset(names) for name, names in self._computed.items()},
            dict(self._constants),
            tuple(dict.fromkeys(self._casts)),
            frozenset(used),
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and self._names(args):
            # A loader that reads a value: nothing has one here. What it is written to cannot be seen, so it must not be lost.
            names = sorted(self._names(args))
            raise ManifestError(f"the engine's loader reads the value of {', '.join(names)} while it loads", tensor=names[0])
        if func is torch.ops.aten.copy_.default and self._copied(args[0], args[1]):
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        self._follow(func, args, kwargs, result)
        return result

    def _copied(self, into: torch.Tensor, out_of: torch.Tensor) -> bool:
        """Note a copy of a slice into a parameter; False if it is something else."""
        target = self._targets.get(into.untyped_storage()._cdata)
        key = out_of.untyped_storage()._cdata
        source = self._incoming.get(key)
        if target is None:
            return False
        held = self._parameters[target].dtype
        if into.dtype == held and (source is None or out_of.dtype == self._sent[source]):
            self._note_cast(self._cast_of.get(key), held)
        if source is None or into.shape != out_of.shape:
            return False
        if {into.dtype, out_of.dtype, held, self._sent[source]} != {into.dtype}:
            return False  # a cast, or a view of the bytes as something else: its geometry would count other elements
        self._copies.append(SliceCopy(source, Geometry.of(out_of), target, Geometry.of(into)))
        return True

    def _note_cast(self, source: str | None, held: torch.dtype) -> None:
        if source is not None and self._sent[source] != held:
            self._casts.append((source, dtype_name(self._sent[source]), dtype_name(held)))

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Whatever is computed from an incoming tensor carries its name on; what is written to a parameter is noted."""
        names = self._names((args, kwargs))
        for tensor in _tensors(list(_written_by(func, args, kwargs))):
            self._written(func, tensor, names)
        if names:
            for tensor in _tensors(result):
                key = self._storage(tensor)
                self._trail[key] = self._trail.get(key, frozenset()) | names
                if func is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self._cast_of:
                    self._cast_of[key] = self._cast_of[args[0].untyped_storage()._cdata]

    def _written(self, func: Any, tensor: torch.Tensor, names: frozenset[str]) -> None:
        key = tensor.untyped_storage()._cdata
        target = self._targets.get(key)
        if target is None:
            self._incoming.pop(key, None)  # a sent tensor that the loader changes is not what was sent any more
            self._cast_of.pop(key, None)
            if names:
                self._trail[self._storage(tensor)] = self._trail.get(key, frozenset()) | names
            return
        if not tensor.numel():
            return
        copies = [copy for copy in self._copies if copy.target == target]
        if names or (copies and (func not in _CONSTANTS or self._overwrites(tensor, copies))):
            self._computed.setdefault(target, set()).update(names, (copy.source for copy in copies))
        else:
            self._constants[target] = self._constants.get(target, 0) + tensor.numel()

    def _overwrites(self, tensor: torch.Tensor, copies: Iterable[SliceCopy]) -> bool:
        """Whether a write to part of a parameter may hit something that was copied there."""
        parameter = self._parameters[next(iter(copies)).target]
        own = Geometry.of(tensor).box(parameter)
        others = [copy.into.box(parameter) for copy in copies]
        return own is None or any(other is None or _overlap(own, other) for other in others)

    def _names(self, values: Any) -> frozenset[str]:
        found: frozenset[str] = frozenset()
        for tensor in _tensors(values):
            found |= self._trail.get(tensor.untyped_storage()._cdata, frozenset())
        return found


_CONSTANTS: Final = frozenset({torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default})


def _overlap(one: Box, other: Box) -> bool:
    axes = zip(zip(*one, strict=True), zip(*other, strict=True), strict=True)
    return all(max(start, its_start) < min(stop, its_stop) for (start, stop), (its_start, its_stop) in axes)


def _written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments that an operator writes to, by its schema."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if argument.name in kwargs:
                yield kwargs[argument.name]
            elif number < len(args):
                yield args[number]


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested arguments."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
