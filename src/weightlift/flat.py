"""What FSDP makes of a module: FSDP1's flat parameters, FSDP2's units, and the state that both are in between steps.

Owns: reading the handles of FullyShardedDataParallel, resharding. Must not know: who gathers or moves shards.
torch has no public way to read one unit of FSDP1 without a collective on the training's own process group, so the handle's attributes
are read; tests/multiprocess/test_sharded_sources.py and test_offload.py hold this to every layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

__all__ = ["flat_handles", "is_unit", "local_shard", "places_of", "reshard"]


def flat_handles(module: torch.nn.Module) -> list[Any]:
    """The handles of all flat parameters under a module, in module order."""
    units = [unit for unit in module.modules() if isinstance(unit, FullyShardedDataParallel)]
    return [unit._handle for unit in units if getattr(unit, "_handle", None) is not None]


def local_shard(handle: Any) -> torch.Tensor:
    """This rank's part of a flat parameter, 1-D, padding included. Also while FSDP has the whole tensor in its place (a root after
    a forward pass without a backward)."""
    flat = handle.flat_param
    shard: torch.Tensor | None = getattr(flat, "_local_shard", None)
    return (flat if shard is None else shard).detach()


def places_of(handle: Any) -> Iterator[tuple[int, str]]:
    """Where the original parameters of a handle hang, as (id of the dict, key)."""
    for info in (*handle.flat_param._param_infos, *handle.flat_param._shared_param_infos):
        yield id(info.module._parameters), info.param_name


def is_unit(module: torch.nn.Module) -> bool:
    """Whether `fully_shard` was applied to this module itself."""
    return isinstance(module, FSDPModule)


def reshard(module: torch.nn.Module) -> None:
    """Give back whole parameters, as FSDP does after a backward pass: a root keeps them after a forward pass without one."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()
    for handle in flat_handles(module):
        if not handle.uses_sharded_strategy or getattr(handle.flat_param, "_local_shard", None) is None:
            continue
        if not handle.is_sharded(handle.flat_param):
            handle.reshard(True)
            handle.post_reshard()
