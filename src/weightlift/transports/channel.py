"""The control channel: typed frames between one publisher and its subscribers, over ZeroMQ.

Owns: the sockets, liveness, the limits on frames. Must not know: what a frame means; rounds.
Both ends are used by one thread at a time. Nothing here waits without a limit.

    ServerChannel (ROUTER, publisher)            ClientChannel (DEALER, subscriber)
        poll(timeout_s) -> Received | Garbage | Gone       poll(timeout_s) -> the same
        send(key, frame) -> bool                           send(frame)

A peer is gone when its pidfd says so (same host), when libzmq's own heartbeats stop (other hosts; they run in libzmq's I/O thread,
which no transfer and no interpreter lock can block), or when its connection is closed.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import socket as sockets
import struct
import time
import weakref
from typing import Final, NamedTuple, TypeAlias

import zmq
from zmq.utils.monitor import recv_monitor_message

from weightlift.errors import ConfigError, RemoteProtocolError, TransportUnavailable
from weightlift.liveness import lives, open_pidfd
from weightlift.protocol import codec
from weightlift.protocol.messages import Frame, FromPublisher, FromSubscriber, Ping
from weightlift.transports.curve import HANDSHAKE_FAILURES, CurveKeys, failure_text
from weightlift.transports.endpoint import Endpoint, discard, lock_within

__all__ = ["Barred", "ClientChannel", "Garbage", "Gone", "Received", "ServerChannel"]

_HEARTBEAT_S: Final = 0.5
_PING_S: Final = 2.0
_HEARTBEAT_TIMEOUT_S: Final = 8.0
_HANDSHAKE_S: Final = 5.0
_OVER: Final = f"(it left, or sent a frame over the limit of {codec.MAX_FRAME_FROM_SUBSCRIBER} bytes)"
_MOST_FRAMES: Final = 256
"""Frames taken from a socket in one go."""
_QUEUE_FRAMES: Final = 16
"""Frames of one connection that wait unread: with the limit on a frame, 64 MB that a stranger can make a publisher hold."""
_CURVE_REMEDY: Final = "give the publisher curve=CurveKeys, and every subscriber curve= its public key."
_LINGER_MS: Final = 300
"""How long a closing socket may try to deliver its last frames (a Goodbye, an Abort)."""


class Received(NamedTuple):
    """A frame. `key` is the connection it came on."""

    key: bytes
    frame: FromSubscriber | FromPublisher


class Garbage(NamedTuple):
    """Bytes that are not a frame."""

    key: bytes
    error: RemoteProtocolError


class Barred(NamedTuple):
    """The security handshake failed: this connection will never carry a frame."""

    error: RemoteProtocolError


class Gone(NamedTuple):
    """The process or the connection behind `key` is gone."""

    key: bytes
    reason: str


Arrival: TypeAlias = Received | Garbage | Barred | Gone


class _Channel:
    """What both ends share: one context, one socket with its monitor, pidfds."""

    _kind: int

    def __init__(self, endpoint: Endpoint, curve: CurveKeys | str | None = None) -> None:
        """`curve`: the publisher's keys, or, on a subscriber's end, its public key."""
        self.endpoint = endpoint
        self._curve = curve
        self._context = zmq.Context(io_threads=1)
        self._poller = zmq.Poller()
        self._pidfds: dict[bytes, int] = {}
        self.closed_in_handshake = False
        self._sockets: list[zmq.Socket[bytes]] = []
        # Not __del__: in a cycle the context may be finalised before its sockets are closed, and then waits for them for ever.
        weakref.finalize(self, _abandon, self._context, self._sockets, self._pidfds)
        try:
            self._open()
        except BaseException:
            _abandon(self._context, self._sockets, self._pidfds)
            raise

    def _open(self) -> None:
        socket: zmq.Socket[bytes] = self._context.socket(self._kind)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        if self.endpoint.remote:
            socket.setsockopt(zmq.IPV6, 1)
        self._socket = socket
        self._monitor = self._watch_connections(socket)
        self._sockets[:] = [self._monitor, self._socket]
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def _watch_connections(self, socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        """A socket that tells of closed connections and failed handshakes.

        Not pyzmq's `get_monitor_socket`: with its limit on unread events, libzmq's I/O thread would stand still, and every frame with
        it, when strangers knock a thousand times while the trainer trains and nobody polls.
        """
        name = f"inproc://monitor-{socket.underlying}"
        socket.monitor(name, zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | HANDSHAKE_FAILURES)
        monitor: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 0)
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.connect(name)
        return monitor

    def _shut(self) -> None:
        for key in list(self._pidfds):
            self.unwatch(key)
        self._poller.unregister(self._socket)
        self._poller.unregister(self._monitor)
        self._socket.monitor(None, 0)
        self._monitor.close(linger=0)
        self._socket.close()

    def watch(self, key: bytes, pid: int, host: str) -> bool:
        """Report Gone when that process ends; False if it has ended already."""
        try:
            pidfd = open_pidfd(pid, host)
        except ProcessLookupError:
            return False
        if pidfd is not None:
            self.unwatch(key)
            self._pidfds[key] = pidfd
            self._poller.register(pidfd, zmq.POLLIN)
        return True

    def unwatch(self, key: bytes) -> None:
        """Stop watching. Idempotent."""
        pidfd = self._pidfds.pop(key, None)
        if pidfd is not None:
            self._poller.unregister(pidfd)
            os.close(pidfd)

    def _drain_monitor(self) -> tuple[int, list[Arrival]]:
        """Since the last call: the number of disconnections, and the handshakes that failed."""
        count, barred = 0, list[Arrival]()
        for _ in range(_MOST_FRAMES):
            if not self._monitor.poll(0):
                break
            message = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            event = int(message["event"])
            if event & HANDSHAKE_FAILURES:
                text = failure_text(event, int(message["value"]))
                barred.append(Barred(RemoteProtocolError(f"the security handshake failed: {text}", remedy=_CURVE_REMEDY)))
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self.closed_in_handshake = True
            else:
                count += 1
        return count, barred

    def _deaths(self, ready: dict[object, int]) -> list[Arrival]:
        dead = [key for key, pidfd in self._pidfds.items() if pidfd in ready]
        for key in dead:
            self.unwatch(key)
        return [Gone(key, "its process has ended") for key in dead]

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return bool(self._context.closed)

    def close(self) -> None:
        """Close the socket; frames that were sent are still delivered for a moment. Idempotent."""
        if self.closed:
            return
        self._shut()
        self._context.term()


class ServerChannel(_Channel):
    """The publisher's end. Raises ConfigError when the address is in use, TransportUnavailable when it cannot be bound."""

    _kind = zmq.ROUTER

    def _open(self) -> None:
        super()._open()
        self._known: set[bytes] = set()
        self._pinged = time.monotonic()
        socket = self._socket
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.RCVHWM, _QUEUE_FRAMES)
        if isinstance(self._curve, CurveKeys):
            socket.curve_server = True
            socket.curve_secretkey = self._curve.secret.encode()
        socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_FRAME_FROM_SUBSCRIBER)
        path = None if self.endpoint.directory is None else self.endpoint.directory / "control"
        binding = None if path is None else os.open(path.with_name("binding"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if path is not None and binding is not None:
                # Of several publishers that start at once, one looks and binds at a time.
                lock_within(binding, fcntl.LOCK_EX, path.parent)
            if path is not None and path.exists():
                # libzmq replaces an existing socket file in silence; a publisher that still listens on it must not be cut off.
                if _answers(path):
                    raise zmq.ZMQError(zmq.EADDRINUSE)
                discard(path)
            socket.bind(self.endpoint.zmq)
        except zmq.ZMQError as error:
            # Whoever made this closes what is open. Not `close`: that removes the socket file, and it may be another publisher's.
            if error.errno == zmq.EADDRINUSE:
                raise ConfigError(
                    f"address {self.endpoint.address} is in use by another publisher",
                    remedy="one publisher per address: make another with new_address(), or close the other one first.",
                ) from error
            raise TransportUnavailable(f"cannot bind {self.endpoint.zmq}: {error}") from error
        finally:
            if binding is not None:
                os.close(binding)

    def poll(self, timeout_s: float) -> list[Arrival]:
        """Everything that arrived; waits at most `timeout_s` for the first."""
        wait_s = min(timeout_s, _PING_S) if self._known - set(self._pidfds) else timeout_s
        ready = dict(self._poller.poll(_milliseconds(wait_s)))
        arrivals: list[Arrival] = []
        # A peer that never stops talking must not keep the round from looking at its clock.
        while self._socket in ready and len(arrivals) < _MOST_FRAMES:
            try:
                key, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            arrivals.append(self._read(key, parts))
        arrivals += self._deaths(ready)
        closed, barred = self._drain_monitor()
        arrivals += barred
        if closed or time.monotonic() - self._pinged > _PING_S:
            self._pinged = time.monotonic()
            ping = Ping(round=0, version=-1)
            gone = [Gone(key, "its connection is closed") for key in list(self._known) if not self.send(key, ping)]
            arrivals += gone
            if closed > len(gone):
                # libzmq closes a connection at a frame over the limit, and tells nobody whose it was.
                arrivals.append(Garbage(b"", RemoteProtocolError(f"the connection of a stranger was closed {_OVER}")))
        for arrival in arrivals:
            if isinstance(arrival, Gone):
                self._known.discard(arrival.key)
        return arrivals

    def _read(self, key: bytes, parts: list[bytes]) -> Arrival:
        self._known.add(key)
        if len(parts) != 1:
            return Garbage(key, RemoteProtocolError(f"a frame must be one part, got {len(parts)}"))
        try:
            return Received(key, codec.decode_from_subscriber(parts[0]))
        except RemoteProtocolError as error:
            return Garbage(key, error)

    def send(self, key: bytes, frame: Frame) -> bool:
        """Hand a frame to the socket; False if nobody is connected under that key."""
        try:
            self._socket.send_multipart([key, codec.encode(frame)], zmq.NOBLOCK)
        except zmq.Again:
            return True  # connected, but its queue is full: it does not read, and the deadline of its stage will say so
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def close(self) -> None:
        """Also removes the socket file."""
        if not self._context.closed:
            super().close()
            if self.endpoint.directory is not None:
                discard(self.endpoint.directory / "control")


class ClientChannel(_Channel):
    """A subscriber's end. `generation` counts connections: a frame of an older one never arrives after a reset."""

    _kind = zmq.DEALER
    PUBLISHER: Final = b"publisher"

    def _open(self) -> None:
        super()._open()
        socket = self._socket
        socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_FRAME_FROM_PUBLISHER)
        # A socket that a dead publisher's child holds open takes connections and never answers.
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(_HANDSHAKE_S * 1000))
        if self.endpoint.remote:
            # On this side only, with a time to live that tells the publisher when to give up: a ROUTER that sends heartbeats itself
            # aborts its process when a stranger fills its queue and leaves (libzmq issues 3937, 4364, 4767).
            socket.setsockopt(zmq.HEARTBEAT_IVL, int(_HEARTBEAT_S * 1000))
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(_HEARTBEAT_TIMEOUT_S * 1000))
            socket.setsockopt(zmq.HEARTBEAT_TTL, int(_HEARTBEAT_TIMEOUT_S * 1000))
        if self._curve is not None:
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.curve_serverkey = str(self._curve).encode()
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        try:
            socket.connect(self.endpoint.zmq)
        except zmq.ZMQError as error:
            raise ConfigError(f"address {self.endpoint.address} cannot be connected to: {error}") from error

    def reset(self) -> None:
        """Forget the publisher: a new connection with a new identity, nothing of the old one left in a queue."""
        self._socket.setsockopt(zmq.LINGER, 0)
        self._shut()
        self._open()

    def poll(self, timeout_s: float) -> list[Arrival]:
        """Everything that arrived; waits at most `timeout_s` for the first."""
        ready = dict(self._poller.poll(_milliseconds(timeout_s)))
        arrivals: list[Arrival] = []
        while self._socket in ready and len(arrivals) < _MOST_FRAMES:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                if len(parts) != 1:
                    raise RemoteProtocolError(f"a frame must be one part, got {len(parts)}")
                arrivals.append(Received(self.PUBLISHER, codec.decode_from_publisher(parts[0])))
            except RemoteProtocolError as error:
                arrivals.append(Garbage(self.PUBLISHER, error))
        deaths = self._deaths(ready)
        closed, barred = self._drain_monitor()
        if barred:
            return arrivals + barred
        if not deaths and closed:
            deaths = [Gone(self.PUBLISHER, "its connection is closed")]
        return arrivals + deaths

    def send(self, frame: Frame) -> None:
        """Queue a frame; it is delivered when the publisher is there."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(codec.encode(frame), zmq.NOBLOCK)


def _abandon(context: zmq.Context[zmq.Socket[bytes]], sockets: list[zmq.Socket[bytes]], pidfds: dict[bytes, int]) -> None:
    """Close what a channel that nobody closed has left."""
    for socket in sockets:
        socket.close(linger=0)
    for pidfd in pidfds.values():
        os.close(pidfd)
    pidfds.clear()
    context.term()


def _answers(path: os.PathLike[str]) -> bool:
    """Whether the process that listens on a unix socket lives. A child that it forked may hold the socket open after its end."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
        # Of whoever called listen(); 0 for a process that has no number in this pid namespace.
        pid, _, _ = struct.unpack("3i", probe.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, 12))
    return pid == 0 or lives(pid)


def _milliseconds(seconds: float) -> int:
    """Rounded up: a wait that ends a moment early would spin."""
    return min(max(0, math.ceil(seconds * 1000)), (1 << 31) - 1)
