"""The publisher raises in its source, is killed, or is stopped, in every phase; every engine must come out whole or TORN.

The engines live in the test's process (in threads), the publisher is a process of its own. Each cell is followed by a sync with a fresh
publisher on the same address, and leaves no shared memory, run file, descriptor or thread.
"""

import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from weightlift import (
    Deadlines,
    PeerLost,
    Publisher,
    ShmConfig,
    SourceError,
    State,
    Subscriber,
    TransferTimeout,
    WeightliftError,
    new_address,
)
from weightlift.loaders import MappingLoader
from weightlift.sources import MappingSource
from weightlift.testing.faults import FaultyLoader, FaultySource, fail_at, kill, kill_group, raising, stop
from weightlift.testing.processes import Worker, say

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("nothing_left")]

DEADLINES = Deadlines(announce_s=5.0, prepare_s=2.0, transfer_s=1.5, release_s=2.0, commit_s=2.0, cause_s=1.0)
BUCKETS = 8
ACTS: dict[str, Callable[[], None]] = {
    "raise": raising(KeyError("no such tensor")),
    "SIGKILL": kill,
    "SIGKILL to the group": kill_group,
    "SIGSTOP": stop,
    "nothing": lambda: None,
}
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}


def parameters(value: float) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((16, 16), value) for i in range(BUCKETS)}


@dataclasses.dataclass(frozen=True)
class Point:
    """Where the publisher is struck: by its own source, or, in release and commit, from an engine's hook."""

    at: str
    tensor: int | None = None

    def __str__(self) -> str:
        return self.at if self.tensor is None else f"{self.at} {self.tensor}"


