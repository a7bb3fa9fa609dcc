"""Whether a run of `weightlift train` left what it promises: one sync a step, versions in order, every file there.

`python scripts/check_demo.py RUN --steps N`; exits 1 with the first thing that is wrong.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys


def problems(run: pathlib.Path, steps: int) -> list[str]:
    """Everything that is wrong with a run's files."""
    missing = [name for name in ("metrics.jsonl", "plot.png", "config.json", "summary.json") if not (run / name).is_file()]
    if missing:
        return [f"{run} lacks {', '.join(missing)}"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = []
    if [line["step"] for line in lines] != list(range(1, steps + 1)):
        found.append(f"metrics.jsonl has {len(lines)} steps, expected {steps}")
    for line in lines:
        sync = line["sync"]
        if not sync or not sync["committed"] or sync["version"] != line["step"] or sync["fenced"]:
            found.append(f"step {line['step']} did not end in a committed sync: {sync}")
        elif sync["transport"] != "shm":
            found.append(f"step {line['step']} went over {sync['transport']}, expected shm between two processes")
        if not 0.0 <= line["reward_mean"] <= 1.0:
            found.append(f"step {line['step']} has reward {line['reward_mean']}")
    return found


def main() -> int:
    """Check and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=pathlib.Path)
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()
    found = problems(arguments.run, arguments.steps)
    print("\n".join(found[:5]) if found else f"{arguments.run}: {arguments.steps} steps, every one with its sync")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
