"""Whole runs of `weightlift train`: every kind of trainer learns the same, memory is handed over in order, a stopped run goes on."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

pytestmark = pytest.mark.multiprocess
TINY = ["--tiny.hidden-size", "48", "--tiny.layers", "2", "--tiny.heads", "2"]
START = ["--warm-start.steps", "120", "--warm-start.until-loss", "0.7"]
TASK = ["--problems.options", "min_word_len", "2", "max_word_len", "3", "--problems.held-out", "16"]
SMALL = [*TINY, *START, *TASK, "--sampling.prompts", "16", "--grpo.learning-rate", "1e-3"]
EXACT = ("step", "version", "sample_versions", "tokens", "reward_mean", "silent_groups")
"""What must be equal in two runs that should be the same run."""


def start(out: pathlib.Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "weightlift.cli", "train", "--out", str(out), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def train(out: pathlib.Path, *words: str) -> list[dict[str, Any]]:
    child = start(out, *words)
    text, _ = child.communicate(timeout=110)
    assert child.returncode == 0, text
    return rows(out)


def rows(out: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def kind(name: str) -> list[str]:
    return ["--trainer", name, *([] if name == "single" else ["--trainer-processes", "2"])]


def summary(out: pathlib.Path) -> dict[str, Any]:
    return json.loads((out / "summary.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Four steps in one process, with one thread: what all other runs are compared with."""
    steps = train(tmp_path_factory.mktemp("whole") / "run", *SMALL, "--steps", "4", "--threads", "1")
    assert all(row["reward_mean"] > 0 and row["grad_norm"] > 0 for row in steps), (
        "nothing is learned: the comparisons would be empty"
    )
    return steps


def same(found: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    """The gradient of two ranks is a sum in another order: losses agree to 1e-4, and the samples drawn after it exactly, over a few
    steps. One thread for each rank, for the same reason."""
    assert [{key: row[key] for key in EXACT} for row in found] == [{key: row[key] for key in EXACT} for row in want]
    for row, other in zip(found, want, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-4)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("name", ["ddp", "fsdp1", "fsdp2"])
def test_every_kind_of_trainer_learns_the_same(tmp_path: pathlib.Path, whole: list[dict[str, Any]], name: str) -> None:
    same(train(tmp_path / "run", *kind(name), *SMALL, "--steps", "4", "--threads", "2"), whole)


@pytest.mark.parametrize(("name", "threads"), [("single", "1"), ("fsdp1", "2")])
def test_a_colocated_run_hands_memory_over_in_order_and_learns_the_same(
    tmp_path: pathlib.Path, whole: list[dict[str, Any]], name: str, threads: str
) -> None:
    steps = train(tmp_path / "run", *kind(name), *SMALL, "--steps", "4", "--threads", threads, "--colocate")
    same(steps, whole)
    arrows = [entry["arrow"] for entry in steps[-1]["handoff"]]
    assert arrows == ["sleep", "load", "update", "release", "wake_empty", "publish", "offload", "settle", "meet", "wake_kv"]
    at = {entry["arrow"]: entry for entry in steps[-1]["handoff"]}
    assert at["update"]["allocated"] > 0
    assert not any(who.startswith("rollout") for who in at["update"]["holders"]), "the engine sleeps while the trainer trains"
    assert at["settle"]["allocated"] == 0
    assert not any(who.startswith("trainer") for who in at["meet"]["holders"]), "every rank has left when the barrier opens"
    assert at["wake_kv"]["holders"]["rollout-0/kv_cache"] > 0
    done = summary(tmp_path / "run")
    assert done["device_bytes_peak"] <= done["device_bytes"]
    # The budget is tight: an engine that had woken before the trainer left would not have fitted.
    assert at["wake_kv"]["device_used"] + at["update"]["allocated"] > done["device_bytes"]


def test_a_colocated_engine_may_keep_its_weights_through_a_step_without_a_sync(tmp_path: pathlib.Path) -> None:
    steps = train(tmp_path / "run", *SMALL, "--steps", "2", "--colocate", "--no-sync", "--sleep-level", "1")
    assert [row["sample_versions"] for row in steps] == [{"0": 128}, {"0": 128}]
    assert [entry["arrow"] for entry in steps[1]["handoff"]][3:6] == ["release", "wake_weights", "reuse"]


@pytest.mark.parametrize(("name", "more"), [("single", ["--threads", "1"]), ("fsdp2", ["--threads", "2", "--colocate"])])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(
    tmp_path: pathlib.Path, whole: list[dict[str, Any]], name: str, more: list[str]
) -> None:
    part = tmp_path / "part"
    train(part, *kind(name), *SMALL, *more, "--steps", "3", "--checkpoint-every", "1")
    (part / "checkpoints" / "step-3" / "state.json").unlink()  # killed while it was written: it does not count
    same(train(tmp_path / "rest", "--resume", str(part), "--steps", "4"), whole[2:])


def test_a_run_without_a_checkpoint_is_not_resumed(tmp_path: pathlib.Path) -> None:
    child = start(tmp_path / "rest", "--resume", str(tmp_path))
    text, _ = child.communicate(timeout=60)
    assert child.returncode == 2, text
    assert "resume must be" in text


@pytest.mark.parametrize("victim", ["trainer", "leader"])
def test_when_a_trainer_rank_is_killed_nothing_is_left_running(tmp_path: pathlib.Path, victim: str) -> None:
    out = tmp_path / "run"
    child = start(out, *kind("fsdp2"), *SMALL, "--steps", "100000")
    deadline = time.monotonic() + 60
    while not ((out / "metrics.jsonl").exists() and rows(out)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    children = descendants(child.pid)
    (rank,) = [pid for pid in children if "weightlift.rl.rank" in command_of(pid)]
    os.kill(rank if victim == "trainer" else child.pid, signal.SIGKILL)
    text, _ = child.communicate(timeout=60)
    if victim == "trainer":
        assert child.returncode == 1, text
        assert "trainer" in text
    while alive := [pid for pid in children if "weightlift" in command_of(pid)]:
        assert time.monotonic() < deadline + 60, alive
        time.sleep(0.1)


def descendants(pid: int) -> list[int]:
    found = []
    for task in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def command_of(pid: int) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
