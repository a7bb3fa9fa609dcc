"""One peer in one round: the law of both ends, as two tables.

Owns: the stages and events of a subscriber and of a publisher's view of one peer, and what each transition does to the weights.
Must not know: time (deadlines are given by round.py and the driver), frames' bytes, other peers.

The tables are the law. `docs/protocol.md` is generated from them, and the tests walk every cell: what is not in a table is illegal,
raises, and leaves the state unchanged.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from weightlift.errors import LocalProtocolError, RemoteProtocolError

__all__ = [
    "PEER_LAW",
    "PHASE_OF_PEER_STAGE",
    "PHASE_OF_STAGE",
    "SUBSCRIBER_LAW",
    "Effect",
    "Event",
    "PeerEvent",
    "PeerStage",
    "Phase",
    "Stage",
    "SubscriberSession",
]


class Phase(enum.StrEnum):
    """The phases of a round, as they appear in errors and reports."""

    ANNOUNCE = "ANNOUNCE"
    PREPARE = "PREPARE"
    TRANSFER = "TRANSFER"
    RELEASE = "RELEASE"
    COMMIT = "COMMIT"


# --- the subscriber -------------------------------------------------------------------------------------------------------------


class Stage(enum.Enum):
    """Where a subscriber stands in a round."""

    IDLE = "between rounds"
    PREPARE = "announced; the manifest is checked against the own parameters"
    READY = "fits; waits for Begin"
    TRANSFER = "waits for the first bucket; no byte of the live parameters has changed"
    LOADING = "past the point of no return: live parameters hold a mixture"
    RELEASE = "all installed; drops views, unmaps, proves coverage"
    VERIFIED = "complete and said so; waits for Commit"
    COMMIT = "told to commit; resets caches"


class Event(enum.Enum):
    """What can happen to a subscriber. OFFER to ABORT are frames of the publisher, the rest is local."""

    OFFER = "Announce"
    MANIFEST = "ManifestBody"
    BEGIN = "Begin"
    DISPUTE = "Dispute"
    COMMIT = "Commit"
    ABORT = "Abort, Fenced or Goodbye"
    ACCEPT = "own parameters match"
    REFUSE = "own parameters do not match"
    WRITE = "about to write the first byte"
    LOADED = "last bucket installed"
    CLEAN = "released and covered"
    DONE = "caches reset"
    FAIL = "own error"
    LOST = "publisher gone"
    EXPIRED = "deadline passed"
    DISCARD = "the engine gave its weights away"


class Effect(enum.Enum):
    """What a transition does to the weights that the engine serves."""

    KEEP = "keep"
    TEAR = "TORN"
    ADVANCE = "new version"


_QUIT = (Event.ABORT, Event.FAIL, Event.LOST, Event.EXPIRED)
_KEEP: Mapping[Event, tuple[Stage, Effect]] = dict.fromkeys(_QUIT, (Stage.IDLE, Effect.KEEP))
_TEAR: Mapping[Event, tuple[Stage, Effect]] = dict.fromkeys(_QUIT, (Stage.IDLE, Effect.TEAR))

SUBSCRIBER_LAW: Final[Mapping[Stage, Mapping[Event, tuple[Stage, Effect]]]] = {
    Stage.IDLE: {Event.OFFER: (Stage.PREPARE, Effect.KEEP), Event.DISCARD: (Stage.IDLE, Effect.TEAR)},
    Stage.PREPARE: {
        Event.MANIFEST: (Stage.PREPARE, Effect.KEEP),
        Event.ACCEPT: (Stage.READY, Effect.KEEP),
        Event.REFUSE: (Stage.IDLE, Effect.KEEP),
        **_KEEP,
    },
    Stage.READY: {Event.BEGIN: (Stage.TRANSFER, Effect.KEEP), **_KEEP},
    Stage.TRANSFER: {Event.WRITE: (Stage.LOADING, Effect.KEEP), **_KEEP},
    Stage.LOADING: {Event.LOADED: (Stage.RELEASE, Effect.KEEP), **_TEAR},
    Stage.RELEASE: {Event.CLEAN: (Stage.VERIFIED, Effect.KEEP), **_TEAR},
    Stage.VERIFIED: {
        Event.DISPUTE: (Stage.VERIFIED, Effect.KEEP),
        Event.COMMIT: (Stage.COMMIT, Effect.KEEP),
        **_TEAR,
    },
    Stage.COMMIT: {Event.DONE: (Stage.IDLE, Effect.ADVANCE), **_TEAR},
}

PHASE_OF_STAGE: Final[Mapping[Stage, Phase]] = {
    Stage.IDLE: Phase.ANNOUNCE,
    Stage.PREPARE: Phase.PREPARE,
    Stage.READY: Phase.PREPARE,
    Stage.TRANSFER: Phase.TRANSFER,
    Stage.LOADING: Phase.TRANSFER,
    Stage.RELEASE: Phase.RELEASE,
    Stage.VERIFIED: Phase.COMMIT,
    Stage.COMMIT: Phase.COMMIT,
}

_REMOTE = frozenset({Event.OFFER, Event.MANIFEST, Event.BEGIN, Event.DISPUTE, Event.COMMIT, Event.ABORT})


class SubscriberSession:
    """A subscriber's stage and what it serves, over all rounds of its life.

    `serves` is the version whose weights it holds completely (None before the first sync and when torn); `torn` says that live
    parameters hold a mixture. Both change only through the table.
    """

    __slots__ = ("round", "serves", "stage", "torn", "version")

    def __init__(self) -> None:
        self.stage = Stage.IDLE
        self.serves: int | None = None
        self.torn = False
        self.round = 0
        self.version = -1

    @property
    def phase(self) -> Phase:
        """The phase that an error in this stage is reported under."""
        return PHASE_OF_STAGE[self.stage]

    @property
    def touched(self) -> bool:
        """Whether leaving the round now tears the weights."""
        return SUBSCRIBER_LAW[self.stage].get(Event.FAIL) == (Stage.IDLE, Effect.TEAR)

    def offer(self, round: int, version: int) -> None:
        """Enter a round. RemoteProtocolError if the version goes back behind the one that is served."""
        if self.serves is not None and version < self.serves:
            raise RemoteProtocolError(
                f"the publisher offers version {version}, but version {self.serves} is served already",
                version=version,
                phase=Phase.ANNOUNCE,
                remedy="versions never go back; publish a higher one.",
            )
        self.on(Event.OFFER)
        self.round, self.version = round, version

    def on(self, event: Event) -> None:
        """Apply one event; illegal ones raise Local- or RemoteProtocolError and change nothing."""
        row = SUBSCRIBER_LAW[self.stage]
        if event not in row:
            blame = RemoteProtocolError if event in _REMOTE else LocalProtocolError
            raise blame(f"{event.name} is not possible in stage {self.stage.name}", phase=self.phase)
        self.stage, effect = row[event]
        if effect is Effect.TEAR:
            self.serves, self.torn = None, True
        elif effect is Effect.ADVANCE:
            self.serves, self.torn = self.version, False


# --- the publisher's view of one peer ------------------------------------------------------------------------------------------


class PeerStage(enum.Enum):
    """Where a peer stands in a round, as far as the publisher knows."""

    ANNOUNCED = "told of the round; no answer yet"
    PREPARING = "asked for the manifest; checks it"
    READY = "fits; waits until all that are needed are ready"
    TRANSFER = "buckets under way"
    CAUSE = "closed its data plane; its reason is awaited"
    RELEASE = "acknowledged all buckets; releases and proves coverage"
    DISPUTE = "holds other bytes than the trainer; was asked which"
    VERIFIED = "complete; waits for the other ranks of its replica"
    COMMIT = "told to commit"
    DONE = "serves the new version"
    SPARED = "out of the round, untouched: serves what it served"
    FENCED = "out of the round, touched or unknown: addressed again only by a full sync"


class PeerEvent(enum.Enum):
    """What can happen to a peer, as seen by the publisher. NEED to FAILED are frames of the peer, the rest is local."""

    NEED = "NeedManifest"
    READY = "Ready"
    REFUSED = "Refused"
    RELEASED = "Released"
    EVIDENCE = "Evidence"
    COMMITTED = "Committed"
    FAILED = "Failed"
    BEGIN = "all needed peers are ready"
    SENT = "its transfer ended well"
    DIFFERS = "Released, with another digest"
    BROKEN = "its data plane closed or stalled"
    COMMIT = "all ranks of its replica are verified"
    GIVE_UP = "its replica or the round failed"
    LOST = "process gone, or it said Goodbye"
    EXPIRED = "deadline passed"


_P, _E = PeerStage, PeerEvent
_SPARE: Mapping[PeerEvent, PeerStage] = dict.fromkeys((_E.FAILED, _E.GIVE_UP, _E.LOST, _E.EXPIRED), _P.SPARED)
_FENCE: Mapping[PeerEvent, PeerStage] = dict.fromkeys((_E.FAILED, _E.GIVE_UP, _E.LOST, _E.EXPIRED), _P.FENCED)

PEER_LAW: Final[Mapping[PeerStage, Mapping[PeerEvent, PeerStage]]] = {
    _P.ANNOUNCED: {_E.NEED: _P.PREPARING, _E.READY: _P.READY, _E.REFUSED: _P.SPARED, **_SPARE},
    _P.PREPARING: {_E.READY: _P.READY, _E.REFUSED: _P.SPARED, **_SPARE},
    _P.READY: {_E.BEGIN: _P.TRANSFER, **_SPARE},
    _P.TRANSFER: {_E.SENT: _P.RELEASE, _E.BROKEN: _P.CAUSE, **_FENCE},
    _P.CAUSE: _FENCE,
    _P.RELEASE: {_E.RELEASED: _P.VERIFIED, _E.DIFFERS: _P.DISPUTE, **_FENCE},
    _P.DISPUTE: {_E.EVIDENCE: _P.FENCED, **_FENCE},
    _P.VERIFIED: {_E.COMMIT: _P.COMMIT, **_FENCE},
    _P.COMMIT: {_E.COMMITTED: _P.DONE, **_FENCE},
    _P.DONE: {},
    _P.SPARED: {},
    _P.FENCED: {},
}

PHASE_OF_PEER_STAGE: Final[Mapping[PeerStage, Phase]] = {
    _P.ANNOUNCED: Phase.ANNOUNCE,
    _P.PREPARING: Phase.PREPARE,
    _P.READY: Phase.PREPARE,
    _P.TRANSFER: Phase.TRANSFER,
    _P.CAUSE: Phase.TRANSFER,
    _P.RELEASE: Phase.RELEASE,
    _P.DISPUTE: Phase.RELEASE,
    _P.VERIFIED: Phase.RELEASE,
    _P.COMMIT: Phase.COMMIT,
    _P.DONE: Phase.COMMIT,
    _P.SPARED: Phase.PREPARE,
    _P.FENCED: Phase.TRANSFER,
}
