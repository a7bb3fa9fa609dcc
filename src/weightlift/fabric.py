"""Sends and receives between the ranks of one group, each bounded, in a communicator of its own.

Owns: `Fabric`, and what torch.distributed's store and backends raise, mapped to this library's errors. Must not know: what is sent,
who decides. Used by sources (gathers) and by nobody's default process group: a training step that runs meanwhile is not disturbed.

    receiver                                        sender
      posts its receives of step k
      want/k in the store  ----------------------->  waits for it, in slices, as long as the receiver lives
      waits for the bytes  <-----------------------  sends

Waiting for another rank happens in the store, where a wait may be given up and taken up again. A Gloo receive that was given up
closes its connection for good, so the communicator itself is waited for only when both ends are known to be there; after any
failure it is torn down, and the next round builds a new one (a few milliseconds on one host).
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from weightlift.errors import ConfigError, PeerLost, TransferTimeout
from weightlift.liveness import host_identity, lives

__all__ = ["Fabric", "default_store"]

_SLICE_S: Final = 0.5
"""How long one wait in the store lasts before the other rank's life is looked at."""
_PULSE_S: Final = 0.5
_FASTEST_POLL_S: Final = 20e-6
_SLOWEST_POLL_S: Final = 2e-3
_SLOWEST_ASK_S: Final = 10e-3


class _Card(msgspec.Struct, frozen=True):
    """Who a rank is, for the others to watch."""

    pid: int
    host: str


