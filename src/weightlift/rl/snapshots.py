"""What both sides of a run held, for `weightlift verify --out RUN`.

Owns: `digests.jsonl`, and the tensors of trainer and engine at the end. Must not know: steps, rewards. Used by rl/loop.py.
"""

from __future__ import annotations

import contextlib
import pathlib
from types import TracebackType

import torch

from weightlift.errors import WeightliftError
from weightlift.rl.engine import Engine
from weightlift.verify.snapshot import append_digests, save_tensors

__all__ = ["Snapshots"]


class Snapshots:
    """A context manager around the steps; leaving it writes the tensors, also when the run failed: that is when one wants to know."""

    def __init__(self, directory: pathlib.Path, model: torch.nn.Module, engine: Engine) -> None:
        self._directory = directory
        self._model = model
        self._engine = engine

    def version(self, version: int) -> None:
        """The model is about to be published as `version`."""
        append_digests(self._directory / "digests.jsonl", version, self._model)

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # a signal leaves no time for it
        save_tensors(self._directory / "trainer.safetensors", self._model)
        with contextlib.suppress(WeightliftError):  # an engine that is gone has none
            self._engine.save(self._directory)
