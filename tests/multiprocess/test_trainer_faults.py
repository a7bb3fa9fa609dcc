"""A failure on any rank of a trainer never leaves another one inside a gather: all raise, in bounded time, with the first cause.

Each fault is followed by a publish that works, wherever the ranks are still there; the plain publish before it is its twin.
"""

import signal
import time
from typing import Any

import pytest
import torch

import trainer_crew
import weightlift
from trainer_crew import Engine, Ranks, reference, stage
from weightlift.testing.processes import Leftovers, Worker
from weightlift.transports.endpoint import release_addresses

pytestmark = pytest.mark.multiprocess
BOUND_S = 30.0
KINDS = ["fsdp2", "fsdp1"]


def sync(ranks: Ranks, engines: list[Engine], version: int, model: torch.nn.Module) -> None:
    """A publish that works, on everybody."""
    for engine in engines:
        engine.pull()
    answers = ranks.ask("publish", version=version)
    assert [answer.get("version") for answer in answers] == [version] * len(ranks.workers), answers
    for engine in engines:
        assert engine.join().version == version, engine.outcome
        assert engine.wrong(reference(model)) == []


def fail(ranks: Ranks, engines: list[Engine], version: int, among: list[int] | None = None, **late: float) -> list[dict[str, Any]]:
    """A publish that fails; what every rank raised. Bounded."""
    start = time.monotonic()
    for engine in engines:
        engine.pull()
    ranks.tell("publish", among, version=version, **late)
    answers = [answer if "striking" not in answer else ranks.hear([0])[0] for answer in ranks.hear(among, BOUND_S)]
    for engine in engines:
        engine.join(BOUND_S)
    assert time.monotonic() - start < BOUND_S
    assert all("error" in answer for answer in answers), answers
    return [answer["error"] for answer in answers]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_whose_part_raises(kind: str, size: int) -> None:
    with stage(kind, size) as (ranks, engines, model, _):
        sync(ranks, engines, 1, model)
        digests = ranks.ask("digest")
        for rank, at in [(1, 0), (size - 1, 2)]:
            ranks.ask("arm", [rank], at=at, act="raise")
            errors = fail(ranks, engines, 2)
            assert {error["type"] for error in errors} == {"SourceError"}, errors
            for error in errors:
                assert "cosmic ray in the shard" in error["text"], error
                assert "ValueError" in (error["cause"] or "") + error["text"], error
            others = [error["text"] for place, error in enumerate(errors) if place != rank]
            if rank:
                assert all(f"rank {rank} of the trainer" in text for text in others), others
            assert ranks.ask("digest") == digests, "a failed sync changed the trainer"
            assert isinstance(engines[0].outcome, Exception)
            assert "cosmic ray" in str(engines[0].outcome)
        sync(ranks, engines, 2, model)
        ranks.end()


@pytest.mark.parametrize("kind", [*KINDS, "ddp"])
def test_an_engine_that_fails(kind: str) -> None:
    with stage(kind, 2) as (ranks, engines, model, _):
        sync(ranks, engines, 1, model)
        digests = ranks.ask("digest")
        engines[0].fault = ValueError("bad shape for w7")
        errors = fail(ranks, engines, 2)
        assert {error["type"] for error in errors} == {"LoaderError"}, errors
        assert all("bad shape for w7" in error["text"] for error in errors)
        assert all(error["peer"] == "engine-0" for error in errors)
        assert ranks.ask("digest") == digests
        engines[0].fault = None
        sync(ranks, engines, 2, model)
        ranks.end()


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_refuses_before_the_first_byte(kind: str) -> None:
    with stage(kind, 2) as (ranks, engines, model, _):
        engines[0].held["more"] = torch.zeros(3)
        errors = fail(ranks, engines, 1)
        assert {error["type"] for error in errors} == {"MissingParameter"}, errors
        del engines[0].held["more"]
        sync(ranks, engines, 1, model)
        ranks.end()


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_stalls(kind: str) -> None:
    with stage(kind, 2) as (ranks, engines, model, _):
        sync(ranks, engines, 1, model)
        engines[0].slow_s = 5.0
        errors = fail(ranks, engines, 2)
        assert {error["type"] for error in errors} == {"TransferTimeout"}, errors
        assert all("engine-0 did not acknowledge bucket" in error["text"] for error in errors), errors
        engines[0].slow_s = 0.0
        sync(ranks, engines, 2, model)
        ranks.end()


