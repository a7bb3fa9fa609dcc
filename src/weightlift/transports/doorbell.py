"""Doorbells of the data plane on one host: small typed frames over unix sockets, next to the bytes they speak of.

Owns: listening, connecting, framing, passing of file descriptors, noticing that the other process is gone. Must not know: which
transport uses it, what a bucket is.

Why not the control channel: a bucket costs one frame each way, and a ZeroMQ frame passes through two I/O threads. A SOCK_SEQPACKET
socket wakes the other process directly, reports its end at once, and can carry the descriptor of a segment that has no name.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import select
import socket
import struct
import time
from typing import Final, Generic, TypeVar

import msgspec

from weightlift.errors import PeerLost, RemoteProtocolError, TransferTimeout, TransportUnavailable
from weightlift.liveness import host_identity, open_pidfd
from weightlift.transports.endpoint import discard

__all__ = ["Doorbell", "Listener"]

_MAX_FRAME: Final = 4096
_LONGEST_POLL_MS: Final = (1 << 31) - 1
_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()


class Doorbell(Generic[_T]):
    """One connection. `peer` is the name used in errors; `kinds` decodes what the other side may send.

    Sends never block: at most one frame per slot is under way, far below the socket's buffer.
    """

    def __init__(self, connection: socket.socket, decoder: msgspec.msgpack.Decoder[_T], *, peer: str) -> None:
        self.peer = peer
        self._socket = connection
        self._owner = os.getpid()
        self._socket.setblocking(False)
        self._decoder = decoder
        self._pidfd: int | None = None
        pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            self.close()
            raise RemoteProtocolError(f"a process of user {uid} connected to the data plane of user {os.geteuid()}")
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = open_pidfd(pid, host_identity())

    @classmethod
    def connect(cls, path: str, decoder: msgspec.msgpack.Decoder[_T], *, peer: str) -> Doorbell[_T]:
        """Connect to a listener on this host; PeerLost if its process is gone, TransportUnavailable otherwise."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)  # a full backlog is EAGAIN, not a wait without an end
        try:
            connection.connect(path)
        except ConnectionRefusedError as error:
            connection.close()
            raise PeerLost(f"{peer} is gone: nobody listens at its data plane {path}", peer=peer) from error
        except OSError as error:
            connection.close()
            raise TransportUnavailable(f"cannot reach the data plane of {peer} at {path}: {error}") from error
        return cls(connection, decoder, peer=peer)

    def fileno(self) -> int:
        """For poll."""
        return self._socket.fileno()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What to poll: the socket, and the other process's pidfd where there is one."""
        return (self._socket.fileno(),) if self._pidfd is None else (self._socket.fileno(), self._pidfd)

    def send(self, frame: msgspec.Struct, *, descriptor: int | None = None) -> None:
        """Send one frame, with an open file if given; PeerLost if the other end is closed."""
        data = _encoder.encode(frame)
        try:
            if descriptor is None:
                self._socket.send(data)
            else:
                socket.send_fds(self._socket, [data], [descriptor])
        except BlockingIOError as error:
            raise TransferTimeout(f"{self.peer} does not read its data plane", peer=self.peer) from error
        except OSError as error:
            raise PeerLost(f"{self.peer} closed its end of the data plane: {error}", peer=self.peer) from error

    def receive(self, timeout_s: float, *, waiting_for: str) -> _T:
        """The next frame; PeerLost when the other end is closed, TransferTimeout after `timeout_s`."""
        frame, descriptor = self.receive_with_descriptor(timeout_s, waiting_for=waiting_for)
        if descriptor is not None:
            os.close(descriptor)  # nobody asked for an open file here
        return frame

    def receive_with_descriptor(self, timeout_s: float, *, waiting_for: str) -> tuple[_T, int | None]:
        """Like `receive`, with the open file that came along."""
        deadline = time.monotonic() + timeout_s
        while True:
            if (arrived := self.try_receive()) is not None:
                return arrived
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TransferTimeout(f"{self.peer} did not send {waiting_for} within {timeout_s} s", peer=self.peer)
            wait_readable(self.descriptors, left_s)

    def try_receive(self) -> tuple[_T, int | None] | None:
        """The next frame if one is there, else None; PeerLost when the other end is closed or its process has ended."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _MAX_FRAME, 1)
        except BlockingIOError:
            if self._pidfd is not None and wait_readable((self._pidfd,), 0):
                raise PeerLost(f"the process of {self.peer} has ended", peer=self.peer) from None
            return None
        except OSError as error:
            raise PeerLost(f"{self.peer} closed its end of the data plane: {error}", peer=self.peer) from error
        if not data:
            raise PeerLost(f"{self.peer} closed its end of the data plane", peer=self.peer)
        try:
            return self._decoder.decode(data), descriptors[0] if descriptors else None
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            for descriptor in descriptors:
                os.close(descriptor)
            raise RemoteProtocolError(f"{self.peer} sent a data frame that could not be read: {error}") from error

    def open(self) -> bool:
        """Whether the other end is still there, between rounds, when nothing is under way."""
        return not wait_readable(self.descriptors, 0)

    def close(self) -> None:
        """Close this end. Idempotent."""
        # A child that this process forked may hold the socket open; when the child itself closes, it ends nothing.
        if os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


class Listener(Generic[_T]):
    """Accepts doorbells at a path inside the run directory."""

    def __init__(self, path: pathlib.Path, decoder: msgspec.msgpack.Decoder[_T]) -> None:
        self.path = path
        self._decoder = decoder
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            discard(path)
            self._socket.bind(os.fspath(path))
            self._socket.listen(1024)
        except OSError as error:
            self._socket.close()
            raise TransportUnavailable(f"cannot listen for the data plane at {path}: {error}") from error
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """For poll."""
        return self._socket.fileno()

    def accept(self) -> Doorbell[_T] | None:
        """A new connection if one is waiting, else None."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return None
            except OSError as error:
                raise TransportUnavailable(f"a connection to the data plane could not be taken: {error}") from error
            with contextlib.suppress(RemoteProtocolError):  # another user's process is turned away; the round is not its business
                return Doorbell(connection, self._decoder, peer="a process that has not said its name")

    def close(self) -> None:
        """Stop listening and remove the socket file. Idempotent."""
        self._socket.close()
        discard(self.path)


def wait_readable(descriptors: tuple[int, ...], timeout_s: float) -> list[int]:
    """Those of the descriptors that can be read, after at most `timeout_s`."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(min(max(0.0, timeout_s) * 1000, _LONGEST_POLL_MS))]
