"""The publisher's driver: performs the actions of protocol/round.py and feeds back what happened. Blocking; one thread at a time.

Owns: the loop of a round. Must not know: rules (protocol/), who may join (reception.py), how bytes move (a Sender).
The subscriber's counterpart is follower.py.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable

from weightlift.errors import SourceError, TransferTimeout, WeightliftError, drop_frames
from weightlift.observe.events import FrameRefused, RoundStarted, Sink, emit
from weightlift.observe.report import StopWatch
from weightlift.protocol.codec import encode_manifest
from weightlift.protocol.manifest import Manifest
from weightlift.protocol.messages import Announce, Begin, Commit, Fenced, Frame, Limits, ManifestBody, PeerId
from weightlift.protocol.plan import Plan
from weightlift.protocol.round import Action, Round, Send, SendAnnounce, SendManifest, Transfer
from weightlift.transports.base import Fill, Sender, SendJob
from weightlift.transports.reception import Left, Reception, Said
from weightlift.verify.audit import Auditor

__all__ = ["Delivery", "Driver"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What one round has to deliver, and with what.

    need: how many replicas must be ready; None for all.
    ready, consent: asked before the first Begin, and before the first Commit; raising gives the round up.
    """

    version: int
    need: int | None
    plan: Plan
    fill: Fill
    sender: Sender
    transport: str
    limits: Limits
    watch: StopWatch
    audit: Auditor | None
    ready: Callable[[], None] | None = None
    consent: Callable[[], None] | None = None


class Driver:
    """Runs rounds, one after the other, over one reception."""

    def __init__(self, reception: Reception, *, sink: Sink | None) -> None:
        self._reception = reception
        self._sink = sink
        self._rounds = 0
        self.committed = False
        """Whether a replica serves the version of the last round, whatever came of the round."""
        self._body: tuple[Manifest, bytes] | None = None
        self._asked: set[type] = set()
        """Begin, Commit: whether somebody was asked in this round whether they may be sent."""
        self._announcement: Announce | None = None

    def wait_until(self, enough: Callable[[], bool], timeout_s: float, missing: Callable[[], str]) -> None:
        """Serve the handshake until `enough()`; TransferTimeout with `missing()` otherwise. Takes in all that is there already."""
        deadline = time.monotonic() + timeout_s
        self._reception.visits(0.0)
        while not enough():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TransferTimeout(f"{missing()} within {timeout_s} s", phase="ANNOUNCE")
            self._reception.visits(left_s)

    def run(self, delivery: Delivery) -> Round:
        """One round to every complete replica; returns when it is done, whatever came of it."""
        self.committed = False
        self._asked.clear()
        members = self._reception.roster.members()
        replicas = len({member.replica for member in members})
        self._rounds += 1
        current = Round(
            round=self._rounds,
            version=delivery.version,
            members=members,
            need=replicas if delivery.need is None else delivery.need,
            limits=delivery.limits,
            now=time.monotonic(),
            audit=delivery.audit,
        )
        emit(self._sink, "round", RoundStarted(round=current.round, version=current.version, peers=len(members)))
        try:
            self._announcement = _announce(current, delivery) if members else None  # one for all: an offer is made once a round
            self._perform(current, current.start(), delivery)
            while not current.done:
                self._step(current, delivery)
        except BaseException as error:
            # Interrupted from outside (Ctrl-C): whoever is inside the round is told before this process goes on.
            drop_frames(error)
            self._perform(current, current.source_failed(_as_ours(error), time.monotonic()), delivery)
            raise
        finally:
            self.committed = bool(current.committed_replicas())
            for peer, view in current.peers.items():
                self._reception.roster.serve(peer, version=view.serves, torn=view.torn)
        return current

    def _step(self, current: Round, delivery: Delivery) -> None:
        """Wait for something to happen, and act on it."""
        deadline = current.next_deadline()
        assert deadline is not None, "a round that waits has a deadline"
        with delivery.watch.measure(current.phase.lower()):
            visits = self._reception.visits(deadline - time.monotonic())
        heard = time.monotonic()  # what follows may take long (a transfer, digests); what came meanwhile has not been read yet
        for visit in visits:
            now = time.monotonic()
            match visit:
                case Said(peer=peer, frame=frame):
                    self._perform(current, current.receive(peer, frame, now), delivery)
                case Left(peer=peer, error=error):
                    self._perform(current, current.lost(peer, error, now), delivery)
        self._perform(current, current.tick(heard), delivery)

    def _perform(self, current: Round, actions: Iterable[Action], delivery: Delivery) -> None:
        """Perform actions, and those that follow from them, in order."""
        queue, moved = collections.deque(actions), False
        while queue:
            match queue.popleft():
                case SendAnnounce(peer=peer):
                    assert self._announcement is not None, "made when the round began"
                    queue.extend(self._send(current, peer, self._announcement))
                case SendManifest(peer=peer):
                    queue.extend(self._send(current, peer, self._manifest(current, delivery.plan.manifest)))
                case Send(peer=peer, frame=Fenced(error=info) as frame):
                    refused = FrameRefused(peer=peer, reason=info.message)
                    emit(self._sink, "round", refused, level=logging.WARNING)
                    queue.extend(self._send(current, peer, frame))
                case Send(frame=Begin() | Commit() as frame) if (withheld := self._withheld_by(frame, delivery)) is not None:
                    queue.clear()  # nobody was told yet: what was queued is the same for others, and the transfer
                    untouched = isinstance(frame, Begin)
                    queue.extend(current.source_failed(withheld, time.monotonic(), untouched=untouched))
                case Send(peer=peer, frame=frame):
                    queue.extend(self._send(current, peer, frame))
                case Transfer(peers=peers):
                    queue.extend(_transfer(current, peers, delivery))
                    moved = True
        if moved and delivery.audit is not None and not current.done:
            _settle(delivery.audit, delivery.watch)

    def _withheld_by(self, frame: Begin | Commit, delivery: Delivery) -> WeightliftError | None:
        """Why a frame may not be sent; None if it may. Asked once a round, for the first of its kind."""
        ask, phase = (delivery.ready, "PREPARE") if isinstance(frame, Begin) else (delivery.consent, "COMMIT")
        if ask is None or type(frame) in self._asked:
            return None
        self._asked.add(type(frame))
        try:
            ask()
        except WeightliftError as error:
            drop_frames(error)
            return error.fill(phase=phase)
        return None

    def _send(self, current: Round, peer: PeerId, frame: Frame) -> list[Action]:
        left = self._reception.send(peer, frame)
        return [] if left is None else current.lost(peer, left.error, time.monotonic())

    def _manifest(self, current: Round, manifest: Manifest) -> ManifestBody:
        if self._body is None or self._body[0] is not manifest:
            self._body = manifest, encode_manifest(manifest)
        return ManifestBody(round=current.round, version=current.version, body=self._body[1])


