"""How the trainer's model is spread over ranks: wrapping, gradients, the source that publishes it.

Owns: the four kinds of trainer. Must not know: losses, samples, engines.
A gradient is the mean over the ranks, whatever the kind; so a rank scales its loss by its share of the tokens (rl/learner.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from weightlift.rl.config import TrainerKind
from weightlift.sources import DDPSource, ModuleSource, Source, TrainerGroup

__all__ = ["clip_gradients", "decoder_layers", "source_for", "wrap"]


def decoder_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The list of equal layers of a causal LM: what is wrapped one by one."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module)]
    return max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()), default=torch.nn.ModuleList())


def wrap(kind: TrainerKind, model: torch.nn.Module) -> torch.nn.Module:
    """The model as its kind of trainer holds it; every rank calls this with the same weights."""
    if kind == "single":
        return model
    device = next(model.parameters()).device
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    layers = decoder_layers(model)
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        # On the CPU, FSDP1 asks for a device id as well, and must not be told to offload by itself.
        options: dict[str, Any] = {"device_id": device, "use_orig_params": True}
        for number, layer in enumerate(layers):
            layers[number] = FullyShardedDataParallel(layer, **options)
        return FullyShardedDataParallel(model, **options)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def clip_gradients(kind: TrainerKind, model: torch.nn.Module, max_norm: float) -> float:
    """Scale the gradients down to a norm over all ranks; returns the norm before."""
    if kind == "fsdp1":
        return float(model.clip_grad_norm_(max_norm))  # type: ignore[operator]
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def source_for(kind: TrainerKind, model: torch.nn.Module, group: TrainerGroup | None, *, dtype: str | None = None) -> Source:
    """What publishes the model, in a dtype of its own or each parameter's."""
    if kind == "single":
        return ModuleSource(model, dtype=dtype)
    if kind == "ddp":
        return DDPSource(model, group=group, dtype=dtype)
    if kind == "fsdp1":
        from weightlift.sources.fsdp1 import FSDP1Source

        return FSDP1Source(model, group=group, dtype=dtype)
    from weightlift.sources.fsdp2 import FSDP2Source

    return FSDP2Source(model, group=group, dtype=dtype)
