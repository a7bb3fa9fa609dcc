"""Does the engine compute what the trainer computes? Some fixed texts, scored by both after every sync.

Owns: the texts, the comparison, the tolerance. Must not know: how weights travel, who scores. Called by rl/loop.py.
Digests say that every byte arrived; this says that the engine's model, with all that it derives from the bytes, is the trainer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from weightlift.errors import LoaderError
from weightlift.rl.models import TextModel
from weightlift.rl.tasks import Task

__all__ = ["Agreement"]


class Agreement:
    """Compares log-probabilities of fixed texts.

    Args:
        count: texts, taken from the held-out problems with their right answers. tolerance: nats a token.
    """

    def __init__(self, text_model: TextModel, task: Task, *, count: int, tolerance: float) -> None:
        self.sequences: Final = [
            [*text_model.encode_prompt(problem.prompt), *text_model.encode_answer(problem.answer)]
            for problem in task.held_out[:count]
        ]
        self.trainer: Sequence[Sequence[float]] = ()
        """What the trainer said last."""
        self._tolerance = tolerance

    def gap(self, engine: Sequence[Sequence[float]]) -> float:
        """The largest difference to what the engine says, in nats."""
        pairs = zip(self.trainer, engine, strict=True)
        return max(abs(a - b) for own, other in pairs for a, b in zip(own, other, strict=True))

    def check(self, gap: float, version: int) -> None:
        """LoaderError where the two no longer agree."""
        if gap > self._tolerance:
            raise LoaderError(
                f"after the sync the engine's log-probabilities are {gap:.3f} nats from the trainer's, more than {self._tolerance:g}",
                version=version,
                remedy="the bytes arrived: look at what the engine derives from them, or raise engine_options.tolerance.",
            )
