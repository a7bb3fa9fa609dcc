"""A transformers model under the names of its checkpoint, which are those that engines load.

Owns: the mapping from parameters to checkpoint tensors, the sources that apply it. Must not know: engines, transports.

transformers keeps some models in another form than it saves them: experts fused into one tensor (`mlp.experts.gate_up_proj`), other
prefixes. Its own conversion, run backwards on tensors without memory, says which slice of which parameter each checkpoint tensor is.
What is sent are those slices: views, no copies. Where a conversion is more than slicing, nothing is sent in silence: ConfigError.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightlift.errors import ConfigError, SourceError
from weightlift.modules import prefixes
from weightlift.protocol.manifest import Entry, Manifest
from weightlift.sources.base import GroupSource, Source, StableSource
from weightlift.sources.group import TrainerGroup
from weightlift.sources.module import DtypePolicy, ModuleSource
from weightlift.tensors import torch_dtype

__all__ = ["HuggingFaceSource", "checkpoint_source"]


class _Slice(NamedTuple):
    """One checkpoint tensor: a view of a contiguous parameter, in elements."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.shape, self.strides, int(tensor.storage_offset()) + self.offset)


class _Renamed:
    """A source of parameters, as a source of checkpoint tensors."""

    def __init__(self, model: torch.nn.Module, inner: Source) -> None:
        self._model = _pretrained(model)
        self._inner = inner
        self._known: tuple[Manifest, Manifest] | None = None
        self._slices: dict[str, list[_Slice]] = {}

    def manifest(self) -> Manifest:
        """Checkpoint names, in the order of the parameters; the same object while the parameters are the same."""
        inner = self._inner.manifest()
        if self._known is None or self._known[0] is not inner:
            self._slices = _conversion(self._model, inner)
            self._known = inner, Manifest(self._entries(inner))
        return self._known[1]

    def _entries(self, inner: Manifest) -> Iterator[Entry]:
        for entry in inner.entries:
            targets = self._slices.get(entry.alias_of, [])
            for number, one in enumerate(self._slices[entry.name]):
                yield Entry(one.name, entry.dtype, one.shape, targets[number].name if entry.alias_of else "")

    def stream(self) -> Iterator[torch.Tensor]:
        """See Source. Every tensor is a view of what the inner source yields."""
        self.manifest()
        names = (entry.name for entry in self._inner.manifest().entries if not entry.alias_of)
        for name, tensor in zip(names, self._inner.stream(), strict=True):
            yield from self._cut(name, tensor)

    def _cut(self, name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        slices = self._slices[name]
        if len(slices) == 1 and slices[0][1:] == (tuple(tensor.shape), _contiguous(tuple(tensor.shape)), 0):
            yield tensor  # as it is, whatever its strides
            return
        whole = tensor if tensor.is_contiguous() else tensor.contiguous()
        for one in slices:
            yield one.of(whole)


class _StableRenamed(_Renamed):
    """Where the inner source's tensors stay."""

    _inner: StableSource

    def __init__(self, model: torch.nn.Module, inner: StableSource) -> None:
        super().__init__(model, inner)
        self._last: Sequence[torch.Tensor] = ()
        self._cuts: tuple[torch.Tensor, ...] = ()

    def tensors(self) -> Sequence[torch.Tensor]:
        """See StableSource."""
        self.manifest()
        inner = self._inner.tensors()
        same = len(inner) == len(self._last) and all(new is old for new, old in zip(inner, self._last, strict=True))
        if not same:
            names = (entry.name for entry in self._inner.manifest().entries if not entry.alias_of)
            self._cuts = tuple(cut for name, tensor in zip(names, inner, strict=True) for cut in self._stay(name, tensor))
            self._last = tuple(inner)
        return self._cuts

    def _stay(self, name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        if not tensor.is_contiguous() and len(self._slices[name]) > 1:
            raise SourceError(f"{name} is not contiguous: its checkpoint tensors are no views of it", tensor=name)
        return self._cut(name, tensor)


class _GroupRenamed(_Renamed):
    """Where the inner source is spread over ranks."""

    _inner: GroupSource

    @property
    def group(self) -> TrainerGroup:
        """See GroupSource."""
        return self._inner.group

    def sends(self) -> Mapping[int, bytes]:
        """See GroupSource."""
        return self._inner.sends()

    def expects(self) -> Mapping[int, bytes]:
        """See GroupSource."""
        return self._inner.expects()


class _StableGroupRenamed(_StableRenamed, _GroupRenamed):  # type: ignore[misc]
    """Both: ranks that hold full copies."""


class HuggingFaceSource(_StableRenamed):
    """A transformers model in this process, as its checkpoint.

    Args:
        model: a PreTrainedModel, possibly wrapped (compiled, checkpointed).
        dtype: as of ModuleSource; its patterns see the names of parameters.

    Raises (from `manifest`): ConfigError for a conversion that is more than slicing.
    """

    def __init__(self, model: torch.nn.Module, *, dtype: DtypePolicy = None) -> None:
        super().__init__(model, ModuleSource(model, dtype=dtype))


def checkpoint_source(model: torch.nn.Module, inner: Source) -> Source:
    """Any source of a transformers model's parameters (FSDP2Source, DDPSource, ...), as a source of its checkpoint tensors.

    model: the PreTrainedModel that the source was made for, wrapped or not; only its configuration is looked at.
    """
    match isinstance(inner, StableSource), isinstance(inner, GroupSource):
        case True, True:
            return _StableGroupRenamed(model, inner)  # type: ignore[arg-type]
        case True, False:
            return _StableRenamed(model, inner)  # type: ignore[arg-type]
        case False, True:
            return _GroupRenamed(model, inner)
        case _:
            return _Renamed(model, inner)


def _pretrained(model: torch.nn.Module) -> torch.nn.Module:
    """The transformers model inside its wrappers. By class: a compiled module answers for the attributes of what it wraps."""
    modules = {id(module): module for module in model.modules()}
    for key, prefix in prefixes(model).items():
        if prefix == "" and any(cls.__name__ == "PreTrainedModel" for cls in type(modules[key]).__mro__):
            return modules[key]
    raise ConfigError(
        f"model must be a transformers model, got {type(model).__name__}", remedy="use ModuleSource for other modules."
    )


def _conversion(model: torch.nn.Module, inner: Manifest) -> dict[str, list[_Slice]]:
    """Parameter -> the checkpoint tensors that it is saved as."""
    shells = {e.name: torch.empty(e.shape, dtype=torch_dtype(e.dtype), device="meta") for e in inner.entries}
    owner = {shell.untyped_storage()._cdata: name for name, shell in shells.items()}
    saved = _reverted(model, shells)
    found: dict[str, list[_Slice]] = {name: [] for name in shells}
    for name, tensor in saved.items():
        source = owner.get(tensor.untyped_storage()._cdata)
        if source is None:
            raise ConfigError(
                f"transformers computes {name} when it saves a {type(model).__name__}: it is no slice of a parameter",
                tensor=name,
                remedy="publish from a MappingSource of tensors that you convert yourself.",
            )
        found[source].append(_Slice(name, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())))
    for name, slices in found.items():
        covered = sum(math.prod(one.shape) for one in slices)
        if covered != shells[name].numel() or not slices:
            raise ConfigError(f"the checkpoint has {covered} of the {shells[name].numel()} elements of {name}", tensor=name)
    return found


def _reverted(model: torch.nn.Module, shells: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What transformers would save, as views of the shells. transformers before 5 saves what it holds."""
    try:
        from transformers import core_model_loading
    except ImportError:
        return shells
    with _NoCopies():  # type: ignore[no-untyped-call]
        return dict(core_model_loading.revert_weight_conversion(model, dict(shells)))  # type: ignore[arg-type]


class _NoCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets a clone be its original: a conversion makes slices contiguous to save them, and here they are only looked at."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        return func(*args, **(kwargs or {}))


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())
