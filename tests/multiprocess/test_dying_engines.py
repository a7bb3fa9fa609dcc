"""One engine raises, is killed, or is stopped, in every phase; the publisher and the other engines must come out of it whole.

The publisher and the healthy engines live in the test's process (engines in threads), the victim is a process of its own. Each cell is
followed by a sync with a fresh process, and leaves no shared memory, run file, descriptor or thread.
"""

import dataclasses
import signal
import sys
from collections.abc import Callable

import pytest
import torch

from weightlift import (
    Deadlines,
    LoaderError,
    PeerLost,
    Publisher,
    ShmConfig,
    State,
    Subscriber,
    TransferTimeout,
    WeightliftError,
    new_address,
)
from weightlift.loaders import MappingLoader
from weightlift.observe.events import Event, RoundStarted
from weightlift.sources import MappingSource
from weightlift.testing.faults import FaultyLoader, fail_at, kill, kill_group, raising, stop
from weightlift.testing.pair import Outcome, Pair
from weightlift.testing.processes import Worker, say

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("nothing_left")]

DEADLINES = Deadlines(announce_s=2.0, prepare_s=2.0, transfer_s=2.0, release_s=2.0, commit_s=2.0, cause_s=1.0)
BUCKETS = 8
ACTS: dict[str, Callable[[], None]] = {
    "raise": raising(ValueError("no more")),
    "SIGKILL": kill,
    "SIGKILL to the group": kill_group,
    "SIGSTOP": stop,
    "nothing": lambda: None,
}


def parameters(value: float) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((16, 16), value) for i in range(BUCKETS)}


@dataclasses.dataclass(frozen=True)
class Point:
    """Where the victim is struck. `phase` is what the publisher can know of it; `bucket` is set inside the transfer."""

    at: str
    phase: str
    bucket: int | None = None
    touched: bool = False

    def __str__(self) -> str:
        return self.at if self.bucket is None else f"{self.at} {self.bucket}"


