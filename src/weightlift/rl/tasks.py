"""Verifiable tasks: prompts with an exact check of the answer.

Owns: the `Task` seam, the reasoning-gym adapter, the split into train and held-out problems, the extraction of an
answer from a completion. Must not know: models, tokens, processes. Called by rl/loop.py.

The check is exact on purpose. reasoning-gym gives partial credit to a text that merely contains the answer, which a
policy learns to exploit; here the answer is extracted first, and the reward is 1.0 or 0.0.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from weightlift.errors import ConfigError
from weightlift.rl.config import ProblemsConfig

__all__ = ["PRESETS", "Problem", "ReasoningGymTask", "Task", "extract_answer"]

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "spell_backward": {"min_word_len": 3, "max_word_len": 6},
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "basic_arithmetic": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
}
"""Options of the data sets whose own defaults are too hard for a small model."""

_NUMBER: Final = re.compile(r"(?<![\d.])-?\d+(?:\.\d+)?")
_WORD: Final = re.compile(r"[^\W\d_]+")
_MARKED: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One prompt and its answer, as text. `entry` is the data set's own record, for its scorer."""

    prompt: str
    answer: str
    entry: Mapping[str, Any]


class Task(Protocol):
    """What the loop needs of a task. `train` and `held_out` share no prompt."""

    name: str
    train: Sequence[Problem]
    held_out: Sequence[Problem]

    def score(self, problem: Problem, completion: str, *, finished: bool) -> float:
        """1.0 for the right answer, else 0.0. `finished` is False for a completion that was cut off."""
        ...


class ReasoningGymTask:
    """A procedural data set of reasoning-gym, without duplicates, split by a seed.

    Args:
        name: of the data set.
        config: resolved. Style "compact" asks `splash=` or `3-7=` where the data set has a word or an expression, for the
            embedded model; "question" asks in the data set's own words, for a model that reads English.
        seed: of the problems and of the split.
    Raises:
        ConfigError: an unknown data set or option, or too few different problems for the split.
    """

    def __init__(self, name: str, config: ProblemsConfig, *, seed: int) -> None:
        if config.held_out is None:
            raise ConfigError("problems.held_out must be a number, got None; use TrainConfig.resolved()")
        self.name = name
        self._compact = config.style == "compact"
        self._dataset = _create(name, config, seed)
        problems: dict[str, Problem] = {}
        for entry in self._dataset:
            problem = Problem(_prompt(entry, compact=self._compact), str(entry["answer"]), entry)
            problems.setdefault(problem.prompt, problem)
        unique = sorted(problems.values(), key=lambda problem: problem.prompt)
        random.Random(seed).shuffle(unique)
        if len(unique) < 2 * config.held_out:
            raise ConfigError(
                f"problems.held_out must be at most half of the {len(unique)} different problems of {name}, got {config.held_out}"
            )
        self.held_out: Sequence[Problem] = unique[: config.held_out]
        self.train: Sequence[Problem] = unique[config.held_out :]

    def score(self, problem: Problem, completion: str, *, finished: bool) -> float:
        """1.0 if the extracted answer is right. A completion that was cut off has not answered."""
        if not finished:
            return 0.0
        answer = extract_answer(completion, like=problem.answer, whole=self._compact)
        if answer is None:
            return 0.0
        return 1.0 if self._dataset.score_answer(answer=answer, entry=dict(problem.entry)) >= 1.0 else 0.0


def extract_answer(completion: str, *, like: str, whole: bool) -> str | None:
    """The answer in a completion, or None.

    Args:
        like: the right answer, for its kind only: a number is looked for where it is a number, a word where it is one word;
            otherwise all of the text is the answer.
        whole: the completion has to be the answer and nothing else. Otherwise an <answer> element is preferred, and of
            several numbers or words the last one counts ("7 + 5 = 12").
    """
    text = completion.strip()
    if not whole and (marked := _MARKED.search(text)):
        text = marked.group(1).strip()
    pattern = next((kind for kind in (_NUMBER, _WORD) if kind.fullmatch(like)), None)
    if pattern is None:
        return text or None
    if whole:
        return text if pattern.fullmatch(text) else None
    found: list[str] = pattern.findall(text.replace(",", ""))
    return found[-1] if found else None


def _prompt(entry: Mapping[str, Any], *, compact: bool) -> str:
    if compact:
        for key in ("expression", "word"):
            if key in entry["metadata"]:
                return str(entry["metadata"][key]).replace(" ", "") + "="
    return str(entry["question"])


def _create(name: str, config: ProblemsConfig, seed: int) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ConfigError(f"task must be a data set of reasoning-gym, one of {', '.join(sorted(DATASETS))}, got {name!r}")
    options = dict(PRESETS.get(name, {})) if config.options is None else dict(config.options)
    # Data sets seed item i with seed + i: neighbouring run seeds must lie further apart than the pool is large.
    try:
        return reasoning_gym.create_dataset(name, seed=(seed + 1) * 1_000_003, size=config.pool, **options)
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(f"problems.options must be options of {name}, got {options}: {error}") from error
