"""Full tensors out of shards: one layer group after the other, the next one under way while the current one is used.

Owns: what a rank sends to whom, the two arenas, the drain. Must not know: FSDP, DTensors, buckets, who publishes.

    receiver  wait(k)  unpack k  post(k+1)  yield the tensors of k ...  wait(k+1) ...
    holder    post(k)  post(k+1) when k is through ...

Memory of a receiver above its resident shards: the arena that holds group k, and the inbox that fills with k+1 while k is used.
Both are as large as the largest group, are reused from group to group, and are given back when the stream ends. So a tensor that is
yielded is valid until the next one is asked for.

A rank that fails goes on to the end, with parts that are marked as failed: nobody waits for it, and nobody uses what it sends.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import torch
import xxhash

from weightlift.copies import CopyList
from weightlift.errors import SourceError, WeightliftError
from weightlift.fabric import Fabric, Swap
from weightlift.sources.layout import Box, Cut, box_of, elements, extent

__all__ = ["Gatherer", "LayerGroup", "Output", "Plain", "Shard", "Spread"]

_ALIGNMENT: Final = 64
_HEADER_BYTES: Final = _ALIGNMENT
"""In front of every part: one byte that says whether the rest is what it should be."""
_FAILED: Final = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """How one tensor is spread over the ranks of a trainer group.

    shape: of the whole tensor. mesh: size of each mesh dimension. cuts: how each cuts; None where it holds copies.
    ranks: the mesh as indices into the trainer group, in row-major order.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    cuts: tuple[Cut | None, ...]
    ranks: tuple[int, ...]

    def holders(self, receiver: int) -> Mapping[int, Box]:
        """The ranks whose parts make up the whole for a receiver; of copies, those in the receiver's own slice of the mesh."""
        return _holders(self, receiver)

    def box(self, rank: int) -> Box:
        """What a rank holds."""
        return box_of(self.shape, self.mesh, self.cuts, _coordinate(self, rank))


def _coordinate(spread: Spread, rank: int) -> tuple[int, ...]:
    place, at = spread.ranks.index(rank), []
    for size in reversed(spread.mesh):
        place, rest = divmod(place, size)
        at.append(rest)
    return tuple(reversed(at))


