"""What happens, as typed events, for logs, timelines and tests.

Owns: the event types, the fan-out to sinks, JSON lines. Must not know: who emits, who listens.
Every event is also logged on `weightlift.<room>`; the library installs no handler and prints nothing.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import time
from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = [
    "Event",
    "FrameRefused",
    "JsonLines",
    "PeerFenced",
    "PeerJoined",
    "PeerLeft",
    "PeerRejected",
    "RoundEnded",
    "RoundStarted",
    "Sink",
    "Superseded",
    "emit",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base. `at_s` is wall-clock time in seconds since the epoch."""

    at_s: float = dataclasses.field(default_factory=time.time)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the event's type under "event"."""
        return {"event": type(self).__name__, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PeerJoined(Event):
    """A subscriber was taken into the roster."""

    peer: str
    replica: str
    rank: int
    size: int
    pid: int
    serves: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PeerRejected(Event):
    """A connection was refused in the handshake."""

    peer: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PeerLeft(Event):
    """A subscriber is gone from the roster."""

    peer: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PeerFenced(Event):
    """A replica does not serve the version that a round published."""

    replica: str
    version: int
    error: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FrameRefused(Event):
    """A frame was not read, or does not belong to the round."""

    peer: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Superseded(Event):
    """A subscriber passed over an announcement that the publisher had already given up or replaced."""

    round: int
    version: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoundStarted(Event):
    """A round began."""

    round: int
    version: int
    peers: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoundEnded(Event):
    """A round ended; `report` is the SyncReport as a dict, `error` is "" if enough replicas committed."""

    round: int
    version: int
    error: str
    report: dict[str, Any]


Sink: TypeAlias = Callable[[Event], None]


def emit(sink: Sink | None, room: str, event: Event, *, level: int = logging.INFO) -> None:
    """Log an event and hand it to the sink. A sink that raises does not end a round: its error is logged."""
    logger = logging.getLogger(f"weightlift.{room}")
    if logger.isEnabledFor(level):
        logger.log(level, "%s", event.to_dict())
    if sink is not None:
        try:
            sink(event)
        except Exception:
            logger.exception("an event sink raised")


class JsonLines:
    """A sink that appends one JSON object a line to a file."""

    def __init__(self, path: str | pathlib.Path) -> None:
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def __call__(self, event: Event) -> None:
        self._file.write(json.dumps(event.to_dict()) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
