"""Every error that weightlift raises.

    WeightliftError                 version, round, phase, peer, bucket, buckets, tensor; .remedy; .report
    +-- ConfigError                 the caller's value; "must be ..., got X"
    +-- ManifestError               the two sides do not hold the same parameters; raised before any byte moves
    |   +-- MissingParameter        the engine has it, the trainer does not send it
    |   +-- UnexpectedParameter     the trainer sends it, the engine does not have it
    |   +-- DuplicateParameter      one name twice in one manifest
    |   +-- ShapeMismatch
    |   +-- DtypeMismatch
    |   +-- DigestMismatch          same names, other bytes
    +-- ProtocolError               (abstract)
    |   +-- LocalProtocolError      this side was used in an order the protocol does not have
    |   +-- RemoteProtocolError     the other side sent what the protocol does not have here
    +-- TransportError
    |   +-- TransportUnavailable    asked for by name, and cannot be had; the cause is chained
    |   +-- TransferTimeout         a deadline passed; says who was missing
    |   +-- PeerLost                a process is gone, or closed its end
    +-- SourceError                 the trainer's source raised while tensors were read from it
    |   +-- NonFiniteTensor         check_finite found a NaN or an infinity in it
    +-- LoaderError                 the engine's loader raised while tensors were installed, released or committed
    +-- HandoffError
    |   +-- OutOfOrder              a step of the hand-over at a moment when it is not allowed
    |   +-- BarrierTimeout
    |   +-- OutOfDeviceMemory
    |   +-- EngineBusy
    +-- TornWeights                 the engine was touched and not finished; it serves nothing until a full sync

Owns: the tree, the text of a message, pickling. Must not know: torch, zmq, any room of the library.
An error that a peer reported is raised on this side with the same class; the peer's own exception is chained as a `RemoteCause`.
"""

from __future__ import annotations

import traceback
from typing import Any, ClassVar

__all__ = [
    "BarrierTimeout",
    "ConfigError",
    "DigestMismatch",
    "DtypeMismatch",
    "DuplicateParameter",
    "EngineBusy",
    "HandoffError",
    "LoaderError",
    "LocalProtocolError",
    "ManifestError",
    "MissingParameter",
    "NonFiniteTensor",
    "OutOfDeviceMemory",
    "OutOfOrder",
    "PeerLost",
    "ProtocolError",
    "RemoteCause",
    "RemoteProtocolError",
    "ShapeMismatch",
    "SourceError",
    "TornWeights",
    "TransferTimeout",
    "TransportError",
    "TransportUnavailable",
    "UnexpectedParameter",
    "WeightliftError",
    "drop_frames",
    "error_class",
]

_FIELDS = ("version", "round", "phase", "peer", "bucket", "buckets", "tensor", "remedy", "still_works")


class WeightliftError(Exception):
    """Base class. `str()` gives what happened, where, what still works and what to do.

    Args:
        message: what happened, one sentence.
        version: the version that was being published.
        round: the publisher's round number.
        phase: ANNOUNCE, PREPARE, TRANSFER, RELEASE or COMMIT.
        peer: name of the other process (a subscriber's name, or "publisher").
        bucket: index of the bucket in work, from 0. buckets: how many the round has.
        tensor: name on the wire of the tensor in work.
        still_works: which version is served by whom after this error.
        remedy: what the reader can do about it.
    """

    default_remedy: ClassVar[str] = ""

    def __init__(
        self,
        message: str,
        *,
        version: int | None = None,
        round: int | None = None,
        phase: str | None = None,
        peer: str | None = None,
        bucket: int | None = None,
        buckets: int | None = None,
        tensor: str | None = None,
        remedy: str | None = None,
        still_works: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.version = version
        self.round = round
        self.phase = phase
        self.peer = peer
        self.bucket = bucket
        self.buckets = buckets
        self.tensor = tensor
        self.remedy = self.default_remedy if remedy is None else remedy
        self.still_works = still_works
        self.report: Any = None
        """The SyncReport of the failed round, where `Publisher.publish` raised: what every replica serves now."""

    def fields(self) -> dict[str, Any]:
        """The structured fields that are set, by name."""
        return {name: value for name in _FIELDS if (value := getattr(self, name)) not in (None, "")}

    def fill(self, **fields: Any) -> WeightliftError:
        """Set fields that are still unset (a caller further out knows more) and return self."""
        for name, value in fields.items():
            if getattr(self, name) in (None, ""):
                setattr(self, name, value)
        return self

    def where(self) -> str:
        """The place of the error in one bracket: `version 128, phase TRANSFER, peer rollout-3, bucket 17/42`."""
        parts = []
        for name in ("version", "phase", "peer"):
            value = getattr(self, name)
            if value is not None:
                parts.append(f"{name} {value}")
        if self.bucket is not None:
            total = "" if self.buckets is None else f"/{self.buckets}"
            parts.append(f"bucket {self.bucket}{total}")
        if self.tensor is not None:
            parts.append(f"tensor {self.tensor}")
        return ", ".join(parts)

    def __str__(self) -> str:
        where = self.where()
        text = f"{self.message} ({where})" if where else self.message
        if self.still_works:
            text += f"\n  {self.still_works}"
        if self.remedy:
            text += f"\n  Remedy: {self.remedy}"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, {name: getattr(self, name) for name in _FIELDS}, self.report)


