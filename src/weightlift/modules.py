"""torch.nn's side of the vocabulary: canonical names and a stable walk over what a sync consists of.

Owns: `Slot` (one named tensor and where it hangs), `walk`, `aliases`, and `HeldTensors`, named tensors that know whether they
moved. Must not know: manifests' digests, transports, who copies.
Sources and loaders use the same walk, so that wrapped on one side and bare on the other means the same names.

What is walked: parameters, frozen ones too, and persistent buffers; non-persistent buffers are not. Wrapper segments are dropped by
what the wrapper is, not by what the name looks like: a genuine child called `module` keeps its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import torch

from weightlift.errors import ConfigError

__all__ = [
    "HeldTensors",
    "MappingTensors",
    "ModuleTensors",
    "Slot",
    "aliases",
    "canonical_child",
    "prefixes",
    "transient_buffers",
    "walk",
    "walk_under",
]

_WRAPPER_CHILDREN: Final[Mapping[str, frozenset[str]]] = {
    "torch.nn.parallel.distributed.DistributedDataParallel": frozenset({"module"}),
    "torch.nn.parallel.data_parallel.DataParallel": frozenset({"module"}),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": frozenset({"_fsdp_wrapped_module"}),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": frozenset({"_checkpoint_wrapped_module"}),
    "torch._dynamo.eval_frame.OptimizedModule": frozenset({"_orig_mod"}),
    "peft.peft_model.PeftModel": frozenset({"base_model"}),
    "peft.tuners.tuners_utils.BaseTuner": frozenset({"model"}),
}
"""Wrapper class (by qualified name, so that none of them is imported here) -> names of the child that it wraps."""


class Slot(NamedTuple):
    """A tensor and the dict it hangs in. `held()` tells whether the same tensor object still hangs there."""

    name: str
    owner: Mapping[str, torch.Tensor | None]
    key: str
    tensor: torch.Tensor

    def held(self) -> bool:
        """Whether nobody replaced the tensor since the walk."""
        return self.owner.get(self.key) is self.tensor


def canonical_child(parent: torch.nn.Module, name: str) -> bool:
    """Whether a child's name is part of the canonical name: False for the child of a wrapper."""
    for cls in type(parent).__mro__:
        children = _WRAPPER_CHILDREN.get(f"{cls.__module__}.{cls.__qualname__}")
        if children is not None and name in children:
            return False
    return True


def walk(module: torch.nn.Module, prefix: str = "", *, deep: bool = True) -> Iterator[Slot]:
    """Every parameter and persistent buffer with its canonical name, tied ones under each of their names, in module order.

    deep: whether children are walked, too.
    """
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield Slot(prefix + key, module._parameters, key, parameter)
    for key, buffer in module._buffers.items():
        if buffer is not None and key not in module._non_persistent_buffers_set:
            yield Slot(prefix + key, module._buffers, key, buffer)
    for name, child in module._modules.items() if deep else ():
        if child is not None:
            yield from walk(child, f"{prefix}{name}." if canonical_child(module, name) else prefix)


def walk_under(
    module: torch.nn.Module, is_unit: Callable[[torch.nn.Module], bool], unit: torch.nn.Module | None = None, prefix: str = ""
) -> Iterator[tuple[torch.nn.Module | None, Slot]]:
    """What `walk` yields, each with the nearest module above it that is a unit."""
    unit = module if is_unit(module) else unit
    for slot in walk(module, prefix, deep=False):
        yield unit, slot
    for name, child in module._modules.items():
        if child is not None:
            yield from walk_under(child, is_unit, unit, f"{prefix}{name}." if canonical_child(module, name) else prefix)


