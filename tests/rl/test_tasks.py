"""Tasks: exact scores, disjoint splits, the same problems for the same seed."""

from __future__ import annotations

import collections

import pytest

from weightlift.errors import ConfigError
from weightlift.rl.config import ProblemsConfig
from weightlift.rl.tasks import PRESETS, ReasoningGymTask, extract_answer


def task(name="spell_backward", seed=0, **config):
    return ReasoningGymTask(name, ProblemsConfig(**{"pool": 400, "held_out": 50, "style": "compact", **config}), seed=seed)


def problem_of(made, word):
    return next(problem for problem in [*made.train, *made.held_out] if problem.answer == word)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_right_answer_scores_one_and_everything_else_zero(name):
    made = task(name)
    for problem in made.train[:50]:
        right = problem.answer
        assert made.score(problem, right, finished=True) == 1.0
        assert made.score(problem, f" {right}\n", finished=True) == 1.0
        for wrong in ("", "x", right + "1", right + " " + right, right + "!", f"the answer is {right}", problem.prompt):
            assert made.score(problem, wrong, finished=True) == 0.0, wrong


def test_a_completion_that_was_cut_off_has_not_answered():
    made = task()
    assert made.score(made.train[0], made.train[0].answer, finished=False) == 0.0


def test_no_constant_answer_is_worth_anything():
    made = task(pool=4000)
    ((_, count),) = collections.Counter(problem.answer.lower() for problem in made.train).most_common(1)
    assert count / len(made.train) < 0.01


def test_train_and_held_out_share_no_prompt():
    made = task(pool=3000)
    train, held_out = [{problem.prompt for problem in part} for part in (made.train, made.held_out)]
    assert (len(train), len(held_out)) == (len(made.train), 50)
    assert not train & held_out


def test_the_seed_decides_the_problems():
    assert task(seed=1).train == task(seed=1).train
    assert task(seed=1).held_out != task(seed=2).held_out


def test_prompts_are_short_for_the_embedded_model_and_words_for_others():
    assert task().train[0].prompt.removesuffix("=") == task().train[0].answer[::-1]
    assert " " not in task("chain_sum").train[0].prompt
    assert "backward" in task(style="question").train[0].prompt


@pytest.mark.parametrize(
    ("text", "like", "whole", "answer"),
    [
        ("12", "7", True, "12"),
        ("-3", "7", True, "-3"),
        ("12 ", "7", True, "12"),
        ("=12", "7", True, None),
        ("1 2", "7", True, None),
        ("7 + 5 = 12.", "7", False, "12"),
        ("It is -4", "7", False, "-4"),
        ("9-4", "7", False, "4"),
        ("1,024", "7", False, "1024"),
        ("<answer>5</answer>, not 6", "7", False, "5"),
        ("none", "7", False, None),
        ("nus", "abc", True, "nus"),
        ("nus nus", "abc", True, None),
        ("The word is: nus.", "abc", False, "nus"),
        ("", "abc", False, None),
        ("a b; c", "d e", False, "a b; c"),
    ],
)
def test_extraction(text, like, whole, answer):
    assert extract_answer(text, like=like, whole=whole) == answer


def test_wrong_settings_name_the_setting():
    with pytest.raises(ConfigError, match="task must be a data set of reasoning-gym"):
        task("no_such_task")
    with pytest.raises(ConfigError, match=r"problems\.options must be options of spell_backward"):
        task(options={"no_such_option": 1})
    with pytest.raises(ConfigError, match=r"problems\.options must be options of chain_sum"):
        task("chain_sum", options={"min_terms": 5, "max_terms": 2})
    with pytest.raises(ConfigError, match=r"problems\.held_out must be at most half"):
        task(held_out=399)
