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
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightlift.errors import ManifestError, ShapeMismatch, UnexpectedParameter
from weightlift.protocol.manifest import near_matches
from weightlift.tensors import dtype_name

__all__ = ["Geometry", "Recording", "SliceCopy", "record"]


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

    def indices(self) -> Iterator[int]:
        """Every element's place in the storage; of a contiguous view `range` is cheaper."""
        for at in itertools.product(*map(range, self.shape)):
            yield self.offset + sum(i * stride for i, stride in zip(at, self.strides, strict=True))


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

    copies: in order. computed: parameter -> incoming names whose values reach it in another way than by a slice.
    constants: parameter -> how many of its elements are set to a constant (padding).
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
    last = ""

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal last
        for name, tensor in incoming.items():
            last = name
            yield name, tensor

    try:
        with torch.no_grad(), mode:
            load(stream())
    except Exception as error:
        raise _refusal(error, last, incoming, parameters) from error
    return mode.result()


def _refusal(error: Exception, name: str, incoming: Mapping[str, Any], parameters: Mapping[str, Any]) -> ManifestError:
    """A loader that raises on a tensor does not know its name, or does not like its shape."""
    what = f"the engine's loader refused {name}: {type(error).__name__}: {error}"
    if isinstance(error, KeyError | AttributeError) or (isinstance(error, ValueError) and "no module or parameter" in str(error)):
        near = near_matches(name, [*parameters])
        hint = f"; near: {', '.join(near)}" if near else ""
        return UnexpectedParameter(what + hint, tensor=name)
    shape = list(incoming[name].shape) if name in incoming else None
    if isinstance(error, AssertionError | RuntimeError | IndexError | ValueError):
        return ShapeMismatch(f"{what} (it is sent with shape {shape})", tensor=name)
    return ManifestError(what, tensor=name)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows incoming tensors, by storage, through whatever a loader does."""

    def __init__(self, incoming: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Storages are kept alive: an address that is used again would be taken for another tensor.
        self._keep: list[torch.UntypedStorage] = []
        self._incoming = {self._storage(tensor): name for name, tensor in incoming.items()}
        self._targets = {self._storage(tensor): name for name, tensor in parameters.items()}
        self._trail: dict[int, frozenset[str]] = {key: frozenset({name}) for key, name in self._incoming.items()}
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
            raise ManifestError(f"the engine's loader reads the value of {', '.join(sorted(self._names(args)))} while it loads")
        if func is torch.ops.aten.copy_.default and self._copied(args[0], args[1]):
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        self._follow(func, args, kwargs, result)
        return result

    def _copied(self, into: torch.Tensor, out_of: torch.Tensor) -> bool:
        """Note a copy of a slice into a parameter; False if it is something else."""
        target = self._targets.get(into.untyped_storage()._cdata)
        source = self._incoming.get(out_of.untyped_storage()._cdata)
        if target is not None and into.dtype != out_of.dtype:
            sources = [source] if source is not None else self._names((out_of,))
            self._casts += [(name, dtype_name(out_of.dtype), dtype_name(into.dtype)) for name in sources]
        if target is None or source is None or into.shape != out_of.shape or into.dtype != out_of.dtype:
            return False
        self._copies.append(SliceCopy(source, Geometry.of(out_of), target, Geometry.of(into)))
        return True

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Whatever is computed from an incoming tensor carries its name on; what is written to a parameter is noted."""
        names = self._names((args, kwargs))
        if func._schema.is_mutable:
            for tensor in _tensors(args[:1]):
                self._written(tensor, names)
        if names:
            for tensor in _tensors(result):
                key = self._storage(tensor)
                self._trail[key] = self._trail.get(key, frozenset()) | names

    def _written(self, tensor: torch.Tensor, names: frozenset[str]) -> None:
        key = tensor.untyped_storage()._cdata
        target = self._targets.get(key)
        if target is not None and names:
            self._computed.setdefault(target, set()).update(names)
        elif target is not None:
            self._constants[target] = self._constants.get(target, 0) + tensor.numel()
        elif names:
            self._trail[self._storage(tensor)] = self._trail.get(key, frozenset()) | names

    def _names(self, values: Any) -> frozenset[str]:
        found: frozenset[str] = frozenset()
        for tensor in _tensors(values):
            found |= self._trail.get(tensor.untyped_storage()._cdata, frozenset())
        return found


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