def default_store() -> Any:
    """A connection of our own to the store of the default process group; ConfigError without one.

    Of our own, because a wait holds the connection, and others use it at the same time.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError("torch.distributed must be initialized before a sharded source is made, got no default process group")
    store = dist.distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store


class Fabric:
    """One rank's end.

    Args:
        name: the same on all ranks, different for two fabrics of one job.
        index: this rank, 0 to size - 1. size: how many ranks.
        silence_s: how long another rank may be silent before it is given up.
        store: a torch.distributed store that all ranks reach; default: the default process group's.

    The constructor does not wait for anybody. Not for use from two threads.
    """

    def __init__(self, name: str, index: int, size: int, *, silence_s: float, store: Any = None) -> None:
        self.index: Final = index
        self.size: Final = size
        self.silence_s: Final = silence_s
        base = default_store() if store is None else store
        self._store = PrefixStore(f"weightlift/{name}", base)
        self._pulse = _Pulse(PrefixStore(f"weightlift/{name}", base.clone() if hasattr(base, "clone") else base), index)
        self._cards: dict[int, _Card] = {}
        self._pulses: dict[int, bytes] = {}
        self._backends: dict[str, Any] = {}
        self._generation = 0
        self.broken = False
        """Whether the communicator cannot be used any more: something was left half way."""
        self.put(f"card/{index}", msgspec.msgpack.encode(_Card(os.getpid(), host_identity())))

    # --- the store --------------------------------------------------------------------------------------------------------------

    def put(self, key: str, value: bytes) -> None:
        """Set a key. PeerLost if the store is gone."""
        with _mapped("the store of the process group is gone"):
            self._store.set(key, value)  # type: ignore[arg-type]  # bytes are taken, and read as they are

    def has(self, key: str) -> bool:
        """Whether a key is set."""
        with _mapped("the store of the process group is gone"):
            return bool(self._store.check([key]))

    def drop(self, keys: Sequence[str]) -> None:
        """Delete keys; those that are not there, and a store that is gone, do not matter."""
        for key in keys:
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(key)

    def get(
        self, key: str, *, of: int, doing: str, timeout_s: float | None = None, unless: Callable[[], bool] = lambda: False
    ) -> bytes:
        """The value of a key that rank `of` sets, waited for.

        timeout_s: how long since that rank's last sign of life (see `alive`); None for silence_s. A rank that shows that it lives
        is waited for: it is bounded by its own deadlines.
        unless: whether it is known by now that the rank will not do it any more. Where that rank may in turn be waiting for this one,
            somewhere else, this is what ends it: both show that they live.
        doing: what the rank is expected to do, for the error: "rank 1 of the trainer did not <doing> within 30 s".
        """
        limit_s = self.silence_s if timeout_s is None else timeout_s
        heard = time.monotonic()
        while not self._wait(key, max(0.001, min(_SLICE_S, heard + limit_s - time.monotonic()))):
            heard = self._last_sign(of, doing, heard)
            if unless():
                raise PeerLost(f"rank {of} of the trainer gave up; it was to {doing}", peer=f"trainer rank {of}")
            if time.monotonic() >= heard + limit_s:
                message = f"rank {of} of the trainer did not {doing} within {limit_s} s"
                raise TransferTimeout(message, peer=f"trainer rank {of}", remedy=_REMEDY)
        with _mapped(f"the store of the process group is gone, while rank {of} was to {doing}"):
            return bytes(self._store.get(key))

    def _wait(self, key: str, seconds: float) -> bool:
        """Whether the key is there, or comes within `seconds`.

        Asked again and again, at longer intervals the longer it takes: a store's own wait logs a warning each time it expires.
        """
        start = time.monotonic()
        while not self.has(key):
            waited = time.monotonic() - start
            if waited >= seconds:
                return False
            time.sleep(min(max(waited / 8, _FASTEST_POLL_S), _SLOWEST_ASK_S, seconds - waited))
        return True

    def _last_sign(self, of: int, doing: str, heard: float) -> float:
        """When the rank was last heard of, `heard` if not since; PeerLost for a process of this host that has ended."""
        card = self._card(of)
        if card is not None and card.host == host_identity() and not lives(card.pid):
            raise PeerLost(f"rank {of} of the trainer (pid {card.pid}) has ended; it was to {doing}", peer=f"trainer rank {of}")
        with _mapped("the store of the process group is gone"):
            pulse = bytes(self._store.get(f"pulse/{of}")) if self._store.check([f"pulse/{of}"]) else b""
        if pulse == self._pulses.get(of, b""):
            return heard
        self._pulses[of] = pulse
        return time.monotonic()

    def _card(self, of: int) -> _Card | None:
        card = self._cards.get(of)
        if card is None and self.has(f"card/{of}"):
            card = self._cards[of] = msgspec.msgpack.decode(bytes(self._store.get(f"card/{of}")), type=_Card)
        return card

    def alive(self) -> contextlib.AbstractContextManager[None]:
        """A context in which this rank shows the others that it lives, whatever its main thread is waiting for."""
        return self._pulse.beating()

    # --- the communicator -------------------------------------------------------------------------------------------------------

    def rebuild(self, generation: int) -> None:
        """Use the communicator of a generation; all ranks name the same. The old one is torn down."""
        if generation != self._generation:
            self.tear_down()
            self._generation = generation
        self.broken = False

    @property
    def generation(self) -> int:
        """Which communicator is in use."""
        return self._generation

    def swap(
        self,
        sends: Mapping[int, torch.Tensor],
        receives: Mapping[int, torch.Tensor],
        *,
        stream: str,
        number: int,
        device: torch.device,
        timeout_s: float,
    ) -> Swap:
        """Start one step's sends and receives (rank -> contiguous uint8 tensor on `device`); `Swap.wait` ends it.

        stream, number: name the step, the same on all ranks. timeout_s: of a rank that is there and does not move its bytes.
        """
        backend = self.connect(device, timeout_s)
        step = f"{stream}/{number}"
        if receives and not sends:
            works = [(rank, _start(backend.recv, tensor, rank)) for rank, tensor in receives.items()]
            self.put(f"want/{step}/{self.index}", b"1")
            return Swap(self, works, timeout_s, device)
        if receives:
            self.put(f"want/{step}/{self.index}", b"1")
        for rank in sends:
            gone = functools.partial(self.has, f"left/{stream}/{rank}")
            self.get(f"want/{step}/{rank}", of=rank, doing="ask for the next layer group", unless=gone)
        with _together(backend, device, both=bool(sends and receives)):
            works = [(rank, _start(backend.recv, tensor, rank)) for rank, tensor in receives.items()]
            works += [(rank, _start(backend.send, tensor, rank)) for rank, tensor in sends.items()]
        return Swap(self, works, timeout_s, device)

    def leave(self, stream: str) -> None:
        """Give up a stream in the middle: the others need not wait, and the communicator cannot be used any more."""
        self.put(f"left/{stream}/{self.index}", b"1")
        self.tear_down()

    def forget(self, stream: str, steps: int) -> None:
        """Remove what a stream of so many steps left in the store."""
        self.drop([*(f"want/{stream}/{number}/{self.index}" for number in range(steps)), f"left/{stream}/{self.index}"])

    def connect(self, device: torch.device, timeout_s: float) -> Any:
        """The communicator for a kind of device; the first time all ranks must call it, within `timeout_s` of each other."""
        backend = self._backends.get(device.type)
        if backend is None:
            store = PrefixStore(f"{self._generation}/{device.type}", self._store)
            with _mapped(f"the ranks of the trainer could not be connected within {timeout_s} s"):
                backend = self._backends[device.type] = _make(store, self.index, self.size, device, timeout_s)
        return backend

    def tear_down(self) -> None:
        """Drop the communicators; `rebuild` names the generation of new ones."""
        self.broken = True
        backends, self._backends = list(self._backends.values()), {}
        for backend in backends:
            for end in ("abort", "shutdown"):  # Gloo and NCCL do not have both, and one that is broken already may refuse
                with contextlib.suppress(RuntimeError, AttributeError, NotImplementedError):
                    getattr(backend, end)()

    def close(self) -> None:
        """Give back everything. Idempotent."""
        self._pulse.stop()
        self.tear_down()
        self.drop([f"card/{self.index}", f"pulse/{self.index}"])


class Swap:
    """Sends and receives under way."""

    def __init__(self, fabric: Fabric, works: list[tuple[int, Any]], timeout_s: float, device: torch.device) -> None:
        self._fabric = fabric
        self._works = works
        self._timeout_s = timeout_s
        self._device = device

    def wait(self) -> None:
        """Until all are done. PeerLost or TransferTimeout names the rank; the communicator is torn down then."""
        works, self._works = self._works, []
        deadline = time.monotonic() + self._timeout_s
        while works:
            rank, work = works.pop(0)
            try:
                _finish(work, deadline, self._device)
            except RuntimeError as error:
                # What still refers to the communicator keeps its connections open, and the other ranks waiting.
                del work
                works.clear()
                self._fabric.tear_down()
                peer = f"trainer rank {rank}"
                if _is_expiry(error):
                    message = f"rank {rank} of the trainer did not move its part of a layer group within {self._timeout_s} s"
                    raise TransferTimeout(message, peer=peer, remedy=_REMEDY) from error
                message = f"the connection to rank {rank} of the trainer broke in the middle of a gather: {_line(error)}"
                raise PeerLost(message, peer=peer) from error


_REMEDY: Final = "see what that rank is doing (py-spy dump), or raise Deadlines.gather_s."
_STORE: Final = "the rank that hosts the store (usually rank 0) has ended: restart the job from its last checkpoint."


class _Pulse:
    """A thread that counts up a key while a context is open."""

    def __init__(self, store: Any, index: int) -> None:
        self._store = store
        self._key = f"pulse/{index}"
        self._count = 0
        self._beating = 0
        self._end: threading.Event | None = None
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def beating(self) -> Any:
        self._beating += 1
        if self._beating == 1:
            self._end = threading.Event()
            self._thread = threading.Thread(target=self._beat, args=(self._end,), name="weightlift-pulse", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            self._beating -= 1
            if not self._beating:
                self.stop()

    def _beat(self, end: threading.Event) -> None:
        while True:
            self._count += 1
            try:
                self._store.set(self._key, str(self._count).encode())
            except RuntimeError:
                return  # the store is gone: the main thread finds that out by itself
            if end.wait(_PULSE_S):
                return

    def stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None and self._end is not None:
            self._end.set()
            thread.join(2 * _PULSE_S)


def _make(store: Any, index: int, size: int, device: torch.device, timeout_s: float) -> Any:
    """A backend that is in no registry: nothing of the default process group is touched."""
    limit = datetime.timedelta(seconds=timeout_s)
    store.set_timeout(limit)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, index, size, limit)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, index, size, options)
    raise ConfigError(f"sharded parameters must be on cpu or cuda, got {device.type}")


def _start(call: Any, tensor: torch.Tensor, rank: int) -> Any:
    with _mapped(f"rank {rank} of the trainer cannot be reached"):
        return call([tensor], rank, 0)


@contextlib.contextmanager
def _together(backend: Any, device: torch.device, *, both: bool) -> Any:
    """On NCCL a send that is queued before its receive waits for ever: both go out as one group."""
    if not (both and device.type == "cuda"):
        yield
        return
    backend._start_coalescing(device)
    try:
        yield
    finally:
        backend._end_coalescing(device)


def _finish(work: Any, deadline: float, device: torch.device) -> None:
    """Wait for one work; RuntimeError when it fails or the deadline passes."""
    if device.type == "cpu":
        work.wait(datetime.timedelta(seconds=max(0.001, deadline - time.monotonic())))
        return
    pause_s = _FASTEST_POLL_S
    while not work.is_completed():  # NCCL's own wait only orders streams: it cannot be bounded
        if time.monotonic() > deadline:
            raise RuntimeError("timed out")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _SLOWEST_POLL_S)
    work.wait()


def _is_expiry(error: RuntimeError) -> bool:
    """Whether a wait ended because its time was over. torch has no class for it that all stores and backends use."""
    text = str(error).lower()
    return "timed out" in text or ("timeout" in text and "closure" not in text)


def _line(error: BaseException) -> str:
    """The first line of what torch says."""
    return str(error).strip().partition("\n")[0]


@contextlib.contextmanager
def _mapped(what: str) -> Any:
    """torch.distributed raises RuntimeError and its subclasses for everything."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"{what}: {_line(error)}", remedy=_STORE if "store" in what else None) from error
