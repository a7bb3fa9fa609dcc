"""The model that search.py walks: one publisher, some engines, their queues and the data plane between them.

Owns: `Scenario`, `Engine`, `World`: states that can be copied and compared, around the real machines. Must not know: which steps there
are, what must hold.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Final

from weightlift.errors import DigestMismatch, PeerLost
from weightlift.protocol.messages import (
    Abort,
    Announce,
    Dispute,
    ErrorInfo,
    Evidence,
    Fenced,
    Frame,
    Limits,
    ManifestBody,
    PeerId,
    Ready,
    Released,
)
from weightlift.protocol.round import Action, Round, Send, SendAnnounce, SendManifest, Transfer
from weightlift.protocol.session import Stage, SubscriberSession

__all__ = ["ACKED", "BROKEN", "CORRUPT", "ERROR", "LIMITS", "MOVING", "STALLED", "Engine", "ModelAudit", "Scenario", "World"]

ERROR: Final = ErrorInfo(error="WeightliftError", message="")
LIMITS: Final = Limits(announce_s=1, prepare_s=1, transfer_s=1, release_s=1, commit_s=1, cause_s=1)
MOVING, ACKED, BROKEN, STALLED = "moving", "acked", "broken", "stalled"
"""What the pending transfer knows of one peer."""
CORRUPT: Final = -1
"""Half of an engine's weights that is no version at all."""


class ModelAudit:
    """An audit to which any digest but the empty one is a difference."""

    def expect(self, peer: PeerId, frame: Ready) -> None:
        """Nothing to note."""

    def examine(self, peer: PeerId, frame: Released) -> tuple[Dispute, DigestMismatch] | None:
        """A question, if there is a digest."""
        question = Dispute(round=frame.round, version=frame.version, entry=0, copy=0, block=1, blocks=b"")
        return (question, DigestMismatch("")) if frame.digests else None

    def conclude(self, peer: PeerId, frame: Evidence) -> DigestMismatch:
        """The verdict."""
        return DigestMismatch("")


@dataclasses.dataclass(frozen=True)
class Scenario:
    """replicas: name of the replica of each subscriber. need: replicas that must be ready; None for all.

    faults: how many faults may happen on one path. rounds: how many versions are published.
    """

    replicas: tuple[str, ...] = ("a", "b")
    need: int | None = None
    faults: int = 2
    rounds: int = 2


class Engine:
    """A subscriber process: the real session, its weights as two halves, and its ends of queue and data plane."""

    def __init__(self) -> None:
        self.session = SubscriberSession()
        self.weights = (0, 0)
        self.alive = True
        self.knows_manifest = False
        self.plane = False
        self.inbox: tuple[Frame, ...] = ()
        self.outbox: tuple[Frame, ...] = ()

    def clone(self) -> Engine:
        new = object.__new__(Engine)
        new.__dict__.update(self.__dict__)
        new.session = SubscriberSession()
        for name in SubscriberSession.__slots__:
            setattr(new.session, name, getattr(self.session, name))
        return new

    @property
    def serves(self) -> int | None:
        """The version it would stamp on a sample; None where it refuses."""
        whole = self.alive and self.session.stage is Stage.IDLE and not self.session.torn
        return self.session.serves if whole else None

    def key(self) -> tuple[object, ...]:
        s = self.session
        return (
            s.stage,
            s.serves,
            s.torn,
            s.round,
            self.weights,
            self.alive,
            self.knows_manifest,
            self.plane,
            self.inbox,
            self.outbox,
        )


class World:
    """One state. `publisher` is None after it died; `transfer` is the pending opaque action."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.engines = {PeerId(f"s{i}"): Engine() for i in range(len(scenario.replicas))}
        self.publisher_alive = True
        self.round: Round | None = None
        self.transfer: dict[PeerId, str] | None = None
        self.rounds = 0
        self.faults = 0
        for engine in self.engines.values():
            engine.session.serves = 0

    def clone(self) -> World:
        """An independent copy."""
        new = object.__new__(World)
        new.__dict__.update(self.__dict__)
        new.engines = {peer: engine.clone() for peer, engine in self.engines.items()}
        new.transfer = None if self.transfer is None else dict(self.transfer)
        if self.round is not None:
            copy = new.round = object.__new__(Round)
            copy.__dict__.update(self.round.__dict__)
            copy.peers = {peer: dataclasses.replace(view) for peer, view in self.round.peers.items()}
            copy._replicas = {}
            for view in copy.peers.values():
                copy._replicas.setdefault(view.member.replica, []).append(view)
        return new

    def key(self) -> tuple[object, ...]:
        """Equal for two states that behave alike."""
        views: tuple[object, ...] = ()
        if self.round is not None:
            peers = self.round.peers.values()
            stages = tuple((v.stage, v.serves, v.torn, v.deadline is None, v.error is None) for v in peers)
            views = (*stages, self.round.begun, self.round.first_error is None)
        transfer = None if self.transfer is None else tuple(self.transfer.items())
        engines = tuple(engine.key() for engine in self.engines.values())
        return self.publisher_alive, self.rounds, self.faults, views, transfer, engines

    # --- performing ------------------------------------------------------------------------------------------------------------

    def perform(self, actions: list[Action]) -> None:
        """What the publisher's driver does with actions. Sending to an engine that died is how it may hear of the death."""
        assert self.round is not None
        n, v = self.round.round, self.round.version
        queue = collections.deque(actions)
        while queue:
            match queue.popleft():
                case Send(peer=peer) | SendAnnounce(peer=peer) | SendManifest(peer=peer) if not self.engines[peer].alive:
                    queue.extend(self.round.lost(peer, PeerLost("its connection is closed"), 0.0))
                case SendAnnounce(peer=peer):
                    offer = Announce(
                        round=n, version=v, manifest_digest=b"", transport="", offer=b"", capacity=1, alignment=1, limits=LIMITS
                    )
                    self.post(peer, offer)
                case SendManifest(peer=peer):
                    self.post(peer, ManifestBody(round=n, version=v, body=b""))
                case Send(peer=peer, frame=Abort()):
                    self.post(peer, Abort(round=n, version=v, error=ERROR))
                case Send(peer=peer, frame=Fenced(round=old, version=version)):
                    self.post(peer, Fenced(round=old, version=version, error=ERROR))
                case Send(peer=peer, frame=frame):
                    self.post(peer, frame)
                case Transfer(peers=peers):
                    going = [peer for peer in peers if not self.round.peers[peer].out]
                    if going:
                        self.transfer = {peer: MOVING if self.engines[peer].plane else BROKEN for peer in going}

    def post(self, peer: PeerId, frame: Frame) -> None:
        """Queue a frame for an engine that lives."""
        engine = self.engines[peer]
        if engine.alive:
            engine.inbox += (frame,)

    def close_plane(self, peer: PeerId) -> None:
        """An engine closes its end: the pending transfer sees it."""
        self.engines[peer].plane = False
        if self.transfer is not None and self.transfer.get(peer) == MOVING:
            self.transfer[peer] = BROKEN
