"""The arithmetic of GRPO against values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from weightlift.errors import ConfigError
from weightlift.rl.grpo import group_advantages, k3, policy_loss

CLIP = {"clip_low": 0.2, "clip_high": 0.2}


def loss_of(ratios, advantages, mask=None, **options):
    """policy_loss for given ratios: old log-probabilities are 0, so that the new ones are log(ratio)."""
    logprobs = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_(True)
    old = torch.zeros_like(logprobs)
    weights = torch.ones_like(logprobs) if mask is None else torch.tensor(mask)
    parts = policy_loss(logprobs, old, torch.tensor(advantages, dtype=torch.float64), weights, **{**CLIP, **options})
    return parts, logprobs


def test_advantages_are_normalised_within_their_group():
    # Group 1: mean 0.5, population deviation 0.5. Group 2: mean 0.25, deviation sqrt(3)/4.
    advantages = group_advantages(torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0]), 4)
    high, low = 0.75 / (math.sqrt(3) / 4), -0.25 / (math.sqrt(3) / 4)
    expected = torch.tensor([1.0, -1.0, 1.0, -1.0, high, low, low, low])
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1e6])
def test_a_group_without_variance_has_advantage_zero_exactly(value):
    assert torch.equal(group_advantages(torch.full((7,), value), 7), torch.zeros(7))


@pytest.mark.parametrize(("shape", "size"), [((6,), 4), ((0,), 2), ((2, 2), 2), ((4,), 0)])
def test_rewards_that_are_not_groups_are_refused(shape, size):
    with pytest.raises(ConfigError, match="must be"):
        group_advantages(torch.zeros(shape), size)


def test_k3_is_zero_for_equal_distributions_and_never_negative():
    logprobs = torch.tensor([-0.5, -1.0, -2.0])
    assert torch.equal(k3(logprobs, logprobs), torch.zeros(3))
    reference = logprobs + torch.tensor([math.log(2.0), -math.log(2.0), 0.1])
    expected = torch.tensor([2 - math.log(2) - 1, 0.5 + math.log(2) - 1, math.exp(0.1) - 0.1 - 1])
    torch.testing.assert_close(k3(logprobs, reference), expected)
    assert bool((k3(logprobs, reference) >= 0).all())


def test_k3_is_an_unbiased_estimate_of_the_divergence():
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.4, 0.4, 0.2])
    exact = (policy * (policy / reference).log()).sum()
    expectation = (policy * k3(policy.log(), reference.log())).sum()
    torch.testing.assert_close(expectation, exact)


def test_ratio_one_gives_minus_the_mean_advantage_over_tokens():
    parts, _ = loss_of([[1.0, 1.0], [1.0, 1.0]], [1.0, -0.5])
    assert parts.loss.item() == pytest.approx(-(1.0 + 1.0 - 0.5 - 0.5) / 4)
    assert (parts.kl, parts.clip_fraction, parts.ratio_max) == (0.0, 0.0, pytest.approx(1.0))


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate", "moves"),
    [
        (1.5, 1.0, 1.2, False),  # already more likely than the clip rewards
        (1.5, -1.0, -1.5, True),  # bad, and more likely: pushed back in full
        (0.5, 1.0, 0.5, True),  # good, and less likely: pulled back in full
        (0.5, -1.0, -0.8, False),  # already less likely than the clip rewards
        (1.1, 1.0, 1.1, True),
        (0.9, -1.0, -0.9, True),
    ],
)
def test_the_clip_stops_only_what_goes_too_far_the_right_way(ratio, advantage, surrogate, moves):
    parts, logprobs = loss_of([[ratio]], [advantage])
    parts.loss.backward()
    assert parts.loss.item() == pytest.approx(-surrogate)
    assert (logprobs.grad.abs().item() > 0) is moves
    assert parts.clip_fraction == (0.0 if moves else 1.0)
    if moves:
        assert logprobs.grad.item() == pytest.approx(-ratio * advantage)


def test_the_two_clip_bounds_are_separate():
    assert loss_of([[1.5]], [1.0], clip_high=0.4)[0].loss.item() == pytest.approx(-1.4)
    assert loss_of([[0.5]], [-1.0], clip_low=0.3)[0].loss.item() == pytest.approx(0.7)


def test_every_token_of_the_batch_has_the_same_weight():
    # Per completion first (as in the paper) would be -(1 + -1) / 2 = 0; over tokens it is -(3 * 1 - 1 * 1) / 4.
    parts, _ = loss_of([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], [1.0, -1.0], mask=[[1, 1, 1], [1, 0, 0]])
    assert parts.loss.item() == pytest.approx(-(3 - 1) / 4)


def test_padding_has_no_loss_and_no_gradient():
    parts, logprobs = loss_of([[1.0, 50.0]], [1.0], mask=[[1, 0]])
    parts.loss.backward()
    assert parts.loss.item() == pytest.approx(-1.0)
    assert logprobs.grad[0, 1].item() == 0.0
    assert (parts.clip_fraction, parts.ratio_max) == (0.0, pytest.approx(1.0))


def test_the_kl_term_is_added_with_its_coefficient():
    reference = torch.tensor([[math.log(2.0), 0.0]], dtype=torch.float64)
    parts, _ = loss_of([[1.0, 1.0]], [0.0], kl_coefficient=0.5, reference_logprobs=reference)
    divergence = (2 - math.log(2) - 1) / 2
    assert parts.kl == pytest.approx(divergence)
    assert parts.loss.item() == pytest.approx(0.5 * divergence)


def test_a_kl_term_without_a_reference_and_an_empty_batch_are_refused():
    with pytest.raises(ConfigError, match="reference_logprobs must be given"):
        loss_of([[1.0]], [1.0], kl_coefficient=0.1)
    with pytest.raises(ConfigError, match="at least one token"):
        loss_of([[1.0]], [1.0], mask=[[0]])


def test_the_gradient_matches_finite_differences():
    torch.manual_seed(0)
    logprobs = (-torch.rand(3, 4, dtype=torch.float64)).requires_grad_(True)
    old, reference = -torch.rand(3, 4, dtype=torch.float64), -torch.rand(3, 4, dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])

    def loss(values):
        return policy_loss(
            values, old, advantages, mask, clip_low=0.2, clip_high=0.3, kl_coefficient=0.1, reference_logprobs=reference
        ).loss

    assert torch.autograd.gradcheck(loss, (logprobs,))