def _transfer(current: Round, peers: tuple[PeerId, ...], delivery: Delivery) -> list[Action]:
    """The opaque action: all buckets to all peers."""
    peers = tuple(peer for peer in peers if not current.peers[peer].out)  # one may have gone since the transfer was decided
    if not peers:
        return []
    job = SendJob(
        round=current.round,
        version=current.version,
        plan=delivery.plan,
        peers=peers,
        fill=delivery.fill,
        stall_s=delivery.limits.transfer_s,
    )
    try:
        with delivery.watch.measure("transfer"):
            failed = delivery.sender.send(job)
    except WeightliftError as error:
        drop_frames(error)
        return current.source_failed(error.fill(phase="TRANSFER"), time.monotonic())
    actions: list[Action] = []
    for peer in peers:
        actions += current.transferred(peer, failed.get(peer), time.monotonic())
    return actions


def _settle(audit: Auditor, watch: StopWatch) -> None:
    """Compute this side's digests while the peers compute theirs."""
    try:
        with watch.measure("verify"):
            audit.settle()
    except Exception as error:
        raise SourceError(f"reading the source again raised {type(error).__name__}: {error}", phase="RELEASE") from error


def _announce(current: Round, delivery: Delivery) -> Announce:
    return Announce(
        round=current.round,
        version=current.version,
        manifest_digest=delivery.plan.manifest.digest,
        transport=delivery.transport,
        offer=delivery.sender.offer(delivery.plan, tuple(current.peers)),
        capacity=delivery.plan.capacity,
        alignment=delivery.plan.alignment,
        limits=delivery.limits,
        verify="off" if delivery.audit is None else delivery.audit.scope,
        digest="xxh3" if delivery.audit is None else delivery.audit.algorithm,
    )


def _as_ours(error: BaseException) -> WeightliftError:
    if isinstance(error, WeightliftError):
        return error
    ours = WeightliftError(f"the publisher was interrupted by {type(error).__name__}: {error}")
    ours.__cause__ = error
    return ours
