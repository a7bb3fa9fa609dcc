"""Shared memory: a ring of small slots, one writer, any number of readers on the same host.

Owns: the ring's order and its doorbells. Must not know: tensors' names, models, the control channel.

    sender                                        reader
      fill slot k % slots
      BucketReady(k) ------------------------------> install
      <------------------------------ BucketDone(k)
    Slot k % slots is filled again when every live reader has acknowledged bucket k.

The segment and the connections stay for the next round; after a failure they are dropped and made anew.
"""

from __future__ import annotations

import collections
import contextlib
import pathlib
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from weightlift.config import ShmConfig
from weightlift.errors import RemoteProtocolError, TransferTimeout, TransportError, WeightliftError
from weightlift.protocol.messages import PeerId
from weightlift.protocol.plan import Plan
from weightlift.transports.base import ReceiveJob, SendJob, Usage
from weightlift.transports.doorbell import Doorbell, Listener, wait_readable
from weightlift.transports.endpoint import discard
from weightlift.transports.segment import Segment

__all__ = ["ShmReceiver", "ShmSender"]


class _Offer(msgspec.Struct, frozen=True, tag_field="kind", tag="shm_offer"):
    path: str
    segment: str
    slots: int
    slot_bytes: int


class _Attach(msgspec.Struct, frozen=True, tag_field="kind", tag="attach"):
    """Reader: who I am, and which segment I was offered."""

    peer: str
    segment: str


class _Segment(msgspec.Struct, frozen=True, tag_field="kind", tag="segment"):
    """Sender: the open file of the segment comes with this frame."""

    segment: str


class _BucketReady(msgspec.Struct, frozen=True, tag_field="kind", tag="ready"):
    round: int
    version: int
    bucket: int


class _BucketDone(msgspec.Struct, frozen=True, tag_field="kind", tag="done"):
    round: int
    version: int
    bucket: int


_FromReader = _Attach | _BucketDone
_FromSender = _Segment | _BucketReady
_from_reader: Final[msgspec.msgpack.Decoder[_FromReader]] = msgspec.msgpack.Decoder(_FromReader)
_from_sender: Final[msgspec.msgpack.Decoder[_FromSender]] = msgspec.msgpack.Decoder(_FromSender)
_offer: Final[msgspec.msgpack.Decoder[_Offer]] = msgspec.msgpack.Decoder(_Offer)


class _Reader:
    """The sender's view of one reader in one transfer: which buckets it has not acknowledged, and since when it owes progress."""

    def __init__(self, peer: PeerId, bell: Doorbell[_FromReader]) -> None:
        self.peer = peer
        self.bell = bell
        self.owed: collections.deque[int] = collections.deque()
        self.since = time.monotonic()


