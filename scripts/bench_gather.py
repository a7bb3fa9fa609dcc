"""Runs `weightlift bench gather` for both kinds of sharding and writes docs/benchmarks/gather.md, with machine, versions and commit."""

from __future__ import annotations

import json
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any

import torch

import weightlift

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "benchmarks" / "gather.md"

HEAD = """# Gathering a sharded trainer's full tensors

Made by `make bench`. `weightlift bench gather` shards a model of Qwen3-0.6B's shapes (bf16) over ranks on one host and makes its full
tensors in two ways, in turn, in the same ranks: group by group, as a publish does, and as torch's full state dict
(`get_model_state_dict(full_state_dict=True)`). Seconds are medians of whole exports, until every rank is through. Peak is the highest
resident size of the first rank during an export, above what was resident before it, as the kernel counts. Every tensor is compared.
"""

AFTER = """
Ours holds the arena of one layer group and the inbox of the next: two groups at most, and the largest one is the embedding. A full
state dict holds everything, on every rank.
"""


def measure(trainer: str, processes: int) -> dict[str, Any]:
    """One run of the command, as its JSON."""
    words = ["--trainer", trainer, "--processes", str(processes), "--json"]
    command = [sys.executable, "-m", "weightlift.cli", "bench", "gather", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure and write."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    versions = f"python {platform.python_version()}, torch {torch.__version__}, weightlift {weightlift.__version__}"
    lines = [HEAD, f"Machine: cores {os.cpu_count()}, processor {platform.machine()}, {versions}. Commit {commit}.\n"]
    lines.append(
        "| trainer | ranks | ours s | state dict s | ratio | ours peak MiB | state dict peak MiB | largest group MiB | wrong |"
    )
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for trainer, processes in (("fsdp2", 2), ("fsdp1", 2), ("fsdp2", 4)):
        r = measure(trainer, processes)
        peaks = " | ".join(f"{r[key] / 2**20:.0f}" for key in ("ours_peak_bytes", "plain_peak_bytes", "layer_group_bytes"))
        lines.append(
            f"| {trainer} | {processes} | {r['ours_s']:.3f} | {r['plain_s']:.3f} | {r['ratio']:.2f} | {peaks} | {r['wrong_tensors']} |"
        )
        print(lines[-1], flush=True)
    TARGET.write_text("\n".join(lines) + "\n" + AFTER)
    print(f"written: {TARGET}")


if __name__ == "__main__":
    main()
