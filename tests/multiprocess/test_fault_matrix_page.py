"""docs/failure-model.md shows what the cells of this session saw. Runs after them: the files of the matrix sort before this one."""

import importlib.util
import pathlib
import types

import pytest
from matrix_rows import ROWS
from test_fault_matrix import PEER_CELLS, POINTS, PUBLISHER_CELLS
from test_fault_matrix_memory import CELLS

pytestmark = pytest.mark.multiprocess

COUNTS = 2
ALL = COUNTS * (len(PEER_CELLS) + len(PUBLISHER_CELLS) + 2 * len(POINTS) + len(CELLS) + 6)
"""Every cell of both files, with one and with three engines: the last two terms are the twins and the publisher's on memory."""


def script() -> types.ModuleType:
    path = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "make_matrix.py"
    spec = importlib.util.spec_from_file_location("make_matrix", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_what_was_seen() -> None:
    if len(ROWS) < ALL:
        pytest.skip(f"only {len(ROWS)} of {ALL} cells ran, or passed, in this session: run the whole folder")
    assert len(ROWS) == ALL
    module = script()
    assert module.shown() == module.tables(ROWS).strip(), "make matrix"
