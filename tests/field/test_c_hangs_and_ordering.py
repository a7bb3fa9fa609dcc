"""Field reports, group C and what of D and E can be seen without a device: hangs, hidden errors, order of release. Numbers are those of
docs/field-coverage.md."""

import gc
import threading
import time
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightlift import Deadlines, LoaderError, PeerLost, Publisher, State, TransferTimeout, WeightliftError, new_address
from weightlift.loaders import MappingLoader
from weightlift.protocol.messages import Frame, Released
from weightlift.sources import MappingSource
from weightlift.testing.faults import Fault, FaultyLoader, fail_at, raising, sleeping
from weightlift.testing.pair import Outcome, Pair, pair
from weightlift.testing.toy import ToyEngine, tagged
from weightlift.transports.shm import ShmReceiver

pytestmark = pytest.mark.usefixtures("nothing_left")

TRANSPORTS = pytest.mark.parametrize("transport", ["memory", "shm"])
SHORT = Deadlines(announce_s=2, prepare_s=2, transfer_s=2, release_s=2, commit_s=2, cause_s=1)
NAMES = tuple(f"w{i}" for i in range(8))
BOUND_S = 20.0
"""Far above what a deadline of 2 s needs, far below a hang."""


def struck(transport: str, *faults: Fault) -> tuple[Outcome, float]:
    """One sync with these faults, how long it took, and a good one on the same objects afterwards."""
    loader = FaultyLoader(MappingLoader(tagged(-1, NAMES)), list(faults))
    with pair(MappingSource(tagged(1, NAMES)), loader, transport=transport, slot_bytes=64, deadlines=SHORT) as ends:
        start = time.monotonic()
        outcome = ends.sync(1)
        took_s = time.monotonic() - start
        ends.sync(1 if outcome.error is not None else 2).raise_any()
    return outcome, took_s


def test_b24a_no_receiver() -> None:
    with Publisher(MappingSource(tagged(1)), new_address(), deadlines=SHORT) as publisher:
        with pytest.raises(TransferTimeout, match=r"0 of 1 subscribers connected within 0\.2 s"):
            publisher.wait_for_peers(1, timeout_s=0.2)
        with pytest.raises(PeerLost, match="no subscriber is connected"):
            publisher.publish(1)


@TRANSPORTS
def test_b24a_a_receiver_that_never_pulls(transport: str) -> None:
    with pair(MappingSource(tagged(1)), MappingLoader(tagged(-1)), transport=transport, deadlines=SHORT) as ends:
        start = time.monotonic()
        error = ends.sync(1, pulling=[]).error
        assert time.monotonic() - start < BOUND_S
        assert isinstance(error, TransferTimeout)
        assert (error.phase, error.peer) == ("ANNOUNCE", "engine")
        ends.sync(1).raise_any()


@TRANSPORTS
@pytest.mark.parametrize("bucket", [0, 2, 7])
def test_b24b_receiver_raises_in_a_bucket(transport: str, bucket: int) -> None:
    outcome, took_s = struck(transport, fail_at("install", raising(ValueError("boom")), bucket=bucket))
    assert took_s < BOUND_S
    assert isinstance(outcome.error, LoaderError)
    assert (outcome.error.bucket, outcome.error.tensor) == (bucket, f"w{bucket}")


@TRANSPORTS
@pytest.mark.parametrize("at", ["finish", "commit", "abort"])
def test_b24c_receiver_raises_in_its_clean_up(transport: str, at: str) -> None:
    faults = [fail_at(at, raising(ValueError("boom")))]
    if at == "abort":
        faults.append(fail_at("install", raising(KeyError("first")), bucket=1))
    outcome, took_s = struck(transport, *faults)
    assert took_s < BOUND_S
    assert isinstance(outcome.error, LoaderError)


@TRANSPORTS
@pytest.mark.parametrize(("at", "bucket"), [("prepare", None), ("install", 0), ("install", 5), ("finish", None), ("commit", None)])
def test_b24d_receiver_sleeps(transport: str, at: str, bucket: int | None) -> None:
    outcome, took_s = struck(transport, fail_at(at, sleeping(4.5), bucket=bucket))
    assert took_s < BOUND_S
    assert isinstance(outcome.error, TransferTimeout)
    assert outcome.error.peer == "engine"
    assert outcome.error.bucket == bucket


