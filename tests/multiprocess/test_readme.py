"""The README's code blocks, run as the processes that they are meant to be."""

import pathlib
import re
import subprocess
import sys

import pytest

from weightlift import new_address

README = pathlib.Path(__file__).resolve().parents[2] / "README.md"

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("nothing_left")]


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(tmp_path: pathlib.Path, *names: str) -> dict[str, str]:
    """The output of some blocks that run together."""
    blocks = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", README.read_text(), flags=re.DOTALL))
    assert set(blocks) == {"trainer.py", "engine.py", "sharded.py"}
    address = new_address()
    running = {}
    for name in names:
        (tmp_path / name).write_text(blocks[name])
        how = TORCHRUN if name == "sharded.py" else ["-W", "error"]
        command = [sys.executable, *how, str(tmp_path / name), address]
        running[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return {name: process.communicate(timeout=90)[0] for name, process in running.items()}


def test_the_readme_works(tmp_path: pathlib.Path) -> None:
    output = run(tmp_path, "trainer.py", "engine.py")
    assert output["engine.py"].splitlines() == [f"serving {v}: {v}" for v in (1, 2, 3)], output
    assert output["trainer.py"].splitlines() == [f"published {v}: 40 bytes over shm" for v in (1, 2, 3)], output


def test_the_sharded_trainer_of_the_readme_works(tmp_path: pathlib.Path) -> None:
    output = run(tmp_path, "sharded.py", "engine.py")
    assert output["engine.py"].splitlines() == [f"serving {v}: {v}" for v in (1, 2, 3)], output
    said = [line for line in output["sharded.py"].splitlines() if "published" in line]
    assert sorted(said) == [f"rank {rank} published {v}" for rank in (0, 1) for v in (1, 2, 3)], output
