"""The files of a run."""

from __future__ import annotations

import json

import pytest

from weightlift.errors import ConfigError
from weightlift.rl.runlog import RunLog, StepRecord, Stopwatch, default_directory

PNG = b"\x89PNG\r\n\x1a\n"


def record(step, reward, *, synced=True):
    return StepRecord(
        step=step,
        version=step if synced else 0,
        reward_mean=reward,
        sample_versions={step - 1 if synced else 0: 8},
        sync={"version": step, "bytes": 10} if synced else None,
        sync_seconds=0.01 if synced else None,
        sync_gbps=0.5 if synced else None,
        loss=0.1,
        kl=0.0,
        clip_fraction=0.0,
        ratio_max=1.0,
        grad_norm=0.2,
        silent_groups=0.5,
        tokens=80,
        seconds={"total": 1.0},
    )


@pytest.mark.parametrize("synced", [True, False])
def test_a_finished_run_has_its_four_files(tmp_path, synced):
    rewards = [step / 100 for step in range(1, 26)]
    with RunLog(tmp_path / "run", {"seed": 3}) as log:
        for step, reward in enumerate(rewards, 1):
            log.step(record(step, reward, synced=synced))
        summary = log.finish({"held_out_after": 0.5})
    files = {path.name: path for path in (tmp_path / "run").iterdir()}
    assert set(files) == {"metrics.jsonl", "config.json", "summary.json", "plot.png"}
    assert json.loads(files["config.json"].read_text()) == {"seed": 3}
    assert json.loads(files["summary.json"].read_text()) == summary
    assert summary["reward_first"] == pytest.approx(sum(rewards[:10]) / 10)
    assert summary["reward_last"] == pytest.approx(sum(rewards[-10:]) / 10)
    assert (summary["steps"], summary["held_out_after"]) == (25, 0.5)
    assert summary["sync_seconds_mean"] == (pytest.approx(0.01) if synced else None)
    lines = [json.loads(line) for line in files["metrics.jsonl"].read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 26))
    assert lines[4]["sample_versions"] == ({"4": 8} if synced else {"0": 8})
    assert (lines[0]["sync"] is None) is not synced
    assert files["plot.png"].read_bytes().startswith(PNG)


def test_a_step_is_on_disk_as_soon_as_it_is_over(tmp_path):
    with RunLog(tmp_path, {}) as log:
        log.step(record(1, 0.5))
        assert json.loads((tmp_path / "metrics.jsonl").read_text())["reward_mean"] == 0.5


def test_a_directory_with_a_run_in_it_is_refused(tmp_path):
    RunLog(tmp_path, {"first": True}).close()
    with pytest.raises(ConfigError, match="out must be a directory without a run in it"):
        RunLog(tmp_path, {"first": False})
    assert json.loads((tmp_path / "config.json").read_text()) == {"first": True}


def test_a_place_that_cannot_be_a_directory_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="out must be"):
        RunLog(tmp_path / "file", {})


def test_default_directories_do_not_collide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("weightlift.rl.runlog.time.strftime", lambda form: "20260101-000000")
    first = default_directory()
    first.mkdir(parents=True)
    assert str(first) == "runs/20260101-000000"
    assert str(default_directory()) == "runs/20260101-000000-2"


def test_laps_add_up_to_the_total():
    watch = Stopwatch()
    watch.lap("one")
    watch.lap("two")
    seconds = watch.seconds()
    assert list(seconds) == ["one", "two", "total"]
    assert seconds["total"] == pytest.approx(seconds["one"] + seconds["two"])
