"""Clients that speak garbage, another protocol, too much, or out of turn: refused and logged, the round goes on for the others."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch
import zmq

from weightlift import new_address
from weightlift.loaders import MappingLoader
from weightlift.observe.events import Event, FrameRefused, PeerRejected
from weightlift.protocol import codec
from weightlift.protocol.messages import Committed, Hello, Ready, Rejected
from weightlift.sources import MappingSource
from weightlift.testing.pair import Pair, pair
from weightlift.transports.endpoint import parse_address

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def ends(seen: list[Event], address: str) -> Iterator[Pair]:
    held = {f"w{i}": torch.zeros(64) for i in range(4)}
    sent = {name: torch.ones(64) for name in held}
    with pair(MappingSource(sent), MappingLoader(held), address=address, slot_bytes=256, sink=seen.append) as both:
        yield both


@pytest.fixture
def seen() -> list[Event]:
    return []


@pytest.fixture
def address() -> str:
    return new_address()


@pytest.fixture
def client(address: str, ends: Pair) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(parse_address(address).zmq)
    yield socket
    socket.close()
    context.term()


def hello(address: str, **changes: object) -> Hello:
    fields = {
        "round": 0,
        "version": -1,
        "protocol": 1,
        "run_id": parse_address(address).run_id,
        "token": "",
        "peer": "stranger",
        "incarnation": "x",
        "replica": "stranger",
        "rank": 0,
        "size": 1,
        "pid": 1,
        "host": "elsewhere",
        "serves": -1,
        "torn": False,
        "transports": (),
    }
    return Hello(**{**fields, **changes})  # type: ignore[arg-type]


def wait_for(condition: Callable[[], bool], ends: Pair) -> None:
    deadline = time.monotonic() + 20.0
    while not condition() and time.monotonic() < deadline:
        assert ends.publisher.peers
        time.sleep(0.01)
    assert condition()


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\x00" * 100],
        [b"GET / HTTP/1.1\r\n\r\n"],
        [msgspec.msgpack.encode({"kind": "Ready"})],
        [msgspec.msgpack.encode({"kind": "NoSuchFrame", "round": 1, "version": 1})],
        [msgspec.json.encode({"kind": "Ready", "round": 1, "version": 1})],
        [b"two", b"parts"],
    ],
    ids=["empty", "zeros", "http", "no round", "unknown kind", "json", "two parts"],
)
def test_garbage_is_refused_and_the_round_goes_on(
    client: zmq.Socket[bytes], ends: Pair, seen: list[Event], frames: list[bytes]
) -> None:
    client.send_multipart(frames)
    wait_for(lambda: any(isinstance(event, FrameRefused) for event in seen), ends)
    assert ends.sync(1).raise_any().report is not None
    assert ends.publisher.peers == ["engine"]


def test_an_oversized_frame_closes_its_connection_and_no_other(client: zmq.Socket[bytes], ends: Pair, seen: list[Event]) -> None:
    client.send(b"\x00" * (codec.MAX_FRAME_FROM_SUBSCRIBER + 1))
    wait_for(lambda: any(isinstance(event, FrameRefused) and "over the limit of" in event.reason for event in seen), ends)
    assert ends.sync(1).raise_any().report is not None
    assert ends.publisher.peers == ["engine"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"protocol": 99}, "speaks protocol 99"),
        ({"run_id": "another"}, "belongs to run another"),
        ({"token": "guess"}, "did not show the token"),
        ({"rank": 3}, "rank 3 of 1"),
        ({"peer": ""}, "replica"),
    ],
)
def test_a_wrong_hello_is_answered_with_the_reason(
    client: zmq.Socket[bytes], ends: Pair, seen: list[Event], address: str, changes: dict[str, object], text: str
) -> None:
    client.send(codec.encode(hello(address, **changes)))
    wait_for(lambda: any(isinstance(event, PeerRejected) for event in seen), ends)
    assert client.poll(5000)
    answer = codec.decode_from_publisher(client.recv())
    assert isinstance(answer, Rejected)
    assert text in answer.error.message
    assert ends.sync(1).raise_any().report is not None


def test_a_frame_without_a_handshake_is_refused_in_the_middle_of_a_round(
    client: zmq.Socket[bytes], ends: Pair, seen: list[Event]
) -> None:
    stop = threading.Event()

    def shout() -> None:
        while not stop.wait(0.001):
            client.send(codec.encode(Ready(round=1, version=1)))
            client.send(codec.encode(Committed(round=1, version=1, commit_s=0.0)))

    thread = threading.Thread(target=shout)
    thread.start()
    try:
        for version in range(1, 6):
            report = ends.sync(version).raise_any().report
            assert report is not None
            assert report.replicas == {"engine": version}
    finally:
        stop.set()
        thread.join()
    assert any(isinstance(event, FrameRefused) for event in seen)


FLOOD = """
import socket, sys, zmq
import torch
from weightlift import Publisher, Subscriber, new_address
from weightlift.loaders import MappingLoader
from weightlift.sources import MappingSource
from weightlift.transports.endpoint import parse_address

address = new_address()
path = parse_address(address).zmq.removeprefix("ipc://")
with Publisher(MappingSource({"w": torch.ones(4)}), address) as publisher:
    for knock in range(3000):  # the trainer trains: nobody polls
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(path)
            stranger.sendall(b"GET / HTTP/1.1" * 5 if knock % 2 else bytes(10))
    with Subscriber(MappingLoader({"w": torch.zeros(4)}), address, "engine") as engine:
        publisher.wait_for_peers(1, timeout_s=30)
        import threading
        pulling = threading.Thread(target=engine.pull, args=(30,))
        pulling.start()
        print(publisher.publish(1).replicas)
        pulling.join()
"""


def test_three_thousand_strangers_while_nobody_polls_do_not_stop_the_publisher() -> None:
    """In a process of its own: what this guards against holds the interpreter lock for ever."""
    done = subprocess.run([sys.executable, "-c", FLOOD], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "{'engine': 1}\n"), done.stderr


UNREAD = """
import socket, time, zmq
import torch
from weightlift import Publisher
from weightlift.sources import MappingSource

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
with Publisher(MappingSource({"w": torch.ones(4)}), f"tcp://127.0.0.1:{port}", token="secret") as publisher:
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"tcp://127.0.0.1:{port}")
    for _ in range(2000):
        try:
            stranger.send(b"x" * 100, zmq.NOBLOCK)
        except zmq.Again:
            break
    time.sleep(1.0)
    stranger.close(linger=0)
    context.term()
    time.sleep(6.0)  # the trainer trains: nobody polls
    print(publisher.peers)
"""


def test_a_stranger_who_fills_the_queue_and_leaves_does_not_abort_the_process() -> None:
    """libzmq asserts when a heartbeat falls due on a connection whose queue is full and whose other end is gone."""
    done = subprocess.run([sys.executable, "-c", UNREAD], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr[-500:]
