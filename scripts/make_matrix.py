"""Puts the results of the fault matrix into docs/failure-model.md, between its two marks.

`make matrix` runs the cells and then `python scripts/make_matrix.py RESULTS.jsonl`. tests/multiprocess/test_fault_matrix_page.py
compares the page with the results of its own session.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "failure-model.md"
BEGIN = "<!-- the tables below are made by `make matrix` from the results of the tests -->"
END = "<!-- end of the tables -->"
PHASES = ["announce", "prepare", "transfer-0", "transfer-4", "transfer-7", "release", "commit"]
FAULTS = {
    "none": "nothing",
    "raise": "raises",
    "clean-up raises": "raises, and its clean-up too",
    "keeps a tensor": "keeps a tensor",
    "kill": "SIGKILL",
    "kill group": "SIGKILL to its group",
    "stop": "SIGSTOP",
}

Row = dict[str, Any]


def tables(rows: Iterable[Row]) -> str:
    """The tables, as they stand in the page."""
    kept = list(rows)
    parts = []
    for transport in ("shm", "memory"):
        for who in ("engine", "publisher"):
            some = [row for row in kept if (row["transport"], row["who"]) == (transport, who)]
            if some:
                parts += [_title(transport, who), *_table(some), ""]
    return "\n".join(parts)


def _title(transport: str, who: str) -> str:
    what = {
        "engine": "an engine is struck: what `publish` raises / the engine then serves / the other engines then serve",
        "publisher": "the publisher is struck: what every `pull` raises / every engine then serves",
    }
    return f"### `{transport}`: {what[who]}\n"


def _table(rows: list[Row]) -> Iterator[str]:
    faults = [fault for fault in FAULTS if any(row["fault"] == fault for row in rows)]
    stalls = {"stop": "stalls"} if rows[0]["transport"] == "memory" else {}
    yield "| phase | " + " | ".join(stalls.get(fault, FAULTS[fault]) for fault in faults) + " |"
    yield "|---" * (len(faults) + 1) + "|"
    for phase in PHASES:
        cells = [_cell([row for row in rows if row["phase"] == phase and row["fault"] == fault]) for fault in faults]
        if any(cells):
            yield f"| {phase} | " + " | ".join(cells) + " |"


def _cell(rows: list[Row]) -> str:
    """One engine and three must agree in everything but the others, of whom one engine has none."""
    if not rows:
        return ""
    seen = {(row["error"], row["struck"]) for row in rows}
    others = {row["others"] for row in rows if row["others"]}
    assert len(seen) == 1, f"one and three engines differ: {rows}"
    assert len(others) <= 1, f"one and three engines differ: {rows}"
    error, struck = seen.pop()
    parts = [f"`{error}`" if error else "—", *([struck] if rows[0]["who"] == "engine" else []), *others]
    return " / ".join(parts)


def load(path: pathlib.Path) -> list[Row]:
    """Rows from a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def shown() -> str:
    """What stands between the marks now."""
    text = PAGE.read_text(encoding="utf-8")
    return text.split(BEGIN)[1].split(END)[0].strip()


def main() -> int:
    """Write the page."""
    made = tables(load(pathlib.Path(sys.argv[1]))).strip()
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n\n{made}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