def test_an_engine_that_is_killed() -> None:
    address = weightlift.new_address()
    ranks = Ranks("fsdp2", 2, [address])
    try:
        with Worker(trainer_crew.__file__, "engine_main", address=address) as engine:
            assert engine.hear() == {"ready": True}
            ranks.ask("wait", count=1)
            ranks.tell("publish", version=1)
            assert engine.hear() == {"installing": 0}
            engine.signal(signal.SIGKILL)
            errors = [answer["error"] for answer in ranks.hear(None, BOUND_S)]
        assert {error["type"] for error in errors} == {"PeerLost"}, errors
        assert all(error["peer"] == "lost" for error in errors), errors
        ranks.end()
    finally:
        ranks.close()


def test_what_the_packer_finds_is_raised_on_every_rank() -> None:
    """A NaN on one rank, seen by the sender when it packs the whole tensor."""
    with stage("fsdp2", 2, check_finite=True) as (ranks, engines, model, _):
        sync(ranks, engines, 1, model)
        ranks.ask("nan", [1])
        errors = fail(ranks, engines, 2)
        assert {error["type"] for error in errors} == {"NonFiniteTensor"}, errors
        assert len({error["tensor"] for error in errors}) == 1
        assert errors[0]["tensor"] is not None


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_is_slower_than_every_deadline_between_ranks(kind: str) -> None:
    """Five buckets, longer than gather_s in all: the ranks that wait for the sender see that it lives, and do not give up."""
    with stage(kind, 2) as (ranks, engines, model, _):
        engines[0].slow_s = 1.2
        sync(ranks, engines, 1, model)
        ranks.end()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("act", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP), ("hang", None)])
def test_a_rank_that_dies_stops_or_hangs_in_a_gather(kind: str, act: str, number: int | None) -> None:
    with stage(kind, 4) as (ranks, engines, model, _):
        sync(ranks, engines, 1, model)
        ranks.ask("arm", [2], at=1, act=act)
        for engine in engines:
            engine.pull()
        start = time.monotonic()
        ranks.tell("publish", version=2)
        answers = ranks.hear([0, 1, 3], BOUND_S)
        assert time.monotonic() - start < BOUND_S
        errors = [answer["error"] for answer in answers]
        expected = {"kill": {"PeerLost"}, "stop": {"TransferTimeout"}, "hang": {"TransferTimeout"}}[act]
        assert {error["type"] for error in errors} <= expected, errors
        assert all("rank 2 of the trainer" in error["text"] for error in errors), errors
        assert isinstance(engines[0].join(), Exception)
        if act == "hang":  # it comes back, and is told
            assert ranks.workers[2].hear() == {"striking": "hang"}
            late = ranks.workers[2].hear(60.0)
            assert "error" in late, late
            sync(ranks, engines, 2, model)
            ranks.end()


@pytest.mark.parametrize("kind", KINDS)
def test_the_sending_rank_dies(kind: str) -> None:
    with stage(kind, 2) as (ranks, engines, model, _):
        sync(ranks, engines, 1, model)
        engines[0].slow_s = 60.0
        engines[0].before_install.clear()
        engines[0].pull()
        ranks.tell("publish", version=2)
        assert engines[0].before_install.wait(20.0)
        ranks.workers[0].signal(signal.SIGKILL)
        (answer,) = ranks.hear([1], BOUND_S)
        assert answer["error"]["type"] == "PeerLost", answer
        assert answer["version"] == 1


