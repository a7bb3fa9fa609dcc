"""`weightlift train` as a user runs it: two real processes. Whatever ends the run, nothing is left."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from weightlift.rl.rollout import EXIT_ORPHANED
from weightlift.verify.explain import explain
from weightlift.verify.snapshot import load_digests, load_tensors

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SMALL = [
    "--tiny.hidden-size",
    "32",
    "--tiny.layers",
    "1",
    "--tiny.heads",
    "2",
    "--problems.pool",
    "400",
    "--problems.held-out",
    "16",
]
SMALL += ["--warm-start.steps", "2", "--sampling.prompts", "8", "--threads", "1"]
LONG = ["--steps", "100000"]
STARTED_S = 60.0
ENDED_S = 20.0


def alive(pid):
    """Whether the process still runs; a zombie, which only waits for a parent to read its exit code, does not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid):
    try:
        return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def wait_until(condition, timeout_s, what):
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"after {timeout_s} s still not: {what}"
        time.sleep(0.05)
    return value


class Run:
    """One `weightlift train` in a process group and a temporary directory of its own."""

    def __init__(self, tmp_path, *arguments):
        self.out = tmp_path / "run"
        # Not below tmp_path: the path of a Unix socket is limited to 107 bytes, and pytest's paths are long.
        self.tmp = pathlib.Path(tempfile.mkdtemp(prefix="wl-test-", dir="/tmp"))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "weightlift.cli.train", "--out", str(self.out), *SMALL, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # torch makes a cache directory below TMPDIR when it is imported; that one is not ours to remove.
            env={
                **os.environ,
                "TMPDIR": str(self.tmp),
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
                "HF_HUB_OFFLINE": "1",
            },
        )
        self.rollout = None

    def records(self):
        try:
            return [
                json.loads(line)
                for line in (self.out / "metrics.jsonl").read_text().splitlines(keepends=True)
                if line.endswith("\n")
            ]
        except FileNotFoundError:
            return []

    def wait_for_steps(self, count):
        def there():
            assert self.process.poll() is None, self.process.communicate()
            return len(self.records()) >= count

        wait_until(there, STARTED_S, f"{count} steps")
        (self.rollout,) = [pid for pid in children(self.process.pid) if b"weightlift.rl.rollout" in cmdline(pid)]

    def finish(self, timeout_s=ENDED_S):
        output, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output, errors

    def assert_nothing_left(self):
        wait_until(lambda: not alive(self.rollout), ENDED_S, "the rollout process is gone")
        wait_until(lambda: not list(self.tmp.iterdir()), ENDED_S, f"no files left, but {list(self.tmp.rglob('*'))}")

    def kill(self):
        for pid in (self.process.pid, self.rollout):
            if pid is not None and alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()
        shutil.rmtree(self.tmp, ignore_errors=True)


