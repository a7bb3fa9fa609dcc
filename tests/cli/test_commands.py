"""The command line: what it lists, the doctor, and a small benchmark with its JSON."""

import json
import subprocess
import sys

import pytest

from weightlift.cli.doctor import examine
from weightlift.cli.main import main
from weightlift.transports import registry


def test_without_a_command_it_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    listed = capsys.readouterr().err
    assert [word for word in ("train", "bench shm", "doctor") if word not in listed] == []


def test_doctor_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--json"])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["transports"] == {"memory": "", "shm": ""}
    assert "torch" in found["versions"]


def test_doctor_says_why_a_transport_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))
    monkeypatch.setattr(registry, "_FAILURES", {})
    registry.register("broken", "a_module_that_is_not_there", sender=None, receiver=None)  # type: ignore[arg-type]
    assert "ModuleNotFoundError" in examine()["transports"]["broken"]


@pytest.mark.multiprocess
def test_bench_reports_ours_next_to_the_limit() -> None:
    command = [sys.executable, "-m", "weightlift.cli", "bench", "shm", "--workload", "empty", "--rounds", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong_tensors"] == 0
    assert found["shm_bytes"] <= 64 << 20
    assert {"ratio_to_limit", "gbps", "limit_gbps", "cpu_s", "shm_bytes", "tensors", "bytes", "phases"} <= set(found)
