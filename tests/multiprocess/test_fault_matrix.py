"""The fault matrix on real processes: every phase x every fault, with one and with three engines, each with its no-fault twin.

One process dies, stops or raises; every other process must end within a bounded time with the exact error, serve exactly one version or
refuse, and sync again with whoever comes after. What each cell saw is a row of docs/failure-model.md.
"""

import contextlib
import dataclasses
import signal
from collections.abc import Iterable, Iterator

import pytest
from fault_crew import BOUND_S, BUCKETS, Answer, Crew, Scene, answer, ask, assert_serves, assert_torn, wait_stopped
from matrix_rows import record

from weightlift.testing.processes import Leftovers, Worker

pytestmark = pytest.mark.multiprocess

VICTIM = "engine-0"
ABOUT_TO_END_S = 3.0
"""Timeout of a pull that no round will come for."""


@dataclasses.dataclass(frozen=True)
class Point:
    """Where a process is struck. `call`: the loader's call inside which an engine is then. `touched`: the engine's weights are."""

    phase: str
    call: str
    bucket: int | None = None
    touched: bool = False

    def __str__(self) -> str:
        return self.phase.lower() if self.bucket is None else f"transfer-{self.bucket}"


POINTS = [
    Point("ANNOUNCE", ""),
    Point("PREPARE", "prepare"),
    Point("TRANSFER", "install", 0, touched=True),
    Point("TRANSFER", "install", BUCKETS // 2, touched=True),
    Point("TRANSFER", "install", BUCKETS - 1, touched=True),
    Point("RELEASE", "finish", touched=True),
    Point("COMMIT", "commit", touched=True),
]


@pytest.fixture(scope="module", params=[1, 3], ids=["1 engine", "3 engines"])
def count(request: pytest.FixtureRequest) -> int:
    """How many engines there are. A fixture of the module: all cells of one scene run one after the other."""
    return int(request.param)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.close()


class Stages:
    """Keeps one scene open from cell to cell; another kind of scene, or a failed cell, closes it."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._open: tuple[tuple[int, bool], Scene, Leftovers] | None = None
        self.clean = True

    def scene(self, count: int, *, faulty_source: bool) -> Scene:
        kind = (count, faulty_source)
        if self._open is None or self._open[0] != kind or not self.clean:
            self.close()
            before = Leftovers()
            self._open = kind, Scene(self._crew, count, faulty_source=faulty_source), before
        self.clean = True
        return self._open[1]

    def close(self) -> None:
        """End the scene. Its run directory goes when the last process that knows the address lets go of it: this one."""
        if self._open is None:
            return
        from weightlift.transports.endpoint import release_addresses

        _, scene, before = self._open
        self._open = None
        scene.close()
        self._crew.close()
        release_addresses()
        if self.clean:
            before.check(ignore=("threads",))  # the library runs in none of this process's: pytest-timeout has one of its own


@pytest.fixture(scope="module")
def stages(crew: Crew) -> Iterator[Stages]:
    stages = Stages(crew)
    yield stages
    stages.close()


@contextlib.contextmanager
def cell(stages: Stages, scene: Scene, point: Point, who: str, fault: str) -> Iterator[Answer]:
    """Runs one cell: nothing may be left in shared memory or in the run directory; its line goes to the file of results."""
    row: Answer = {
        "transport": "shm",
        "who": who,
        "phase": str(point),
        "fault": fault,
        "subscribers": len(scene.names),
        "error": "",
        "struck": "",
        "others": "",
    }
    memory, before, publisher = Leftovers(), scene.run_files(), scene.publisher
    stages.clean = False
    yield row
    memory.check(ignore=("descriptors", "threads", "run files"))
    # The socket of a killed publisher's data plane stays as long as the run lives: see the test of it below.
    new = scene.run_files() - before
    assert {name.split("-")[0] for name in new} <= ({"data"} if scene.publisher is not publisher else set()), new
    assert len(new) <= 1
    stages.clean = True
    record(row)


def check(error: Answer | None, expected: str, **fields: object) -> None:
    """The exact class, and these fields."""
    assert error is not None, f"{expected} should have been raised"
    assert error["type"] == expected, error["text"]
    assert {name: error[name] for name in fields} == fields, error["text"]


def place(point: Point) -> Answer:
    """The fields that name a bucket."""
    if point.bucket is None:
        return {"bucket": None, "buckets": None, "tensor": None}
    return {"bucket": point.bucket, "buckets": BUCKETS, "tensor": f"w{point.bucket}"}


def serving(told: Iterable[Answer], old: int, new: int) -> str:
    """What engines serve, for the table of results: old, new or TORN; nothing for no engines."""
    names = {old: "old", new: "new", "TornWeights": "TORN"}
    return ", ".join(sorted({names[each["serving"]] for each in told}))


# --- an engine is struck --------------------------------------------------------------------------------------------------------

PEER_FAULTS = ["raise", "clean-up raises", "kill", "kill group", "stop", "keeps a tensor"]
"""clean-up raises: the loader raises, and then its abort() does. keeps a tensor: the loader keeps the memory of its bucket."""
PEER_CELLS = [
    (point, fault)
    for point in POINTS
    for fault in PEER_FAULTS
    if not (fault == "clean-up raises" and point.phase == "ANNOUNCE") and not (fault == "keeps a tensor" and point.bucket is None)
]
_ITS_OWN = {
    "raise": ("LoaderError", "KeyError"),
    "clean-up raises": ("LoaderError", "KeyError"),
    "keeps a tensor": ("LoaderError", ""),
}
"""The error of an engine that is not killed or stopped, and its cause."""
SIGNALS = {"kill": signal.SIGKILL, "kill group": signal.SIGKILL, "stop": signal.SIGSTOP}


def strike_engine(scene: Scene, point: Point, fault: str) -> tuple[Answer, dict[str, Answer]]:
    """One round in which the victim is struck; what the publisher and the other engines made of it."""
    victim, others = scene.engines[VICTIM], scene.names[1:]
    outside, early = point.phase == "ANNOUNCE", not point.touched
    # An engine that finds an announcement together with its end passes it over. Here the others are inside before the victim is struck.
    scene.pull(others, **({"at": "prepare", "act": "tell"} if early else {}))
    # The victim leaves a child behind that keeps all its sockets open: only its pidfd tells of its end.
    fork = fault in ("kill", "kill group")
    if not outside:
        scene.pull([VICTIM], at=point.call, bucket=point.bucket, act=fault, hold=early, fork=fork)
    # A new manifest makes the victim ask for it: the publisher knows then that it is preparing.
    scene.publish(new_manifest=point.phase == "PREPARE", announce=outside)
    if outside:
        assert scene.publisher.hear(BOUND_S) == {"started": True}
    if early:
        assert list(scene.hear_engines(others).values()) == [{"reached": True}] * len(others)
    if outside:
        strike_outside(victim, fault)
    elif early:
        assert victim.hear(BOUND_S) == {"holding": True}
        victim.tell()
    return scene.publisher.hear(BOUND_S), scene.hear_engines(others)


def strike_outside(victim: Worker, fault: str) -> None:
    """The victim is connected, and not inside pull()."""
    if fault == "raise":
        ask(victim, "leave", by="raise")
    elif fault == "kill group":
        victim.signal_group(signal.SIGKILL)
    elif fault == "nothing":
        ask(victim, "pull", timeout_s=BOUND_S)
    else:
        victim.signal(SIGNALS[fault])


def peer_error(point: Point, fault: str) -> Answer:
    """What the publisher must raise."""
    if fault == "raise" and point.phase == "ANNOUNCE":
        kind, cause = "PeerLost", ""  # the application left the subscriber's context: it said Goodbye
    else:
        kind, cause = {**_ITS_OWN, "stop": ("TransferTimeout", "")}.get(fault, ("PeerLost", ""))
    return {"expected": kind, "cause": cause, "peer": VICTIM, "phase": point.phase, **place(point)}


@pytest.mark.parametrize(("point", "fault"), PEER_CELLS, ids=str)
def test_an_engine_is_struck(stages: Stages, point: Point, fault: str, count: int) -> None:
    scene = stages.scene(count, faulty_source=False)
    old, new = scene.version, scene.version + 1
    if fault in ("kill", "kill group"):
        scene.crew.warm_up()
    with cell(stages, scene, point, "engine", fault) as row:
        published, others = strike_engine(scene, point, fault)
        row["error"] = (published["error"] or {"type": ""})["type"]
        row["others"] = serving(others.values(), old, new)

        expected = peer_error(point, fault)
        check(published["error"], **expected, version=new)
        assert set(published["fenced"]) == ({VICTIM} if point.touched else set(scene.names))
        for told in others.values():
            if point.touched:
                assert told["error"] is None, told["error"]
                assert_serves(told, new)
            else:
                check(told["error"], **expected, version=new)
                assert_serves(told, old)
        serves = new if point.touched else old
        assert {name: published["replicas"][name] for name in others} == dict.fromkeys(others, serves)
        if point.touched:
            assert published["replicas"][VICTIM] is None
        assert published["version"] == (new if others and point.touched else old)
        assert (published["version"] == new) == (new in published["replicas"].values())

        row["struck"] = aftermath(scene, point, fault, old, new)
        scene.sync()


def aftermath(scene: Scene, point: Point, fault: str, old: int, new: int) -> str:
    """What the victim itself ends with, and serves; afterwards an engine of its name is connected."""
    victim = scene.engines[VICTIM]
    if fault in ("kill", "kill group"):
        assert victim.wait() == -signal.SIGKILL
        scene.replace_engine(VICTIM)
        return "ended"
    if fault == "raise" and point.phase == "ANNOUNCE":
        assert victim.hear(BOUND_S) == {"left": "raise"}
        scene.open_engine(VICTIM)
        return "left"
    if fault == "stop":
        wait_stopped(victim)
        victim.signal(signal.SIGCONT)
    if point.phase == "ANNOUNCE":
        told = answer(victim, "pull", timeout_s=ABOUT_TO_END_S)
        check(told["error"], "TransferTimeout", phase="ANNOUNCE", peer="publisher")
        assert_serves(told, old)
        return "old"
    told = victim.hear(BOUND_S)
    if fault == "stop" and point.phase == "COMMIT":
        # It was told to commit before it was stopped: it serves the new version, completely.
        assert told["error"] is None
        assert_serves(told, new)
        return "new"
    kind, cause = _ITS_OWN.get(fault, ("TransferTimeout", ""))
    check(told["error"], kind, cause=cause, peer=VICTIM, phase=point.phase, version=new, **place(point))
    if fault == "keeps a tensor":
        assert "kept a view of a bucket" in told["error"]["text"]
        assert answer(victim, "let_go") == {"kept": 1}
    if point.touched:
        assert_torn(told)
    else:
        assert_serves(told, old)
    return serving([told], old, new)


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_an_engine_is_not_struck(stages: Stages, point: Point, count: int) -> None:
    """The twin: the same script with nothing done at the point."""
    scene = stages.scene(count, faulty_source=False)
    new = scene.version + 1
    with cell(stages, scene, point, "engine", "none") as row:
        published, others = strike_engine(scene, point, "nothing")
        row["others"] = row["struck"] = "new"
        assert published["error"] is None, published["error"]
        assert (published["version"], published["replicas"], published["fenced"]) == (new, dict.fromkeys(scene.names, new), [])
        for told in (*others.values(), scene.engines[VICTIM].hear(BOUND_S)):
            assert told["error"] is None, told["error"]
            assert_serves(told, new)
        scene.sync()


# --- the publisher is struck ----------------------------------------------------------------------------------------------------


PUBLISHER_CELLS = [
    (point, fault) for point in POINTS for fault in ("raise", "kill", "stop") if fault != "raise" or point.phase == "TRANSFER"
]


def strike_publisher(scene: Scene, point: Point, fault: str) -> dict[str, Answer]:
    """One round in which the publisher is struck; what the engines made of it.

    ANNOUNCE and TRANSFER: it strikes itself. Otherwise every engine waits inside a call of its loader while it is struck.
    """
    held = point.phase in ("PREPARE", "RELEASE", "COMMIT")
    if held:
        scene.pull(scene.names, at=point.call, act="hold")
        scene.publish()
        assert list(scene.hear_engines(scene.names).values()) == [{"holding": True}] * len(scene.names)
        if fault != "nothing":
            scene.publisher.signal(SIGNALS[fault])
            wait_until_it_shows(scene.publisher, fault)
        for engine in scene.engines.values():
            engine.tell()
    else:
        scene.pull(scene.names, timeout_s=ABOUT_TO_END_S if point.phase == "ANNOUNCE" else BOUND_S)
        scene.publish(at="start" if point.phase == "ANNOUNCE" else "tensor", bucket=point.bucket, act=fault)
        wait_until_it_shows(scene.publisher, fault)
    return scene.hear_engines(scene.names)


def wait_until_it_shows(worker: Worker, fault: str) -> None:
    """Wait until the signal has done its work."""
    if fault == "kill":
        assert worker.wait() == -signal.SIGKILL
    elif fault == "stop":
        wait_stopped(worker)


def check_engine(told: Answer, point: Point, fault: str, old: int, new: int) -> None:
    """What an engine must end with when the publisher was struck."""
    if point.phase == "COMMIT":
        assert told["error"] is None, "an engine that was told to commit needs nobody for it"
        assert_serves(told, new)
        return
    kind = {"raise": "SourceError", "kill": "PeerLost", "stop": "TransferTimeout"}[fault]
    # After Released an engine waits for Commit: that is the phase which it can name.
    phase = "COMMIT" if point.phase == "RELEASE" else point.phase
    if point.bucket == 0 and fault != "raise" and told["error"] and told["error"]["phase"] == "PREPARE":
        # Begin can still be on its way when the publisher is struck in the middle of its first bucket: the engine then never
        # saw the transfer begin, and says so.
        phase = "PREPARE"
    version: int | None = new
    if point.phase == "ANNOUNCE":
        kind, version = "TransferTimeout", None  # no round ever reached it
    # An engine that is about to attach looks at its connection, finds it closed, and nobody to connect to.
    cause = {("raise", "TRANSFER"): "KeyError", ("kill", "PREPARE"): "ConnectionRefusedError"}.get((fault, point.phase), "")
    check(told["error"], kind, cause=cause, phase=phase, version=version, peer="publisher")
    if phase == "TRANSFER":
        assert point.bucket is not None
        error = told["error"]
        # Killed: the bucket that did not come, or the one before it, if its acknowledgement could not be sent any more.
        possible = (point.bucket - 1, point.bucket) if fault == "kill" else (point.bucket,)
        assert error["bucket"] in possible, error["text"]
        assert (error["buckets"], error["tensor"]) == (BUCKETS, f"w{error['bucket']}")
    # The publisher is struck before it writes `bucket`: before the first one nobody is touched.
    if point.touched and point.bucket != 0:
        assert_torn(told)
    else:
        assert_serves(told, old)


@pytest.mark.parametrize(("point", "fault"), PUBLISHER_CELLS, ids=str)
def test_the_publisher_is_struck(stages: Stages, point: Point, fault: str, count: int) -> None:
    scene = stages.scene(count, faulty_source=True)
    old, new = scene.version, scene.version + 1
    if fault == "kill":
        scene.crew.warm_up()
    with cell(stages, scene, point, "publisher", fault) as row:
        engines = strike_publisher(scene, point, fault)
        row["error"] = (engines[VICTIM]["error"] or {"type": ""})["type"]
        row["others"] = serving(engines.values(), old, new)
        if fault == "stop":
            wait_stopped(scene.publisher)
            scene.publisher.signal(signal.SIGCONT)
        for told in engines.values():
            check_engine(told, point, fault, old, new)
        if fault == "kill":
            scene.replace_publisher()
        else:
            check_publisher(scene.publisher.hear(BOUND_S), scene, point, fault, old, new)
        scene.sync()


def check_publisher(told: Answer, scene: Scene, point: Point, fault: str, old: int, new: int) -> None:
    """What a publisher ends with that raised, or that was stopped and goes on when everybody has given it up."""
    touched = point.touched and point.bucket != 0
    assert (told["version"] == new) == (new in told["replicas"].values())
    if point.phase == "COMMIT" and told["error"] is None:
        # It heard Committed before it looked at the clock.
        assert told["replicas"] == dict.fromkeys(scene.names, new)
        return
    if fault == "raise":
        check(told["error"], "SourceError", cause="KeyError", phase="TRANSFER", version=new, peer=None, **place(point))
    else:
        # Which comes first after it wakes: its own deadline, or what the engines said in the meantime, from their next stage.
        late = {"PREPARE": ("ANNOUNCE", "PREPARE"), "RELEASE": ("RELEASE", "COMMIT")}.get(point.phase, (point.phase,))
        if point.bucket == 0:
            late = ("PREPARE", "TRANSFER")  # An engine that never saw Begin gave up in PREPARE, and said so first.
        check(told["error"], "TransferTimeout", version=new)
        assert told["error"]["phase"] in late, told["error"]["text"]
        if told["error"]["phase"] == "TRANSFER":
            check(told["error"], "TransferTimeout", **place(point))
    if point.phase == "COMMIT":
        assert set(told["replicas"].values()) <= {None, new}
    else:
        assert told["replicas"] == dict.fromkeys(scene.names, None if touched else old)
        assert told["version"] == old
        assert told["fenced"] == scene.names


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_the_publisher_is_not_struck(stages: Stages, point: Point, count: int) -> None:
    """The twin: the same script, the same waiting inside the loader, and nothing done."""
    scene = stages.scene(count, faulty_source=True)
    new = scene.version + 1
    with cell(stages, scene, point, "publisher", "none") as row:
        for told in strike_publisher(scene, point, "nothing").values():
            assert told["error"] is None, told["error"]
            assert_serves(told, new)
        published = scene.publisher.hear(BOUND_S)
        row["others"] = "new"
        assert published["error"] is None, published["error"]
        assert (published["version"], published["replicas"]) == (new, dict.fromkeys(scene.names, new))
        scene.sync()
