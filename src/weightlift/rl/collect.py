"""A step's experience: problems drawn, completions asked of the engine, rewards given.

Owns: which problems a step sees, text to tokens and back around the engine. Must not know: gradients, syncs. Called by
rl/loop.py.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from weightlift.errors import ConfigError
from weightlift.rl.config import SamplingConfig
from weightlift.rl.engine import Engine
from weightlift.rl.models import TextModel
from weightlift.rl.tasks import Problem, Task
from weightlift.samples import Sample, SamplingParams

__all__ = ["Collector", "Experience"]


@dataclasses.dataclass(frozen=True, slots=True)
class Experience:
    """P prompts with G samples each: prompts as token ids, groups in the same order, rewards [P * G] float32."""

    prompts: list[list[int]]
    groups: list[list[Sample]]
    rewards: torch.Tensor

    def versions(self) -> dict[int, int]:
        """Version of the weights -> how many of these samples it made."""
        return dict(sorted(collections.Counter(sample.version for group in self.groups for sample in group).items()))


class Collector:
    """Asks one engine for experience on one task.

    Args:
        config: resolved (`max_new_tokens` is a number). seed: of the choice of problems and of the engine's sampling.
    """

    def __init__(self, engine: Engine, task: Task, text_model: TextModel, config: SamplingConfig, *, seed: int) -> None:
        if config.max_new_tokens is None or config.prompts is None:
            raise ConfigError("sampling.max_new_tokens and prompts must be numbers, got None; use TrainConfig.resolved()")
        self._engine = engine
        self._task = task
        self._text_model = text_model
        self._prompts = config.prompts
        self._training = SamplingParams(
            samples=config.group_size,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            greedy=False,
            seed=0,
        )
        self._random = random.Random(seed)

    def collect(self) -> Experience:
        """The next step's experience; train problems only, without repetition where there are enough."""
        pool, count = self._task.train, self._prompts
        problems = self._random.sample(pool, count) if len(pool) >= count else self._random.choices(pool, k=count)
        params = msgspec.structs.replace(self._training, seed=self._random.getrandbits(32))
        prompts = [self._text_model.encode_prompt(problem.prompt) for problem in problems]
        groups = self._engine.generate(prompts, params)
        return Experience(prompts, groups, torch.tensor(self._rewards(problems, groups)))

    def state(self) -> list[Any]:
        """Where the choice of problems stands, for a checkpoint."""
        version, words, gauss = self._random.getstate()
        return [version, list(words), gauss]

    def restore(self, state: Sequence[Any]) -> None:
        """Go on from `state`: the same problems, the same seeds for the engine."""
        self._random.setstate((state[0], tuple(state[1]), state[2]))

    def evaluate(self) -> float:
        """Share of the held-out problems that the engine answers right, greedily, with the weights that it serves
        now."""
        problems = self._task.held_out
        params = msgspec.structs.replace(self._training, samples=1, greedy=True)
        width = self._prompts * self._training.samples
        right = 0.0
        for start in range(0, len(problems), width):
            part = problems[start : start + width]
            groups = self._engine.generate([self._text_model.encode_prompt(problem.prompt) for problem in part], params)
            right += sum(self._rewards(part, groups))
        return right / len(problems)

    def _rewards(self, problems: Sequence[Problem], groups: Sequence[Sequence[Sample]]) -> list[float]:
        return [
            self._task.score(problem, self._text_model.decode(sample.tokens), finished=sample.finished)
            for problem, group in zip(problems, groups, strict=True)
            for sample in group
        ]
