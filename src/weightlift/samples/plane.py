"""The sample plane: requests to engines and their replies, over ZeroMQ, between processes of one host.

    trainer                                         engine (one per name)
    SamplePlane (ROUTER, binds, private directory)  <-- EngineHello --       SampleEndpoint (DEALER, connects)
    submit(engine, ...) -> id                       -- request -->           receive(timeout_s)
    collect(id, timeout_s)                          <-- reply --             reply(frame)

What each side waits for, and who ends the wait: `wait_for_engines` waits for every named hello, `collect` for the one
reply; both end by the frame, by `watch()` (which raises when the engine's process is gone) or by their deadline.
`receive` waits for a request and returns None at its deadline, because an idle engine is no error. Nothing here blocks
without a deadline. Bounded: at most `max_in_flight` requests are unanswered at any time; one more is a
LocalProtocolError at the caller.

Owns: sockets, request ids, the bound. Must not know: models, tasks, what a sample is worth. Called by rl/engine.py and
rl/rollout.py; nobody else of `rl` knows that there is ZeroMQ. One thread per object.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Final, Literal

import zmq

from weightlift.config import check_int, check_seconds
from weightlift.errors import (
    ConfigError,
    LocalProtocolError,
    RemoteProtocolError,
    TransferTimeout,
    TransportUnavailable,
)
from weightlift.protocol.failure import revive
from weightlift.samples.messages import (
    MAX_FRAME_BYTES,
    EngineHello,
    FailureReply,
    FromEngine,
    FromTrainer,
    GenerateReply,
    GenerateRequest,
    MemoryReply,
    MemoryRequest,
    Prompt,
    SamplingParams,
    SaveReply,
    SaveRequest,
    ScoreReply,
    ScoreRequest,
    ShutdownRequest,
    SyncReply,
    SyncRequest,
    decode_from_engine,
    decode_from_trainer,
    encode,
)

__all__ = ["SampleEndpoint", "SamplePlane", "remove_address"]

_TICK_S: Final = 0.05
"""Seconds between two looks at `watch()` while waiting: the time to notice that a process is gone."""
_PREFIX: Final = "wl-samples-"
_SOCKET: Final = "s"
_LINGER_MS: Final = 200
"""Milliseconds that close() waits for frames already queued (the shutdown request) to leave."""


def _never() -> None:
    """The default `watch`: nobody to look after."""


class SamplePlane:
    """The trainer's end. A context manager; `close` removes the socket and its directory.

    Args:
        max_in_flight: unanswered requests at most, over all engines together.
        watch: called about twenty times a second during every wait; raises (PeerLost) when the other process is gone.
    """

    def __init__(self, *, max_in_flight: int = 2, watch: Callable[[], None] = _never) -> None:
        check_int("max_in_flight", max_in_flight, at_least=1)
        self._max_in_flight = max_in_flight
        self._watch = watch
        self._next_id = 1
        self._pending: dict[int, str] = {}
        self._replies: dict[int, FromEngine] = {}
        self._hellos: dict[str, EngineHello] = {}
        # mkdtemp makes the directory 0700 with an unguessable name: nobody else on the host can connect or listen in.
        self._directory = pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_short_tmp()))
        self.address: Final = f"ipc://{self._directory / _SOCKET}"
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, max_in_flight + 1)
        # A frame for an engine that is not connected is an error at the sender, not a frame that is dropped in silence.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.bind(self.address)
        except zmq.ZMQError as error:
            self.close()
            raise TransportUnavailable(f"the sample plane cannot listen on {self.address}: {error}") from error

    @property
    def in_flight(self) -> int:
        """Requests that were submitted and not yet collected."""
        return len(self._pending)

    def wait_for_engines(self, names: Sequence[str], *, timeout_s: float) -> list[EngineHello]:
        """Wait until every named engine said hello; TransferTimeout names those that did not."""
        missing = self._wait(lambda: not [name for name in names if name not in self._hellos], timeout_s)
        if missing:
            absent = ", ".join(name for name in names if name not in self._hellos)
            raise TransferTimeout(
                f"engine {absent} did not report for work within {timeout_s:g} s",
                peer=absent,
                remedy="read the engine's log, or allow more time for it to build its model.",
            )
        return [self._hellos[name] for name in names]

    def generate(self, engine: str, prompts: Sequence[Prompt], sampling: SamplingParams) -> int:
        """Ask for completions; returns the request's id for `collect`."""
        return self._submit(engine, GenerateRequest(id=self._next_id, prompts=list(prompts), sampling=sampling))

    def score(self, engine: str, sequences: Sequence[Sequence[int]]) -> int:
        """Ask for the log-probabilities of some sequences; returns the request's id for `collect`."""
        return self._submit(engine, ScoreRequest(id=self._next_id, sequences=[list(tokens) for tokens in sequences]))

    def sync(self, engine: str, *, version: int, timeout_s: float) -> int:
        """Tell the engine that `version` is about to be published; returns the request's id for `collect`."""
        check_seconds("timeout_s", timeout_s)
        return self._submit(engine, SyncRequest(id=self._next_id, version=version, timeout_s=timeout_s))

    def move_memory(self, engine: str, action: Literal["sleep", "wake_weights", "wake_kv_cache"], *, level: int = 0) -> int:
        """Ask for a MemoryRequest; returns the id to collect."""
        return self._submit(engine, MemoryRequest(id=self._next_id, action=action, level=level))

    def save(self, engine: str, path: str) -> int:
        """Ask the engine to write its tensors to a file; returns the request's id for `collect`."""
        return self._submit(engine, SaveRequest(id=self._next_id, path=path))

    def shutdown(self, engine: str) -> None:
        """Ask the engine to end. No reply comes, and an engine that is already gone is fine."""
        if engine in self._hellos:
            try:
                self._socket.send_multipart([engine.encode(), encode(ShutdownRequest(id=self._next_id))], zmq.DONTWAIT)
            except zmq.ZMQError:
                return

    def collect(self, id: int, *, timeout_s: float) -> GenerateReply | ScoreReply | SyncReply | SaveReply | MemoryReply:
        """Wait for the reply to a request.

        Raises:
            the engine's own error, of the same class, where the request failed there; the request is then answered.
            TransferTimeout: no reply in time; names the engine. The request stays unanswered: it still counts as in
            flight. LocalProtocolError: the id was never submitted, or was collected before.
        """
        engine = self._pending.get(id)
        if engine is None:
            raise LocalProtocolError(f"request {id} is not in flight; in flight are {sorted(self._pending) or 'none'}")
        if self._wait(lambda: id in self._replies, timeout_s):
            raise TransferTimeout(
                f"engine {engine} did not answer request {id} within {timeout_s:g} s",
                peer=engine,
                remedy="read the engine's log, or raise the timeout of this kind of request.",
            )
        del self._pending[id]
        reply = self._replies.pop(id)
        if isinstance(reply, FailureReply):
            raise revive(reply.error, version=reply.version, round=0, peer=engine)
        assert not isinstance(reply, EngineHello)  # a hello is filed by name, never by id
        return reply

    def close(self) -> None:
        """Close the socket and remove its directory. Safe to call again."""
        self._socket.close()
        self._context.term()
        remove_address(self.address)

    def __enter__(self) -> SamplePlane:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _submit(self, engine: str, frame: GenerateRequest | ScoreRequest | SyncRequest | SaveRequest | MemoryRequest) -> int:
        if engine not in self._hellos:
            raise LocalProtocolError(f"engine {engine} did not say hello; known are {sorted(self._hellos) or 'none'}", peer=engine)
        if len(self._pending) >= self._max_in_flight:
            raise LocalProtocolError(
                f"{len(self._pending)} requests are in flight, and max_in_flight is {self._max_in_flight}",
                peer=engine,
                remedy="collect() a reply before the next request.",
            )
        try:
            self._socket.send_multipart([engine.encode(), encode(frame)], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            self._watch()
            raise TransportUnavailable(f"engine {engine} cannot be reached: {error}", peer=engine) from error
        self._pending[frame.id] = engine
        self._next_id += 1
        return frame.id

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Read frames until done() or the deadline; True if the deadline came first."""
        check_seconds("timeout_s", timeout_s)
        deadline = time.monotonic() + timeout_s
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                return True
            if self._socket.poll(round(1000 * min(left, _TICK_S)) + 1):
                self._file(*self._socket.recv_multipart())
            else:
                # Only when nothing is left to read: a last reply of a process that ended since then is still taken.
                self._watch()
        return False

    def _file(self, name: bytes, *body: bytes) -> None:
        engine = name.decode(errors="replace")
        if len(body) != 1:
            raise RemoteProtocolError(f"a sample-plane message must be one frame, got {len(body)}", peer=engine)
        frame = decode_from_engine(body[0])
        if isinstance(frame, EngineHello):
            if engine in self._hellos or frame.name != engine:
                raise RemoteProtocolError(f"engine {engine} said hello as {frame.name}, or twice", peer=engine)
            self._hellos[engine] = frame
        elif self._pending.get(frame.id) != engine or frame.id in self._replies:
            raise RemoteProtocolError(f"engine {engine} answered request {frame.id}, which it was not asked", peer=engine)
        else:
            self._replies[frame.id] = frame


class SampleEndpoint:
    """The engine's end. A context manager.

    Args:
        address: `SamplePlane.address`. name: of this engine, unique on the plane.
    """

    def __init__(self, *, address: str, name: str) -> None:
        if not name:
            raise ConfigError("name must be a non-empty string, got ''")
        self._name = name
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.ROUTING_ID, name.encode())
        self._socket.connect(address)

    def hello(self) -> None:
        """Report for work: the model is built."""
        self.reply(EngineHello(id=0, name=self._name, pid=os.getpid()))

    def receive(self, *, timeout_s: float) -> FromTrainer | None:
        """The next request, or None when none came within the time; RemoteProtocolError for what is not a request."""
        check_seconds("timeout_s", timeout_s)
        if not self._socket.poll(round(1000 * timeout_s) + 1):
            return None
        frames = self._socket.recv_multipart()
        if len(frames) != 1:
            raise RemoteProtocolError(f"a sample-plane message must be one frame, got {len(frames)}", peer="trainer")
        return decode_from_trainer(frames[0])

    def reply(self, frame: FromEngine, *, timeout_s: float = 10.0) -> None:
        """Send a reply; TransferTimeout when the trainer takes nothing for that long."""
        if not self._socket.poll(round(1000 * timeout_s), zmq.POLLOUT):
            raise TransferTimeout(f"the trainer took no frame of engine {self._name} for {timeout_s:g} s", peer="trainer")
        self._socket.send(encode(frame), zmq.DONTWAIT)

    def close(self) -> None:
        """Close the socket. Safe to call again."""
        self._socket.close()
        self._context.term()

    def __enter__(self) -> SampleEndpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def remove_address(address: str) -> None:
    """Remove the directory of a plane's address. For the trainer's close, and for an engine whose trainer was
    killed."""
    directory = pathlib.Path(address.removeprefix("ipc://")).parent
    if directory.name.startswith(_PREFIX):
        shutil.rmtree(directory, ignore_errors=True)


def _short_tmp() -> str:
    """A directory whose socket paths fit into the 107 bytes that a Unix socket address may have."""
    default = tempfile.gettempdir()
    return default if len(default) + len(_PREFIX) + 12 < 100 else "/tmp"
