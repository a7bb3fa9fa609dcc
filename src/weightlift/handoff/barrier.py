"""The roll call before a KV cache wakes: every rank says that its memory is free, or why it is not.

Owns: `Barrier`. Must not know: phases, memory. In a single process it does nothing. It never uses a collective: a rank that does
not come is named, and nobody is left inside of something that cannot be given up.
"""

from __future__ import annotations

import asyncio
import collections
import time
from typing import Any, Final

import msgspec
import torch.distributed as dist

from weightlift.config import check_seconds
from weightlift.errors import BarrierTimeout, HandoffError, PeerLost, TransferTimeout
from weightlift.fabric import Fabric

__all__ = ["Barrier"]

_GLANCE_S: Final = 0.001
_TURN_S: Final = 0.05
"""How long one rank is waited for before the others are looked at again; shorter than the pulse by which a rank shows that it lives,
or a rank that waits at another meeting would keep this one waiting for ever."""
_made: collections.Counter[str] = collections.Counter()


class _Here(msgspec.Struct, frozen=True):
    """A rank arrived; its reason if it cannot let the others go on."""

    failure: str = ""


_here: Final = msgspec.msgpack.Decoder(_Here)


class Barrier:
    """A reusable roll call of ranks.

    Args:
        name: the same on all ranks. index, size: this rank among them; None: of the default process group, or alone without one.
        store: a torch.distributed store that all reach; default: the default process group's.

    One thread at a time. `meet` blocks; in asyncio, `await barrier.meet_async(...)`.
    """

    def __init__(self, name: str = "barrier", *, index: int | None = None, size: int | None = None, store: Any = None) -> None:
        if index is None or size is None:
            together = dist.is_available() and dist.is_initialized()
            index, size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        self.index: Final = index
        self.size: Final = size
        self._meetings = 0
        _made[name] += 1
        name = f"barrier/{name}/{_made[name]}"
        self._fabric = None if size == 1 else Fabric(name, index, size, silence_s=20.0, store=store)

    def meet(self, timeout_s: float, *, failure: BaseException | None = None) -> None:
        """Wait until every rank is here.

        failure: why this rank cannot let the others go on: all raise it.
        Raises: BarrierTimeout naming every rank that is missing; HandoffError with the reason of a rank that failed (on that rank
        its own exception); in a single process nothing but the failure.
        """
        check_seconds("timeout_s", timeout_s)
        fabric = self._fabric
        if fabric is not None:
            self._meetings = self._next(fabric)
            own = "" if failure is None else f"{type(failure).__name__}: {failure}"
            fabric.put(self._key(self.index), msgspec.msgpack.encode(_Here(own)))
            fabric.put(f"at/{self.index}", str(self._meetings).encode())
            fabric.drop([f"{self._meetings - 2}/{self.index}"])
        if failure is not None:
            raise failure
        if fabric is not None:
            try:
                self._hear(fabric, timeout_s)
            except BarrierTimeout:
                # Whoever comes later must not take this rank for one that is here.
                fabric.drop([self._key(self.index)])
                raise

    def _next(self, fabric: Fabric) -> int:
        """The number of this meeting. A rank that missed some, which the others gave up, joins them where they are."""
        others = (f"at/{rank}" for rank in range(self.size) if rank != self.index)
        there = (int(fabric.get(key, of=0, doing="come to the barrier")) for key in others if fabric.has(key))
        return max([self._meetings + 1, *there])

    def _key(self, rank: int) -> str:
        return f"{self._meetings}/{rank}"

    def _hear(self, fabric: Fabric, timeout_s: float) -> None:
        waiting = list(range(self.size))
        lost: dict[int, BaseException] = {}
        deadline = time.monotonic() + timeout_s
        while waiting:
            # All are looked for in every turn: one that gives up takes back that it was here, and must have been seen before.
            waiting = [rank for rank in waiting if not self._is_here(fabric, rank, _GLANCE_S, lost)]
            over = time.monotonic() >= deadline
            if over or set(waiting) <= set(lost):
                break
            self._is_here(fabric, next(rank for rank in waiting if rank not in lost), _TURN_S, lost)
        if waiting:
            names = ", ".join(f"rank {rank}" for rank in waiting)
            raise BarrierTimeout(
                f"{names} of {self.size} did not come to the barrier within {timeout_s} s",
                remedy="the KV cache stays asleep; see what they are doing, and try again.",
            ) from next(iter(lost.values()), None)

    def _is_here(self, fabric: Fabric, rank: int, seconds: float, lost: dict[int, BaseException]) -> bool:
        """Whether a rank came, waited for so long; HandoffError if it cannot go on. A process that has ended is noted in `lost`."""
        try:
            here = _here.decode(fabric.get(self._key(rank), of=rank, doing="come to the barrier", timeout_s=seconds))
        except TransferTimeout:
            return False
        except PeerLost as error:
            lost[rank] = error
            return False
        if here.failure:
            raise HandoffError(f"rank {rank} cannot go on: {here.failure}", peer=f"trainer rank {rank}")
        return True

    async def meet_async(self, timeout_s: float, *, failure: BaseException | None = None) -> None:
        """The same, off the event loop."""
        await asyncio.to_thread(self.meet, timeout_s, failure=failure)

    def close(self) -> None:
        """Give back everything. Idempotent."""
        if self._fabric is not None:
            self._fabric.close()
