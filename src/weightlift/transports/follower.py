"""The subscriber's driver: takes part in one round at a time. Blocking; one thread at a time.

Owns: the order of a round on the engine's side, and what is said when it ends early: answer first, clean up second.
Must not know: what a loader does, how a transport moves bytes. The law is the table in protocol/session.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch

from weightlift.errors import LoaderError, PeerLost, RemoteProtocolError, TransferTimeout, WeightliftError, drop_frames
from weightlift.loaders.base import Loader
from weightlift.observe.report import StopWatch, SyncReport
from weightlift.protocol.codec import decode_manifest
from weightlift.protocol.failure import describe
from weightlift.protocol.messages import (
    Announce,
    Begin,
    Commit,
    Committed,
    Dispute,
    ErrorInfo,
    Failed,
    ManifestBody,
    NeedManifest,
    Ready,
    Refused,
)
from weightlift.protocol.plan import Plan
from weightlift.protocol.session import Event, Stage, SubscriberSession
from weightlift.transports import summary
from weightlift.transports.base import ReceiveJob, Receiver
from weightlift.transports.mailbox import Interrupted, Mailbox
from weightlift.transports.registry import make_receiver
from weightlift.transports.views import installer
from weightlift.verify.proof import Proof

__all__ = ["Follower"]

_T = TypeVar("_T")


class Follower:
    """One subscriber's rounds. `peer` is its name."""

    def __init__(self, mailbox: Mailbox, session: SubscriberSession, loader: Loader, *, peer: str) -> None:
        self._mailbox = mailbox
        self._session = session
        self._loader = loader
        self._peer = peer
        self._receivers: dict[str, Receiver] = {}
        self._plan: Plan | None = None
        self._proof: Proof | None = None

    def pull(self, timeout_s: float) -> SyncReport:
        """The next round that the publisher has not given up before this side could answer."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                offer = self._mailbox.next_offer(max(0.0, deadline - time.monotonic()), asked_s=timeout_s)
            except WeightliftError as error:
                error.fill(still_works=summary.still_of_engine(self._session))
                raise
            report = self._take_part(offer)
            if report is not None:
                return report

    def _take_part(self, offer: Announce) -> SyncReport | None:
        """One round, from Announce to Committed; raises the first cause when it ends early for this peer.

        None if the round was over before this side answered: the announcement had waited while the engine was busy.
        """
        watch = StopWatch()
        try:
            self._session.offer(offer.round, offer.version)
            return self._steps(offer, watch)
        except Interrupted as interrupted:
            late = interrupted.event is Event.ABORT and self._mailbox.came_late(interrupted.error)
            if late and not self._session.touched:
                self._session.on(interrupted.event)
                self._clean_up(interrupted.error)
                self._mailbox.pass_over(offer)
                return None
            self._leave(offer, interrupted.event, interrupted.error)
        except BaseException as error:
            self._leave(offer, Event.FAIL, error)

    def _steps(self, offer: Announce, watch: StopWatch) -> SyncReport:
        """The main path, one step after the other."""
        session, mailbox, limits = self._session, self._mailbox, offer.limits
        with watch.measure("prepare"):
            plan, receiver, proof = self._prepare(offer)
        session.on(Event.ACCEPT)
        mailbox.send(Ready(round=offer.round, version=offer.version, held=() if proof is None else proof.held))
        with watch.measure("announce"):
            mailbox.expect((Begin,), offer.round, limits.announce_s + limits.prepare_s + limits.cause_s)
        session.on(Event.BEGIN)
        with watch.measure("transfer"):
            load_s = self._receive(offer, plan, receiver)
        session.on(Event.LOADED)
        with watch.measure("release"):
            self._guarded("finish", self._loader.finish)
            self._guarded("release", receiver.release)
        with watch.measure("verify"):
            digests = b"" if proof is None else proof.digests(offer)
        session.on(Event.CLEAN)
        mailbox.send(summary.released(offer, plan, watch.seconds(load=load_s), digests))
        with watch.measure("commit"):
            others_s = 2 * limits.transfer_s + limits.release_s  # the other ranks of the replica may still be at work
            answer = mailbox.expect((Commit, Dispute), offer.round, others_s + limits.commit_s + limits.cause_s)
            if isinstance(answer, Dispute):
                self._give_evidence(offer, answer)
            session.on(Event.COMMIT)
            self._guarded("commit", self._loader.commit, offer.version)
            session.on(Event.DONE)
        mailbox.send(Committed(round=offer.round, version=offer.version, commit_s=watch.seconds().commit))
        return summary.of_subscriber(offer, plan, receiver, watch, load_s)

    def _prepare(self, offer: Announce) -> tuple[Plan, Receiver, Proof | None]:
        """Everything that can be refused, before anything changes."""
        plan = self._plan_of(offer)
        self._guarded("prepare", self._loader.prepare, plan)
        receiver = self._receivers.get(offer.transport)
        if receiver is None:
            receiver = self._receivers[offer.transport] = make_receiver(offer.transport, self._peer)
        receiver.attach(offer.offer, plan)
        self._proof = Proof.of(offer, plan, lambda: self._guarded("live", self._loader.live), self._proof)
        return plan, receiver, self._proof

    def _give_evidence(self, offer: Announce, dispute: Dispute) -> NoReturn:
        """The publisher found another digest: say where, and hear the verdict."""
        assert self._proof is not None, "a dispute follows digests"
        self._session.on(Event.DISPUTE)
        self._mailbox.send(self._proof.evidence(dispute))
        self._mailbox.expect((), offer.round, offer.limits.release_s + offer.limits.cause_s)
        raise RemoteProtocolError("the publisher let a disputed round go on")

    def _plan_of(self, offer: Announce) -> Plan:
        """The cached plan, or a new one from the manifest, which is asked for when its digest is new."""
        manifest = None if self._plan is None else self._plan.manifest
        if manifest is None or manifest.digest != offer.manifest_digest:
            self._mailbox.send(NeedManifest(round=offer.round, version=offer.version))
            body = self._mailbox.expect((ManifestBody,), offer.round, offer.limits.prepare_s)
            self._session.on(Event.MANIFEST)
            manifest = decode_manifest(body.body)
            if manifest.digest != offer.manifest_digest:
                raise RemoteProtocolError("the manifest that came is not the one that was announced")
        geometry = (manifest, offer.capacity, offer.alignment)
        if self._plan is None or (self._plan.manifest, self._plan.capacity, self._plan.alignment) != geometry:
            self._plan = Plan(manifest, capacity=offer.capacity, alignment=offer.alignment)
        return self._plan

    def _receive(self, offer: Announce, plan: Plan, receiver: Receiver) -> float:
        """All buckets into the live parameters; returns the seconds that the loader took."""
        load_s, put = 0.0, installer(self._loader)

        def install(index: int, memory: torch.Tensor) -> None:
            nonlocal load_s
            if self._session.stage is Stage.TRANSFER:
                self._session.on(Event.WRITE)
            start = time.perf_counter()
            try:
                self._guarded("install", put, plan.buckets[index], memory)
            except WeightliftError as error:
                error.fill(bucket=index, buckets=len(plan), tensor=plan.names(index))
                raise
            load_s += time.perf_counter() - start

        # Twice: the publisher may be waiting that long for another peer before it goes on with this one.
        stall_s = 2 * offer.limits.transfer_s
        job = ReceiveJob(round=offer.round, version=offer.version, plan=plan, install=install, stall_s=stall_s)
        try:
            receiver.receive(job)
        except (PeerLost, TransferTimeout) as error:
            self._first_cause(offer, error)
        if self._session.stage is Stage.TRANSFER:
            self._session.on(Event.WRITE)  # a version without a single byte is installed, too
        return load_s

    def _first_cause(self, offer: Announce, closed: WeightliftError) -> NoReturn:
        """The data plane closed or stalled: raise the publisher's reason if it gives one within the grace, else what was seen."""
        stalled = isinstance(closed, TransferTimeout)
        try:
            self._mailbox.expect((Commit,), offer.round, 0.0 if stalled else offer.limits.cause_s)
        except Interrupted as interrupted:
            if interrupted.event is Event.EXPIRED:
                raise Interrupted(Event.EXPIRED if stalled else Event.LOST, closed) from None
            place = {"bucket": closed.bucket, "buckets": closed.buckets, "tensor": closed.tensor}
            interrupted.error.fill(**place)
            raise
        raise RemoteProtocolError("the publisher sent Commit in the middle of a transfer")

    def _guarded(self, what: str, call: Callable[..., _T], *arguments: object) -> _T:
        """Call into loader or transport; a foreign exception becomes a LoaderError, chained."""
        try:
            return call(*arguments)
        except WeightliftError:
            raise
        except Exception as error:
            raise LoaderError(f"{what} raised {type(error).__name__}: {error}") from error

    def _leave(self, offer: Announce, event: Event, error: BaseException) -> NoReturn:
        """End the round early: settle what is served, tell the publisher, drop the data plane, raise."""
        session = self._session
        stage, phase = session.stage, session.phase
        if stage is Stage.PREPARE and event is Event.FAIL:
            event = Event.REFUSE
        if stage is not Stage.IDLE:
            session.on(event)
        if isinstance(error, WeightliftError):
            error.fill(version=offer.version, round=offer.round, phase=str(phase), peer=self._peer)
            error.fill(still_works=summary.still_of_engine(session))
        try:
            if event is not Event.ABORT and event is not Event.LOST:
                self._tell(offer, event, describe(error, phase=str(phase), peer=self._peer))
        finally:
            drop_frames(error)
            self._clean_up(error)
        if event is Event.LOST:
            self._mailbox.start_over()
        raise error

    def _tell(self, offer: Announce, event: Event, info: ErrorInfo) -> None:
        if event is Event.REFUSE:
            self._mailbox.send(Refused(round=offer.round, version=offer.version, error=info))
            return
        torn, serves = self._session.torn, -1 if self._session.serves is None else self._session.serves
        self._mailbox.send(Failed(round=offer.round, version=offer.version, error=info, torn=torn, serves=serves))

    def _clean_up(self, error: BaseException) -> None:
        """Drop the views, then the data plane. If that fails as well, it must not hide the error that the caller has to know."""
        for abort in (self._loader.abort, *(receiver.abort for receiver in self._receivers.values())):
            try:
                abort()
            except Exception as second:
                drop_frames(second)
                error.add_note(f"the clean-up afterwards raised {type(second).__name__}: {second}")

    def close(self) -> None:
        """Drop views, then the data plane. Idempotent."""
        try:
            self._loader.abort()
        finally:
            for receiver in self._receivers.values():
                receiver.close()
            self._receivers.clear()
