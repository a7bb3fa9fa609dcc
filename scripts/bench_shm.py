"""Runs `weightlift bench shm` over its workloads and writes docs/benchmarks/shm.md, with machine, versions and commit."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "benchmarks" / "shm.md"
WORKLOADS = ("qwen3-0.6b", "moe-20k", "one-huge", "empty")

HEAD = """# Shared memory, two processes

Made by `make bench`. Ours and the limit are measured in turn in the same two processes and compared by their medians; absolute numbers
drift with the machine, the ratio hardly does. The limit is one flat tensor of the same size through the same kind of ring: one process
writes, the other reads, nothing else happens (the better of 2 and 4 MiB slots). CPU seconds are of both processes, per round. Every
tensor is compared after the last round.
"""

WHY = """
With 20,000 tensors the CPU seconds are above 1.5 times the limit's. It is host time per tensor, on both sides; a profile of the parts
alone (process time, milliseconds for 20,000 tensors, one side each): looking whether every tensor is still in place and laid out as
before 11 to 12 (address 2, strides 3.5, shape 3.5, dtype 2, the mapping 1), sampled digests 11 to 12, the call of memmove for each
16 in the trainer and 25 in the engine, where autograd is told of the write. Tried and not faster: all addresses in one list (the same),
iterators instead of a loop (1.7 times slower), torch's own guards for shapes, strides and dtypes (4.6 instead of 6, and private). What
would bring it under the target is to sample not every tensor in every round; it is not done. Before verification, and before layouts
were looked at, the same workload had 1.33 times the limit's (commit 6b39a51).
"""

MANY = """The same slots are read by all. On a machine with fewer cores than processes the wall time says little; CPU seconds say what a
byte costs.
"""


def measure(workload: str, *options: str) -> dict[str, Any]:
    """One run of the command, as its JSON."""
    command = [sys.executable, "-m", "weightlift.cli", "bench", "shm", "--workload", workload, *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def page(results: list[dict[str, Any]], verified: list[dict[str, Any]], many: list[dict[str, Any]], commit: str) -> str:
    """The whole page."""
    machine = results[0]["machine"]
    lines = [HEAD, "Machine: " + ", ".join(f"{name} {value}" for name, value in machine.items()) + f". Commit {commit}.\n"]
    lines.append(
        "| workload | tensors | GB | buckets | GB/s | limit GB/s | ratio | seconds | CPU s | limit CPU s | shm MiB | wrong |"
    )
    lines.append("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for r in results:
        lines.append(
            f"| {r['workload']} | {r['tensors']} | {r['bytes'] / 1e9:.2f} | {r['buckets']} | {r['gbps']:.2f} | {r['limit_gbps']:.2f} "
            f"| {r['ratio_to_limit']:.2f} | {r['seconds']:.4f} | {r['cpu_s']:.3f} | {r['limit_cpu_s']:.3f} "
            f"| {r['shm_bytes'] / 2**20:.0f} | {r['wrong_tensors']} |"
        )
    lines.append("\nSeconds by phase of the median round:\n")
    lines.append("| workload | " + " | ".join(results[0]["phases"]) + " |")
    lines.append("|---" * (len(results[0]["phases"]) + 1) + "|")
    for r in results:
        lines.append(f"| {r['workload']} | " + " | ".join(f"{value:.4f}" for value in r["phases"].values()) + " |")
    lines.append("\n`pack` and `load` run at the same time in the two processes; `transfer` contains both.")
    lines += [
        WHY,
        "## What verification costs\n",
        "| workload | verify | ratio | seconds | CPU s | limit CPU s |",
        "|---|---|---|---|---|---|",
    ]
    for r in verified:
        lines.append(
            f"| {r['workload']} | {r['verify']} | {r['ratio_to_limit']:.2f} | {r['seconds']:.4f} | {r['cpu_s']:.3f} "
            f"| {r['limit_cpu_s']:.3f} |"
        )
    lines += ["\n## Several engines\n", MANY, "| engines | seconds | CPU s | CPU s per GB read |", "|---|---|---|---|"]
    for r in many:
        read = r["subscribers"] * r["bytes"] / 1e9
        lines.append(f"| {r['subscribers']} | {r['seconds']:.4f} | {r['cpu_s']:.3f} | {r['cpu_s'] / read:.3f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    results = []
    for workload in WORKLOADS:
        results.append(measure(workload))
        print(f"{workload}: ratio to the limit {results[-1]['ratio_to_limit']:.2f}", flush=True)
    verified = [measure(workload, "--verify", level) for workload in WORKLOADS[:2] for level in ("off", "sample", "full")]
    many = [measure("qwen3-0.6b", "--subscribers", count) for count in ("1", "4")]
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(page(results, verified, many, commit.stdout.strip()))
    print(f"written: {TARGET}")


if __name__ == "__main__":
    main()
