"""FSDP1's flat parameters: where they are, and what a rank holds of them.

Owns: reading the handles of FullyShardedDataParallel. Must not know: who gathers or moves them.
torch has no public way to read one unit's shards without a collective on the training's own process group, so the handle's attributes
are read; tests/multiprocess/test_sharded_sources.py and test_offload.py hold this to every layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["flat_handles", "local_shard", "places_of"]


def flat_handles(module: torch.nn.Module) -> list[Any]:
    """The handles of all flat parameters under a module, in module order."""
    from torch.distributed.fsdp import FullyShardedDataParallel

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
