"""One version to N peers: which frame is sent when, who is waited for, who is given up, when a replica commits.

Owns: the round of a publisher. Must not know: clocks (time is an argument), sockets, tensors, how buckets move.
The driver performs the actions that each call returns and feeds back what happened; the transfer itself is one opaque action.

Rules that no peer can bend:
    - the transfer begins when every peer is ready or out; if then too few replicas are left, nobody receives a byte;
    - a replica commits when all its ranks are verified, whatever happens to other replicas; if one rank is out, all its ranks are;
    - answer first: whoever is given up is told so, with the first cause, in the same call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

from weightlift.errors import DigestMismatch, PeerLost, RemoteProtocolError, SourceError, TransferTimeout, WeightliftError
from weightlift.protocol.failure import describe, revive
from weightlift.protocol.messages import (
    Abort,
    Begin,
    Commit,
    Committed,
    Dispute,
    ErrorInfo,
    Evidence,
    Failed,
    Fenced,
    Frame,
    Goodbye,
    Limits,
    NeedManifest,
    PeerId,
    Ready,
    Refused,
    Released,
)
from weightlift.protocol.session import PEER_LAW, PHASE_OF_PEER_STAGE, PeerEvent, PeerStage, Phase

__all__ = ["Action", "Audit", "Member", "PeerView", "Round", "Send", "SendAnnounce", "SendManifest", "Transfer", "members_of"]


class Member(NamedTuple):
    """A live peer at ANNOUNCE. `serves` is the version it said it holds; -1 for none."""

    peer: PeerId
    replica: str
    serves: int = -1
    torn: bool = False


class SendAnnounce(NamedTuple):
    """Send Announce with the transport's offer for this peer."""

    peer: PeerId


class SendManifest(NamedTuple):
    """Send ManifestBody."""

    peer: PeerId


class Send(NamedTuple):
    """Send a frame."""

    peer: PeerId
    frame: Frame


class Transfer(NamedTuple):
    """Move all buckets to these peers; then call `transferred` once for each, or `source_failed`."""

    peers: tuple[PeerId, ...]


Action: TypeAlias = SendAnnounce | SendManifest | Send | Transfer


class Audit(Protocol):
    """Compares what peers hold with what the trainer holds. It reads tensors, so it comes from outside (verify/audit.py)."""

    def expect(self, peer: PeerId, frame: Ready) -> None:
        """Note how the peer holds what it will get; RemoteProtocolError if that cannot be."""

    def examine(self, peer: PeerId, frame: Released) -> tuple[Dispute, DigestMismatch] | None:
        """The question to ask, and the error so far, if a digest differs."""

    def conclude(self, peer: PeerId, frame: Evidence) -> DigestMismatch:
        """The error with its place and both values."""


_EVENT_OF: Final[dict[type, PeerEvent]] = {
    NeedManifest: PeerEvent.NEED,
    Ready: PeerEvent.READY,
    Refused: PeerEvent.REFUSED,
    Released: PeerEvent.RELEASED,
    Evidence: PeerEvent.EVIDENCE,
    Committed: PeerEvent.COMMITTED,
    Failed: PeerEvent.FAILED,
    Goodbye: PeerEvent.LOST,
}
_OUT: Final = frozenset({PeerStage.DONE, PeerStage.SPARED, PeerStage.FENCED})
_BEFORE_BYTES: Final = frozenset({PeerStage.ANNOUNCED, PeerStage.PREPARING, PeerStage.READY})


@dataclasses.dataclass(slots=True)
class PeerView:
    """What the publisher knows of one peer in this round. `serves` is -1 where that is nothing, or unknown."""

    member: Member
    stage: PeerStage
    deadline: float | None
    serves: int
    torn: bool
    error: WeightliftError | None = None
    released: Released | None = None
    committed: Committed | None = None

    @property
    def out(self) -> bool:
        """Whether nothing more is expected of the peer in this round."""
        return self.stage in _OUT


