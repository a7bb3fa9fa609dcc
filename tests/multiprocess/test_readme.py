"""The README's two code blocks, run as two processes."""

import pathlib
import re
import subprocess
import sys

import pytest

from weightlift import new_address

README = pathlib.Path(__file__).resolve().parents[2] / "README.md"

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("nothing_left")]


def test_the_readme_works(tmp_path: pathlib.Path) -> None:
    blocks = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", README.read_text(), flags=re.DOTALL))
    assert set(blocks) == {"trainer.py", "engine.py"}
    address = new_address()
    running = {}
    for name, code in blocks.items():
        (tmp_path / name).write_text(code)
        command = [sys.executable, "-W", "error", str(tmp_path / name), address]
        running[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = {name: process.communicate(timeout=90)[0] for name, process in running.items()}
    assert output["engine.py"].splitlines() == [f"serving {v}: {v}" for v in (1, 2, 3)], output
    assert output["trainer.py"].splitlines() == [f"published {v}: 40 bytes over shm" for v in (1, 2, 3)], output
