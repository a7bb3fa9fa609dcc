"""`weightlift doctor`: what can be used here, and why not.

Owns: the questions and how the answers are printed. Exit code 1 if no transport between processes can be used.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import resource
from typing import Any

from rich.console import Console
from rich.table import Table

from weightlift.errors import WeightliftError
from weightlift.transports import registry
from weightlift.transports.endpoint import run_directories
from weightlift.transports.segment import SHM_ROOT, free_bytes

__all__ = ["DoctorConfig", "examine", "run"]

_PACKAGES = ("weightlift", "torch", "numpy", "pyzmq", "msgspec", "xxhash", "transformers", "reasoning-gym")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """Which transports can be used here, free shared memory, limits, versions."""

    json: bool = False
    """Print one JSON object instead of tables."""


def run(config: DoctorConfig) -> int:
    """Examine and print."""
    found = examine()
    if config.json:
        print(json.dumps(found, indent=2))
    else:
        _print(found, Console(soft_wrap=True))
    return 0 if not found["transports"]["shm"] else 1


def examine() -> dict[str, Any]:
    """Everything the doctor looks at, as plain values. transports: name -> "" if it can be used, else the reason."""
    return {
        "transports": registry.available(),
        "shared memory": _shared_memory(),
        "run directories": _run_directories(),
        "limits": {
            "open files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "processor cores": len(os.sched_getaffinity(0)),
            "pidfd": "yes" if hasattr(os, "pidfd_open") else "no: deaths are seen by closed connections only",
        },
        "versions": {"python": platform.python_version(), "kernel": platform.release(), **_versions()},
    }


def _shared_memory() -> dict[str, str]:
    try:
        return {"path": str(SHM_ROOT), "free": f"{free_bytes() / 2**20:.0f} MiB", "needed by default": "16 MiB"}
    except WeightliftError as error:
        return {"path": str(SHM_ROOT), "problem": error.message}


def _run_directories() -> dict[str, str]:
    try:
        root = run_directories()
        return {"path": str(root), "runs": str(sum(1 for _ in root.iterdir()))}
    except (OSError, WeightliftError) as error:
        return {"problem": str(error)}


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _print(found: dict[str, Any], console: Console) -> None:
    for title, values in found.items():
        table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
        table.add_column(style="dim", min_width=18)
        table.add_column()
        for key, value in values.items():
            table.add_row(key, (value or "available") if title == "transports" else str(value))
        console.print(table)
        console.print()
