"""FSDP1 (`FullyShardedDataParallel`): flat parameters, with and without `use_orig_params`.

Owns: reading flat parameters: which names lie where in which flat tensor. Must not know: how parts move.
What is not sharded (ignored parameters, buffers) is whole on every rank and sent as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weightlift.errors import ConfigError
from weightlift.flat import flat_handles, local_shard, places_of
from weightlift.modules import aliases, prefixes, walk
from weightlift.sources.gather import Shard, Spread
from weightlift.sources.layout import Cut
from weightlift.sources.sharded import Layer, Named, ShardedSource

__all__ = ["FSDP1Source"]


class FSDP1Source(ShardedSource):
    """All parameters and persistent buffers of a module wrapped in FullyShardedDataParallel, under canonical names.

    Args: as of ShardedSource. Where `dtype` names one dtype for all parameters of a flat tensor, the cast happens before it is sent;
    otherwise the flat tensor travels as it is, and each parameter is cast where it is packed.
    """

    def _structure(self) -> object:
        return [(id(handle), handle._use_orig_params) for handle in flat_handles(self.module)]

    def _layers(self) -> Sequence[Layer]:
        handles = flat_handles(self.module)
        if not handles:
            raise ConfigError("module must be wrapped in FullyShardedDataParallel, got one without a flat parameter")
        names_of = prefixes(self.module)
        managed: set[tuple[int, str]] = set()
        layers = []
        for handle in handles:
            managed |= set(places_of(handle))
            layers.append(Layer(tuple(self._of_handle(handle, names_of)), divisible=False))
        slots = [slot for slot in walk(self.module) if (id(slot.owner), slot.key) not in managed and slot.key != "_flat_param"]
        alias = aliases((slot.name, slot.tensor) for slot in slots)
        plain = [
            Named(
                slot.name,
                tuple(slot.tensor.shape),
                self._dtype(slot.name, slot.tensor),
                None,
                plain=lambda owner=slot.owner, key=slot.key: owner[key],  # type: ignore[misc]
                alias_of=alias.get(slot.name, ""),
            )
            for slot in slots
        ]
        return [*layers, Layer(tuple(plain), divisible=True)] if plain else layers

    def _of_handle(self, handle: Any, names_of: dict[int, str]) -> Iterator[Named]:
        flat = handle.flat_param
        local = local_shard(handle)
        names = [names_of[id(info.module)] + info.param_name for info in flat._param_infos]
        dtypes = [self._dtype(name, local) for name in names]
        shard = self._shard(handle, dtypes[0] if len(set(dtypes)) == 1 else local.dtype)
        whole: dict[tuple[int, str], Named] = {}
        starts = _starts(flat)
        for number, info in enumerate(flat._param_infos):
            shape, stride = tuple(flat._shapes[number]), tuple(flat._strides[number])
            contiguous = flat._contiguities[number]
            named = Named(
                names[number],
                shape,
                dtypes[number],
                shard,
                start=starts[number],
                stride=None if contiguous else stride,
            )
            whole[id(info.module), info.param_name] = named
            yield named
        for tie in flat._shared_param_infos:
            first = whole[id(tie.prim_module), tie.prim_param_name]
            yield Named(
                names_of[id(tie.module)] + tie.param_name, first.shape, first.dtype, shard, start=first.start, alias_of=first.name
            )

    def _shard(self, handle: Any, dtype: torch.dtype) -> Shard:
        sharded = bool(handle.uses_sharded_strategy)
        members = dist.get_process_group_ranks(handle.process_group) if sharded else [self.group.ranks[self.group.index]]
        outside = [rank for rank in members if rank not in self.group.ranks]
        name = handle.flat_param._fqns[0] if handle.flat_param._fqns else "a flat parameter"
        if outside:
            raise ConfigError(f"the trainer group must contain all ranks that hold {name}, got none of {outside}")
        return Shard(
            f"the flat parameter with {name}",
            dtype,
            Spread(
                shape=(local_shard(handle).numel() * len(members),),
                mesh=(len(members),),
                cuts=(Cut(0),),
                ranks=tuple(self.group.ranks.index(rank) for rank in members),
            ),
            lambda: local_shard(handle).view(-1),
        )

    def _device(self) -> torch.device:
        handles = flat_handles(self.module)
        return torch.device(handles[0].device) if handles else torch.device("cpu")


def _starts(flat: Any) -> list[int]:
    """Where each original parameter begins in the flat tensor: FSDP puts padding between them where it aligns."""
    starts, at = [], 0
    padded = getattr(flat, "_numels_with_padding", None) or flat._numels
    is_padding = getattr(flat, "_is_padding_mask", None) or [False] * len(padded)
    for count, skip in zip(padded, is_padding, strict=True):
        if not skip:
            starts.append(at)
        at += count
    return starts