def transient_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that no checkpoint has and no sync sends, by their names in the module."""
    for name, child in module.named_modules():
        for key in sorted(child._non_persistent_buffers_set):
            buffer = child._buffers.get(key)
            if buffer is not None:
                yield f"{name}.{key}" if name else key, buffer


def prefixes(module: torch.nn.Module, prefix: str = "") -> dict[int, str]:
    """id of every module -> its canonical prefix, "" or ending in a dot; of a module in two places the first."""
    found = {id(module): prefix}
    for name, child in module._modules.items():
        if child is not None:
            below = prefixes(child, f"{prefix}{name}." if canonical_child(module, name) else prefix)
            found.update({key: value for key, value in below.items() if key not in found})
    return found


_Place: TypeAlias = tuple[int, tuple[int, ...], torch.Size, torch.dtype]


class HeldTensors(Protocol):
    """Named tensors somewhere in this process, with a cheap test whether they are still the same ones in the same place."""

    def look(self) -> list[tuple[str, torch.Tensor]]:
        """All names with their tensors, tied ones under each name."""

    def unchanged(self) -> bool:
        """Whether names lead to the same tensors, with the same storage, as at the last look; False before the first."""


class ModuleTensors:
    """What `walk` yields of a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._slots: list[Slot] = []
        self._tree: list[tuple[Mapping[str, torch.nn.Module | None], str, torch.nn.Module]] = []
        self._places: list[_Place] = []

    def look(self) -> list[tuple[str, torch.Tensor]]:
        self._slots = list(walk(self.module))
        self._tree = [
            (m._modules, name, child) for m in self.module.modules() for name, child in m._modules.items() if child is not None
        ]
        self._places = [_place(slot.tensor) for slot in self._slots]
        return [(slot.name, slot.tensor) for slot in self._slots]

    def unchanged(self) -> bool:
        # `parameter.data = ...` is seen by its place.
        return self.same_objects() and _in_place((slot.tensor for slot in self._slots), self._places)

    def same_objects(self) -> bool:
        """Whether names lead to the same tensor objects, wherever their storage is now."""
        # Replacing a module is seen by the tree, a tensor by its slot, adding one by the count.
        return bool(self._slots) and (
            all(children.get(name) is child for children, name, child in self._tree)
            and all(slot.held() for slot in self._slots)
            and len(self._slots) == _count(self.module)
        )


class MappingTensors:
    """The items of a mapping; ConfigError for anything that is not str -> tensor."""

    def __init__(self, mapping: Mapping[str, torch.Tensor]) -> None:
        self.mapping = mapping
        self._seen: list[tuple[str, torch.Tensor]] = []
        self._places: list[_Place] = []

    def look(self) -> list[tuple[str, torch.Tensor]]:
        for name, tensor in self.mapping.items():
            if type(name) is not str or not isinstance(tensor, torch.Tensor):
                raise ConfigError(f"tensors must be a mapping of str to tensors, got {name!r}: {type(tensor).__name__}")
        self._seen = list(self.mapping.items())
        self._places = [_place(tensor) for _, tensor in self._seen]
        return self._seen

    def unchanged(self) -> bool:
        return bool(self._seen) and (
            len(self._seen) == len(self.mapping)
            and all(self.mapping.get(name) is tensor for name, tensor in self._seen)
            and _in_place((tensor for _, tensor in self._seen), self._places)
        )


def _place(tensor: torch.Tensor) -> _Place:
    """Where a tensor's elements are, and how they are laid out there: `t.t_()` and `t.data = t.data.t()` keep the address."""
    return tensor.data_ptr(), tensor.stride(), tensor.shape, tensor.dtype


def _in_place(tensors: Iterable[torch.Tensor], places: Iterable[_Place]) -> bool:
    """Whether all are where they were. Nothing is kept on the way: 20,000 new tuples a round would set off the garbage collector."""
    for tensor, (address, strides, shape, dtype) in zip(tensors, places, strict=True):
        if tensor.data_ptr() != address or tensor.stride() != strides or tensor.shape != shape or tensor.dtype != dtype:
            return False
    return True


def _count(module: torch.nn.Module) -> int:
    """How many slots a walk would yield; modules shared by two parents count twice, as in the walk."""
    own = sum(tensor is not None for tensor in module._parameters.values())
    own += sum(tensor is not None and key not in module._non_persistent_buffers_set for key, tensor in module._buffers.items())
    return own + sum(_count(child) for child in module._modules.values() if child is not None)


def aliases(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Name -> first name, for every tensor that is the same memory, shape, strides and dtype as an earlier one."""
    first: dict[Any, str] = {}
    found: dict[str, str] = {}
    for name, tensor in named:
        identity = _identity(tensor)
        earlier = first.setdefault(identity, name)
        if earlier != name:
            found[name] = earlier
    return found


def _identity(tensor: torch.Tensor) -> Any:
    """Equal for two tensors exactly when they are the same bytes seen in the same way."""
    if tensor.device.type == "meta" or not tensor.numel() or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return id(tensor)
    storage = tensor.untyped_storage()
    return storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
