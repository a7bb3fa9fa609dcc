"""Settings: wrong values are refused with their name, defaults depend on the model."""

from __future__ import annotations

import json
import pathlib

import pytest

from weightlift.errors import ConfigError
from weightlift.rl.config import (
    GrpoConfig,
    ProblemsConfig,
    SamplingConfig,
    TimeoutConfig,
    TinyModelConfig,
    TrainConfig,
    WarmStartConfig,
)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: TrainConfig(steps=0), "steps"),
        (lambda: TrainConfig(seed=-1), "seed"),
        (lambda: TrainConfig(threads=0), "threads"),
        (lambda: TrainConfig(model=pathlib.Path("/no/such/folder")), "model"),
        (lambda: TrainConfig(sampling=SamplingConfig(prompts=1), grpo=GrpoConfig(minibatches=2)), "grpo.minibatches"),
        (lambda: ProblemsConfig(style="loud"), "problems.style"),
        (lambda: ProblemsConfig(held_out=0), "problems.held_out"),
        (lambda: TinyModelConfig(hidden_size=36, heads=4), "tiny.hidden_size"),
        (lambda: WarmStartConfig(learning_rate=0.0), "warm_start.learning_rate"),
        (lambda: WarmStartConfig(until_loss=-1.0), "warm_start.until_loss"),
        (lambda: SamplingConfig(group_size=1), "sampling.group_size"),
        (lambda: SamplingConfig(temperature=float("nan")), "sampling.temperature"),
        (lambda: GrpoConfig(clip_low=1.0), "grpo.clip_low"),
        (lambda: GrpoConfig(kl_coefficient=-0.1), "grpo.kl_coefficient"),
        (lambda: GrpoConfig(learning_rate=float("inf")), "grpo.learning_rate"),
        (lambda: TimeoutConfig(sync_s=0.0), "timeouts.sync_s"),
    ],
)
def test_a_wrong_value_is_named(make, name):
    with pytest.raises(ConfigError, match="must be") as caught:
        make()
    assert name in str(caught.value)


def test_defaults_follow_the_model(tmp_path):
    tiny, folder = TrainConfig().resolved(), TrainConfig(model=tmp_path).resolved()
    assert (tiny.task, tiny.problems.style, folder.task, folder.problems.style) == (
        "spell_backward",
        "compact",
        "chain_sum",
        "question",
    )
    assert tiny.warm_start.steps > folder.warm_start.steps == 0
    assert tiny.resolved() == tiny


def test_a_given_value_beats_the_default(tmp_path):
    config = TrainConfig(
        model=tmp_path, task="gcd", warm_start=WarmStartConfig(steps=5), grpo=GrpoConfig(learning_rate=0.5)
    ).resolved()
    assert (config.task, config.warm_start.steps, config.grpo.learning_rate) == ("gcd", 5, 0.5)


def test_a_config_is_json(tmp_path):
    data = TrainConfig(model=tmp_path).resolved().to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["model"] == str(tmp_path)
