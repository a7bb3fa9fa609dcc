"""CURVE, tokens, replayed frames, and two jobs on one host that must not hear each other."""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable

import pytest
import torch
import zmq

from weightlift import ConfigError, CurveKeys, Deadlines, Publisher, Subscriber, TransferTimeout, new_address
from weightlift.errors import RemoteProtocolError
from weightlift.loaders import MappingLoader
from weightlift.observe.events import Event, FrameRefused, PeerRejected
from weightlift.protocol import codec
from weightlift.protocol.messages import Committed, Frame, Ready, Released
from weightlift.sources import MappingSource
from weightlift.testing.pair import pair
from weightlift.testing.toy import tagged

pytestmark = pytest.mark.usefixtures("nothing_left")


def until(condition: Callable[[], bool], publisher: Publisher, *, limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        _ = publisher.peers
        time.sleep(0.01)
    assert condition()


FAILED = "the security handshake failed"

# --- CURVE ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:{port}", "tcp://[::1]:{port}", "ipc"])
def test_a_whole_sync_over_curve(address: str, free_port: int) -> None:
    keys = CurveKeys.generate()
    where = new_address() if address == "ipc" else address.format(port=free_port)
    sent, held = tagged(1), tagged(-1)
    how = {"transport": "shm" if address == "ipc" else "memory", "curve": keys, "subscriber": {"curve": keys.public}}
    with pair(MappingSource(sent), MappingLoader(held), address=where, **how) as ends:  # type: ignore[arg-type]
        ends.sync(1).raise_any()
        ends.sync(2).raise_any()
    assert all(torch.equal(sent[name], held[name]) for name in sent)


@pytest.mark.parametrize(
    ("server", "client", "text"),
    [
        (True, None, "one side uses CURVE and the other does not"),
        (False, "another", "one side uses CURVE and the other does not"),
        (True, "another", "the peer was given another publisher's public key"),
    ],
)
def test_a_peer_without_the_right_key_is_refused_on_both_sides(server: bool, client: str | None, text: str) -> None:
    keys, other = CurveKeys.generate(), CurveKeys.generate()
    seen: list[Event] = []
    address = new_address()
    with Publisher(MappingSource(tagged(1)), address, curve=keys if server else None, sink=seen.append) as publisher:
        right = {"curve": keys.public} if server else {}
        wrong = {} if client is None else {"curve": other.public}
        with (
            Subscriber(MappingLoader(tagged(-1)), address, "good", **right) as good,
            Subscriber(MappingLoader(tagged(-1)), address, "bad", **wrong) as bad,
        ):
            publisher.wait_for_peers(1, timeout_s=20)
            if server and client:  # otherwise the client may find it out first, and close before the publisher could look
                until(lambda: any(isinstance(e, FrameRefused) and FAILED in e.reason for e in seen), publisher)
            # Who is refused for its key learns only that the connection was closed: libzmq tells it nothing.
            with pytest.raises(
                (RemoteProtocolError, TransferTimeout), match=r"in its handshake|security handshake failed"
            ) as refused:
                bad.pull(timeout_s=3)
            # Whichever side finds it out first closes the connection: the other one only knows that it was closed.
            logged = [event.reason for event in seen if isinstance(event, FrameRefused)]
            assert any(text in words for words in [*logged, refused.value.message])
            thread = threading.Thread(target=good.pull, args=(20,))
            thread.start()
            assert publisher.publish(1).replicas == {"good": 1}, "the round goes on for the others"
            thread.join(20)
            assert (good.version, bad.version) == (1, None)


def test_frames_are_not_readable_on_the_way(free_port: int) -> None:
    """A relay between the two records every byte: neither the token nor a name is in it."""
    keys, token = CurveKeys.generate(), "a-secret-token"
    recorded, ended = bytearray(), threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def relay() -> None:
        front, _ = listener.accept()
        with front, socket.create_connection(("127.0.0.1", free_port)) as back, contextlib.suppress(OSError):
            ends = {front: back, back: front}
            while not ended.is_set():
                for one in select.select(list(ends), [], [], 0.05)[0]:
                    data = one.recv(65536)
                    if not data:
                        return
                    recorded.extend(data)
                    ends[one].sendall(data)

    thread = threading.Thread(target=relay)
    thread.start()
    try:
        with (
            Publisher(MappingSource(tagged(1)), f"tcp://127.0.0.1:{free_port}", token=token, curve=keys) as publisher,
            Subscriber(
                MappingLoader(tagged(-1)),
                f"tcp://127.0.0.1:{listener.getsockname()[1]}",
                "engine-with-a-name",
                token=token,
                curve=keys.public,
            ) as _,
        ):
            # Through the relay the two see different ports, and the port is the run's id: the Hello is answered with a refusal.
            until(lambda: len(recorded) > 500, publisher)
    finally:
        ended.set()
        thread.join()
        listener.close()
    assert b"CURVE" in recorded
    for secret in (token, "engine-with-a-name", "run_id"):
        assert secret.encode() not in recorded


@pytest.mark.parametrize("key", ["", "short", "x" * 41, "\x00" * 40, "é" * 40, 5, CurveKeys.generate()], ids=str)
def test_a_wrong_key_is_a_config_error_that_does_not_show_it(key: object) -> None:
    with pytest.raises(ConfigError, match="must be a key of 40 characters in Z85") as refused:
        Subscriber(MappingLoader(tagged(-1)), new_address(), "engine", curve=key)  # type: ignore[arg-type]
    assert not isinstance(key, str) or not key or key not in str(refused.value)


def test_keys_of_two_pairs_are_refused_and_the_secret_is_not_printed() -> None:
    one, other = CurveKeys.generate(), CurveKeys.generate()
    with pytest.raises(ConfigError, match="two pairs"):
        CurveKeys(public=one.public, secret=other.secret)
    assert one.secret not in repr(one)
    assert one.public in repr(one)


# --- tokens ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("server", "client"), [("right", "wrong"), ("right", ""), ("", "right")])
def test_a_wrong_token_is_refused_on_both_sides(server: str, client: str, free_port: int) -> None:
    seen: list[Event] = []
    address = f"tcp://127.0.0.1:{free_port}"
    with (
        Publisher(MappingSource(tagged(1)), address, token=server, transport="memory", sink=seen.append) as publisher,
        Subscriber(MappingLoader(tagged(-1)), address, "bad", token=client) as bad,
        Subscriber(MappingLoader(tagged(-1)), address, "good", token=server) as good,
    ):
        publisher.wait_for_peers(1, timeout_s=20)
        until(lambda: any(isinstance(event, PeerRejected) for event in seen), publisher)
        with pytest.raises(RemoteProtocolError, match="did not show the token"):
            bad.pull(timeout_s=10)
        thread = threading.Thread(target=good.pull, args=(20,))
        thread.start()
        assert publisher.publish(1).replicas == {"good": 1}
        thread.join(20)


# --- replayed frames ------------------------------------------------------------------------------------------------------------


def test_frames_of_an_earlier_round_are_refused_and_logged_and_change_nothing() -> None:
    seen: list[Event] = []
    sent, held, other = tagged(1), tagged(-1), tagged(-1)
    loaders = {"engine": MappingLoader(held), "other": MappingLoader(other)}
    with pair(MappingSource(sent), loaders, sink=seen.append) as ends:
        mailbox = ends.subscribers[0]._mailbox
        recorded: list[Frame] = []
        send = mailbox.send

        def record(frame: Frame) -> None:
            recorded.append(frame)
            send(frame)

        mailbox.send = record  # type: ignore[method-assign]
        ends.sync(1).raise_any()
        first = list(recorded)
        assert {type(frame) for frame in first} >= {Ready, Released, Committed}

        def replay(frame: Frame) -> None:
            for old in first:
                send(old)
            send(frame)

        mailbox.send = replay  # type: ignore[method-assign]
        for tensor in sent.values():
            tensor.fill_(2.0)
        report = ends.sync(2).raise_any().report
        assert report is not None
        assert report.replicas == {"engine": 2, "other": 2}
        assert {float(t.min()) for mine in (held, other) for t in mine.values()} == {2.0}
        reasons = [event.reason for event in seen if isinstance(event, FrameRefused)]
        assert any("Committed of round 1, version 1: that round is over" in reason for reason in reasons)


def test_a_frame_that_comes_twice_in_its_round_puts_out_its_sender_alone() -> None:
    held, other = tagged(-1), tagged(-1)
    with pair(MappingSource(tagged(1)), {"engine": MappingLoader(held), "other": MappingLoader(other)}, min_replicas=1) as ends:
        send = ends.subscribers[0]._mailbox.send

        def twice(frame: Frame) -> None:
            send(frame)
            if isinstance(frame, Released):
                send(frame)

        ends.subscribers[0]._mailbox.send = twice  # type: ignore[method-assign]
        outcome = ends.sync(1).report
        assert outcome is not None
        assert outcome.replicas["other"] == 1
        assert "Released is not possible in stage COMMIT" in outcome.fenced["engine"]
        ends.subscribers[0]._mailbox.send = send  # type: ignore[method-assign]
        assert ends.sync(2).raise_any().report is not None


def test_recorded_frames_from_another_connection_are_refused(free_port: int) -> None:
    """Somebody who recorded a round without CURVE and says it again, word by word, from a connection of his own."""
    seen: list[Event] = []
    address = f"tcp://127.0.0.1:{free_port}"
    loader = MappingLoader(tagged(-1))
    with pair(MappingSource(tagged(1)), loader, address=address, transport="memory", sink=seen.append) as ends:
        recorded: list[Frame] = []
        send = ends.subscribers[0]._mailbox.send

        def record(frame: Frame) -> None:
            recorded.append(frame)
            send(frame)

        ends.subscribers[0]._mailbox.send = record  # type: ignore[method-assign]
        ends.sync(1).raise_any()
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.linger = 0
        stranger.connect(address)
        try:
            for frame in recorded:
                stranger.send(codec.encode(frame))
            until(lambda: sum(isinstance(event, FrameRefused) for event in seen) >= len(recorded), ends.publisher)
            ends.sync(2).raise_any()
            assert ends.publisher.peers == ["engine"]
        finally:
            stranger.close()
            context.term()


# --- two jobs on one host -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_two_jobs_with_the_same_names_and_ranks_do_not_hear_each_other(transport: str) -> None:
    sent = [tagged(1, shape=(40, 40)), tagged(2, shape=(40, 40))]
    held = [{f"engine-{rank}": tagged(-1, shape=(40, 40)) for rank in range(2)} for _ in range(2)]
    errors: list[BaseException] = []

    def job(number: int) -> None:
        loaders = {name: MappingLoader(tensors) for name, tensors in held[number].items()}
        try:
            with pair(MappingSource(sent[number]), loaders, transport=transport, slot_bytes=1024) as ends:
                for version in range(20):
                    report = ends.sync(version).raise_any().report
                    assert report is not None
                    assert report.replicas == dict.fromkeys(held[number], version)
                    every = [tensor for mine in held[number].values() for tensor in mine.values()]
                    assert all(bool((tensor == number + 1).all()) for tensor in every)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=job, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert errors == []


def test_a_subscriber_of_another_job_gets_nothing_even_at_the_same_port(free_port: int) -> None:
    """A job that ended left its engine running; another job binds the port that it had."""
    address = f"tcp://127.0.0.1:{free_port}"
    seen: list[Event] = []
    short = Deadlines(announce_s=5, prepare_s=5, transfer_s=5, release_s=5, commit_s=5, cause_s=1)
    with Subscriber(MappingLoader(tagged(-1)), address, "engine-0", token="job one") as stale:
        with (
            Publisher(
                MappingSource(tagged(7)), address, token="job two", deadlines=short, transport="memory", sink=seen.append
            ) as publisher,
            Subscriber(MappingLoader(tagged(-1)), address, "engine-0", token="job two") as own,
        ):
            publisher.wait_for_peers(1, timeout_s=20)
            until(lambda: any(isinstance(event, PeerRejected) for event in seen), publisher)
            with pytest.raises(RemoteProtocolError, match="token of this run"):
                stale.pull(timeout_s=10)
            thread = threading.Thread(target=own.pull, args=(20,))
            thread.start()
            assert publisher.publish(3).replicas == {"engine-0": 3}
            thread.join(20)
            assert (own.version, stale.version) == (3, None)
        with pytest.raises((TransferTimeout, RemoteProtocolError)):
            stale.pull(timeout_s=0.5)