POINTS = [
    Point("before pull", "ANNOUNCE"),
    Point("prepare", "ANNOUNCE"),
    Point("install", "TRANSFER", 0, touched=True),
    Point("install", "TRANSFER", BUCKETS // 2, touched=True),
    Point("install", "TRANSFER", BUCKETS - 1, touched=True),
    Point("finish", "RELEASE", touched=True),
    Point("commit", "COMMIT", touched=True),
]


def victim(address: str, at: str, bucket: int | None, act: str) -> None:
    """The engine that is struck in its second round."""
    do = ACTS[act]
    held = parameters(0.0)
    loader = FaultyLoader(MappingLoader(held), [fail_at(at, do, bucket=bucket, round=2)])
    with Subscriber(loader, address, "victim") as subscriber:
        for number in (1, 2):
            if number == 2:
                say(waiting=True)
                sys.stdin.readline()
                if at == "before pull":
                    do()
            try:
                subscriber.pull(timeout_s=6.0)
                error = ""
            except WeightliftError as caught:
                error = type(caught).__name__
            values = sorted({float(v) for tensor in held.values() for v in tensor.unique().tolist()})
            say(error=error, state=str(subscriber.state), version=subscriber.version, values=values)


def fresh(address: str) -> None:
    """An engine without faults."""
    held = parameters(0.0)
    with Subscriber(MappingLoader(held), address, "fresh") as subscriber:
        subscriber.pull(timeout_s=30.0)
        say(version=subscriber.version, values=sorted({float(v) for t in held.values() for v in t.unique().tolist()}))


class Stage:
    """A publisher, some healthy engines, and a victim that has taken part in one healthy round."""

    def __init__(self, healthy: int, point: Point, act: str) -> None:
        self.address = new_address()
        self.sent = parameters(1.0)
        self.held = [parameters(0.0) for _ in range(healthy)]
        self.publisher = Publisher(
            MappingSource(self.sent),
            self.address,
            transport="shm",
            shm=ShmConfig(slot_bytes=1024, slots=2),
            deadlines=DEADLINES,
            sink=self.on_event,
        )
        engines = [Subscriber(MappingLoader(h), self.address, f"healthy-{i}") for i, h in enumerate(self.held)]
        self.ends = Pair(self.publisher, engines)
        self.victim = Worker(__file__, "victim", address=self.address, at=point.at, bucket=point.bucket, act=act)
        self.publisher.wait_for_peers(healthy + 1, timeout_s=60.0)
        self.ends.sync(1, timeout_s=30.0).raise_any()
        assert self.victim.hear()["version"] == 1
        assert self.victim.hear()["waiting"]
        self.fill(2.0)

    def on_event(self, event: Event) -> None:
        """The victim goes on when round 2 has begun: it is a member of it, whatever happens to it next."""
        if isinstance(event, RoundStarted) and event.version == 2:
            self.victim.tell()

    def fill(self, value: float) -> None:
        for tensor in self.sent.values():
            tensor.fill_(value)

    def values(self) -> list[set[float]]:
        return [{float(v) for t in held.values() for v in t.unique().tolist()} for held in self.held]

    def close(self) -> None:
        self.victim.close()
        for engine in self.ends.subscribers:
            engine.close()
        self.publisher.close()


def check_error(outcome: Outcome, point: Point, act: str) -> None:
    """The publisher's error: exact class, place, cause."""
    error = outcome.error
    killed = act.startswith("SIGKILL") or (act == "raise" and point.at == "before pull")
    expected = PeerLost if killed else TransferTimeout if act == "SIGSTOP" else LoaderError
    assert type(error) is expected, repr(error)
    phase = "PREPARE" if act == "raise" and point.at == "prepare" else point.phase
    assert (error.peer, error.phase, error.version) == ("victim", phase, 2)
    if point.bucket is not None:
        assert (error.bucket, error.buckets, error.tensor) == (point.bucket, BUCKETS, f"w{point.bucket}")
    if expected is LoaderError:
        assert "ValueError: no more" in str(error)
        assert "no more" in str(error.__cause__), "the first cause is chained"


def check_healthy(stage: Stage, outcome: Outcome, point: Point) -> None:
    """The others: before any byte they keep version 1 and hear the first cause; after it they commit."""
    version = 2 if point.touched else 1
    assert stage.values() == [{float(version)}] * len(stage.held)
    for engine in stage.ends.subscribers:
        assert (engine.version, engine.state) == (version, State.SERVING)
        if point.touched:
            assert outcome.pulled[engine.name].version == 2
        elif "no round was announced" in str(outcome.failed[engine.name]):
            assert type(outcome.failed[engine.name]) is TransferTimeout, "the round was over before this engine looked"
        else:
            assert type(outcome.failed[engine.name]) is type(outcome.error)
            assert outcome.failed[engine.name].peer == "victim"  # type: ignore[attr-defined]
    assert stage.publisher.version == (2 if point.touched and stage.held else 1)


@pytest.mark.parametrize("healthy", [0, 2], ids=["1 engine", "3 engines"])
@pytest.mark.parametrize("act", [a for a in ACTS if a != "nothing"])
@pytest.mark.parametrize("point", POINTS, ids=str)
def test_cell(point: Point, act: str, healthy: int) -> None:
    stage = Stage(healthy, point, act)
    try:
        outcome = stage.ends.sync(2, timeout_s=5.0)
        check_error(outcome, point, act)
        check_healthy(stage, outcome, point)
        assert outcome.error is not None
        report = outcome.error.report  # type: ignore[attr-defined]
        assert report.replicas["victim"] == (None if point.touched else 1)
        if act == "SIGSTOP":
            stage.victim.signal(signal.SIGCONT)
            check_woken(stage.victim.hear(), point)
        elif act == "raise" and point.at != "before pull":
            told = stage.victim.hear()
            assert told["error"] == "LoaderError"
            assert told["state"] == ("TORN" if point.touched else "SERVING")
        stage.victim.close()
        with Worker(__file__, "fresh", address=stage.address) as replacement:
            stage.publisher.wait_for_peers(healthy + 1, timeout_s=60.0)
            while "victim" in stage.publisher.peers:
                pass
            stage.fill(3.0)
            stage.ends.sync(3, timeout_s=30.0).raise_any()
            assert replacement.hear() == {"version": 3, "values": [3.0]}
        assert stage.values() == [{3.0}] * healthy
    finally:
        stage.close()


def check_woken(told: dict[str, object], point: Point) -> None:
    """A stopped engine that goes on: a typed error and TORN, or untouched; never a mixture that is served."""
    if point.at == "commit":
        # Told to commit before it was stopped: it serves the new version completely (docs/failure-model.md).
        assert told == {"error": "", "state": "SERVING", "version": 2, "values": [2.0]}
    elif point.touched:
        assert told["state"] == "TORN"
        assert told["error"] in ("TransferTimeout", "PeerLost")
        assert told["version"] is None
    else:
        assert (told["state"], told["version"], told["values"]) == ("SERVING", 1, [1.0])
        assert told["error"] in ("TransferTimeout", "PeerLost")


@pytest.mark.parametrize("healthy", [0, 2], ids=["1 engine", "3 engines"])
def test_twin_without_a_fault(healthy: int) -> None:
    """The same script with every point armed and nothing done there: version 2 everywhere."""
    for point in POINTS if healthy == 0 else POINTS[2:4]:
        stage = Stage(healthy, point, "nothing")
        try:
            report = stage.ends.sync(2, timeout_s=30.0).raise_any().report
            assert report is not None
            assert set(report.replicas.values()) == {2}
            assert stage.victim.hear() == {"error": "", "state": "SERVING", "version": 2, "values": [2.0]}
        finally:
            stage.close()