@settings(max_examples=15, deadline=None)
@given(
    at=st.sampled_from(["prepare", "install", "finish", "commit"]),
    bucket=st.integers(0, 7),
    error=st.sampled_from([ValueError, KeyError, RuntimeError, MemoryError, AssertionError, OSError, torch.OutOfMemoryError]),
)
def test_b24_and_b25_whatever_is_raised_wherever(at: str, bucket: int, error: type[Exception]) -> None:
    """The kind: any exception, in any call, is told to the sender with its text, in bounded time, and the next sync works."""
    outcome, took_s = struck("memory", fail_at(at, raising(error("bad shape for w7")), bucket=bucket if at == "install" else None))
    assert took_s < BOUND_S
    assert isinstance(outcome.error, LoaderError)
    assert "bad shape for w7" in str(outcome.error)
    assert error.__name__ in str(outcome.error)


@TRANSPORTS
def test_b25_the_receivers_error_reaches_the_trainer_with_type_text_and_tensor(transport: str) -> None:
    outcome, _ = struck(transport, fail_at("install", raising(ValueError("bad shape for w7")), bucket=2))
    assert "ValueError" in str(outcome.error)
    assert "bad shape for w7" in str(outcome.error)
    assert isinstance(outcome.error, LoaderError)
    assert outcome.error.__cause__ is not None
    assert "Traceback" in str(outcome.error.__cause__), "the other process's traceback comes along"


def test_b25_in_a_thread_of_the_caller_the_wait_raises() -> None:
    """What asyncio.to_thread does: the error is the future's, not a line in a log."""
    import asyncio

    loader = FaultyLoader(MappingLoader(tagged(-1)), [fail_at("install", raising(ValueError("bad shape for w7")))])

    async def train(ends: Pair) -> None:
        await asyncio.to_thread(ends.publisher.publish, 1)

    with pair(MappingSource(tagged(1)), loader, deadlines=SHORT) as ends:
        engine = threading.Thread(target=_pull_and_ignore, args=(ends,))
        engine.start()
        with pytest.raises(LoaderError, match="bad shape for w7"):
            asyncio.run(train(ends))
        engine.join(20)
        ends.sync(1).raise_any()


def _pull_and_ignore(ends: Pair) -> None:
    with pytest.raises(WeightliftError):
        ends.subscribers[0].pull(10)


def test_b27_a_skipped_version_deadlocks_nobody() -> None:
    sent, held = tagged(1), tagged(-1)
    with pair(MappingSource(sent), MappingLoader(held), deadlines=SHORT) as ends:
        ends.sync(1).raise_any()
        # The consumer is busy during version 2: the trainer is told in bounded time, and goes on.
        assert isinstance(ends.sync(2, pulling=[]).error, TransferTimeout)
        for tensor in sent.values():
            tensor.fill_(3.0)
        ends.sync(3).raise_any()
        assert ends.subscribers[0].version == 3
        assert {float(t.min()) for t in held.values()} == {3.0}


