"""In-process transport: the contract of base.py in its plainest form, one bucket at a time.

Owns: the links between one sender and its receivers in one process. Must not know: anything the other transports need.
It is the executable specification: what the contract suite asks of a transport, this file answers in the fewest lines. Receivers live
in other threads of the same process.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import torch

from weightlift.errors import PeerLost, RemoteProtocolError, TransferTimeout, TransportUnavailable, WeightliftError
from weightlift.protocol.messages import PeerId
from weightlift.protocol.plan import Plan
from weightlift.transports.base import ReceiveJob, SendJob, Usage

__all__ = ["MemoryReceiver", "MemorySender"]

_DEFAULT_CAPACITY: Final = 4 * 1024 * 1024


class _Filled(NamedTuple):
    round: int
    version: int
    bucket: int
    memory: torch.Tensor


class _Closed(NamedTuple):
    """The other end is closed."""


class _Link:
    """Two queues between a sender and one receiver. Closing puts _Closed into both: a waiting end wakes up."""

    def __init__(self) -> None:
        self.buckets: queue.Queue[_Filled | _Closed] = queue.Queue()
        self.done: queue.Queue[int | _Closed] = queue.Queue()

    def close(self) -> None:
        self.buckets.put(_Closed())
        self.done.put(_Closed())


_SENDERS: Final[weakref.WeakValueDictionary[str, MemorySender]] = weakref.WeakValueDictionary()


class MemorySender:
    """The publisher's end."""

    def __init__(self, *, capacity: int = _DEFAULT_CAPACITY) -> None:
        self.capacity = capacity
        self._token = secrets.token_hex(16)
        self._links: dict[PeerId, _Link] = {}
        self._lock = threading.Lock()
        self._memory: torch.Tensor | None = None
        _SENDERS[self._token] = self

    def connect(self, peer: PeerId) -> _Link:
        """A receiver of this process attaches; an older link of the same name is closed."""
        with self._lock:
            old, self._links[peer] = self._links.get(peer), (link := _Link())
        if old is not None:
            old.close()
        return link

    def holds(self, peer: PeerId, link: _Link | None) -> bool:
        """Whether that link still leads here."""
        with self._lock:
            return link is not None and self._links.get(peer) is link

    def offer(self, plan: Plan, peers: Sequence[PeerId]) -> bytes:
        if self._memory is None:
            self._memory = torch.empty(self.capacity, dtype=torch.uint8)
        return self._token.encode()

    def send(self, job: SendJob) -> Mapping[PeerId, WeightliftError]:
        assert self._memory is not None, "offer comes before send"
        failed: dict[PeerId, WeightliftError] = {}
        links = {peer: self._links[peer] for peer in job.peers if peer in self._links}
        for peer in set(job.peers) - set(links):
            failed[peer] = PeerLost(f"peer {peer} did not attach", peer=peer)
        try:
            for bucket in range(len(job.plan)):
                if links:
                    self._one(job, links, failed, bucket)
        except BaseException:
            self.forget(list(self._links))
            raise
        self.forget(list(failed))
        return failed

    def _one(self, job: SendJob, links: dict[PeerId, _Link], failed: dict[PeerId, WeightliftError], bucket: int) -> None:
        """Fill one bucket, show it to every peer, wait for every acknowledgement."""
        assert self._memory is not None, "offer comes before send"
        job.fill(bucket, self._memory)
        for link in links.values():
            link.buckets.put(_Filled(job.round, job.version, bucket, self._memory))
        deadline = time.monotonic() + job.stall_s
        for peer, link in list(links.items()):
            where = {"peer": peer, "bucket": bucket, "buckets": len(job.plan), "tensor": job.plan.names(bucket)}
            try:
                answer = link.done.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                message = f"peer {peer} did not acknowledge bucket {bucket}/{len(job.plan)} within {job.stall_s} s"
                failed[peer] = TransferTimeout(message).fill(**where)
            else:
                if answer == bucket:
                    continue
                failed[peer] = PeerLost(f"{peer} closed its end of the data plane").fill(**where)
            del links[peer]

    def settle(self) -> None:
        """Nothing to give back."""

    def forget(self, peers: Sequence[PeerId]) -> None:
        for peer in peers:
            link = self._links.pop(peer, None)
            if link is not None:
                link.close()

    def usage(self) -> Usage:
        return Usage(host_bytes=0 if self._memory is None else self._memory.numel())

    def close(self) -> None:
        self.forget(list(self._links))
        self._memory = None
        _SENDERS.pop(self._token, None)


class MemoryReceiver:
    """A subscriber's end. `peer` is its own name."""

    def __init__(self, peer: str) -> None:
        self._peer = PeerId(peer)
        self._token = ""
        self._link: _Link | None = None

    def attach(self, offer: bytes, plan: Plan) -> None:
        token = offer.decode("ascii", "replace")
        sender = _SENDERS.get(token)
        if token == self._token and sender is not None and sender.holds(self._peer, self._link):
            return
        self.abort()
        if sender is None:
            raise TransportUnavailable(
                "the publisher is not in this process",
                remedy="the memory transport joins threads of one process; use transport='shm' between processes.",
            )
        self._token, self._link = token, sender.connect(self._peer)

    def receive(self, job: ReceiveJob) -> None:
        assert self._link is not None, "attach comes before receive"
        for bucket in range(len(job.plan)):
            where = {"peer": "publisher", "bucket": bucket, "buckets": len(job.plan), "tensor": job.plan.names(bucket)}
            try:
                filled = self._link.buckets.get(timeout=job.stall_s)
            except queue.Empty:
                message = f"publisher did not send bucket {bucket}/{len(job.plan)} within {job.stall_s} s"
                raise TransferTimeout(message).fill(**where) from None
            if isinstance(filled, _Closed):
                raise PeerLost("publisher closed its end of the data plane").fill(**where)
            if (filled.round, filled.version, filled.bucket) != (job.round, job.version, bucket):
                raise RemoteProtocolError(f"bucket {filled.bucket} of round {filled.round} came, expected {bucket}")
            job.install(bucket, filled.memory)
            self._link.done.put(bucket)

    def release(self) -> None:
        """The memory is the sender's."""

    def abort(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def usage(self) -> Usage:
        return Usage()

    def close(self) -> None:
        self.abort()
