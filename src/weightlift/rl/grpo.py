"""GRPO as pure functions: rewards to advantages, log-probabilities to a loss.

Owns: the arithmetic. Must not know: models, tokenizers, processes, where a tensor came from. Called by rl/learner.py.

The method is Group Relative Policy Optimization (Shao et al., DeepSeekMath, arXiv:2402.03300, section 4.1): G
completions of one prompt are each other's baseline, and the policy ratio is clipped as in PPO. Where this file departs
from that paper:

- Loss over tokens. The paper takes the mean over the tokens of each completion first and over completions second, which
  gives a token of a long completion less weight. Here every token of the batch has the same weight (DAPO, Yu et al.,
  arXiv:2503.14476, section 3.3).
- Two clip bounds. `clip_low` and `clip_high` may differ (DAPO, section 3.1); they are equal by default, as in the
  paper.
- KL is off by default (`kl_coefficient=0`). The paper's coefficient is 0.04. The estimator is the paper's, k3 of
  Schulman's note "Approximating KL Divergence" (joschu.net/blog/kl-approx.html, 2020): never negative, and unbiased for
  samples of the policy.
- Old log-probabilities come from the rollout engine, which computed them for the tokens it sampled, not from a second
  pass of the trainer's model. The ratio is therefore trainer-now to engine-then, and stale weights in the engine show
  in it.
- Standard deviation with an epsilon. A group without variance (all right or all wrong) has advantage 0 exactly, and
  teaches nothing.

Shapes: B completions, T tokens (padded on the right), G completions a prompt, so that B = prompts * G, groups
contiguous.
"""

from __future__ import annotations

import dataclasses

import torch

from weightlift.errors import ConfigError

__all__ = ["LossParts", "group_advantages", "k3", "policy_loss"]

_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True, slots=True)
class LossParts:
    """What `policy_loss` computed. `loss` carries the gradient; the rest is for the log.

    kl: mean k3 to the reference over tokens, 0.0 without a reference. clip_fraction: share of tokens whose ratio was
    clipped in the direction of their advantage, so that their gradient is 0. ratio_max: largest ratio, trainer-now to
    engine-then.
    """

    loss: torch.Tensor
    kl: float
    clip_fraction: float
    ratio_max: float


def group_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """(reward - mean of its group) / (population standard deviation of its group), 0 for a group without variance.

    Args:
        rewards: [B], float; B is a multiple of group_size.
    Returns:
        [B], float32.
    Raises:
        ConfigError: rewards is not [B] with B a positive multiple of group_size.
    """
    if rewards.ndim != 1 or group_size < 1 or rewards.numel() == 0 or rewards.numel() % group_size:
        raise ConfigError(f"rewards must be [B] with B a multiple of group_size {group_size}, got {list(rewards.shape)}")
    groups = rewards.to(torch.float32).view(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    deviation = groups.std(dim=1, keepdim=True, unbiased=False)
    # Equal rewards may leave a rounding residue after the mean: compare with the epsilon, do not divide by it.
    advantages = torch.where(deviation > _EPSILON, centred / (deviation + _EPSILON), torch.zeros_like(centred))
    return advantages.reshape(-1)


def k3(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 estimate of KL(policy || reference) for each token: exp(d) - d - 1 with d = reference - logprobs.

    Args:
        logprobs, reference: natural logarithms of the same sampled tokens, same shape.
    """
    difference = reference - logprobs
    return torch.exp(difference) - difference - 1.0


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    kl_coefficient: float = 0.0,
    reference_logprobs: torch.Tensor | None = None,
) -> LossParts:
    """The clipped surrogate, averaged over every token of the batch, plus the KL term where it is asked for.

    Args:
        logprobs: [B, T], of the sampled tokens under the model in training; carries the gradient.
        old_logprobs: [B, T], of the same tokens as the rollout engine computed them when it sampled.
        advantages: [B].
        mask: [B, T], 1 for a sampled token, 0 for padding. Padding may hold any finite value.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        reference_logprobs: [B, T]; needed when kl_coefficient is above 0.
    Raises:
        ConfigError: no token at all, or a KL term without a reference.
    """
    weights = mask.to(logprobs.dtype)
    tokens = weights.sum()
    if not bool(tokens > 0):
        raise ConfigError("mask must select at least one token, got none")
    ratio = torch.exp(logprobs - old_logprobs)
    advantage = advantages.unsqueeze(1)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    surrogate = torch.minimum(ratio * advantage, clipped * advantage)
    loss = -(surrogate * weights).sum() / tokens
    kl = 0.0
    if kl_coefficient > 0.0:
        if reference_logprobs is None:
            raise ConfigError(f"reference_logprobs must be given when kl_coefficient is {kl_coefficient:g}, got None")
        divergence = (k3(logprobs, reference_logprobs) * weights).sum() / tokens
        loss = loss + kl_coefficient * divergence
        kl = divergence.item()
    with torch.no_grad():
        too_high = (ratio > 1.0 + clip_high) & (advantage > 0)
        too_low = (ratio < 1.0 - clip_low) & (advantage < 0)
        clip_fraction = ((too_high | too_low) * weights).sum() / tokens
        ratio_max = torch.where(weights > 0, ratio, torch.zeros_like(ratio)).max()
    return LossParts(loss=loss, kl=kl, clip_fraction=clip_fraction.item(), ratio_max=ratio_max.item())
