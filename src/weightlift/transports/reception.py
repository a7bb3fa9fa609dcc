"""The publisher's reception: who comes, who goes, and whose frame is for the round.

Owns: the channel together with its roster. Must not know: what a round does.
"""

from __future__ import annotations

import logging
import os
import secrets
from typing import NamedTuple, TypeAlias

from weightlift.errors import PeerLost, WeightliftError
from weightlift.liveness import host_identity
from weightlift.observe.events import FrameRefused, PeerJoined, PeerLeft, PeerRejected, Sink, emit
from weightlift.protocol.failure import describe
from weightlift.protocol.messages import PROTOCOL_VERSION, Fenced, Frame, Goodbye, Hello, PeerId, Ping, Welcome
from weightlift.transports.channel import Arrival, Barred, Garbage, Gone, ServerChannel
from weightlift.transports.curve import CurveKeys
from weightlift.transports.endpoint import Endpoint
from weightlift.transports.roster import Connected, Roster

__all__ = ["Left", "Reception", "Said"]


class Said(NamedTuple):
    """A frame of a peer of the roster."""

    peer: PeerId
    frame: Frame


class Left(NamedTuple):
    """A peer is gone from the roster, or came back as another connection."""

    peer: PeerId
    error: WeightliftError


Visit: TypeAlias = Said | Left


class Reception:
    """One control channel and its roster, over all rounds of a publisher."""

    def __init__(self, endpoint: Endpoint, *, token: str, curve: CurveKeys | None, sink: Sink | None) -> None:
        self._channel = ServerChannel(endpoint, curve)
        self._sink = sink
        self._departed: dict[PeerId, str] = {}
        welcome = Welcome(
            round=0,
            version=-1,
            protocol=PROTOCOL_VERSION,
            run_id=endpoint.run_id,
            pid=os.getpid(),
            host=host_identity(),
            incarnation=secrets.token_hex(8),
        )
        self.roster = Roster(welcome, token=token, alive=self._alive)

    def visits(self, timeout_s: float) -> list[Visit]:
        """What concerns the round, after at most `timeout_s`; handshakes are answered on the way."""
        found: list[Visit] = []
        for arrival in self._channel.poll(timeout_s):
            found += self._sort(arrival)
        return found

    def absent(self) -> str:
        """Who was here and is gone, for a message; empty if nobody was."""
        return ", ".join(f"{peer}: {reason}" for peer, reason in list(self._departed.items())[-8:])

    def send(self, peer: PeerId, frame: Frame) -> Left | None:
        """Send a frame; Left if the peer cannot be reached any more."""
        key = self.roster.key_of(peer)
        if key is not None and self._channel.send(key, frame):
            return None
        return self._leave(peer, "its connection is closed")

    def _sort(self, arrival: Arrival) -> list[Visit]:
        if isinstance(arrival, Barred):
            self._refuse(None, str(arrival.error))
            return []
        peer = self.roster.name_of(arrival.key)
        match arrival:
            case Gone(reason=reason):
                return [] if peer is None else [self._leave(peer, reason)]
            case Garbage(error=error):
                self._refuse(peer, str(error))
                return []
        frame = arrival.frame
        if isinstance(frame, Hello):
            return self._hello(arrival.key, frame)
        if peer is None:
            self._stranger(arrival.key, frame)
            return []
        if isinstance(frame, Goodbye):
            return [self._leave(peer, f"it left: {frame.reason}")]
        return [Said(peer, frame)]

    def _hello(self, key: bytes, hello: Hello) -> list[Visit]:
        peer = PeerId(hello.peer)
        joined = self.roster.hello(key, hello)
        found: list[Visit] = []
        if joined.replaced is not None:
            self._channel.unwatch(joined.replaced.key)
            found.append(Left(peer, PeerLost(f"peer {peer} connected anew", peer=peer)))
        self._channel.send(key, joined.answer)
        if joined.error is not None:
            rejected = PeerRejected(peer=peer, reason=str(joined.error))
            emit(self._sink, "roster", rejected, level=logging.WARNING)
            return found
        fields = {name: getattr(hello, name) for name in ("peer", "replica", "rank", "size", "pid", "serves")}
        emit(self._sink, "roster", PeerJoined(**fields))
        self._departed.pop(peer, None)
        if not self._channel.watch(key, hello.pid, hello.host):
            found.append(self._leave(peer, "its process has ended"))
        return found

    def _stranger(self, key: bytes, frame: Frame) -> None:
        """A frame without a handshake: a peer of an earlier run, or one that was lost. It is told so."""
        self._refuse(None, f"{type(frame).__name__} of round {frame.round} from a peer that is not in the roster")
        error = PeerLost("this publisher does not know you: you belong to an earlier run, or were given up")
        self._channel.send(key, Fenced(round=frame.round, version=frame.version, error=describe(error)))

    def _leave(self, peer: PeerId, reason: str) -> Left:
        key = self.roster.key_of(peer)
        if key is not None:
            self._channel.unwatch(key)
            self.roster.remove(key)
            self._departed[peer] = reason
            emit(self._sink, "roster", PeerLeft(peer=peer, reason=reason))
        return Left(peer, PeerLost(f"peer {peer} is gone: {reason}", peer=peer))

    def _refuse(self, peer: PeerId | None, reason: str) -> None:
        emit(self._sink, "channel", FrameRefused(peer=peer or "unknown", reason=reason), level=logging.WARNING)

    def _alive(self, connected: Connected) -> bool:
        hello = connected.hello
        watched = self._channel.watch(connected.key, hello.pid, hello.host)
        return watched and self._channel.send(connected.key, Ping(round=0, version=-1))

    def close(self, reason: str) -> None:
        """Say Goodbye to everybody and close the channel. Idempotent."""
        goodbye = Goodbye(round=0, version=-1, reason=reason)
        for connected in self.roster.connected():
            self._channel.send(connected.key, goodbye)
            self._channel.unwatch(connected.key)
            self.roster.remove(connected.key)
        self._channel.close()