def _rebuild(cls: type[WeightliftError], message: str, fields: dict[str, Any], report: Any) -> WeightliftError:
    error = cls(message, **fields)
    error.report = report
    return error


class RemoteCause(Exception):
    """What the other process raised, as text: its type, its message, its traceback. Chained as `__cause__`."""

    def __init__(self, type_name: str, message: str, traceback: str) -> None:
        super().__init__(type_name, message, traceback)
        self.type_name = type_name
        self.message = message
        self.traceback = traceback

    def __str__(self) -> str:
        head = f"{self.type_name}: {self.message}"
        return f"{head}\n--- traceback of the other process ---\n{self.traceback}" if self.traceback else head


class ConfigError(WeightliftError, ValueError):
    """A value given by the caller is wrong."""


class ManifestError(WeightliftError):
    """The trainer's and the engine's parameters do not match. Nothing was changed."""

    default_remedy = "compare the two models' parameter names; the engine still serves its old version."


class MissingParameter(ManifestError):
    """The engine holds parameters that the trainer does not send."""


class UnexpectedParameter(ManifestError):
    """The trainer sends parameters that the engine does not hold."""


class DuplicateParameter(ManifestError):
    """One name occurs twice in what the trainer sends."""

    default_remedy = "give every tensor its full name; a tied tensor is declared once, as an alias."


class ShapeMismatch(ManifestError):
    """Same name, another shape."""


class DtypeMismatch(ManifestError):
    """Same name, another dtype, and the declared cast policy does not allow the conversion."""

    default_remedy = "send the engine's dtype (source dtype=...) or declare the cast (loader cast=...)."


class DigestMismatch(ManifestError):
    """The bytes that arrived are not the bytes that were sent."""


class ProtocolError(WeightliftError):
    """Abstract: somebody left the protocol."""


class LocalProtocolError(ProtocolError):
    """This side was used in an order the protocol does not have. State is unchanged."""


class RemoteProtocolError(ProtocolError):
    """The other side sent something the protocol does not have in this state. State is unchanged."""


class TransportError(WeightliftError):
    """The bytes could not be moved."""


class TransportUnavailable(TransportError):
    """A transport was asked for and cannot be used here; the reason is chained."""

    default_remedy = "weightlift doctor"


class TransferTimeout(TransportError):
    """A deadline passed. The message names who was missing, in which phase, at which bucket, for which version."""


class PeerLost(TransportError):
    """A process of this round is gone, or closed its end without a reason."""


class SourceError(WeightliftError):
    """The trainer's source raised. The original exception is chained."""


class NonFiniteTensor(SourceError):
    """A tensor that was to be published holds a NaN or an infinity; the message names the first one."""

    default_remedy = "the optimiser step went wrong: restore the last good checkpoint, or publish with check_finite=False."


class LoaderError(WeightliftError):
    """The engine's loader raised. The original exception is chained."""


class HandoffError(WeightliftError):
    """The hand-over of device memory between trainer and engine broke its order or its promise."""


class OutOfOrder(HandoffError):
    """A step of the hand-over was asked for when it is not allowed: the KV cache before the barrier, a sync while the weights are
    asleep. Nothing was done."""


class BarrierTimeout(HandoffError):
    """Not every rank reached the barrier in time; the message names the missing ones."""


class OutOfDeviceMemory(HandoffError):
    """A memory promise was broken."""


class EngineBusy(HandoffError):
    """The engine could not flush its caches because requests are pending."""


class TornWeights(WeightliftError):
    """The engine holds a mixture of two versions and refuses to serve."""

    default_remedy = "take part in the next full sync: call pull() while the trainer publishes."


_CLASSES: dict[str, type[WeightliftError]] = {
    cls.__name__: cls for cls in list(globals().values()) if isinstance(cls, type) and issubclass(cls, WeightliftError)
}


def error_class(name: str) -> type[WeightliftError] | None:
    """The class of this tree with that name, or None."""
    return _CLASSES.get(name)


def drop_frames(error: BaseException) -> None:
    """Clear the local variables of the finished frames of an error and its causes.

    A traceback keeps every local alive, a view of a bucket among them, and an exception and its frames are a cycle that only the
    garbage collector breaks: without this a mapping would outlive the round in which it failed. The text of the traceback stays.
    """
    seen: set[int] = set()
    stack: list[BaseException | None] = [error]
    while stack:
        one = stack.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        stack += [one.__cause__, one.__context__]
