"""The trainer's half of a step: samples and rewards in, changed weights out.

Owns: the optimiser, minibatches, the reference copy. Must not know: where samples come from, how weights leave. Called
by rl/loop.py.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import torch

from weightlift.errors import ConfigError
from weightlift.rl.config import GrpoConfig
from weightlift.rl.grpo import LossParts, group_advantages, policy_loss
from weightlift.rl.models import Padded, TextModel, pad_left, pad_right, token_logprobs
from weightlift.samples import Sample

__all__ = ["Learner", "UpdateStats"]


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateStats:
    """Means over the minibatches of one update; `ratio_max` and `grad_norm` are the largest. tokens: sampled tokens
    trained on.

    silent_groups: share of groups whose rewards were all equal, so that they taught nothing.
    """

    loss: float
    kl: float
    clip_fraction: float
    ratio_max: float
    grad_norm: float
    silent_groups: float
    tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
    """B completions: prompts padded on the left, completions on the right, old_logprobs [B, T], advantages [B]."""

    prompts: Padded
    completions: Padded
    old_logprobs: torch.Tensor
    advantages: torch.Tensor

    def rows(self, index: torch.Tensor) -> _Batch:
        return _Batch(
            Padded(self.prompts.tokens[index], self.prompts.mask[index]),
            Padded(self.completions.tokens[index], self.completions.mask[index]),
            self.old_logprobs[index],
            self.advantages[index],
        )


class Learner:
    """Trains `text_model.model` in place.

    Args:
        config: resolved (`learning_rate` is a number). temperature: that the samples are drawn with.
        seed: of the order of the groups.
    """

    def __init__(self, text_model: TextModel, config: GrpoConfig, *, temperature: float, seed: int) -> None:
        if config.learning_rate is None:
            raise ConfigError("grpo.learning_rate must be a number, got None; use TrainConfig.resolved()")
        self._text_model = text_model
        self._model = text_model.model
        self._config = config
        self._learning_rate = config.learning_rate
        self._temperature = temperature
        self._updates = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._optimiser = torch.optim.AdamW(self._model.parameters(), lr=self._learning_rate, weight_decay=0.0, betas=(0.9, 0.99))
        self._reference: torch.nn.Module | None = None
        if config.kl_coefficient > 0.0:
            self._reference = copy.deepcopy(self._model).eval().requires_grad_(False)

    def update(self, prompts: Sequence[Sequence[int]], groups: Sequence[Sequence[Sample]], rewards: torch.Tensor) -> UpdateStats:
        """One pass over the samples in `minibatches` optimiser steps.

        Args:
            prompts: token ids, one row a group. groups: the samples of each prompt, all groups of one size G.
            rewards: [prompts * G], float, in the order of the samples.
        """
        batch = self._batch(prompts, groups, rewards)
        group_size = len(groups[0])
        self._updates += 1
        rate = self._learning_rate * min(1.0, self._updates / max(1, self._config.lr_warmup_steps))
        for parameter_group in self._optimiser.param_groups:
            parameter_group["lr"] = rate
        self._model.train()
        parts: list[tuple[LossParts, float]] = []
        # Groups are shuffled whole: the samples of one prompt are compared with each other, so they belong in one
        # optimiser step.
        for chosen in torch.randperm(len(groups), generator=self._generator).chunk(self._config.minibatches):
            index = (chosen.unsqueeze(1) * group_size + torch.arange(group_size)).reshape(-1)
            parts.append(self._minibatch(batch.rows(index)))
        spread = rewards.view(-1, group_size)
        silent = (spread == spread[:, :1]).all(dim=1).float().mean().item()
        count = len(parts)
        return UpdateStats(
            loss=sum(part.loss.item() for part, _ in parts) / count,
            kl=sum(part.kl for part, _ in parts) / count,
            clip_fraction=sum(part.clip_fraction for part, _ in parts) / count,
            ratio_max=max(part.ratio_max for part, _ in parts),
            grad_norm=max(norm for _, norm in parts),
            silent_groups=silent,
            tokens=int(batch.completions.mask.sum()),
        )

    def _batch(self, prompts: Sequence[Sequence[int]], groups: Sequence[Sequence[Sample]], rewards: torch.Tensor) -> _Batch:
        pad_id = self._text_model.pad_id
        samples = [sample for group in groups for sample in group]
        completions = pad_right([sample.tokens for sample in samples], pad_id)
        width = completions.tokens.shape[1]
        return _Batch(
            prompts=pad_left([prompt for prompt, group in zip(prompts, groups, strict=True) for _ in group], pad_id),
            completions=completions,
            old_logprobs=torch.tensor([sample.logprobs + [0.0] * (width - len(sample.logprobs)) for sample in samples]),
            advantages=group_advantages(rewards, len(groups[0])),
        )

    def _minibatch(self, batch: _Batch) -> tuple[LossParts, float]:
        logprobs = token_logprobs(self._model, batch.prompts, batch.completions, temperature=self._temperature)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference = token_logprobs(self._reference, batch.prompts, batch.completions, temperature=self._temperature)
        # Padding holds the log-probability of a pad token under one model and 0.0 under the other: neither may reach
        # exp().
        mask = batch.completions.mask
        parts = policy_loss(
            logprobs * mask,
            batch.old_logprobs,
            batch.advantages,
            mask,
            clip_low=self._config.clip_low,
            clip_high=self._config.clip_high,
            kl_coefficient=self._config.kl_coefficient,
            reference_logprobs=None if reference is None else reference * mask,
        )
        self._optimiser.zero_grad(set_to_none=True)
        parts.loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.max_grad_norm)
        self._optimiser.step()
        return parts, float(norm)
