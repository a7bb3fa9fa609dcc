"""FSDP2 (`fully_shard`), and any module whose parameters are DTensors: HSDP, tensor parallelism, and both.

Owns: reading DTensors: mesh, placements, local part. Must not know: how parts move.
What is not a DTensor (ignored parameters, buffers) is whole on every rank and sent as it is. A DTensor that holds partial sums is
refused: its value does not exist before a reduction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from weightlift.errors import ConfigError, SourceError
from weightlift.flat import is_unit, reshard
from weightlift.modules import Slot, aliases, walk_under
from weightlift.sources.gather import Shard, Spread
from weightlift.sources.layout import Cut
from weightlift.sources.sharded import Layer, Named, ShardedSource, runs

__all__ = ["FSDP2Source"]


class FSDP2Source(ShardedSource):
    """All parameters and persistent buffers of a module that `fully_shard` was applied to, under canonical names.

    Args: as of ShardedSource. Layer groups are what was wrapped together; a root that holds the embedding and the head is gathered
    in runs, so that never more than a few layers are whole at once.
    """

    def _settle(self) -> None:
        reshard(self.module)

    def _layers(self) -> Sequence[Layer]:
        found = list(walk_under(self.module, is_unit))
        alias = aliases((slot.name, slot.tensor) for _, slot in found)
        return list(runs([(unit, self._named(slot, alias)) for unit, slot in found]))

    def _named(self, slot: Slot, alias: Mapping[str, str]) -> Named:
        tensor = slot.tensor
        dtype = self._dtype(slot.name, tensor)
        shape, alias_of = tuple(tensor.shape), alias.get(slot.name, "")
        if not isinstance(tensor, DTensor):
            return Named(slot.name, shape, dtype, None, plain=lambda: _current(slot), alias_of=alias_of)
        shard = Shard(slot.name, dtype, self._spread(slot.name, tensor), lambda: _current(slot).to_local())
        return Named(slot.name, shape, dtype, shard, alias_of=alias_of)

    def _spread(self, name: str, tensor: DTensor) -> Spread:
        mesh = tensor.device_mesh
        ranks = [int(rank) for rank in mesh.mesh.flatten().tolist()]
        outside = [rank for rank in ranks if rank not in self.group.ranks]
        if outside:
            raise ConfigError(f"the trainer group must contain all ranks that hold {name}, got none of {outside}")
        return Spread(
            shape=tuple(tensor.shape),
            mesh=tuple(mesh.mesh.shape),
            cuts=tuple(_cut(name, placement) for placement in tensor.placements),
            ranks=tuple(self.group.ranks.index(rank) for rank in ranks),
        )

    def _device(self) -> torch.device:
        for parameter in self.module.parameters():
            if isinstance(parameter, DTensor):
                kind = parameter.device_mesh.device_type
                return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        return torch.device("cpu")


def _current(slot: Slot) -> Any:
    """The tensor that hangs there now; the structure is looked at before every stream."""
    tensor = slot.owner.get(slot.key)
    if tensor is None:
        raise SourceError(f"{slot.name} was removed from the module during a publish", tensor=slot.name)
    return tensor.detach()


def _cut(name: str, placement: Any) -> Cut | None:
    """A placement as a cut. torch has a class of its own for FSDP on an axis that tensor parallelism cuts as well."""
    if isinstance(placement, Replicate):
        return None
    if type(placement).__name__ == "_StridedShard":
        return Cut(placement.dim, last=True)
    if type(placement) is ShardPlacement:
        return Cut(placement.dim)
    raise SourceError(
        f"{name} has the placement {placement}, which cannot be gathered",
        tensor=name,
        remedy="redistribute it to Shard or Replicate placements.",
    )
