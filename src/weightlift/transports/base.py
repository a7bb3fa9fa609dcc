"""The contract of a transport: how buckets get from one publisher to N subscribers.

Owns: the two ends as protocols, what they may assume, who owns which memory until when. Must not know: models, manifests' meaning,
the state machines. The driver calls these methods, in this order, from one thread:

    publisher                                   subscriber
    Sender.offer(plan, peers)    -- Announce --> Receiver.attach(offer, plan)
    Sender.send(job)             -- buckets  --> Receiver.receive(job)
    Sender.settle()                              Receiver.release()      before Released is sent
    Sender.forget(peers)                         Receiver.abort()        after a failed round, on either side
    Sender.close()                               Receiver.close()

Lifetimes. A bucket's memory belongs to the transport. `Fill` may write it until it returns; `Install` may read it until it returns;
neither may keep a view of it. A bucket is acknowledged after `Install` returned, and reused only when every live reader acknowledged.
Waits. Every wait is bounded by `stall_s` without progress of the other side. A receiver gets twice the sender's: the sender may be
waiting that long for another peer.
Order. Buckets arrive in plan order at every peer, each exactly once, or `receive` raises.
Failure. `send` reports a peer that is gone or stalled and goes on with the others. It raises only what `Fill` raised, after closing
the data plane of every peer. After a failure both ends are rebuilt from nothing: no byte of a failed round can reach a later one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import torch

from weightlift.errors import WeightliftError
from weightlift.protocol.messages import PeerId
from weightlift.protocol.plan import Plan

__all__ = ["Fill", "Install", "ReceiveJob", "Receiver", "SendJob", "Sender", "Usage"]

Fill: TypeAlias = Callable[[int, torch.Tensor], None]
"""fill(bucket index, memory): write the bucket into `memory`, uint8, 1-D, at least as long as the bucket."""

Install: TypeAlias = Callable[[int, torch.Tensor], None]
"""install(bucket index, memory): read the bucket from `memory`; raising ends the round for this peer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SendJob:
    """One transfer, as the publisher sees it."""

    round: int
    version: int
    plan: Plan
    peers: Sequence[PeerId]
    fill: Fill
    stall_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveJob:
    """One transfer, as a subscriber sees it."""

    round: int
    version: int
    plan: Plan
    install: Install
    stall_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """Memory that an end holds now, in bytes."""

    host_bytes: int = 0
    device_bytes: int = 0


class Sender(Protocol):
    """The publisher's end."""

    capacity: int
    """Bytes of one bucket."""

    def offer(self, plan: Plan, peers: Sequence[PeerId]) -> bytes:
        """Get ready for a plan and say how to attach; TransportUnavailable if the memory cannot be had."""

    def send(self, job: SendJob) -> Mapping[PeerId, WeightliftError]:
        """Move every bucket to every peer. Returns the peers that failed: PeerLost (closed) or TransferTimeout (stalled)."""

    def settle(self) -> None:
        """The round is over: give back what is not kept between rounds."""

    def forget(self, peers: Sequence[PeerId]) -> None:
        """Drop the data plane of these peers; they attach anew."""

    def usage(self) -> Usage:
        """What is held now."""

    def close(self) -> None:
        """Give back everything. Idempotent."""


class Receiver(Protocol):
    """A subscriber's end."""

    def attach(self, offer: bytes, plan: Plan) -> None:
        """Get ready to receive a plan; raising refuses the round. Nothing has been written."""

    def receive(self, job: ReceiveJob) -> None:
        """Install every bucket. Raises what `Install` raised, PeerLost (the publisher closed), or TransferTimeout (it stalled)."""

    def release(self) -> None:
        """Drop every view of a bucket, and unmap what is not kept; raises LoaderError if somebody kept a view."""

    def abort(self) -> None:
        """Leave a failed round: close the data plane at once, so that the publisher sees it."""

    def usage(self) -> Usage:
        """What is held now."""

    def close(self) -> None:
        """Give back everything. Idempotent."""
