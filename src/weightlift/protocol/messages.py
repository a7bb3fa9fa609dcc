"""The frames of the control channel. Every frame has a kind, a round and a version; nothing else is ever sent on it.

Owns: the structs. Must not know: how they travel (transports/channel.py), what follows from them (session.py, round.py).
`round` and `version` are 0 and -1 where no round is meant (the handshake).

Who sends what:

    subscriber -> publisher   Hello, NeedManifest, Ready, Refused, Released, Evidence, Committed, Failed, Goodbye
    publisher  -> subscriber  Welcome, Rejected, Announce, ManifestBody, Begin, Dispute, Commit, Abort, Fenced, Ping, Goodbye
"""

from __future__ import annotations

from typing import Literal, NewType, TypeAlias

import msgspec

__all__ = [
    "PROTOCOL_VERSION",
    "Abort",
    "Announce",
    "Begin",
    "Commit",
    "Committed",
    "Dispute",
    "ErrorInfo",
    "Evidence",
    "Failed",
    "Fenced",
    "Frame",
    "FromPublisher",
    "FromSubscriber",
    "Goodbye",
    "Hello",
    "Limits",
    "ManifestBody",
    "NeedManifest",
    "PeerId",
    "Ping",
    "Rank",
    "Ready",
    "Refused",
    "Rejected",
    "Released",
    "Version",
    "Welcome",
]

PROTOCOL_VERSION = 1

Version = NewType("Version", int)
"""A published version of the weights: an integer >= 0 owned by the publisher; -1 on the wire stands for "none yet"."""
Rank = NewType("Rank", int)
PeerId = NewType("PeerId", str)
"""A subscriber's name, unique among the live peers of one publisher."""


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An exception as data: our class name, the sentence, the place, and the foreign cause as text."""

    error: str
    message: str
    phase: str = ""
    peer: str = ""
    tensor: str = ""
    bucket: int = -1
    buckets: int = -1
    remedy: str = ""
    cause_type: str = ""
    cause_message: str = ""
    traceback: str = ""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The deadlines of one round in seconds, as both sides keep them (config.Deadlines, on the wire)."""

    announce_s: float
    prepare_s: float
    transfer_s: float
    release_s: float
    commit_s: float
    cause_s: float


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str, forbid_unknown_fields=True):
    """Base of all frames."""

    round: int
    version: int


class Hello(Frame, frozen=True):
    """First frame of a subscriber on a connection; repeated when it connects to another publisher process."""

    protocol: int
    run_id: str
    token: str
    peer: str
    incarnation: str
    replica: str
    rank: int
    size: int
    pid: int
    host: str
    serves: int
    torn: bool
    transports: tuple[str, ...]


class Welcome(Frame, frozen=True):
    """The publisher took the peer into its roster; it will be addressed from the next round on."""

    protocol: int
    run_id: str
    pid: int
    host: str
    incarnation: str


class Rejected(Frame, frozen=True):
    """The publisher did not take the peer; the reason."""

    error: ErrorInfo


class Announce(Frame, frozen=True):
    """A round begins. The manifest is named by its digest; the geometry follows from manifest, capacity and alignment."""

    manifest_digest: bytes
    transport: str
    offer: bytes
    capacity: int
    alignment: int
    limits: Limits
    verify: Literal["off", "sample", "full"] = "off"
    digest: Literal["xxh3", "lanes"] = "xxh3"


class NeedManifest(Frame, frozen=True):
    """The peer does not hold the manifest with that digest."""


class ManifestBody(Frame, frozen=True):
    """The manifest, encoded by protocol/codec.py."""

    body: bytes


class Ready(Frame, frozen=True):
    """The manifest fits the peer's own parameters, the data plane is attached. No byte has moved.

    `held`: (entry, dtypes) of the live tensors that it fills, where that is not one tensor of the sent dtype.
    """

    held: tuple[tuple[int, tuple[str, ...]], ...] = ()


class Refused(Frame, frozen=True):
    """It does not fit. Nothing was changed, the old version stays in force."""

    error: ErrorInfo


class Begin(Frame, frozen=True):
    """All peers that are needed are ready: the transfer begins."""


class Released(Frame, frozen=True):
    """Everything is installed and covered, every view of a bucket is dropped, the mapping is given back where it was promised.

    `digests`: 8 bytes for each live tensor, in manifest order; empty where nothing is verified.
    """

    digests: bytes
    tensors: int
    total_bytes: int
    load_s: float
    release_s: float


class Dispute(Frame, frozen=True):
    """One of the digests differs: where? `blocks`: 8 bytes for every `block` elements of the trainer's tensor, cast as held."""

    entry: int
    copy: int
    block: int
    blocks: bytes


class Evidence(Frame, frozen=True):
    """The first block that differs: its first element, and the peer's bytes; start -1 if none does any more."""

    start: int
    data: bytes


class Commit(Frame, frozen=True):
    """All ranks of the replica are verified: it now serves the version."""


class Committed(Frame, frozen=True):
    """The peer serves the version, its caches are reset."""

    commit_s: float


class Failed(Frame, frozen=True):
    """The peer leaves the round with an error. `torn` says whether it was touched, `serves` what it serves (-1: nothing)."""

    error: ErrorInfo
    torn: bool
    serves: int


class Abort(Frame, frozen=True):
    """The publisher ends the round for this peer; the first cause."""

    error: ErrorInfo


class Fenced(Frame, frozen=True):
    """Answer to a frame of a round that is over for this peer."""

    error: ErrorInfo


class Ping(Frame, frozen=True):
    """Nothing; its delivery, or the failure of it, is the message."""


class Goodbye(Frame, frozen=True):
    """The sender leaves for good, between rounds or within one."""

    reason: str


FromSubscriber: TypeAlias = Hello | NeedManifest | Ready | Refused | Released | Evidence | Committed | Failed | Goodbye
FromPublisher: TypeAlias = Welcome | Rejected | Announce | ManifestBody | Begin | Dispute | Commit | Abort | Fenced | Ping | Goodbye
