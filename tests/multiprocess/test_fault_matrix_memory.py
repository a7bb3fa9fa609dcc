"""The fault matrix on the `memory` transport: threads of one process, so nobody can be killed; raise, keep and stall they can."""

import threading
from collections.abc import Callable

import pytest
import torch
from matrix_rows import record

from weightlift import Deadlines, LoaderError, SourceError, State, Subscriber, TransferTimeout, WeightliftError
from weightlift.loaders import MappingLoader
from weightlift.sources import MappingSource
from weightlift.testing.faults import FaultySource, KeepingLoader, fail_at, raising
from weightlift.testing.pair import Outcome, pair

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("nothing_left")]

BUCKETS = 8
SHORT = Deadlines(announce_s=2.0, prepare_s=2.0, transfer_s=2.0, release_s=2.0, commit_s=2.0, cause_s=1.0)
STALL_S = 4.5
"""Longer than the publisher waits, shorter than the pull of the others."""
VICTIM = "engine-0"
COMMIT_STALLS = "commit stop"
"""The one case in which the publisher knows less than there is: an engine that was told to commit, and answers too late."""
POINTS = {
    "prepare": ("PREPARE", None),
    "transfer-0": ("TRANSFER", 0),
    f"transfer-{BUCKETS // 2}": ("TRANSFER", BUCKETS // 2),
    f"transfer-{BUCKETS - 1}": ("TRANSFER", BUCKETS - 1),
    "release": ("RELEASE", None),
    "commit": ("COMMIT", None),
}
CALLS = {"PREPARE": "prepare", "TRANSFER": "install", "RELEASE": "finish", "COMMIT": "commit"}
FAULTS = ("none", "raise", "clean-up raises", "stop", "keeps a tensor")
CELLS = [(p, f) for p, (_, bucket) in POINTS.items() for f in FAULTS if f != "keeps a tensor" or bucket is not None]


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((16, 16), value) for i in range(BUCKETS)}


def serving(subscriber: Subscriber, held: dict[str, torch.Tensor]) -> str:
    """old, new or TORN, and the parameters are exactly that."""
    if subscriber.state is State.TORN:
        return "TORN"
    version = subscriber.ensure_serving()
    assert {float(v) for tensor in held.values() for v in tensor.flatten().tolist()} == {float(version)}
    return {1: "old", 2: "new"}[version]


def check_error(error: BaseException | None, kind: type[WeightliftError], phase: str, bucket: int | None, peer: str | None) -> None:
    assert type(error) is kind, error
    assert isinstance(error, WeightliftError)
    assert (error.phase, error.version, error.peer) == (phase, 2, peer)
    expected = (None, None, None) if bucket is None else (bucket, BUCKETS, f"w{bucket}")
    assert (error.bucket, error.buckets, error.tensor) == expected


def struck(kind: str, count: int, strike: Callable[[KeepingLoader, FaultySource], None]) -> tuple[Outcome, dict[str, str]]:
    """Two rounds, the second one struck, then a good one; what became of the second."""
    sent = tensors(1.0)
    held = {f"engine-{i}": tensors(-1.0) for i in range(count)}
    loaders = {name: KeepingLoader(MappingLoader(mine)) for name, mine in held.items()}
    source = FaultySource(MappingSource(sent))
    with pair(source, loaders, transport="memory", slot_bytes=1024, deadlines=SHORT) as ends:
        ends.sync(1).raise_any()
        for tensor in sent.values():
            tensor.fill_(2.0)
        strike(loaders[VICTIM], source)
        outcome = ends.sync(2, timeout_s=20.0)
        serves = {name: serving(subscriber, held[name]) for name, subscriber in zip(held, ends.subscribers, strict=True)}
        assert (ends.publisher.version == 2) == ("new" in serves.values()) or kind == COMMIT_STALLS
        loaders[VICTIM].keep = None
        loaders[VICTIM].kept.clear()
        for tensor in sent.values():
            tensor.fill_(3.0)
        ends.sync(3).raise_any()
        assert {float(t.min()) for mine in held.values() for t in mine.values()} == {3.0}
    return outcome, serves


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("point", "fault"), CELLS)
def test_an_engine_is_struck(point: str, fault: str, count: int) -> None:
    phase, bucket = POINTS[point]
    stalled = threading.Event()

    def strike(loader: KeepingLoader, source: FaultySource) -> None:
        act = {"stop": lambda: stalled.wait(STALL_S) and None, "raise": raising(KeyError("struck"))}
        act["clean-up raises"] = act["raise"]
        if fault in act:
            loader.faults[:] = [fail_at(CALLS[phase], act[fault], bucket=bucket)]
        if fault == "clean-up raises":
            loader.faults.append(fail_at("abort", raising(RuntimeError("second"))))
        loader.keep = bucket if fault == "keeps a tensor" else None

    outcome, serves = struck(f"{point} {fault}", count, strike)
    untouched = phase == "PREPARE"
    others = {serves[name] for name in serves if name != VICTIM}
    row = {"transport": "memory", "who": "engine", "phase": point, "fault": fault, "subscribers": count}
    if fault == "none":
        outcome.raise_any()
        assert set(serves.values()) == {"new"}
        record({**row, "error": "", "struck": "new", "others": "new"})
        return
    kind = TransferTimeout if fault == "stop" else LoaderError
    # An engine that knows the manifest says nothing before it is ready: to the publisher it has not answered the announcement.
    seen = "ANNOUNCE" if fault == "stop" and phase == "PREPARE" else phase
    check_error(outcome.error, kind, seen, bucket, VICTIM)
    if fault in ("raise", "clean-up raises"):
        assert "KeyError: 'struck'" in str(outcome.error)
    if fault == "stop" and phase == "COMMIT":
        assert outcome.failed == {}, "it was told to commit: it serves the new version, completely"
    else:
        assert VICTIM in outcome.failed
    assert others <= ({"old"} if untouched else {"new"})
    late = "new" if fault == "stop" and phase == "COMMIT" else "TORN"
    assert serves[VICTIM] == ("old" if untouched else late)
    error = "" if outcome.error is None else type(outcome.error).__name__
    record({**row, "error": error, "struck": serves[VICTIM], "others": ", ".join(sorted(others))})


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("fault", ["none", "raise"])
@pytest.mark.parametrize("bucket", [0, BUCKETS // 2, BUCKETS - 1])
def test_the_publisher_is_struck(bucket: int, fault: str, count: int) -> None:
    def strike(loader: KeepingLoader, source: FaultySource) -> None:
        if fault == "raise":
            source.faults[:] = [fail_at("tensor", raising(KeyError("struck")), bucket=bucket)]

    outcome, serves = struck(f"transfer-{bucket}", count, strike)
    row = {"transport": "memory", "who": "publisher", "phase": f"transfer-{bucket}", "fault": fault, "subscribers": count}
    if fault == "none":
        outcome.raise_any()
        assert set(serves.values()) == {"new"}
        record({**row, "error": "", "struck": "", "others": "new"})
        return
    check_error(outcome.error, SourceError, "TRANSFER", bucket, None)
    for error in outcome.failed.values():
        check_error(error, SourceError, "TRANSFER", bucket, "publisher")
    assert sorted(outcome.failed) == sorted(serves)
    assert set(serves.values()) == ({"old"} if bucket == 0 else {"TORN"})
    record({**row, "error": "SourceError", "struck": "", "others": next(iter(serves.values()))})
