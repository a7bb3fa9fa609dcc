"""A trainer's parameters, gradients and optimizer state to host memory and back, whatever they are represented as.

Owns: one handler per representation (plain modules, FSDP2's DTensors, FSDP1's flat tensors), the host copies, snapshots of shards.
Must not know: phases, engines, who decides.

Memory is moved by storage, not by tensor: a storage is copied to the host (pinned where there is a GPU) and shrunk to nothing, and
later grown and filled again. So tensor objects, views, ties and optimizer references stay what they were; only addresses may
change, which sources see. While it is away, a tensor has a shape and no memory: a source refuses it.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from weightlift.errors import ConfigError, HandoffError
from weightlift.flat import flat_handles, is_unit, local_shard, places_of, reshard
from weightlift.handoff.barrier import Barrier
from weightlift.handoff.storages import storage_bytes, to_host
from weightlift.modules import transient_buffers, walk

__all__ = ["FSDP1Offload", "FSDP2Offload", "ModuleOffload", "Offload", "ShardSnapshot", "offload_for"]


_States: TypeAlias = list[tuple[Any, dict[str, Any]]]
"""An optimizer's state: parameter, and what it holds for it."""


@dataclasses.dataclass(slots=True)
class _Away:
    """A storage whose bytes are on the host."""

    storage: torch.UntypedStorage
    host: torch.Tensor
    nbytes: int


