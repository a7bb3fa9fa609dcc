"""Sharded trainers on the host and back, and shards that are saved and restored, on real ranks: exact to the bit, nothing skipped."""

import signal
import time

import pytest
import torch

from trainer_crew import reference, stage, train_step

pytestmark = pytest.mark.multiprocess

KINDS = {
    "fsdp2": "FSDP2Offload",
    "fsdp2:ignored": "FSDP2Offload",
    "fsdp1": "FSDP1Offload",
    "fsdp1:flat": "FSDP1Offload",
    "fsdp1:grad_op": "FSDP1Offload",
    "fsdp1:no_shard": "FSDP1Offload",
    "ddp": "ModuleOffload",
}


@pytest.mark.parametrize("kind", KINDS)
def test_offload_load_and_train_on(kind: str) -> None:
    with stage(kind, 2) as (ranks, (engine,), model, optimiser):
        for number in range(2):
            ranks.ask("step")
            train_step(model, optimiser)
            if number:
                ranks.ask("eval")  # a root that is whole is given back, too
            before = ranks.ask("digest")
            for answer in ranks.ask("offload"):
                assert answer["handler"] == KINDS[kind]
                assert answer["moved"] == answer["before"] > 0
                assert answer["left"] == 0
            ranks.ask("load")
            assert ranks.ask("digest") == before
        if number:
            with torch.no_grad():
                model(torch.zeros(2, 11, dtype=torch.int64))
        ranks.ask("step")
        train_step(model, optimiser)
        engine.pull()
        assert [a.get("version") for a in ranks.ask("publish", version=1)] == [1, 1]
        engine.join()
        torch.testing.assert_close(engine.held, reference(model), rtol=1e-5, atol=1e-6)
        ranks.ask("offload")
        engine.pull(5.0)  # a trainer that keeps whole copies finds it before the round
        errors = [a["error"] for a in ranks.ask("publish", version=2)]
        assert {e["type"] for e in errors} == {"SourceError"}, errors
        assert all("storage" in e["text"] or "freed" in e["text"] for e in errors), errors
        engine.join()
        assert engine.subscriber.version == 1
        ranks.ask("load")
        engine.pull()
        assert [a.get("version") for a in ranks.ask("publish", version=2)] == [2, 2]
        assert engine.join().version == 2
        ranks.end()


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1:flat", "fsdp2", "ddp"])
def test_the_asynchronous_pattern_save_train_on_restore(kind: str) -> None:
    """One step on the side and back: the bits of weights and optimizer state, and what is trained then, are as if it never was."""
    with stage(kind, 2) as (ranks, (engine,), model, optimiser):
        ranks.ask("step")
        train_step(model, optimiser)
        ranks.tell("snapshot", [0])
        ranks.tell("snapshot", [1], failure=True)
        first, second = (answer["error"] for answer in ranks.hear())
        assert second["type"] == "ZeroDivisionError"
        assert "rank 1 cannot go on: ZeroDivisionError" in first["text"], first
        for _ in range(2):
            before = ranks.ask("digest")
            assert [a.get("error") for a in ranks.ask("snapshot")] == [None, None]
            ranks.ask("step")
            assert all(a != b for a, b in zip(ranks.ask("digest"), before, strict=True))
            assert [a.get("error") for a in ranks.ask("restore")] == [None, None]
            assert ranks.ask("digest") == before
        ranks.ask("step")
        train_step(model, optimiser)
        engine.pull()
        assert [a.get("version") for a in ranks.ask("publish", version=1)] == [1, 1]
        engine.join()
        torch.testing.assert_close(engine.held, reference(model), rtol=1e-5, atol=1e-6)
        ranks.end()


def test_the_barrier_waits_for_a_slow_rank_and_names_a_stopped_one() -> None:
    with stage("ddp", 3) as (ranks, _, _model, _optimiser):
        ranks.tell("meet", [0, 1], timeout_s=20.0)
        ranks.tell("meet", [2], timeout_s=20.0, late_s=1.0)
        ranks.hear()
        failed = [a["error"] for a in _meet_with_a_failure(ranks)]
        assert "no room on this device" in failed[2]["text"]
        assert all(e["type"] == "HandoffError" and "rank 2 cannot go on: RuntimeError: no room" in e["text"] for e in failed[:2])
        ranks.workers[1].signal(signal.SIGSTOP)
        start = time.monotonic()
        ranks.tell("meet", [0, 2], timeout_s=1.5)
        errors = [a["error"] for a in ranks.hear([0, 2])]
        assert time.monotonic() - start < 15.0
        assert all(e["type"] == "BarrierTimeout" and "rank 1 of 3 did not come" in e["text"] for e in errors), errors


def _meet_with_a_failure(ranks):  # type: ignore[no-untyped-def]
    ranks.tell("meet", [0, 1], timeout_s=20.0)
    ranks.tell("meet", [2], timeout_s=20.0, failure="no room on this device")
    return ranks.hear()
