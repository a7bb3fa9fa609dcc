"""A trainer's checkpoint: sharded model and optimizer state through torch.distributed.checkpoint, the rest of a run's state as
JSON.

Owns: the files under OUT/checkpoints. Must not know: how a step is made. A checkpoint counts when its `state.json` is there: that
file is written last, by rank 0, after every rank has written its shards.
"""

from __future__ import annotations

import base64
import json
import os
import pathlib
import re
from typing import Any, Final

import torch
import torch.distributed as dist

from weightlift.errors import ConfigError
from weightlift.rl.learner import Learner

__all__ = ["latest", "load_shards", "read_state", "save_shards", "write_state"]

_STATE: Final = "state.json"


def directory_of(out: pathlib.Path, step: int) -> pathlib.Path:
    """Where the checkpoint of a step is."""
    return out / "checkpoints" / f"step-{step}"


def latest(out: pathlib.Path) -> pathlib.Path:
    """The last complete checkpoint of a run; ConfigError if there is none."""
    found = {int(m[1]): p for p in (out / "checkpoints").glob("step-*") if (m := re.fullmatch(r"step-(\d+)", p.name))}
    whole = [step for step, path in found.items() if (path / _STATE).exists()]
    if not whole:
        raise ConfigError(f"resume must name a run with a complete checkpoint, got {str(out)!r}")
    return found[max(whole)]


def _shards(model: torch.nn.Module, learner: Learner) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    # cpu_offload stays False: on the CPU, FSDP1 would free the very storage that is written.
    weights, optimiser = get_state_dict(model, learner.optimiser)
    return {"model": weights, "optimiser": optimiser}


def save_shards(path: pathlib.Path, model: torch.nn.Module, learner: Learner) -> None:
    """Every rank writes its part."""
    from torch.distributed.checkpoint.state_dict_saver import save

    save(_shards(model, learner), checkpoint_id=path, no_dist=not dist.is_initialized())


def load_shards(path: pathlib.Path, model: torch.nn.Module, learner: Learner) -> None:
    """Every rank reads its part; the wrapping may be another one than when it was written."""
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    shards = _shards(model, learner)
    load(shards, checkpoint_id=path, no_dist=not dist.is_initialized())
    set_state_dict(model, learner.optimiser, model_state_dict=shards["model"], optim_state_dict=shards["optimiser"])


def write_state(path: pathlib.Path, state: dict[str, Any]) -> None:
    """The rest, as JSON: numbers, strings, lists, and byte tensors."""
    partial = path / f".{_STATE}.partial"
    partial.write_text(json.dumps(state, default=_pack), encoding="utf-8")
    os.replace(partial, path / _STATE)


def read_state(path: pathlib.Path) -> dict[str, Any]:
    """What `write_state` wrote."""
    found: dict[str, Any] = json.loads((path / _STATE).read_text(encoding="utf-8"), object_hook=_unpack)
    return found


def _pack(value: object) -> dict[str, str]:
    if isinstance(value, torch.Tensor) and value.dtype == torch.uint8:
        return {"bytes": base64.b64encode(bytes(value.tolist())).decode()}
    raise TypeError(f"{type(value).__name__} is not part of a run's state")


def _unpack(data: dict[str, Any]) -> Any:
    if set(data) == {"bytes"}:
        return torch.tensor(list(base64.b64decode(data["bytes"])), dtype=torch.uint8)
    return data