class Round:
    """The state machine of one round.

    Args:
        round: number of the round, from 1. version: the version it publishes.
        members: the live peers; every replica complete.
        need: how many replicas must be ready for the first byte to move.
        limits: deadlines. now: the caller's clock, in seconds.
        audit: compares digests before anybody commits; None where nothing is verified.
    """

    def __init__(
        self,
        *,
        round: int,
        version: int,
        members: Sequence[Member],
        need: int,
        limits: Limits,
        now: float,
        audit: Audit | None = None,
    ) -> None:
        self.round = round
        self.version = version
        self.need = need
        self.limits = limits
        self.audit = audit
        self.begun = False
        self._nothing_sent = False
        self.first_error: WeightliftError | None = None
        self.peers: dict[PeerId, PeerView] = {
            m.peer: PeerView(m, PeerStage.ANNOUNCED, now + limits.announce_s, m.serves, m.torn) for m in members
        }
        self._replicas: dict[str, list[PeerView]] = {}
        for view in self.peers.values():
            self._replicas.setdefault(view.member.replica, []).append(view)

    # --- questions -------------------------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether every peer is out."""
        return all(view.out for view in self.peers.values())

    @property
    def phase(self) -> Phase:
        """The phase of the peer that is furthest behind; COMMIT when all are out."""
        waiting = [PHASE_OF_PEER_STAGE[v.stage] for v in self.peers.values() if not v.out]
        order = list(Phase)
        return min(waiting, key=order.index, default=Phase.COMMIT)

    def next_deadline(self) -> float | None:
        """When `tick` must be called at the latest; None only when the round is done or a transfer is under way."""
        return min((v.deadline for v in self.peers.values() if v.deadline is not None), default=None)

    def committed_replicas(self) -> list[str]:
        """The replicas that serve the new version, in the order of the members."""
        return [name for name, ranks in self._replicas.items() if all(v.stage is PeerStage.DONE for v in ranks)]

    def serving(self) -> dict[str, int | None]:
        """Replica -> the version that all its ranks serve; None where they serve nothing, or not the same."""
        found = {name: {view.serves for view in ranks} for name, ranks in self._replicas.items()}
        return {name: max(versions) if len(versions) == 1 and max(versions) >= 0 else None for name, versions in found.items()}

    def fenced_replicas(self) -> dict[str, WeightliftError]:
        """The replicas that do not serve the new version, each with its first cause."""
        failed: dict[str, WeightliftError] = {}
        for name, ranks in self._replicas.items():
            errors = [v.error for v in ranks if v.error is not None]
            if errors:
                failed[name] = errors[0]
        return failed

    # --- inputs ----------------------------------------------------------------------------------------------------------------

    def start(self) -> list[Action]:
        """The first actions."""
        return [SendAnnounce(peer) for peer in self.peers]

    def receive(self, peer: PeerId, frame: Frame, now: float) -> list[Action]:
        """A frame of a member. A frame of another round is answered with Fenced; an illegal one puts its sender out."""
        view = self.peers.get(peer)
        event = _EVENT_OF.get(type(frame))
        ours = (frame.round, frame.version) == (self.round, self.version) or isinstance(frame, Goodbye)
        if view is None or event is None or not ours:
            return [self._stale(peer, frame)]
        if event not in PEER_LAW[view.stage]:
            if view.out:
                return [] if isinstance(frame, Failed | Goodbye) else [self._stale(peer, frame)]
            error = RemoteProtocolError(f"{type(frame).__name__} is not possible in stage {view.stage.name}")
            return self._give_up(view, error, PeerEvent.GIVE_UP, now)
        match frame:
            case NeedManifest():
                self._enter(view, event, now)
                return [SendManifest(peer), *self._advance(now)]
            case Refused(error=info):
                return self._give_up(view, self._revive(info, peer), event, now, tell=False)
            case Failed(error=info, torn=torn, serves=serves):
                view.torn, view.serves = torn, serves
                disputed = view.error if view.stage is PeerStage.DISPUTE else None
                return self._give_up(view, disputed or self._revive(info, peer), event, now, tell=False)
            case Goodbye(reason=reason):
                return self.lost(peer, PeerLost(f"peer {peer} left: {reason}"), now)
            case Ready() | Released() | Evidence() if self.audit is not None:
                return self._audited(self.audit, view, frame, event, now)
            case Released():
                view.released = frame
            case Committed():
                view.committed, view.serves, view.torn = frame, self.version, False
            case _:
                pass
        self._enter(view, event, now)
        return self._advance(now)

    def _audited(
        self, audit: Audit, view: PeerView, frame: Ready | Released | Evidence, event: PeerEvent, now: float
    ) -> list[Action]:
        """The frames of a peer that speak of what it holds."""
        peer = view.member.peer
        try:
            match frame:
                case Ready():
                    audit.expect(peer, frame)
                case Evidence():
                    return self._give_up(view, audit.conclude(peer, frame), event, now)
                case Released():
                    view.released = frame
                    found = audit.examine(peer, frame)
                    if found is not None:
                        question, view.error = found
                        self._enter(view, PeerEvent.DIFFERS, now)
                        return [Send(peer, question)]
        except RemoteProtocolError as error:
            return self._give_up(view, error, PeerEvent.GIVE_UP, now)
        self._enter(view, event, now)
        return self._advance(now)

    def lost(self, peer: PeerId, error: WeightliftError, now: float) -> list[Action]:
        """The peer's process is gone."""
        view = self.peers.get(peer)
        if view is None or view.out:
            return []
        if view.stage is PeerStage.DISPUTE and view.error is not None:
            error = view.error
        elif view.stage is PeerStage.CAUSE and view.error is not None:
            error.fill(bucket=view.error.bucket, buckets=view.error.buckets, tensor=view.error.tensor)
        return self._give_up(view, error, PeerEvent.LOST, now, tell=False)

    def transferred(self, peer: PeerId, error: WeightliftError | None, now: float) -> list[Action]:
        """The transfer to one peer ended: well, or with PeerLost (its end is closed) or TransferTimeout (it stalled)."""
        view = self.peers[peer]
        if view.out:
            return []
        if error is None:
            self._enter(view, PeerEvent.SENT, now)
            mates = self._replicas[view.member.replica]
            cause = next((m.error for m in mates if m.stage is PeerStage.FENCED), None)
            return self._advance(now) if cause is None else self._give_up(view, cause, PeerEvent.GIVE_UP, now)
        if isinstance(error, PeerLost):
            view.error = error
            self._enter(view, PeerEvent.BROKEN, now)
            return []
        return self._give_up(view, error, PeerEvent.EXPIRED, now)

    def source_failed(self, error: WeightliftError, now: float, *, untouched: bool = False) -> list[Action]:
        """The publisher itself failed during the transfer: every peer that is not out is given up.

        A source that failed in the first bucket has sent nothing, nor has anybody before the transfer (`untouched`): then every peer
        still holds what it held.
        """
        self._nothing_sent = untouched or (isinstance(error, SourceError) and error.bucket == 0)
        return self._abort_all(error, now)

    def tick(self, now: float) -> list[Action]:
        """Time has passed: peers whose deadline is over are given up."""
        actions: list[Action] = []
        for peer, view in self.peers.items():
            if view.deadline is not None and view.deadline <= now:
                actions += self.expire(peer, now)
        return actions

    def expire(self, peer: PeerId, now: float) -> list[Action]:
        """The deadline of one peer is over: it is given up."""
        view = self.peers[peer]
        return [] if view.deadline is None else self._give_up(view, self._overdue(view), PeerEvent.EXPIRED, now)

    # --- the rules -------------------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> list[Action]:
        """What the whole round can do now."""
        views = self.peers.values()
        if not self.begun:
            possible = sum(all(not v.out for v in ranks) for ranks in self._replicas.values())
            if possible < max(self.need, 1):
                return self._abort_all(self.first_error, now)
            if any(v.stage in (PeerStage.ANNOUNCED, PeerStage.PREPARING) for v in views):
                return []
            self.begun = True
            ready = [v for v in views if v.stage is PeerStage.READY]
            for view in ready:
                self._enter(view, PeerEvent.BEGIN, now)
            begin = Begin(round=self.round, version=self.version)
            peers = tuple(v.member.peer for v in ready)
            return [*(Send(peer, begin) for peer in peers), Transfer(peers)]
        actions: list[Action] = []
        for ranks in self._replicas.values():
            if all(v.stage is PeerStage.VERIFIED for v in ranks):
                for view in ranks:
                    self._enter(view, PeerEvent.COMMIT, now)
                    actions.append(Send(view.member.peer, Commit(round=self.round, version=self.version)))
        return actions

    def _give_up(self, view: PeerView, error: WeightliftError, event: PeerEvent, now: float, *, tell: bool = True) -> list[Action]:
        """Put one peer out, then the other ranks of its replica, then see what that means for the round."""
        phase = PHASE_OF_PEER_STAGE[view.stage]
        error.fill(version=self.version, round=self.round, phase=str(phase), peer=str(view.member.peer))
        self.first_error = self.first_error or error
        view.error = error
        self._enter(view, event, now)
        actions: list[Action] = [self._abort(view, error)] if tell else []
        for mate in self._replicas[view.member.replica]:
            # A mate inside the transfer cannot be reached; it is given up when its transfer ends.
            if not mate.out and mate.stage is not PeerStage.TRANSFER:
                mate.error = error
                self._enter(mate, PeerEvent.GIVE_UP, now)
                actions.append(self._abort(mate, error))
        return actions + self._advance(now)

    def _abort_all(self, error: WeightliftError | None, now: float) -> list[Action]:
        """Put out everybody who is still in."""
        error = error or WeightliftError("the round was given up")
        error.fill(version=self.version, round=self.round)
        self.first_error = self.first_error or error
        actions: list[Action] = []
        for view in self.peers.values():
            if not view.out:
                view.error = error
                self._enter(view, PeerEvent.GIVE_UP, now)
                actions.append(self._abort(view, error))
        return actions

    def _enter(self, view: PeerView, event: PeerEvent, now: float) -> None:
        """Apply one legal event and set the deadline of the stage that follows."""
        before = view.stage
        view.stage = PEER_LAW[before][event]
        seconds = {
            PeerStage.ANNOUNCED: self.limits.announce_s,
            PeerStage.PREPARING: self.limits.prepare_s,
            PeerStage.CAUSE: self.limits.cause_s,
            PeerStage.RELEASE: self.limits.release_s,
            PeerStage.DISPUTE: self.limits.release_s,
            PeerStage.COMMIT: self.limits.commit_s,
        }.get(view.stage)
        view.deadline = None if seconds is None else now + seconds
        if event is PeerEvent.LOST:
            view.serves = -1  # its process is gone: whatever it held, it serves nothing
        if view.stage is PeerStage.FENCED and view.error is not None and before not in _BEFORE_BYTES:
            known = event is PeerEvent.FAILED or self._nothing_sent
            if not known:
                view.serves, view.torn = -1, True

    def _overdue(self, view: PeerView) -> WeightliftError:
        """Why a peer is given up when its deadline passes."""
        if view.stage in (PeerStage.CAUSE, PeerStage.DISPUTE) and view.error is not None:
            return view.error
        peer, limits = view.member.peer, self.limits
        missing, name, seconds = {
            PeerStage.ANNOUNCED: ("answer the announcement", "announce_s", limits.announce_s),
            PeerStage.PREPARING: ("answer Ready or a refusal", "prepare_s", limits.prepare_s),
            PeerStage.RELEASE: ("say that it released the last bucket", "release_s", limits.release_s),
            PeerStage.COMMIT: ("confirm the commit", "commit_s", limits.commit_s),
        }[view.stage]
        return TransferTimeout(
            f"peer {peer} did not {missing} within {seconds} s",
            remedy=f"see what {peer} is doing (is it inside pull()?), or raise Deadlines.{name}.",
        )

    def _revive(self, info: ErrorInfo, peer: PeerId) -> WeightliftError:
        return revive(info, version=self.version, round=self.round, peer=peer)

    def _abort(self, view: PeerView, error: WeightliftError) -> Send:
        return Send(view.member.peer, Abort(round=self.round, version=self.version, error=describe(error)))

    def _stale(self, peer: PeerId, frame: Frame) -> Send:
        """Tell a peer that its frame belongs to a round that is over for it."""
        error = RemoteProtocolError(
            f"{type(frame).__name__} of round {frame.round}, version {frame.version}: that round is over for {peer}; "
            f"this is round {self.round}, version {self.version}",
            peer=peer,
        )
        return Send(peer, Fenced(round=frame.round, version=frame.version, error=describe(error)))


def members_of(peers: Iterable[tuple[str, str]]) -> list[Member]:
    """Members from (peer, replica) pairs; for tests and the model search."""
    return [Member(PeerId(peer), replica) for peer, replica in peers]
