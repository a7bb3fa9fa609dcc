"""What the cells of the fault matrix saw, one row each: kept for the page that shows them.

`record` is called by every cell that passed. `scripts/make_matrix.py` turns rows into the tables of docs/failure-model.md; a test
compares that page with the rows of its own session.
"""

import json
import os
import pathlib
from typing import Any

ROWS: list[dict[str, Any]] = []


def record(row: dict[str, Any]) -> None:
    """Keep a row; WEIGHTLIFT_MATRIX_OUT names a file that gets it as a line of JSON, too."""
    ROWS.append(row)
    out = os.environ.get("WEIGHTLIFT_MATRIX_OUT")
    if out:
        with pathlib.Path(out).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