class ShmSender:
    """The publisher's end. `directory` is the private run directory of this host."""

    def __init__(self, directory: pathlib.Path, config: ShmConfig) -> None:
        self.capacity = config.slot_bytes
        self._config = config
        self._directory = directory
        self._listener: Listener[_FromReader] | None = None
        self._segment: Segment | None = None
        self._bells: dict[PeerId, Doorbell[_FromReader]] = {}

    def offer(self, plan: Plan, peers: Sequence[PeerId]) -> bytes:
        if self._listener is None:
            # One publisher per address: any other data plane here belongs to one that was killed.
            for stale in self._directory.glob("data-*"):
                discard(stale)
            self._listener = Listener(self._directory / f"data-{secrets.token_hex(4)}", _from_reader)
        while (left := self._listener.accept()) is not None:
            left.close()  # of rounds that ended before the transfer: whoever is addressed now attaches anew
        for peer, bell in list(self._bells.items()):
            if not bell.open():
                self.forget([peer])
        if self._segment is None:
            self._segment = Segment.create(slots=self._config.slots, slot_bytes=self._config.slot_bytes)
        offer = _Offer(str(self._listener.path), self._segment.identity, self._segment.slots, self._segment.slot_bytes)
        return msgspec.msgpack.encode(offer)

    def send(self, job: SendJob) -> Mapping[PeerId, WeightliftError]:
        failed: dict[PeerId, WeightliftError] = {}
        try:
            readers = self._gather(job, failed)
            self._stream(job, readers, failed)
        except BaseException:
            self.forget(list(self._bells))
            raise
        self.forget(list(failed))
        return failed

    def _gather(self, job: SendJob, failed: dict[PeerId, WeightliftError]) -> dict[PeerId, _Reader]:
        """A doorbell for every peer of the job: kept from the last round, or attaching now."""
        assert self._listener is not None, "offer comes before send"
        deadline = time.monotonic() + job.stall_s
        self._accept(job.stall_s)  # a peer that attached anew replaces its old connection before that one is used
        while missing := [peer for peer in job.peers if peer not in self._bells]:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                for peer in missing:
                    failed[peer] = TransferTimeout(
                        f"peer {peer} did not attach to the shared memory within {job.stall_s} s", peer=peer
                    )
                break
            wait_readable((self._listener.fileno(),), left_s)
            self._accept(left_s)
        return {peer: _Reader(peer, self._bells[peer]) for peer in job.peers if peer in self._bells}

    def _accept(self, timeout_s: float) -> None:
        assert self._listener is not None, "offer comes before send"
        while (bell := self._listener.accept()) is not None:
            self._welcome(bell, timeout_s)

    def _welcome(self, bell: Doorbell[_FromReader], timeout_s: float) -> None:
        """Read Attach, hand over the segment. A stranger, or a reader of an earlier segment, is turned away."""
        assert self._segment is not None, "offer comes before send"
        try:
            hello = bell.receive(min(timeout_s, 1.0), waiting_for="Attach")
            if not isinstance(hello, _Attach) or hello.segment != self._segment.identity:
                raise RemoteProtocolError("a reader of another segment attached")
            bell.peer = hello.peer
            bell.send(_Segment(self._segment.identity), descriptor=self._segment.descriptor)
        except WeightliftError:
            bell.close()
            return
        old = self._bells.pop(PeerId(hello.peer), None)
        if old is not None:
            old.close()
        self._bells[PeerId(hello.peer)] = bell

    def _stream(self, job: SendJob, readers: dict[PeerId, _Reader], failed: dict[PeerId, WeightliftError]) -> None:
        """Fill and announce every bucket; return when all live readers have acknowledged the last one."""
        assert self._segment is not None, "offer comes before send"
        slots = self._segment.slots
        for bucket in range(len(job.plan)):
            self._await(job, readers, failed, bucket - slots)
            if not readers:
                return
            job.fill(bucket, self._segment.memory(bucket % slots))
            frame = _BucketReady(job.round, job.version, bucket)
            now = time.monotonic()
            for reader in list(readers.values()):
                if not reader.owed:
                    reader.since = now
                try:
                    reader.bell.send(frame)
                    reader.owed.append(bucket)
                except TransportError as error:
                    self._hear(job, readers, failed, reader)  # what it acknowledged before it went is not to be blamed
                    if reader.peer in readers:
                        reader.owed.append(bucket)
                        _drop(job, readers, failed, reader, error)
        self._await(job, readers, failed, len(job.plan) - 1)

    def _await(self, job: SendJob, readers: dict[PeerId, _Reader], failed: dict[PeerId, WeightliftError], bucket: int) -> None:
        """Wait until every live reader has acknowledged `bucket`; a reader without progress for `stall_s` is dropped."""
        while behind := [r for r in readers.values() if r.owed and r.owed[0] <= bucket]:
            for reader in behind:
                self._hear(job, readers, failed, reader)
            behind = [r for r in behind if r.peer in readers and r.owed and r.owed[0] <= bucket]
            if not behind:
                continue
            left_s = min(r.since for r in behind) + job.stall_s - time.monotonic()
            if left_s > 0:
                wait_readable(tuple(fd for r in behind for fd in r.bell.descriptors), left_s)
                continue
            slow = min(behind, key=lambda r: r.since)
            message = f"peer {slow.peer} did not acknowledge bucket {slow.owed[0]}/{len(job.plan)} within {job.stall_s} s"
            _drop(job, readers, failed, slow, TransferTimeout(message, peer=slow.peer))

    def _hear(
        self,
        job: SendJob,
        readers: dict[PeerId, _Reader],
        failed: dict[PeerId, WeightliftError],
        reader: _Reader,
    ) -> None:
        """Take all acknowledgements that a reader has sent."""
        try:
            while reader.owed and (arrived := reader.bell.try_receive()) is not None:
                frame = arrived[0]
                if frame != _BucketDone(job.round, job.version, reader.owed[0]):
                    raise RemoteProtocolError(f"{reader.peer} acknowledged {frame}, expected bucket {reader.owed[0]}")
                reader.owed.popleft()
                reader.since = time.monotonic()
        except WeightliftError as error:
            _drop(job, readers, failed, reader, error)

    def settle(self) -> None:
        """Nothing to give back: the ring is small and stays for the next round."""

    def forget(self, peers: Sequence[PeerId]) -> None:
        for peer in peers:
            bell = self._bells.pop(peer, None)
            if bell is not None:
                bell.close()

    def usage(self) -> Usage:
        return Usage(host_bytes=0 if self._segment is None else self._segment.nbytes)

    def close(self) -> None:
        self.forget(list(self._bells))
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._segment is not None:
            self._segment.discard()
            self._segment = None


