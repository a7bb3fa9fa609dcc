"""Learning in one process: the learner moves the policy towards what was rewarded, and the collector hands it the truth."""

from __future__ import annotations

import pytest
import torch

from weightlift.errors import ConfigError
from weightlift.rl.collect import Collector
from weightlift.rl.config import GrpoConfig, ProblemsConfig, SamplingConfig, TinyModelConfig, WarmStartConfig
from weightlift.rl.learner import Learner
from weightlift.rl.models import build_tiny, pad_left, pad_right, token_logprobs
from weightlift.rl.rollout import complete
from weightlift.rl.tasks import Problem, ReasoningGymTask
from weightlift.rl.warmstart import warm_start
from weightlift.samples import GenerateRequest, Prompt

TINY = TinyModelConfig(hidden_size=32, layers=1, heads=2, max_tokens=64)
GRPO = GrpoConfig(learning_rate=1e-3, lr_warmup_steps=0, minibatches=2)


class DirectEngine:
    """An engine in this process that samples from a model and stamps a version of the test's choice."""

    def __init__(self, text_model, version=0):
        self.text_model, self.version, self.requests = text_model, version, []

    def generate(self, prompts, sampling):
        asked = [Prompt(id=index, tokens=list(tokens)) for index, tokens in enumerate(prompts)]
        self.requests.append(GenerateRequest(id=1, prompts=asked, sampling=sampling))
        samples = complete(self.requests[-1], self.version, self.text_model)
        return [samples[start : start + sampling.samples] for start in range(0, len(samples), sampling.samples)]


class ShortTask:
    """Rewards a completion that the model can hit by chance: it has an "a" in it."""

    name = "short"

    def __init__(self):
        self.train = [Problem(f"{letter}=", "a", {}) for letter in "bcdefghi"]
        self.held_out = [Problem(f"{letter}=", "a", {}) for letter in "jkl"]

    def score(self, problem, completion, *, finished):
        return 1.0 if "a" in completion else 0.0


def parts(seed=0, version=0, **grpo):
    text_model = build_tiny(TINY, seed=seed)
    engine = DirectEngine(text_model, version)
    sampling = SamplingConfig(prompts=8, group_size=16, max_new_tokens=6)
    collector = Collector(engine, ShortTask(), text_model, sampling, seed=seed)
    learner = Learner(text_model, GrpoConfig(**{"learning_rate": 1e-3, "lr_warmup_steps": 0, **grpo}), temperature=1.0, seed=seed)
    return text_model, engine, collector, learner


def test_reward_rises_when_the_engine_has_the_trained_weights():
    _, _, collector, learner = parts()
    rewards = []
    for _ in range(40):
        experience = collector.collect()
        rewards.append(experience.rewards.mean().item())
        learner.update(experience.prompts, experience.groups, experience.rewards)
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.25, rewards


def test_the_same_seed_gives_the_same_run():
    def run():
        text_model, _, collector, learner = parts(seed=3)
        for _ in range(3):
            experience = collector.collect()
            stats = learner.update(experience.prompts, experience.groups, experience.rewards)
        return stats, text_model.model.state_dict()

    (one, weights), (two, others) = run(), run()
    assert one == two
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_an_update_makes_rewarded_completions_likelier_than_the_others():
    text_model, _, collector, learner = parts(minibatches=1)
    experience = collector.collect()
    samples = [sample for group in experience.groups for sample in group]
    prompts = pad_left([prompt for prompt in experience.prompts for _ in range(16)], text_model.pad_id)
    completions = pad_right([sample.tokens for sample in samples], text_model.pad_id)

    def likelihood():
        with torch.no_grad():
            logprobs = token_logprobs(text_model.model, prompts, completions, temperature=1.0)
        return (logprobs * completions.mask).sum(dim=1)

    before = likelihood()
    learner.update(experience.prompts, experience.groups, experience.rewards)
    change = likelihood() - before
    assert change[experience.rewards == 1].mean() > change[experience.rewards == 0].mean()


def test_equal_rewards_teach_nothing():
    text_model, _, collector, learner = parts()
    before = {name: value.clone() for name, value in text_model.model.state_dict().items()}
    experience = collector.collect()
    stats = learner.update(experience.prompts, experience.groups, torch.ones(8 * 16))
    assert (stats.silent_groups, stats.grad_norm) == (1.0, 0.0)
    assert all(torch.equal(before[name], value) for name, value in text_model.model.state_dict().items())


def test_the_first_minibatch_sees_ratio_one_and_stale_samples_do_not():
    _, _, collector, learner = parts(minibatches=1)
    experience = collector.collect()
    assert learner.update(experience.prompts, experience.groups, experience.rewards).ratio_max == pytest.approx(1.0, abs=1e-3)
    stale = learner.update(experience.prompts, experience.groups, experience.rewards)
    assert stale.ratio_max > 1.001


def test_the_kl_term_measures_the_way_from_the_start():
    _, _, collector, learner = parts(kl_coefficient=0.1, minibatches=1)
    experience = collector.collect()
    first = learner.update(experience.prompts, experience.groups, experience.rewards)
    second = learner.update(experience.prompts, experience.groups, experience.rewards)
    assert first.kl == pytest.approx(0.0, abs=1e-6)
    assert second.kl > 1e-6


def test_experience_counts_the_versions_that_made_it():
    _, _, collector, _ = parts(version=41)
    experience = collector.collect()
    assert experience.versions() == {41: 128}
    assert experience.rewards.shape == (128,)


def test_evaluation_is_greedy_over_the_held_out_problems_only():
    text_model, engine, collector, _ = parts()
    share = collector.evaluate()
    assert share in (0.0, 1 / 3, 2 / 3, 1.0)
    (asked,) = engine.requests
    assert (asked.sampling.greedy, asked.sampling.samples) == (True, 1)
    assert [prompt.tokens for prompt in asked.prompts] == [text_model.encode_prompt(f"{letter}=") for letter in "jkl"]


def test_unresolved_settings_are_refused():
    text_model = build_tiny(TINY, seed=0)
    with pytest.raises(ConfigError, match=r"grpo\.learning_rate"):
        Learner(text_model, GrpoConfig(), temperature=1.0, seed=0)
    with pytest.raises(ConfigError, match=r"sampling\.max_new_tokens"):
        Collector(DirectEngine(text_model), ShortTask(), text_model, SamplingConfig(), seed=0)


def test_the_warm_start_lowers_the_loss_and_ends_at_its_target():
    task = ReasoningGymTask("spell_backward", ProblemsConfig(pool=200, held_out=20, style="compact"), seed=0)
    losses = []

    def train(**settings):
        losses.clear()
        config = WarmStartConfig(**{"batch_size": 16, **settings})
        warm_start(build_tiny(TINY, seed=0), task, config, seed=0, progress=lambda step, loss: losses.append(loss))
        return list(losses)

    full = train(steps=40, until_loss=0.0)
    assert len(full) == 40
    assert full[-1] < full[0] - 0.5
    early = train(steps=40, until_loss=full[20])
    assert 20 < len(early) <= 40
    assert early == full[: len(early)]