@functools.lru_cache(maxsize=65536)
def _holders(spread: Spread, receiver: int) -> Mapping[int, Box]:
    if receiver not in spread.ranks:
        return {}  # it has a copy of this mesh of its own, which this rank is not part of
    own = _coordinate(spread, receiver)
    found: dict[int, Box] = {}
    for rank, at in zip(spread.ranks, itertools.product(*map(range, spread.mesh)), strict=True):
        if all(cut is not None or here == mine for cut, here, mine in zip(spread.cuts, at, own, strict=True)):
            box = box_of(spread.shape, spread.mesh, spread.cuts, at)
            if elements(box):
                found[rank] = box
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """One tensor (or one flat tensor that holds several) that is gathered as a whole.

    name: for errors. dtype: that it is gathered in; the cast happens before it is sent. local: this rank's part, any strides.
    """

    name: str
    dtype: torch.dtype
    spread: Spread
    local: Callable[[], torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """A tensor to yield: `shape` elements of shard number `shard`, from element `start` on; stride None for contiguous."""

    shard: int
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Plain:
    """A tensor to yield that every rank holds whole."""

    tensor: Callable[[], torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerGroup:
    """What is gathered at once. outputs: in the order of the manifest."""

    shards: tuple[Shard, ...]
    outputs: tuple[Output | Plain, ...]


_Item: TypeAlias = tuple[int, Box, int]
"""Shard number, box, offset in the part."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """What one rank sends to another for one group."""

    items: tuple[_Item, ...]
    nbytes: int


def _align(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _part(group: LayerGroup, holder: int, receiver: int) -> _Part:
    items, at = [], _HEADER_BYTES
    for number, shard in enumerate(group.shards):
        box = shard.spread.holders(receiver).get(holder)
        if box is not None:
            items.append((number, box, at))
            at = _align(at + elements(box) * shard.dtype.itemsize)
    return _Part(tuple(items), at)


class Gatherer:
    """Streams the groups of one model, round after round.

    Args:
        fabric: of the trainer group. groups: the same on every rank, in the order of the manifest.
        receivers: indices of the ranks that get full tensors. device: where shards and full tensors are.
        cause: called with what this rank failed with, before it sends anything that is marked as failed.
        why: the error that another rank failed with.
    """

    def __init__(
        self,
        fabric: Fabric,
        groups: Sequence[LayerGroup],
        receivers: Sequence[int],
        *,
        device: torch.device,
        cause: Callable[[WeightliftError], None],
        why: Callable[[int], WeightliftError],
    ) -> None:
        self._fabric = fabric
        self._groups = groups
        self._device = device
        self._cause = cause
        self._why = why
        me = fabric.index
        self._receives = me in receivers
        self._sends: list[dict[int, _Part]] = [
            {q: part for q in receivers if q != me and (part := _part(group, me, q)).items} for group in groups
        ]  # fmt: skip
        holders = [r for r in range(fabric.size) if r != me] if self._receives else []
        self._inbound: list[dict[int, _Part]] = [
            {r: part for r in holders if (part := _part(group, r, me)).items} for group in groups
        ]
        self.sends: Final = _digests(self._sends, range(fabric.size))
        """Receiver -> a digest of everything that this rank is going to send to it in one stream."""
        self.expects: Final = _digests(self._inbound, range(fabric.size))
        """Holder -> a digest of everything that this rank expects from it in one stream."""
        self.peak_bytes = 0
        """Bytes that the last stream held above the resident shards, at most."""

    @property
    def largest_group_bytes(self) -> int:
        """Bytes of the largest group, whole."""
        return max((_whole_bytes(group) for group in self._groups), default=0)

    @property
    def steps(self) -> int:
        """How many layer groups there are."""
        return len(self._groups)

    def stream(self, step: str, timeout_s: float) -> Iterator[torch.Tensor]:
        """The full tensors, in order; none where this rank does not receive. Closing it early still takes part in the rest.

        step: names this stream, the same on all ranks. Raises SourceError for what another rank failed with, PeerLost,
        TransferTimeout.
        """
        walk = _Walk(self, step, timeout_s)
        try:
            self._fabric.connect(self._device, timeout_s)  # all ranks at once, also those that have nothing to send
            walk.post(0)
            for number in range(len(self._groups)):
                walk.collect(number)
                walk.post(number + 1)
                yield from walk.outputs(number)
        except GeneratorExit:
            walk.drain()
            raise
        except WeightliftError as error:
            walk.fail(error)
            raise
        except Exception as error:
            ours = SourceError(f"gathering raised {type(error).__name__}: {error}")
            walk.fail(ours)
            raise ours from error
        finally:
            self.peak_bytes = walk.peak_bytes
            walk.end()


class _Walk:
    """One stream: which group is under way, and the memory."""

    def __init__(self, gatherer: Gatherer, step: str, timeout_s: float) -> None:
        self._of = gatherer
        self._step = step
        self._timeout_s = timeout_s
        self._posted = 0
        self._swap: Swap | None = None
        self._broken = False
        self._failed = False
        self._error: WeightliftError | None = None
        """What this rank failed with in the group that is about to be sent; raised when that is done."""
        self._inbox: dict[int, torch.Tensor] = {}
        self._full: list[torch.Tensor] = []
        inbound = max((sum(part.nbytes for part in parts.values()) for parts in gatherer._inbound), default=0)
        outbound = max((sum(part.nbytes for part in set(parts.values())) for parts in gatherer._sends), default=0)
        whole = max((_whole_bytes(group) for group in gatherer._groups), default=0) if gatherer._receives else 0
        self._memory = {name: self._allocate(size) for name, size in (("in", inbound), ("out", outbound), ("full", whole))}
        self.peak_bytes = inbound + outbound + whole

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._of._device)

    def post(self, number: int) -> None:
        """Start the exchange of a group; every group is started exactly once, in order."""
        of = self._of
        if number != self._posted or number >= len(of._groups) or self._broken:
            return
        self._posted += 1
        inbound, outbound = of._inbound[number], of._sends[number]
        self._inbox, at = {}, 0
        for rank, part in inbound.items():
            self._inbox[rank] = self._memory["in"][at : at + part.nbytes]
            at += part.nbytes
        packed, at = dict[_Part, torch.Tensor](), 0  # several receivers may get the same part
        for part in outbound.values():
            if part not in packed:
                packed[part] = self._memory["out"][at : at + part.nbytes]
                at += part.nbytes
        try:
            if not self._failed:
                self._pack(number, packed)
        except Exception as error:
            # The others expect this part: they get one that says that it is none.
            self.failed_here(error)
        for memory in packed.values():
            memory[0] = _FAILED if self._failed else 0
        sends = {rank: packed[part] for rank, part in outbound.items()}
        if sends or self._inbox:
            try:
                self._swap = of._fabric.swap(
                    sends, self._inbox, stream=self._step, number=number, device=of._device, timeout_s=self._timeout_s
                )
            except BaseException:
                self._broken = True
                raise
        failure, self._error = self._error, None
        if failure is not None:
            raise failure

    def failed_here(self, error: Exception) -> None:
        """This rank cannot make its part: say why, and go on marked."""
        if isinstance(error, WeightliftError):
            ours = error
        else:
            ours = SourceError(f"the source raised {type(error).__name__}: {error}")
            ours.__cause__ = error
        self._failed, self._error = True, ours
        self._of._cause(ours)

    @torch.no_grad()
    def _pack(self, number: int, packed: Mapping[_Part, torch.Tensor]) -> None:
        group, pairs = self._of._groups[number], []
        for part, memory in packed.items():
            for shard, box, at in part.items:
                pairs.append((_view(memory, at, group.shards[shard].dtype, extent(box)), self._local(group.shards[shard], box)))
        CopyList(pairs).run()

    def _local(self, shard: Shard, box: Box) -> torch.Tensor:
        local = shard.local()
        if tuple(local.shape) != extent(box):
            raise SourceError(
                f"{shard.name}: this rank holds a part of shape {list(local.shape)}, expected {list(extent(box))} of "
                f"{list(shard.spread.shape)}",
                tensor=shard.name,
                remedy="the layout of this tensor is not one that can be gathered: publish from a source that holds it whole.",
            )
        return local

    def collect(self, number: int) -> None:
        """Wait for a group, and put it together."""
        self._wait()
        for rank, memory in self._inbox.items():
            if int(memory[0]) == _FAILED:
                raise self._of._why(rank)
        if self._of._receives:
            self._unpack(number)

    def _wait(self) -> None:
        swap, self._swap = self._swap, None
        if swap is not None:
            try:
                swap.wait()
            except BaseException:
                self._broken = True
                raise

    @torch.no_grad()
    def _unpack(self, number: int) -> None:
        of, group = self._of, self._of._groups[number]
        self._full, at = [], 0
        for shard in group.shards:
            nbytes = math.prod(shard.spread.shape) * shard.dtype.itemsize
            self._full.append(_view(self._memory["full"], at, shard.dtype, shard.spread.shape))
            at += _align(nbytes)
        pairs = []
        for rank, part in of._inbound[number].items():
            for shard_number, box, offset in part.items:
                shard = group.shards[shard_number]
                pairs.append((_cut(self._full[shard_number], box), _view(self._inbox[rank], offset, shard.dtype, extent(box))))
        for shard_number, shard in enumerate(group.shards):
            own = shard.spread.holders(of._fabric.index).get(of._fabric.index)
            if own is not None:
                pairs.append((_cut(self._full[shard_number], own), self._local(shard, own)))
        CopyList(pairs).run()

    def outputs(self, number: int) -> Iterator[torch.Tensor]:
        """The tensors of the group that was put together last."""
        if not self._of._receives:
            return
        for output in self._of._groups[number].outputs:
            if isinstance(output, Plain):
                yield output.tensor().detach()
                continue
            flat = self._full[output.shard].reshape(-1)[output.start : output.start + math.prod(output.shape)]
            yield flat.view(output.shape) if output.stride is None else flat.as_strided(output.shape, output.stride)

    def drain(self) -> None:
        """Take part in the rest without using it."""
        while not self._broken and (self._swap is not None or self._posted < len(self._of._groups)):
            self._wait()
            self.post(self._posted)

    def fail(self, error: WeightliftError) -> None:
        """This rank gives up: the others are told, and not kept waiting."""
        if not self._failed:
            self._failed = True
            self._of._cause(error)
        try:
            self.drain()
        except WeightliftError as second:
            error.add_note(f"the rest could not be drained: {second.message}")

    def end(self) -> None:
        """Give the memory back. A walk that was left in the middle leaves a communicator that nobody can use."""
        if self._broken or self._swap is not None or 0 < self._posted < len(self._of._groups):
            self._of._fabric.leave(self._step)
        self._inbox, self._full, self._swap = {}, [], None
        self._memory.clear()


def _digests(parts: Sequence[Mapping[int, _Part]], ranks: Iterable[int]) -> dict[int, bytes]:
    """Of the parts of every group, for each rank that has any. Two ranks that disagree would break the communicator, or worse."""
    found = {}
    for rank in ranks:
        described = [(number, part.nbytes, part.items) for number, of in enumerate(parts) if (part := of.get(rank)) is not None]
        if described:
            found[rank] = xxhash.xxh3_128_digest(repr(described).encode())
    return found


def _whole_bytes(group: LayerGroup) -> int:
    return sum(_align(math.prod(shard.spread.shape) * shard.dtype.itemsize) for shard in group.shards)


def _view(memory: torch.Tensor, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    return memory[at : at + nbytes].view(dtype).view(shape)


def _cut(full: torch.Tensor, box: Box) -> torch.Tensor:
    return full[tuple(slice(start, stop) for start, stop in box)]