class Offload(abc.ABC):
    """Base of the handlers.

    Args:
        module: the trainer's model. optimizers: whose state moves with it.
    Raises ConfigError if the module is not of this handler's representation.
    """

    representation: ClassVar[str] = ""

    def __init__(self, module: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        found = _representation(module)
        if found != self.representation:
            raise ConfigError(
                f"module must be {_NAMES[self.representation]}, got {_NAMES[found]}",
                remedy=f"use {_HANDLERS[found].__name__}, or offload_for(module, ...), which chooses.",
            )
        self.module = module
        self.optimizers = optimizers
        self._away: list[_Away] = []

    # --- what the handlers say --------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every local tensor of parameters and buffers, with a name that is the same on every call."""

    def gradients(self) -> Iterator[torch.Tensor]:
        """Every local gradient there is."""
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                yield _local(parameter.grad)

    def settle(self) -> None:
        """Bring the module into its resting state, in which only local parts have memory."""
        reshard(self.module)

    # --- moving -----------------------------------------------------------------------------------------------------------------

    @property
    def offloaded(self) -> bool:
        """Whether the memory is on the host now."""
        return bool(self._away)

    @property
    def host_bytes(self) -> int:
        """Bytes on the host now."""
        return sum(away.nbytes for away in self._away)

    def resident_bytes(self) -> int:
        """Bytes of all storages that would be moved, as they are now."""
        return sum(storage.nbytes() for storage in self._storages())

    def offload(self) -> int:
        """Move everything to the host; returns the bytes. HandoffError if something cannot be moved: then nothing was."""
        if self._away:
            raise HandoffError("the trainer's memory is on the host already")
        self.settle()
        storages = self._storages()
        for storage in storages:
            if not storage.resizable():
                raise HandoffError(
                    "a parameter's memory belongs to somebody else (numpy, a file, shared memory) and cannot be given back",
                    remedy="keep the trainer's tensors in memory that torch allocated.",
                )
        moved: list[_Away] = []
        try:
            for storage in storages:
                moved.append(_Away(storage, to_host(storage), storage.nbytes()))
                if storage.device.type == "cpu":
                    storage.resize_(0)  # one after the other: never twice the trainer's memory at once
            _wait_for(storages)  # the copies run on the device's stream: only now may their sources go
        except BaseException:
            for away in moved:
                if not away.storage.nbytes():
                    away.storage.resize_(away.nbytes)
                    storage_bytes(away.storage).copy_(away.host)
            raise
        for away in moved:
            away.storage.resize_(0)
        self._away = moved
        return self.host_bytes

    def load(self) -> int:
        """Move everything back; returns the bytes. HandoffError if it was not offloaded."""
        if not self._away:
            raise HandoffError("the trainer's memory is not on the host")
        if any(one.storage.nbytes() for one in self._away):
            raise HandoffError("a tensor was given new memory while the trainer was on the host: something wrote to it")
        count = self.host_bytes
        away, self._away = self._away, []
        try:
            for one in away:
                one.storage.resize_(one.nbytes)
                storage_bytes(one.storage).copy_(one.host, non_blocking=one.host.is_pinned())
            _wait_for([one.storage for one in away])
        except BaseException:
            self._away = away  # the host copies are the only ones: they are kept
            for one in away:
                one.storage.resize_(0)
            raise
        return count

    def _storages(self) -> list[torch.UntypedStorage]:
        """Every storage once, in a stable order; where there is a device, those on it (step counters live on the host anyway)."""
        found: dict[int, torch.UntypedStorage] = {}
        for _, tensor in self.parameters():
            _add(found, tensor)
        for tensor in self.gradients():
            _add(found, tensor)
        for optimizer in self.optimizers:
            for tensor in _state_tensors(optimizer):
                _add(found, tensor)
        on_device = [storage for storage in found.values() if storage.device.type != "cpu"]
        return on_device or list(found.values())


def _add(found: dict[int, torch.UntypedStorage], tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    if storage.nbytes():
        found.setdefault(storage._cdata, storage)


def _wait_for(storages: list[torch.UntypedStorage]) -> None:
    for index in {storage.device.index for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(index)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that has memory here."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield _local(value)


class ModuleOffload(Offload):
    """Plain modules, bare or under DDP."""

    representation = "plain"

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Offload."""
        yield from _everything(self.module)


class FSDP2Offload(Offload):
    """Modules under `fully_shard`: the local parts of DTensors."""

    representation = "fsdp2"

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Offload."""
        yield from _everything(self.module)


class FSDP1Offload(Offload):
    """Modules under FullyShardedDataParallel: the local parts of flat tensors."""

    representation = "fsdp1"

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Offload."""
        managed = set[tuple[int, str]]()
        for number, handle in enumerate(flat_handles(self.module)):
            managed |= set(places_of(handle))
            yield f"flat.{number}", local_shard(handle)
        for slot in walk(self.module):
            if (id(slot.owner), slot.key) not in managed and slot.key != "_flat_param":
                yield slot.name, slot.tensor.detach()
        yield from transient_buffers(self.module)

    def gradients(self) -> Iterator[torch.Tensor]:
        """See Offload."""
        yield from super().gradients()
        for handle in flat_handles(self.module):
            for gradient in (handle.flat_param.grad, getattr(handle.flat_param, "_saved_grad_shard", None)):
                if gradient is not None:
                    yield gradient.detach()


def _everything(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and all buffers, those that no checkpoint has, too: they are memory all the same."""
    for slot in walk(module):
        yield slot.name, _local(slot.tensor)
    for name, buffer in transient_buffers(module):
        yield name, _local(buffer)


_NAMES: Mapping[str, str] = {
    "plain": "a plain module (or one under DDP)",
    "fsdp1": "wrapped in FullyShardedDataParallel (FSDP1, flat tensors)",
    "fsdp2": "sharded by fully_shard (FSDP2, DTensors)",
}
_HANDLERS: Mapping[str, type[Offload]] = {"plain": ModuleOffload, "fsdp1": FSDP1Offload, "fsdp2": FSDP2Offload}


def _representation(module: torch.nn.Module) -> str:
    if flat_handles(module):
        return "fsdp1"
    sharded = any(isinstance(p, DTensor) for p in module.parameters()) or any(is_unit(m) for m in module.modules())
    return "fsdp2" if sharded else "plain"


def offload_for(module: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> Offload:
    """The handler for what a module is."""
    return _HANDLERS[_representation(module)](module, *optimizers)


class ShardSnapshot:
    """This rank's shards as they were: parameters, buffers and optimizer state, on the host.

    For trainers that go one step on the side and come back. Restoring is exact to the bit and fills the same memory; optimizer state
    that did not exist when the snapshot was taken is removed again. Nothing is skipped: a name, shape or dtype that has changed raises
    HandoffError before anything is written.

    Args:
        offload: what is saved. Every rank saves and restores its own shards.
        barrier: of all ranks, which meet when all have saved (and when all have restored): a fast rank does not train on before a slow
            one has, and a rank that fails is an error on all. None in a single process. timeout_s: how long they wait.
    """

    def __init__(self, offload: Offload, *, barrier: Barrier | None = None, timeout_s: float = 60.0) -> None:
        self._barrier = barrier
        self._timeout_s = timeout_s
        self._shards: dict[str, torch.Tensor] = {}
        self._states: list[_States] = []
        self._in_step(lambda: self._save(offload))

    def _in_step(self, action: Callable[[], None]) -> None:
        failure: BaseException | None = None
        try:
            action()
        except Exception as error:  # the others are waiting: they learn why this rank does not come
            failure = error
        if self._barrier is not None:
            self._barrier.meet(self._timeout_s, failure=failure)
        elif failure is not None:
            raise failure

    def _save(self, offload: Offload) -> None:
        if offload.offloaded:
            raise HandoffError("a snapshot is taken while the trainer is on the device")
        offload.settle()
        shards = list(offload.parameters())
        self._shards = {name: tensor.to("cpu", copy=True) for name, tensor in shards}
        if len(self._shards) != len(shards):
            raise HandoffError("two shards have the same name: a snapshot would lose one")
        self._states = [_snapshot_state(optimizer) for optimizer in offload.optimizers]

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        tensors = [*self._shards.values(), *(v for states in self._states for _, state in states for v in state.values())]
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))

    def restore(self, offload: Offload) -> None:
        """Put everything back."""
        self._in_step(lambda: self._put_back(offload))

    @torch.no_grad()
    def _put_back(self, offload: Offload) -> None:
        if offload.offloaded:
            raise HandoffError("a snapshot is restored while the trainer is on the device")
        offload.settle()
        now = dict(offload.parameters())
        if set(now) != set(self._shards):
            names = ", ".join(sorted(set(now) ^ set(self._shards))[:5])
            raise HandoffError(f"the model no longer holds the shards of the snapshot: {names}")
        for name, tensor in now.items():
            kept = self._shards[name]
            if (tensor.shape, tensor.dtype) != (kept.shape, kept.dtype):
                raise HandoffError(
                    f"{name} has shape {list(tensor.shape)} ({tensor.dtype}), the snapshot {list(kept.shape)} ({kept.dtype})"
                )
        for name, tensor in now.items():
            tensor.copy_(self._shards[name])
        for optimizer, states in zip(offload.optimizers, self._states, strict=True):
            _restore_state(optimizer, states)


def _snapshot_state(optimizer: torch.optim.Optimizer) -> _States:
    return [
        (parameter, {k: _local(v).to("cpu", copy=True) if isinstance(v, torch.Tensor) else v for k, v in state.items()})
        for parameter, state in optimizer.state.items()
    ]


def _restore_state(optimizer: torch.optim.Optimizer, states: _States) -> None:
    kept = {id(parameter): state for parameter, state in states}
    for parameter in list(optimizer.state):
        if id(parameter) not in kept:
            del optimizer.state[parameter]  # made by a step that is now undone
    for parameter, state in states:
        current = optimizer.state[parameter]
        for key in [key for key in current if key not in state]:
            del current[key]
        for key, value in state.items():
            held = current.get(key)
            if isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor):
                _local(held).copy_(value)
            elif isinstance(value, torch.Tensor):
                raise HandoffError(f"the optimizer no longer holds {key!r} of a parameter, which the snapshot has")
            else:
                current[key] = value
