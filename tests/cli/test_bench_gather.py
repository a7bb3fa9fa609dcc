"""`weightlift bench gather` at a size that a test can afford: every tensor right, memory within two layer groups."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("trainer", ["fsdp1", "fsdp2"])
def test_the_gather_is_right_and_stays_within_two_layer_groups(trainer: str) -> None:
    command = [sys.executable, "-m", "weightlift.cli", "bench", "gather", "--trainer", trainer, "--rounds", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong_tensors"] == 0
    assert found["tensors"] == 310
    assert found["ours_peak_bytes"] <= 2 * found["layer_group_bytes"]
    assert found["ours_peak_bytes"] < found["plain_peak_bytes"]