def _drop(
    job: SendJob,
    readers: dict[PeerId, _Reader],
    failed: dict[PeerId, WeightliftError],
    reader: _Reader,
    error: WeightliftError,
) -> None:
    """Go on without a reader; its error names the oldest bucket it has not acknowledged."""
    if reader.owed:
        bucket = reader.owed[0]
        error.fill(bucket=bucket, buckets=len(job.plan), tensor=job.plan.names(bucket))
    failed[reader.peer] = error.fill(peer=reader.peer)
    del readers[reader.peer]


class ShmReceiver:
    """A subscriber's end. `peer` is its own name."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._bell: Doorbell[_FromSender] | None = None
        self._segment: Segment | None = None
        self._offered: _Offer | None = None

    def attach(self, offer: bytes, plan: Plan) -> None:
        try:
            offered = _offer.decode(offer)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise RemoteProtocolError(f"the shared-memory offer could not be read: {error}") from error
        if self._offered == offered and self._bell is not None and self._bell.open():
            return
        self.abort()
        self._bell = Doorbell.connect(offered.path, _from_sender, peer="publisher")
        self._bell.send(_Attach(self._peer, offered.segment))
        self._offered = offered

    def receive(self, job: ReceiveJob) -> None:
        assert self._bell is not None, "attach comes before receive"
        if self._segment is None:
            self._segment = self._map(job)
        slots, total = self._segment.slots, len(job.plan)
        for bucket in range(total):
            try:
                frame = self._bell.receive(job.stall_s, waiting_for=f"bucket {bucket}/{total}")
                if frame != _BucketReady(job.round, job.version, bucket):
                    raise RemoteProtocolError(f"the publisher sent {frame}, expected bucket {bucket} of round {job.round}")
                job.install(bucket, self._segment.memory(bucket % slots))
                self._bell.send(_BucketDone(job.round, job.version, bucket))
            except TransportError as error:
                error.fill(bucket=bucket, buckets=total, tensor=job.plan.names(bucket))
                raise

    def _map(self, job: ReceiveJob) -> Segment:
        """Take the open segment from the first frame, and map it."""
        assert self._bell is not None, "attach comes before receive"
        assert self._offered is not None, "attach comes before receive"
        frame, descriptor = self._bell.receive_with_descriptor(job.stall_s, waiting_for="the segment")
        if not isinstance(frame, _Segment) or descriptor is None or frame.segment != self._offered.segment:
            raise RemoteProtocolError(f"the publisher sent {frame}, expected the segment {self._offered.segment}")
        return Segment(descriptor, slots=self._offered.slots, slot_bytes=self._offered.slot_bytes, identity=frame.segment)

    def release(self) -> None:
        """The mapping stays for the next round; views of it are the loader's cached ones only."""

    def abort(self) -> None:
        if self._bell is not None:
            self._bell.close()
            self._bell = None
        if self._segment is not None:
            self._segment.discard()
            self._segment = None
        self._offered = None

    def usage(self) -> Usage:
        return Usage(host_bytes=0 if self._segment is None else self._segment.nbytes)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.abort()
