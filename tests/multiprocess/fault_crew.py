"""The processes of the fault matrix: one worker that can be a publisher or an engine, and the scene that directs them.

Owns: `member` (inside a worker), `Crew` (workers that are ready to be hired), `Scene` (one address, its publisher, its engines).
Must not know: which faults there are to try, what is expected of whom (test_fault_matrix.py).

A worker does one command after the other, each a line of JSON on its standard input, and answers each with one line. It strikes itself
at an exact point of the library (testing/faults.py), or waits there ("hold") until the test has struck somebody else.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch

from weightlift import Deadlines, Publisher, ShmConfig, Subscriber, WeightliftError, new_address
from weightlift.errors import RemoteCause
from weightlift.loaders import MappingLoader
from weightlift.observe.events import Event, RoundStarted
from weightlift.sources import MappingSource
from weightlift.testing.faults import FaultySource, KeepingLoader, fail_at, kill, kill_group, raising, stop
from weightlift.testing.processes import Worker, say
from weightlift.transports.endpoint import parse_address

BUCKETS = 8
SLOT_BYTES = 16 * 16 * 2
"""One tensor of float16 or bfloat16 fills one bucket."""
DEADLINES = Deadlines(announce_s=2.5, prepare_s=2.5, transfer_s=2.5, release_s=2.5, commit_s=2.5, cause_s=1.5)
BOUND_S = 25.0
"""Whatever happens, a survivor answers within this time."""
Answer: TypeAlias = dict[str, Any]


def value_of(version: int) -> float:
    """What every element of a version holds; exact in bfloat16."""
    return float(version % 200 + 1)


# --- inside a worker ------------------------------------------------------------------------------------------------------------


def member() -> None:
    """A worker: commands from standard input, until it is closed."""
    torch.set_num_threads(1)
    end: _PublisherEnd | _EngineEnd | None = None
    for line in iter(sys.stdin.readline, ""):
        command = json.loads(line)
        match command.pop("do"):
            case "open publisher":
                try:
                    end = _PublisherEnd(**command)
                    say(opened=True)
                except WeightliftError as error:
                    say(error=_told(error))
            case "open engine":
                end = _EngineEnd(**command)
                say(opened=True)
            case "look":
                say(descriptors=len(os.listdir("/proc/self/fd")), threads=len(os.listdir("/proc/self/task")))
            case verb:
                say(**getattr(end, verb)(**command))


def _hold() -> None:
    """Say that the point is reached, and stay there until told to go on."""
    say(holding=True)
    sys.stdin.readline()


_ACTS: dict[str, Callable[[], None]] = {
    "raise": raising(KeyError("struck")),
    "kill": kill,
    "kill group": kill_group,
    "stop": stop,
    "hold": _hold,
    "tell": lambda: say(reached=True),
    "nothing": lambda: None,
}


def _fork_a_child() -> None:
    """A child that holds every descriptor of this process open, as a forked data-loading worker does."""
    if os.fork() == 0:
        while True:
            signal.pause()


class _PublisherEnd:
    """`faulty`: the source is a stream that can be struck; else a stable one, whose copies are planned once."""

    def __init__(self, address: str, *, faulty: bool) -> None:
        self.tensors = {f"w{i}": torch.zeros(16, 16, dtype=torch.float16) for i in range(BUCKETS)}
        mapping = MappingSource(self.tensors)
        self.source = FaultySource(mapping) if faulty else mapping
        self.at_start: Callable[[], None] | None = None
        self.publisher = Publisher(
            self.source,
            address,
            transport="shm",
            shm=ShmConfig(slot_bytes=SLOT_BYTES, slots=2),
            deadlines=DEADLINES,
            sink=self._on_event,
        )

    def _on_event(self, event: Event) -> None:
        if isinstance(event, RoundStarted) and self.at_start is not None:
            self.at_start()

    def publish(
        self,
        version: int,
        peers: list[str],
        *,
        at: str = "",
        bucket: int | None = None,
        act: str = "nothing",
        new_manifest: bool = False,
        announce: bool = False,
        fork: bool = False,
    ) -> Answer:
        """One round to exactly these peers. at: "start" or "tensor". announce: say when the round has started."""
        if fork:
            _fork_a_child()
        deadline = time.monotonic() + BOUND_S
        while sorted(self.publisher.peers) != peers and time.monotonic() < deadline:
            time.sleep(0.01)
        for name, tensor in self.tensors.items():
            other = torch.bfloat16 if tensor.dtype is torch.float16 else torch.float16
            self.tensors[name] = torch.full_like(tensor, value_of(version), dtype=other if new_manifest else tensor.dtype)
        self.at_start = _ACTS[act] if at == "start" else (lambda: say(started=True)) if announce else None
        if isinstance(self.source, FaultySource):
            self.source.faults[:] = [fail_at("tensor", _ACTS[act], bucket=bucket)] if at == "tensor" else []
        try:
            report, error = self.publisher.publish(version), None
        except WeightliftError as caught:
            report, error = caught.report, caught
        told = (
            {} if report is None else {"replicas": report.replicas, "fenced": sorted(report.fenced), "committed": report.committed}
        )
        return {"error": _told(error), "version": self.publisher.version, **told}

    def leave(self) -> Answer:
        """Close."""
        self.publisher.close()
        return {"left": True}


class _EngineEnd:
    def __init__(self, address: str, name: str) -> None:
        self.held = {f"w{i}": torch.full((16, 16), -1.0) for i in range(BUCKETS)}
        self.loader = KeepingLoader(MappingLoader(self.held, cast="lossless"))
        self.subscriber = Subscriber(self.loader, address, name)

    def pull(
        self,
        timeout_s: float,
        *,
        at: str = "",
        bucket: int | None = None,
        act: str = "nothing",
        hold: bool = False,
        fork: bool = False,
    ) -> Answer:
        """Take part in one round; struck at that call of the loader. hold: wait there first, until told to go on."""
        if fork:
            _fork_a_child()
        strike = _ACTS["raise" if act == "clean-up raises" else "nothing" if act == "keeps a tensor" else act]
        acts = [_ACTS["hold"], strike] if hold else [strike]
        self.loader.faults[:] = [fail_at(at, do, bucket=bucket) for do in acts] if at else []
        if act == "clean-up raises":
            self.loader.faults.append(fail_at("abort", raising(RuntimeError("second"))))
        self.loader.keep = bucket if act == "keeps a tensor" else None
        error: BaseException | None = None
        try:
            self.subscriber.pull(timeout_s=timeout_s)
        except WeightliftError as caught:
            error = caught
        return {"error": _told(error), **self._state()}

    def _state(self) -> Answer:
        try:
            serving: int | str = self.subscriber.ensure_serving()
        except WeightliftError as refusal:
            serving = type(refusal).__name__
        values = [sorted({float(v) for v in tensor.flatten().tolist()}) for tensor in self.held.values()]
        return {"state": str(self.subscriber.state), "version": self.subscriber.version, "serving": serving, "values": values}

    def let_go(self) -> Answer:
        """Drop what the loader kept: until then the application itself holds the mapping."""
        kept = len(self.loader.kept)
        self.loader.kept.clear()
        return {"kept": kept}

    def leave(self, *, by: str) -> Answer:
        """Leave the context of the subscriber, "raise": with an error of the application."""
        try:
            with self.subscriber:
                _ACTS[by]()
        except KeyError:
            return {"left": by}
        return {"left": ""}


def _told(error: BaseException | None) -> Answer | None:
    """An error as data: its exact class, its fields, its text, the class of what it is chained to."""
    if error is None:
        return None
    assert isinstance(error, WeightliftError), "pull and publish raise nothing else"
    cause = error.__cause__
    chained = cause.type_name if isinstance(cause, RemoteCause) else "" if cause is None else type(cause).__name__
    fields = {name: getattr(error, name) for name in ("version", "phase", "peer", "bucket", "buckets", "tensor")}
    return {"type": type(error).__name__, "cause": chained, "text": str(error), **fields}


# --- in the test ----------------------------------------------------------------------------------------------------------------


def ask(worker: Worker, do: str, **command: Any) -> None:
    """Give a command; the answer is heard later."""
    worker.tell(json.dumps({"do": do, **command}))


def answer(worker: Worker, do: str, **command: Any) -> Answer:
    """Give a command and hear the answer."""
    ask(worker, do, **command)
    return worker.hear(BOUND_S)


def wait_stopped(worker: Worker) -> None:
    """Wait until the kernel says that the worker is stopped."""
    deadline = time.monotonic() + BOUND_S
    while (state := _process_state(worker.pid)) != "T":
        assert time.monotonic() < deadline, f"{worker.name} should be stopped, its state is {state}"
        time.sleep(0.01)


def _process_state(pid: int) -> str:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Crew:
    """Workers that have imported everything. One is kept ready where the next cell will need it."""

    def __init__(self) -> None:
        self._ready: list[Worker] = []

    def warm_up(self) -> None:
        """Start one in advance."""
        if not self._ready:
            self._ready.append(Worker(__file__, "member"))

    def hire(self) -> Worker:
        """A worker."""
        return self._ready.pop() if self._ready else Worker(__file__, "member")

    def close(self) -> None:
        """End those that were not hired."""
        while self._ready:
            self._ready.pop().close()


class Scene:
    """One address with its publisher and `count` engines, which all serve `version` between two cells."""

    def __init__(self, crew: Crew, count: int, *, faulty_source: bool) -> None:
        self.crew = crew
        self.address = new_address()
        self.version = 0
        self.names = [f"engine-{i}" for i in range(count)]
        self._faulty_source = faulty_source
        self._normal: dict[int, Answer] = {}
        self.publisher = crew.hire()
        self.engines = {name: crew.hire() for name in self.names}
        self.open_publisher()
        for name in self.names:
            self.open_engine(name)
        self.sync()

    @property
    def workers(self) -> list[Worker]:
        """Everybody."""
        return [self.publisher, *self.engines.values()]

    def open_publisher(self) -> None:
        """The worker becomes a publisher."""
        told = answer(self.publisher, "open publisher", address=self.address, faulty=self._faulty_source)
        assert told == {"opened": True}, told

    def open_engine(self, name: str) -> None:
        """The worker becomes an engine."""
        assert answer(self.engines[name], "open engine", address=self.address, name=name) == {"opened": True}

    def replace_publisher(self) -> None:
        """Another process at the same address."""
        self.publisher.close()
        self.publisher_follows()

    def publisher_follows(self) -> None:
        """Another process at the same address, while something of the old one may still be there."""
        self.publisher = self.crew.hire()
        self.open_publisher()

    def replace_engine(self, name: str) -> None:
        """Another process of the same name."""
        self.engines[name].close()
        self.engines[name] = self.crew.hire()
        self.open_engine(name)

    def pull(self, names: Iterable[str], **more: Any) -> None:
        """Tell engines to take part; `hear_engines` gives what came of it."""
        for name in names:
            ask(self.engines[name], "pull", **{"timeout_s": BOUND_S, **more})

    def publish(self, **more: Any) -> None:
        """Tell the publisher to publish the next version."""
        self.version += 1
        ask(self.publisher, "publish", version=self.version, peers=self.names, **more)

    def hear_engines(self, names: Iterable[str]) -> dict[str, Answer]:
        """The answers of engines."""
        return {name: self.engines[name].hear(BOUND_S) for name in names}

    def sync(self) -> None:
        """A round without any fault: everybody serves the next version, completely, and nobody holds more than before."""
        self.pull(self.names)
        self.publish()
        published = self.publisher.hear(2 * BOUND_S)
        assert published["error"] is None, published["error"]
        assert (published["version"], published["replicas"]) == (self.version, dict.fromkeys(self.names, self.version))
        for told in self.hear_engines(self.names).values():
            assert told["error"] is None, told["error"]
            assert_serves(told, self.version)
        self._check_holdings()

    def _check_holdings(self) -> None:
        """No process has more descriptors or threads than after its first good round; closing ones get a moment."""
        for worker in self.workers:
            now = answer(worker, "look")
            normal = self._normal.setdefault(worker.pid, now)
            deadline = time.monotonic() + 5.0
            while any(now[kind] > normal[kind] for kind in normal) and time.monotonic() < deadline:
                time.sleep(0.02)
                now = answer(worker, "look")
            assert all(now[kind] <= normal[kind] for kind in normal), f"{worker.name} grew from {normal} to {now}"

    def run_files(self) -> set[str]:
        """What is in the run directory."""
        directory = parse_address(self.address).directory
        assert directory is not None, "the address is on this host"
        return {path.name for path in directory.iterdir()}

    def close(self) -> None:
        """End every process."""
        for worker in self.workers:
            worker.close()


def assert_serves(told: Answer, version: int) -> None:
    """The engine serves that version, and its parameters are that version and nothing else."""
    assert (told["state"], told["version"], told["serving"]) == ("SERVING", version, version)
    assert told["values"] == [[value_of(version)]] * BUCKETS


def assert_torn(told: Answer) -> None:
    """The engine serves nothing."""
    assert (told["state"], told["version"], told["serving"]) == ("TORN", None, "TornWeights")
