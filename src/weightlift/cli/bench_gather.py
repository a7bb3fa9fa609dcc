"""`weightlift bench gather`: full tensors out of a sharded trainer, ours against a plain full-state-dict export, in one run.

Owns: the command, the ranks it starts, the measuring. Must not know: how a gather works.
Both are timed in turn in the same ranks and compared by their medians. Peak bytes are the kernel's: the highest resident size of the
first rank during one export, above what was resident before it. `layer_group_bytes` is the largest group; two of them are the bound.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist

from weightlift.cli.workloads import Workload, make_module
from weightlift.config import check_int
from weightlift.errors import ConfigError

__all__ = ["BenchGatherConfig", "run"]

_TIMEOUT_S = 900.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BenchGatherConfig:
    """What is measured."""

    trainer: Literal["fsdp1", "fsdp2"] = "fsdp2"
    """How the model is sharded."""
    processes: int = 2
    """Ranks on this host, one torch thread each."""
    workload: Workload = "qwen3-0.6b"
    """Shapes of the model, bf16."""
    rounds: int = 5
    """Timed exports of each kind, after one that is not."""
    json: bool = False
    """One line of JSON instead of a table."""

    def __post_init__(self) -> None:
        check_int("processes", self.processes, at_least=2)
        check_int("rounds", self.rounds, at_least=1)
        if self.trainer not in ("fsdp1", "fsdp2"):
            raise ConfigError(f"trainer must be fsdp1 or fsdp2, got {self.trainer!r}")


def run(config: BenchGatherConfig) -> int:
    """Start the ranks, print what the first one measured."""
    settings = dataclasses.asdict(config)
    store = dist.TCPStore("127.0.0.1", 0, config.processes, True, wait_for_workers=False)  # type: ignore[attr-defined]
    ranks = []
    for rank in range(config.processes):
        words = json.dumps({**settings, "rank": rank, "port": store.port})
        command = [sys.executable, "-m", "weightlift.cli.bench_gather", words]
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL))
    try:
        out, _ = ranks[0].communicate(timeout=_TIMEOUT_S)
        failed = [rank for rank, child in enumerate(ranks) if child.wait(60.0)]
    finally:
        for child in ranks:
            child.kill()
            child.wait()
    if failed:
        print(f"ranks {failed} failed", file=sys.stderr)
        return 1
    found = json.loads(out.splitlines()[-1])
    print(json.dumps(found) if config.json else _table(found))
    return 1 if found["wrong_tensors"] else 0


def _table(found: dict[str, Any]) -> str:
    mib = 2**20
    lines = [
        f"{found['workload']}: {found['tensors']} tensors, {found['bytes'] / 1e9:.2f} GB, "
        f"{found['trainer']} on {found['processes']} ranks, {found['wrong_tensors']} wrong",
        f"{'':<24}{'seconds':>10}{'peak MiB':>12}",
    ]
    lines += [
        f"{name:<24}{found[f'{key}_s']:>10.3f}{found[f'{key}_peak_bytes'] / mib:>12.0f}"
        for name, key in (("ours, group by group", "ours"), ("full state dict", "plain"))
    ]
    lines.append(f"ratio of seconds {found['ratio']:.2f}; largest layer group {found['layer_group_bytes'] / mib:.0f} MiB")
    return "\n".join(lines)


# --- in a rank ------------------------------------------------------------------------------------------------------------------


def _rank(settings: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from weightlift.rl.parallel import wrap
    from weightlift.sources.fsdp1 import FSDP1Source
    from weightlift.sources.fsdp2 import FSDP2Source

    torch.set_num_threads(1)
    rank, size = settings["rank"], settings["processes"]
    store = dist.TCPStore("127.0.0.1", settings["port"], size, False, wait_for_workers=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    whole = make_module(settings["workload"], seed=0)
    layers = torch.nn.ModuleList(whole.get_submodule("model.layers").children())
    whole.get_submodule("model").add_module("layers", layers)
    wanted = {name: _sum(parameter) for name, parameter in whole.named_parameters()} if rank == 0 else {}
    model = wrap(settings["trainer"], whole)
    del whole, layers
    source = (FSDP1Source if settings["trainer"] == "fsdp1" else FSDP2Source)(model)

    def ours() -> dict[str, int]:
        return {name: tensor.numel() for name, tensor in source.export()}

    def plain() -> dict[str, Any]:
        # cpu_offload stays False: on the CPU FSDP1 would free the storage that it hands out.
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))

    sums = {name: _sum(tensor) for name, tensor in source.export()}
    wrong = [name for name, value in wanted.items() if sums.get(name) != value]
    found = {key: _measure(call, settings["rounds"]) for key, call in (("ours", ours), ("plain", plain))}
    seconds = _in_turn({"ours": ours, "plain": plain}, settings["rounds"])
    if rank == 0:
        manifest = source.manifest()
        result = {
            **{k: settings[k] for k in ("trainer", "processes", "workload")},
            "tensors": manifest.tensors,
            "bytes": manifest.total_bytes,
            "wrong_tensors": len(wrong),
            "layer_group_bytes": source.largest_group_bytes,
            **{f"{key}_s": statistics.median(times) for key, times in seconds.items()},
            **{f"{key}_peak_bytes": peak for key, peak in found.items()},
            "ratio": statistics.median(seconds["ours"]) / statistics.median(seconds["plain"]),
        }
        print(json.dumps(result), flush=True)
    dist.barrier()
    source.group.close()
    dist.destroy_process_group()


def _sum(tensor: torch.Tensor) -> int:
    return int(tensor.detach().view(torch.int16).sum(dtype=torch.int64))


def _measure(call: Callable[[], object], rounds: int) -> int:
    """Peak of resident bytes during one call, above those before it; the highest of a few."""
    peaks = []
    for _ in range(min(rounds, 3)):
        dist.barrier()
        _forget_peak()
        before = _status("VmRSS")
        call()
        peaks.append(max(0, _status("VmHWM") - before))
    return max(peaks)


def _in_turn(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {key: [] for key in calls}
    for number in range(rounds + 1):
        for key, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            dist.barrier()  # an export is over when every rank is through with it
            if number:
                seconds[key].append(time.perf_counter() - start)
    return seconds


def _forget_peak() -> None:
    """Ask the kernel to count the highest resident size anew."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _status(key: str) -> int:
    for line in pathlib.Path(f"/proc/{os.getpid()}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    _rank(json.loads(sys.argv[1]))
