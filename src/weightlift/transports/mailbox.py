"""A subscriber's mailbox: the control channel of one peer, frame by frame.

Owns: the connection and its handshake, which announcement is the newest, waiting for one frame with a deadline. Must not know: what a
round does with a frame.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import TypeVar

from weightlift.errors import PeerLost, RemoteProtocolError, TransferTimeout, WeightliftError
from weightlift.observe.events import FrameRefused, Sink, Superseded, emit
from weightlift.protocol.failure import revive
from weightlift.protocol.messages import (
    Abort,
    Announce,
    Fenced,
    Frame,
    FromPublisher,
    Goodbye,
    Hello,
    Ping,
    Rejected,
    Welcome,
)
from weightlift.protocol.session import Event, Phase
from weightlift.transports.channel import Barred, ClientChannel, Garbage, Gone
from weightlift.transports.endpoint import Endpoint

__all__ = ["Interrupted", "Mailbox"]

_F = TypeVar("_F", bound=Frame)


class Interrupted(Exception):
    """A wait inside a round ended without the wanted frame. `event` says how, in the words of the session's table."""

    def __init__(self, event: Event, error: WeightliftError) -> None:
        super().__init__(str(error))
        self.event = event
        self.error = error


class Mailbox:
    """Frames from the publisher. `hello` makes the Hello of the moment: it tells what is served now."""

    def __init__(self, endpoint: Endpoint, hello: Callable[[], Hello], *, curve: str | None, sink: Sink | None) -> None:
        self._channel = ClientChannel(endpoint, curve)
        self._hello = hello
        self._sink = sink
        self._inbox: collections.deque[FromPublisher] = collections.deque()
        self.welcome: Welcome | None = None
        self._channel.send(hello())

    def send(self, frame: Frame) -> None:
        """Queue a frame for the publisher."""
        self._channel.send(frame)

    def start_over(self) -> None:
        """The publisher is gone: wait for another one at the same address, as a new connection."""
        self.welcome = None
        self._inbox.clear()
        self._channel.reset()
        self._channel.send(self._hello())

    def next_offer(self, timeout_s: float, *, asked_s: float) -> Announce:
        """The newest announcement that the publisher has not given up; TransferTimeout if none came.

        timeout_s: what is left of the `asked_s` that the caller gave.
        """
        deadline = time.monotonic() + timeout_s
        offer: Announce | None = None
        while True:
            offer = self._newest(offer)
            left_s = deadline - time.monotonic()
            # Once there is an offer, look without waiting: a newer one, or its end, may be queued behind it.
            arrived = self._collect(0.0 if offer is not None else left_s)
            if offer is not None and not arrived:
                return offer
            if offer is None and left_s <= 0 and not arrived:
                state = "a publisher is connected" if self.welcome is not None else "no publisher answered"
                if self.welcome is None and self._channel.closed_in_handshake:
                    state += ", a connection was closed in its handshake (is curve= the public key of this publisher?)"
                raise TransferTimeout(
                    f"no round was announced within {asked_s} s; {state}",
                    phase=str(Phase.ANNOUNCE),
                    peer="publisher",
                    remedy="is the trainer publishing at this address?",
                )

    def came_late(self, error: WeightliftError) -> bool:
        """Whether the publisher gave this peer up for not answering: the announcement had waited while the engine was busy."""
        unanswered = isinstance(error, TransferTimeout) and error.phase == Phase.ANNOUNCE
        return unanswered and error.peer == self._hello().peer

    def pass_over(self, offer: Announce) -> None:
        """Note that an announcement was not followed, because it was over or replaced already."""
        emit(self._sink, "round", Superseded(round=offer.round, version=offer.version))

    def _newest(self, offer: Announce | None) -> Announce | None:
        """Work off the inbox between rounds."""
        while self._inbox:
            match self._inbox.popleft():
                case Announce() as newer:
                    if offer is not None:
                        self.pass_over(offer)
                    offer = newer
                case Abort(round=number) if offer is not None and number == offer.round:
                    # It ended before this side answered, for whatever reason: the next one may already be on its way.
                    self.pass_over(offer)
                    offer = None
                case Fenced(error=info):
                    emit(self._sink, "round", FrameRefused(peer="publisher", reason=info.message))
                case Rejected(error=info):
                    self.start_over()  # asks again: the reason may pass, as that of a name that is taken
                    raise revive(info, version=-1, round=0, peer="publisher").fill(phase=str(Phase.ANNOUNCE))
                case Goodbye():
                    offer = None
                    self.start_over()
                case _:
                    pass  # the rest of a round that this side has left already
        return offer

    def expect(self, wanted: tuple[type[_F], ...], round: int, timeout_s: float) -> _F:
        """The next frame of a round, which must be one of `wanted`.

        Raises Interrupted if the round ends instead, RemoteProtocolError for another frame.
        """
        deadline = time.monotonic() + timeout_s
        self._collect(0.0, in_round=True)
        while True:
            while self._inbox:
                frame = self._inbox.popleft()
                if isinstance(frame, Goodbye):
                    raise Interrupted(Event.LOST, PeerLost(f"the publisher left: {frame.reason}", peer="publisher"))
                if frame.round != round:
                    continue
                if isinstance(frame, Abort | Fenced):
                    error = revive(frame.error, version=frame.version, round=round, peer="publisher")
                    raise Interrupted(Event.ABORT, error)
                if isinstance(frame, wanted):
                    return frame
                raise RemoteProtocolError(f"{type(frame).__name__} came, expected {_names(wanted)}")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                error = TransferTimeout(f"the publisher did not send {_names(wanted)} within {timeout_s} s", peer="publisher")
                raise Interrupted(Event.EXPIRED, error)
            self._collect(left_s, in_round=True)

    def _collect(self, timeout_s: float, *, in_round: bool = False) -> bool:
        """Move arrivals into the inbox; True if there were any."""
        arrivals = self._channel.poll(timeout_s)
        for arrival in arrivals:
            match arrival:
                case Gone(reason=reason):
                    if in_round and not self._inbox:
                        raise Interrupted(Event.LOST, PeerLost(f"the publisher is gone: {reason}", peer="publisher"))
                    self._inbox.append(Goodbye(round=0, version=-1, reason=reason))
                case Barred(error=error):
                    raise error.fill(phase=str(Phase.ANNOUNCE), peer="publisher")
                case Garbage(error=error):
                    emit(self._sink, "channel", FrameRefused(peer="publisher", reason=str(error)))
                case _:
                    self._keep(arrival.frame)  # type: ignore[arg-type]
        return bool(arrivals)

    def _keep(self, frame: FromPublisher) -> None:
        if isinstance(frame, Welcome):
            self.welcome = frame
            if not self._channel.watch(ClientChannel.PUBLISHER, frame.pid, frame.host):
                self._inbox.append(Goodbye(round=0, version=-1, reason="its process has ended"))
        elif not isinstance(frame, Ping):
            self._inbox.append(frame)

    def close(self, goodbye: Frame) -> None:
        """Say Goodbye and close. Idempotent."""
        if not self._channel.closed:
            self._channel.send(goodbye)
            self._channel.close()


def _names(wanted: tuple[type[Frame], ...]) -> str:
    return " or ".join(frame.__name__ for frame in wanted) or "Abort"
