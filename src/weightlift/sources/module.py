"""Sources that hold full tensors in this process: a torch.nn.Module (plain or DDP), or a mapping.

Owns: `ModuleSource`, `DDPSource`, `MappingSource`, the dtype that each tensor is sent in. Must not know: buckets, transports.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from weightlift.modules import HeldTensors, MappingTensors, ModuleTensors, aliases
from weightlift.protocol.manifest import Manifest
from weightlift.sources.group import TrainerGroup
from weightlift.tensors import entry_of, torch_dtype

__all__ = ["DDPSource", "DtypePolicy", "MappingSource", "ModuleSource", "dtype_of"]

DtypePolicy: TypeAlias = torch.dtype | str | Mapping[str, torch.dtype | str] | None
"""The dtype on the wire: None keeps each tensor's own; one dtype for all floating-point tensors; or {regex: dtype}, first match
wins, tensors that match nothing keep their own."""


class _HeldSource:
    """What both sources share: named tensors that are looked at before each round."""

    def __init__(self, held: HeldTensors, dtype: DtypePolicy) -> None:
        self._held = held
        self._policy = _Policy(dtype)
        self._manifest: Manifest | None = None
        self._tensors: tuple[torch.Tensor, ...] = ()

    def manifest(self) -> Manifest:
        """The manifest; made anew only when a tensor was replaced, re-allocated, added or removed."""
        if self._manifest is None or not self._held.unchanged():
            self._look()
        assert self._manifest is not None, "set by the look"
        return self._manifest

    def _look(self) -> None:
        named = self._held.look()
        alias = aliases(named)
        manifest = Manifest(entry_of(n, t, dtype=self._policy(n, t), alias_of=alias.get(n, "")) for n, t in named)
        self._manifest = self._manifest if manifest == self._manifest else manifest
        self._tensors = tuple(tensor.detach() for name, tensor in named if name not in alias)

    def tensors(self) -> Sequence[torch.Tensor]:
        """The tensors of the last `manifest()`, aliases left out."""
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
        super().__init__(ModuleTensors(module), dtype)


class MappingSource(_HeldSource):
    """Any mapping of name -> tensor. Names are sent as they are; two names of one tensor are sent as an alias.

    The mapping is looked at before every round: replacing a value is seen.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, dtype: DtypePolicy = None) -> None:
        super().__init__(MappingTensors(tensors), dtype)


class DDPSource(ModuleSource):
    """A module that every rank of a group holds whole (DistributedDataParallel): nothing is gathered, but all ranks publish in
    step.

    Args: as of ModuleSource. group: the ranks that train it; default: all of the default process group, the first one sends.
    """

    def __init__(self, module: torch.nn.Module, *, group: TrainerGroup | None = None, dtype: DtypePolicy = None) -> None:
        super().__init__(module, dtype=dtype)
        self.group: TrainerGroup = TrainerGroup() if group is None else group

    def sends(self) -> Mapping[int, bytes]:
        """See GroupSource: nothing is gathered."""
        return {}

    expects = sends


def dtype_of(policy: DtypePolicy) -> Callable[[str, torch.Tensor], torch.dtype]:
    """The policy as a function of name and tensor."""
    return _Policy(policy)


class _Policy:
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
