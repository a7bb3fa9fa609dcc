"""Sources that hold full tensors in this process: a torch.nn.Module (plain or DDP), or a mapping.

Owns: `ModuleSource`, `MappingSource`, the dtype that each tensor is sent in. Must not know: buckets, transports.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from weightlift.errors import ConfigError, DuplicateParameter
from weightlift.modules import Slot, aliases, walk
from weightlift.protocol.manifest import Manifest
from weightlift.tensors import entry_of, torch_dtype

__all__ = ["DtypePolicy", "MappingSource", "ModuleSource"]

DtypePolicy: TypeAlias = torch.dtype | str | Mapping[str, torch.dtype | str] | None
"""The dtype on the wire: None keeps each tensor's own; one dtype for all floating-point tensors; or {regex: dtype}, first match wins,
tensors that match nothing keep their own."""


class _HeldSource:
    """What both sources share: a list of named tensors, checked for change before each round."""

    def __init__(self, dtype: DtypePolicy) -> None:
        self._policy = _compile(dtype)
        self._manifest: Manifest | None = None
        self._originals: tuple[torch.Tensor, ...] = ()
        self._tensors: tuple[torch.Tensor, ...] = ()
        self._pointers: tuple[int, ...] = ()

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        """All names with their tensors, tied ones under each name."""
        raise NotImplementedError

    def _unchanged(self) -> bool:
        """Whether the names still lead to the tensors of the last look."""
        raise NotImplementedError

    def manifest(self) -> Manifest:
        """The manifest; looked up anew only when a tensor was replaced, re-allocated, added or removed."""
        if self._manifest is None or not self._unchanged() or self._pointers != _pointers(self._originals):
            self._look()
        assert self._manifest is not None
        return self._manifest

    def _look(self) -> None:
        named = self._named()
        duplicate = next((name for name, count in _counts(named).items() if count > 1), None)
        if duplicate is not None:
            raise DuplicateParameter(f"two tensors are called {duplicate}", tensor=duplicate)
        alias = aliases(named)
        entries = [entry_of(n, t, dtype=self._policy(n, t), alias_of=alias.get(n, "")) for n, t in named]
        manifest = Manifest(entries)
        self._manifest = self._manifest if manifest == self._manifest else manifest
        # `detach` shares storage but does not follow `parameter.data = ...`: that is seen by the pointers of the originals.
        self._originals = tuple(tensor for name, tensor in named if name not in alias)
        self._tensors = tuple(tensor.detach() for tensor in self._originals)
        self._pointers = _pointers(self._originals)

    def tensors(self) -> Sequence[torch.Tensor]:
        """The tensors of `manifest`, aliases left out."""
        self.manifest()
        return self._tensors

    def stream(self) -> Iterator[torch.Tensor]:
        """The same, one by one."""
        yield from self.tensors()


class ModuleSource(_HeldSource):
    """All parameters and persistent buffers of a module, under canonical names; frozen ones too, tied ones as aliases.

    Args:
        module: plain, or wrapped by DDP, activation checkpointing or torch.compile, in any order.
        dtype: see DtypePolicy. The cast happens while a bucket is packed; the module is not changed.
    """

    def __init__(self, module: torch.nn.Module, *, dtype: DtypePolicy = None) -> None:
        super().__init__(dtype)
        self._module = module
        self._slots: list[Slot] = []

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        self._slots = list(walk(self._module))
        return [(slot.name, slot.tensor) for slot in self._slots]

    def _unchanged(self) -> bool:
        # Replacing a tensor is seen here, moving its storage by its pointer; a parameter that is added later is only seen by a walk.
        return all(slot.held() for slot in self._slots) and len(self._slots) == _count(self._module)


class MappingSource(_HeldSource):
    """Any mapping of name -> tensor. Names are sent as they are; two names of one tensor are sent as an alias.

    The mapping is looked at before every round: replacing a value is seen.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, dtype: DtypePolicy = None) -> None:
        super().__init__(dtype)
        self._mapping = tensors
        self._seen: dict[str, torch.Tensor] = {}

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        for name, tensor in self._mapping.items():
            if type(name) is not str or not isinstance(tensor, torch.Tensor):
                raise ConfigError(f"a MappingSource must map str to tensors, got {name!r}: {type(tensor).__name__}")
        self._seen = dict(self._mapping)
        return list(self._seen.items())

    def _unchanged(self) -> bool:
        return len(self._seen) == len(self._mapping) and all(
            self._mapping.get(name) is tensor for name, tensor in self._seen.items()
        )


class _compile:
    """A DtypePolicy as a function of name and tensor."""

    def __init__(self, policy: DtypePolicy) -> None:
        self._rules: list[tuple[re.Pattern[str], torch.dtype]] = []
        self._default: torch.dtype | None = None
        if isinstance(policy, Mapping):
            self._rules = [(re.compile(pattern), torch_dtype(dtype)) for pattern, dtype in policy.items()]
        elif policy is not None:
            self._default = torch_dtype(policy)

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        for pattern, dtype in self._rules:
            if pattern.search(name):
                return dtype
        # One dtype for all speaks of the weights: a step counter stays an integer.
        if self._default is not None and tensor.is_floating_point():
            return self._default
        return tensor.dtype


def _pointers(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


def _count(module: torch.nn.Module) -> int:
    """How many slots a walk would yield; modules shared by two parents count twice, as in the walk."""
    own = sum(tensor is not None for tensor in module._parameters.values())
    own += sum(tensor is not None and key not in module._non_persistent_buffers_set for key, tensor in module._buffers.items())
    return own + sum(_count(child) for child in module._modules.values() if child is not None)


def _counts(named: Sequence[tuple[str, torch.Tensor]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name, _ in named:
        counts[name] = counts.get(name, 0) + 1
    return counts