SOURCE_POINTS = [Point("manifest"), Point("tensor", 0), Point("tensor", BUCKETS // 2), Point("tensor", BUCKETS - 1)]
ENGINE_POINTS = [Point("finish"), Point("commit")]


def publisher(address: str, at: str, tensor: int | None, act: str) -> None:
    """Publishes 1, and 2 with a fault; says what came of it."""
    sent = parameters(1.0)
    source = FaultySource(MappingSource(sent), [fail_at(at, ACTS[act], bucket=tensor, round=2)])
    ring = ShmConfig(slot_bytes=1024, slots=2)
    with Publisher(source, address, transport="shm", shm=ring, deadlines=DEADLINES) as trainer:
        say(pid=os.getpid())
        trainer.wait_for_peers(int(sys.stdin.readline()), timeout_s=60.0)
        for version in (1, 2):
            for tensor_ in sent.values():
                tensor_.fill_(float(version))
            try:
                trainer.publish(version)
                error = cause = ""
            except WeightliftError as caught:
                error, cause = type(caught).__name__, repr(caught.__cause__)
            say(error=error, cause=cause, version=trainer.version)


class Engines:
    """Some engines in threads, with hooks that may strike the publisher."""

    def __init__(self, address: str, count: int) -> None:
        self.held = [parameters(0.0) for _ in range(count)]
        self.loaders = [FaultyLoader(MappingLoader(held)) for held in self.held]
        self.engines = [Subscriber(loader, address, f"e{i}") for i, loader in enumerate(self.loaders)]
        self.errors: list[WeightliftError | None] = []

    def pull(self, timeout_s: float = 30.0) -> list[threading.Thread]:
        self.errors = [None] * len(self.engines)

        def one(number: int) -> None:
            try:
                self.engines[number].pull(timeout_s)
            except WeightliftError as error:
                self.errors[number] = error

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(self.engines))]
        for thread in threads:
            thread.start()
        return threads

    def join(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join(60.0)
            assert not thread.is_alive(), "an engine is still inside pull()"

    def check_whole_or_torn(self) -> None:
        """P1 of the search, on real tensors."""
        for engine, held in zip(self.engines, self.held, strict=True):
            values = {float(v) for t in held.values() for v in t.unique().tolist()}
            if engine.state is State.TORN:
                assert engine.version is None
            else:
                assert engine.state is State.SERVING
                assert values == {float(engine.ensure_serving())}

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def strike(pid: int, number: int) -> None:
    """Signal the publisher and wait until the kernel has done it."""
    os.kill(pid, number)
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        with open(f"/proc/{pid}/stat") as stat:
            if stat.read().rsplit(")", 1)[1].split()[0] in "ZTX":
                return
        time.sleep(0.001)
    raise AssertionError("the publisher did not stop")


@pytest.mark.parametrize("count", [1, 3], ids=["1 engine", "3 engines"])
@pytest.mark.parametrize(
    ("point", "act"),
    [(p, a) for p in SOURCE_POINTS for a in ACTS if a != "nothing"] + [(p, a) for p in ENGINE_POINTS for a in SIGNALS],
    ids=str,
)
def test_cell(point: Point, act: str, count: int) -> None:
    address = new_address()
    by_source = point in SOURCE_POINTS
    engines = Engines(address, count)
    worker = Worker(__file__, "publisher", address=address, at=point.at if by_source else "", tensor=point.tensor, act=act)
    try:
        pid = worker.hear()["pid"]
        threads = engines.pull()
        worker.tell(str(count))
        assert worker.hear()["error"] == ""
        engines.join(threads)
        if not by_source:
            engines.loaders[0].faults = [fail_at(point.at, lambda: strike(pid, SIGNALS[act]), round=2)]
        threads = engines.pull(timeout_s=4.0)
        engines.join(threads)
        engines.check_whole_or_torn()
        check_engines(engines, point, act)
        if act == "SIGSTOP":
            worker.signal(signal.SIGCONT)
            told = worker.hear()
            if point.at == "commit":
                # The engine had confirmed before the publisher's deadline could pass: it reads that first.
                assert told["error"] in ("", "TransferTimeout", "PeerLost")
            else:
                assert told["error"] in ("TransferTimeout", "PeerLost", "LoaderError")
                assert told["version"] == 1
        elif act == "raise":
            told = worker.hear()
            assert told["error"] == "SourceError"
            assert "no such tensor" in told["cause"]
            assert told["version"] == 1
        worker.close()
        heal(address, engines)
    finally:
        worker.close()
        engines.close()


def check_engines(engines: Engines, point: Point, act: str) -> None:
    """The class of every engine's error, and what it serves."""
    states = {engine.state for engine in engines.engines}
    if point.at == "manifest":
        # Nobody was told of a round: the engines wait for the next one until their own limit.
        assert {type(error) for error in engines.errors} == {TransferTimeout}
        assert states == {State.SERVING}
        return
    if point.at == "tensor":
        expected = SourceError if act == "raise" else TransferTimeout if act == "SIGSTOP" else PeerLost
        assert {type(error) for error in engines.errors} == {expected}
        assert states == {State.SERVING if point.tensor == 0 else State.TORN}
        if point.tensor:
            assert {error.phase for error in engines.errors if error is not None} == {"TRANSFER"}
        for error in engines.errors:
            assert error is not None
            if act == "raise":
                assert (error.tensor, error.version) == (f"w{point.tensor}", 2)
                assert "no such tensor" in str(error.__cause__)
            elif point.tensor == 0:
                # Begin may not have arrived yet; then the engine still stands before the transfer.
                assert (error.phase, error.bucket) in (("TRANSFER", 0), ("PREPARE", None))
            else:
                assert error.bucket == point.tensor
        return
    struck, others = engines.engines[0], engines.errors[1:]
    if point.at == "finish":
        assert type(engines.errors[0]) in (PeerLost, TransferTimeout)
        assert struck.state is State.TORN
    else:
        assert engines.errors[0] is None, "it had been told to commit: it serves the new version completely"
        assert struck.version == 2
    assert {type(error) for error in others} <= {type(None), PeerLost, TransferTimeout}


def heal(address: str, engines: Engines) -> None:
    """A fresh publisher on the same address brings everybody to one version."""
    ring = ShmConfig(slot_bytes=1024, slots=2)
    with Publisher(MappingSource(parameters(7.0)), address, transport="shm", shm=ring, deadlines=DEADLINES) as trainer:
        threads = engines.pull()
        trainer.wait_for_peers(len(engines.engines), timeout_s=30.0)
        report = trainer.publish(7)
        engines.join(threads)
    assert engines.errors == [None] * len(engines.engines)
    assert set(report.replicas.values()) == {7}
    engines.check_whole_or_torn()
    assert {engine.version for engine in engines.engines} == {7}


@pytest.mark.parametrize("count", [1, 3], ids=["1 engine", "3 engines"])
def test_twin_without_a_fault(count: int) -> None:
    for point in SOURCE_POINTS:
        address = new_address()
        engines = Engines(address, count)
        with Worker(__file__, "publisher", address=address, at=point.at, tensor=point.tensor, act="nothing") as worker:
            worker.hear()
            threads = engines.pull()
            worker.tell(str(count))
            for version in (1, 2):
                assert worker.hear() == {"error": "", "cause": "", "version": version}
                engines.join(threads)
                assert engines.errors == [None] * count
                threads = engines.pull(timeout_s=4.0) if version == 1 else []
            assert {engine.version for engine in engines.engines} == {2}
            engines.check_whole_or_torn()
            engines.close()