def test_a_rank_that_does_not_come_and_one_that_comes_late() -> None:
    with stage("fsdp2", 2, limits={"announce_s": 2.0}) as (ranks, engines, model, _):
        sync(ranks, engines, 1, model)
        engines[0].pull()
        ranks.tell("publish", [0], version=2)
        (answer,) = ranks.hear([0], BOUND_S)
        assert answer["error"]["type"] == "TransferTimeout", answer
        assert "rank 1 of the trainer did not call publish(2)" in answer["error"]["text"]
        for _ in range(3):  # it misses some more: what the others said then is long gone from the store
            ranks.tell("publish", [0], version=2)
            (answer,) = ranks.hear([0], BOUND_S)
            assert "rank 1 of the trainer did not call publish(2)" in answer["error"]["text"]
        # Late: it does not find a round that is over, but the one that the other begins now.
        ranks.tell("publish", version=2)
        answers = ranks.hear(None, BOUND_S)
        assert [answer.get("version") for answer in answers] == [2, 2], answers
        assert engines[0].join().version == 2
        ranks.end()


def test_ranks_that_disagree() -> None:
    with stage("fsdp2", 2) as (ranks, engines, model, _):
        ranks.tell("publish", [0], version=1)
        ranks.tell("publish", [1], version=2)
        errors = [answer["error"] for answer in ranks.hear(None, BOUND_S)]
        assert {error["type"] for error in errors} == {"SourceError"}, errors
        assert all("about to publish" in error["text"] for error in errors)
        sync(ranks, engines, 1, model)
        ranks.end()


def test_nothing_is_left_and_the_pulse_stops() -> None:
    before = Leftovers()
    with stage("fsdp2", 2) as (ranks, engines, _model, _):
        for version in range(1, 6):
            engines[0].pull()
            answers = ranks.ask("publish", version=version)
            assert [answer["version"] for answer in answers] == [version] * 2
            assert engines[0].join().version == version
        engines[0].pull()
        ranks.ask("publish", version=6)
        engines[0].join()
        ranks.end()
    release_addresses()
    before.check()


EACH = ["fsdp2", "fsdp1", "ddp"]


@pytest.mark.parametrize("kind", EACH)
def test_where_each_rank_sends_no_engine_commits_alone(kind: str) -> None:
    with stage(kind, 2, senders="each") as (ranks, engines, model, _):
        sync(ranks, engines, 1, model)
        digests = ranks.ask("digest")

        engines[1].held["more"] = torch.zeros(3)  # refused before the first byte: nobody is touched
        errors = fail(ranks, engines, 2)
        assert {error["type"] for error in errors} == {"MissingParameter"}, errors
        assert "rank 1 of the trainer" in errors[0]["text"]
        assert [engine.subscriber.version for engine in engines] == [1, 1]
        assert [str(engine.subscriber.state) for engine in engines] == ["SERVING", "SERVING"]
        del engines[1].held["more"]
        version = 2

        engines[1].fault = ValueError("bad shape for w7")  # touched: the other one has everything, and does not commit
        errors = fail(ranks, engines, version)
        assert {error["type"] for error in errors} == {"LoaderError"}, errors
        assert all("bad shape for w7" in error["text"] for error in errors)
        assert [engine.subscriber.version for engine in engines] == [None, None]
        assert [str(engine.subscriber.state) for engine in engines] == ["TORN", "TORN"]
        engines[1].fault = None
        assert ranks.ask("digest") == digests
        sync(ranks, engines, version, model)
        ranks.end()


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_where_each_rank_sends_a_rank_that_dies_is_named_by_the_others(kind: str) -> None:
    with stage(kind, 2, senders="each") as (ranks, engines, model, _):
        sync(ranks, engines, 1, model)
        engines[1].slow_s = 60.0
        engines[1].before_install.clear()
        for engine in engines:
            engine.pull()
        ranks.tell("publish", version=2)
        assert engines[1].before_install.wait(20.0)
        ranks.workers[1].signal(signal.SIGKILL)
        (answer,) = ranks.hear([0], BOUND_S)
        assert answer["error"]["type"] == "PeerLost", answer
        assert "rank 1" in answer["error"]["text"]
        assert isinstance(engines[0].join(), Exception)
        assert engines[0].subscriber.version is None
        engines[1].slow_s = 0.0