@TRANSPORTS
def test_b31_the_last_word_comes_after_the_release(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Order of events: finish, release, then Released; and a failed round drops its mapping without any collection."""
    order: list[str] = []
    loader = FaultyLoader(MappingLoader(tagged(-1)))
    with pair(MappingSource(tagged(1)), loader, transport=transport) as ends:
        (engine,) = ends.subscribers
        send, finish = engine._mailbox.send, loader.loader.finish

        def record(frame: Frame) -> None:
            if isinstance(frame, Released):
                order.append("released")
            send(frame)

        engine._mailbox.send = record  # type: ignore[method-assign]
        loader.loader.finish = lambda: (order.append("finish"), finish())[1]  # type: ignore[attr-defined]
        if transport == "shm":
            release = ShmReceiver.release
            monkeypatch.setattr(ShmReceiver, "release", lambda self: (order.append("release"), release(self))[1])
        ends.sync(1).raise_any()
        assert order == ["finish", *(["release"] if transport == "shm" else []), "released"]


def test_b31_nothing_of_the_source_is_held_between_rounds_by_a_streaming_source() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    class Streaming:
        def __init__(self) -> None:
            self._inner = MappingSource(tagged(1))

        def manifest(self):  # type: ignore[no-untyped-def]
            return self._inner.manifest()

        def stream(self):  # type: ignore[no-untyped-def]
            for tensor in self._inner.stream():
                fresh = tensor.clone()
                alive.append(weakref.ref(fresh))
                yield fresh
                del fresh

    gc.disable()
    try:
        with pair(Streaming(), MappingLoader(tagged(-1))) as ends:
            for version in range(5):
                ends.sync(version).raise_any()
                # The last tensor of the stream may live until the next round begins; no other one does.
                assert sum(ref() is not None for ref in alive) <= 1
    finally:
        gc.enable()


@TRANSPORTS
def test_b40_no_prefix_of_an_older_version_is_served(transport: str) -> None:
    engine = ToyEngine()
    sent = tagged(0)
    with pair(MappingSource(sent), engine.loader, transport=transport) as ends:
        engine.attach(ends.subscribers[0])
        for version in (1, 2):
            for tensor in sent.values():
                tensor.fill_(float(version))
            ends.sync(version).raise_any()
            assert engine.generate("the same prompt") == (version, version)
        engine.resettable = False
        for tensor in sent.values():
            tensor.fill_(3.0)
        outcome = ends.sync(3)
        assert isinstance(outcome.error, LoaderError)
        assert "caches were not reset" in outcome.error.message
        with pytest.raises(WeightliftError):
            engine.generate("the same prompt")


@TRANSPORTS
@pytest.mark.parametrize("at", ["install", "commit", "abort"])
def test_b47_the_version_does_not_advance_when_the_update_failed(transport: str, at: str) -> None:
    """Two replicas; the second fails at bucket 2, at its cache reset, or in its own clean-up."""
    sent, good, bad = tagged(1, NAMES), tagged(-1, NAMES), tagged(-1, NAMES)
    faults = [fail_at("install" if at == "abort" else at, raising(ValueError("no")), bucket=2 if at != "commit" else None, round=2)]
    if at == "abort":
        faults.append(fail_at("abort", raising(RuntimeError("neither"))))
    loaders = {"a": MappingLoader(good), "b": FaultyLoader(MappingLoader(bad), faults)}
    with pair(MappingSource(sent), loaders, transport=transport, slot_bytes=64, deadlines=SHORT) as ends:
        ends.sync(1).raise_any()
        first, second = ends.subscribers
        outcome = ends.sync(2)
        assert isinstance(outcome.error, LoaderError)
        assert outcome.error.report.replicas == {"a": 2, "b": None}
        assert list(outcome.error.report.fenced) == ["b"]
        assert (first.ensure_serving(), second.state) == (2, State.TORN)
        with pytest.raises(WeightliftError):
            second.ensure_serving()
        ends.sync(3).raise_any()
        assert (first.ensure_serving(), second.ensure_serving()) == (3, 3)


def test_b36_no_loop_no_socket_and_no_thread_is_left_by_the_sample_plane() -> None:
    """200 blocking calls, every 10th fails, from a thread and from inside a running loop: descriptors and threads stay the same."""
    import asyncio
    import os

    from weightlift.errors import LocalProtocolError
    from weightlift.samples import Prompt, SampleEndpoint, SamplePlane, SamplingParams, ShutdownRequest, SyncReply

    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def serve(address: str) -> None:
        with SampleEndpoint(address=address, name="engine") as endpoint:
            endpoint.hello()
            while not isinstance(request := endpoint.receive(timeout_s=5), ShutdownRequest):
                if request is not None:
                    endpoint.reply(SyncReply(id=request.id, version=1, seconds=0.0))

    sampling = SamplingParams(samples=1, max_new_tokens=1, temperature=1.0, greedy=True, seed=0)
    gc.disable()
    plane = SamplePlane(max_in_flight=1)
    engine = threading.Thread(target=serve, args=(plane.address,))
    engine.start()
    try:
        plane.wait_for_engines(["engine"], timeout_s=10)

        def some(calls: int) -> None:
            for call in range(calls):
                plane.collect(plane.generate("engine", [Prompt(id=0, tokens=[1])], sampling), timeout_s=10)
                if call % 10 == 0:
                    with pytest.raises(LocalProtocolError):
                        plane.collect(10**6, timeout_s=1)

        async def inside() -> None:
            some(100)

        some(10)
        before = counts()
        worker = threading.Thread(target=some, args=(100,))
        worker.start()
        worker.join(60)
        asyncio.run(inside())
        after = counts()
        assert abs(after[0] - before[0]) <= 2
        assert after[1] == before[1]
    finally:
        gc.enable()
        plane.shutdown("engine")
        engine.join(10)
        plane.close()


def test_e11_sixteen_runs_start_at_once() -> None:
    """No port is probed, released and bound later: addresses are made, not guessed."""
    barrier = threading.Barrier(16)
    failures: list[BaseException] = []

    def start(number: int) -> None:
        try:
            barrier.wait(30)
            with pair(MappingSource(tagged(number)), MappingLoader(tagged(-1))) as ends:
                ends.sync(1).raise_any()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert failures == []


def test_e8_a_small_view_does_not_drag_its_storage_along() -> None:
    big = torch.zeros(1024, 1024)
    sent = {"row": big[:1], "column": big[:, :1], "corner": big[-1:, -1:]}
    payload = sum(tensor.numel() * 4 for tensor in sent.values())
    held = {name: torch.empty(tensor.shape) for name, tensor in sent.items()}
    with pair(MappingSource(sent), MappingLoader(held), slot_bytes=4096) as ends:
        report = ends.sync(1).raise_any().report
    assert report is not None
    assert report.bytes == payload
    assert report.buckets * 4096 < 2 * payload + 4096
