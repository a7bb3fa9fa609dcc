"""What a process held, on disk: its tensors as safetensors, and a line of digests for every version that was published.

Owns: the two formats. Must not know: who compares them (explain.py), what a run is.
The file of digests is JSON lines: {"version": 3, "digests": {"name": "16 hex digits of xxh3"}}. It costs 30 bytes a tensor and version,
and tells later which version a stale tensor is of.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable, Mapping

import torch

from weightlift.errors import ConfigError
from weightlift.modules import walk
from weightlift.verify.digests import Probe

__all__ = ["History", "append_digests", "full_digest", "load_digests", "load_tensors", "save_tensors"]

History = dict[int, dict[str, str]]
"""version -> name -> digest."""


def full_digest(tensor: torch.Tensor) -> str:
    """The xxh3 of all bytes of a tensor, 16 hex digits. Shape and dtype are not in it."""
    return Probe(tensor, tensor.dtype).xxh3((0, tensor.numel())).hex()


def save_tensors(path: pathlib.Path, source: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
    """Write tensors as safetensors, a module's under canonical names, tied ones under each. The file appears whole or not at all."""
    from safetensors.torch import save_file

    # safetensors refuses tensors that share memory: every name gets its own bytes.
    copies = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in _named(source)}
    partial = path.with_name(f"{path.name}.partial")
    save_file(copies, partial)
    os.replace(partial, path)


def _named(source: torch.nn.Module | Mapping[str, torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(source, torch.nn.Module):
        return ((slot.name, slot.tensor) for slot in walk(source))
    return source.items()


def load_tensors(path: pathlib.Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file; ConfigError if it is none."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file: {error}") from error


def append_digests(path: pathlib.Path, version: int, source: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
    """Add the line of one version."""
    line = {"version": version, "digests": {name: full_digest(tensor) for name, tensor in _named(source)}}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def load_digests(path: pathlib.Path) -> History:
    """All lines; ConfigError if one is not as it should be. A file that does not exist is an empty history."""
    if not path.exists():
        return {}
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {int(line["version"]): dict(line["digests"]) for line in lines}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a file of digests: {error}") from error
