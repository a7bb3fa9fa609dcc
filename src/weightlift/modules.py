"""torch.nn's side of the vocabulary: canonical names and a stable walk over what a sync consists of.

Owns: `Slot` (one named tensor and where it hangs), `walk`, `aliases`. Must not know: manifests' digests, transports, who copies.
Sources and loaders use the same walk, so that wrapped on one side and bare on the other means the same names.

What is walked: parameters, frozen ones too, and persistent buffers; non-persistent buffers are not. Wrapper segments are dropped by
what the wrapper is, not by what the name looks like: a genuine child called `module` keeps its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch

__all__ = ["Slot", "aliases", "canonical_child", "walk"]

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


def walk(module: torch.nn.Module, prefix: str = "") -> Iterator[Slot]:
    """Every parameter and persistent buffer with its canonical name, tied ones under each of their names, in module order."""
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield Slot(prefix + key, module._parameters, key, parameter)
    for key, buffer in module._buffers.items():
        if buffer is not None and key not in module._non_persistent_buffers_set:
            yield Slot(prefix + key, module._buffers, key, buffer)
    for name, child in module._modules.items():
        if child is not None:
            yield from walk(child, f"{prefix}{name}." if canonical_child(module, name) else prefix)


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
    return storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