def cmdline(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@pytest.fixture
def start(tmp_path):
    runs = []

    def start_run(*arguments):
        runs.append(Run(tmp_path, *arguments))
        return runs[-1]

    yield start_run
    for run in runs:
        run.kill()


def test_every_step_is_sampled_with_the_version_before_it_and_ends_in_one_sync(start):
    run = start("--steps", "4", "--sync")
    code, output, errors = run.finish(STARTED_S)
    assert (code, errors) == (0, "")
    records = run.records()
    assert [record["version"] for record in records] == [1, 2, 3, 4]
    assert [record["sample_versions"] for record in records] == [{"0": 64}, {"1": 64}, {"2": 64}, {"3": 64}]
    assert [record["sync"]["version"] for record in records] == [1, 2, 3, 4]
    assert {path.name for path in run.out.iterdir()} == {
        "metrics.jsonl",
        "summary.json",
        "plot.png",
        "config.json",
        "rollout-0.log",
        "trainer.safetensors",
        "rollout-0.safetensors",
        "digests.jsonl",
    }
    trainer, engine = (load_tensors(run.out / f"{name}.safetensors") for name in ("trainer", "rollout-0"))
    history = load_digests(run.out / "digests.jsonl")
    assert sorted(history) == [0, 1, 2, 3, 4]
    assert explain(trainer, engine, history) == []
    assert str(run.out) in output
    assert not list(run.tmp.iterdir())


def test_without_sync_every_step_is_sampled_with_the_first_weights(start):
    run = start("--steps", "4", "--no-sync")
    code, _, errors = run.finish(STARTED_S)
    assert (code, errors) == (0, "")
    records = run.records()
    assert [record["sample_versions"] for record in records] == [{"0": 64}] * 4
    assert [(record["version"], record["sync"]) for record in records] == [(0, None)] * 4
    summary = json.loads((run.out / "summary.json").read_text())
    assert summary["held_out_before"] == summary["held_out_after"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_both_processes_and_keeps_the_files(start, number, code):
    run = start(*LONG)
    run.wait_for_steps(2)
    # As Ctrl-C in a terminal does it: to the whole foreground group, twice.
    os.killpg(run.process.pid, number)
    time.sleep(0.1)
    if run.process.poll() is None:
        os.killpg(run.process.pid, number)
    returncode, _, errors = run.finish()
    assert returncode == code
    assert "Traceback" not in errors
    assert errors.startswith("stopped; ")
    assert not alive(run.rollout)
    run.assert_nothing_left()
    assert [record["step"] for record in run.records()] == list(range(1, len(run.records()) + 1))
    assert json.loads((run.out / "config.json").read_text())["steps"] == 100000


def test_ctrl_c_while_the_processes_still_start(start):
    run = start(*LONG)
    (run.rollout,) = wait_until(lambda: children(run.process.pid), STARTED_S, "a rollout process")
    run.process.send_signal(signal.SIGINT)
    code, _, errors = run.finish()
    assert code == 130
    assert "Traceback" not in errors
    run.assert_nothing_left()


def test_a_killed_rollout_process_ends_the_run_with_its_name(start):
    run = start(*LONG)
    run.wait_for_steps(2)
    os.kill(run.rollout, signal.SIGKILL)
    code, _, errors = run.finish()
    assert code == 1
    assert errors.startswith("PeerLost: ")
    assert "rollout-0" in errors
    assert "Traceback" not in errors
    run.assert_nothing_left()


def test_a_stopped_rollout_process_ends_the_run_at_the_deadline(start):
    run = start(*LONG, "--timeouts.generate-s", "1", "--timeouts.sync-s", "1", "--timeouts.stop-s", "1")
    run.wait_for_steps(2)
    os.kill(run.rollout, signal.SIGSTOP)
    code, _, errors = run.finish()
    assert code == 1
    assert errors.startswith(("TransferTimeout: ", "PeerLost: "))
    assert "rollout-0" in errors
    run.assert_nothing_left()


def test_a_killed_trainer_leaves_no_rollout_process(start):
    run = start(*LONG)
    run.wait_for_steps(2)
    run.process.kill()
    run.process.wait(ENDED_S)
    run.assert_nothing_left()


def test_an_orphan_ends_with_its_own_exit_code(tmp_path):
    """A rollout process whose parent is another than the trainer it was told of: the trainer is gone already."""
    settings = {
        "name": "rollout-0",
        "trainer_pid": 1,
        "weights_address": "",
        "samples_address": f"ipc://{tmp_path}/wl-samples-x/s",
        "model": None,
        "tiny": {"hidden_size": 32, "layers": 1, "heads": 2, "max_tokens": 64},
        "seed": 0,
        "threads": 1,
    }
    (tmp_path / "wl-samples-x").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "weightlift.rl.rollout"], input=json.dumps(settings).encode(), timeout=ENDED_S, check=False
    )
    assert done.returncode == EXIT_ORPHANED
    assert not (tmp_path / "wl-samples-x").exists()


def test_a_local_model_folder_is_trained(start, tmp_path):
    from weightlift.rl.config import TinyModelConfig
    from weightlift.rl.models import build_tiny

    made = build_tiny(TinyModelConfig(hidden_size=32, layers=1, heads=2, max_tokens=256), seed=0)
    made.model.save_pretrained(tmp_path / "model")
    made.tokenizer.save_pretrained(tmp_path / "model")
    run = start("--model", str(tmp_path / "model"), "--steps", "2", "--sampling.max-new-tokens", "4", "--warm-start.steps", "0")
    code, _, errors = run.finish(STARTED_S)
    assert (code, errors) == (0, "")
    assert [record["version"] for record in run.records()] == [1, 2]
    assert json.loads((run.out / "config.json").read_text())["task"] == "chain_sum"


def test_a_wrong_value_is_exit_code_two_and_starts_nothing(start):
    run = start("--task", "no_such_task")
    code, _, errors = run.finish(STARTED_S)
    assert code == 2
    assert errors.startswith("ConfigError: task must be")
