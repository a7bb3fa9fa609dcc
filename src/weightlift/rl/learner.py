"""The trainer's half of a step: samples and rewards in, changed weights out.

Owns: the optimiser, minibatches, the reference copy. Must not know: where samples come from, how weights leave. Called
by rl/loop.py.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weightlift.errors import ConfigError
from weightlift.rl.config import GrpoConfig, TrainerKind
from weightlift.rl.grpo import LossParts, group_advantages, policy_loss
from weightlift.rl.models import Padded, TextModel, pad_left, pad_right, token_logprobs
from weightlift.rl.parallel import clip_gradients
from weightlift.samples import Sample

__all__ = ["Learner", "UpdateStats", "copy_of"]


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
        kind, rank, ranks: how the model is trained (rl/parallel.py), and which part of every minibatch is this rank's. All ranks
        get
            the same samples and call `update` together; what they return is the same on all of them.
        wrapped: the model as it is trained; default: `text_model.model` itself.
    """

    def __init__(
        self,
        text_model: TextModel,
        config: GrpoConfig,
        *,
        temperature: float,
        seed: int,
        kind: TrainerKind = "single",
        rank: int = 0,
        ranks: int = 1,
        wrapped: torch.nn.Module | None = None,
        reference: torch.nn.Module | None = None,
    ) -> None:
        if config.learning_rate is None:
            raise ConfigError("grpo.learning_rate must be a number, got None; use TrainConfig.resolved()")
        self._text_model = text_model
        self._model = text_model.model if wrapped is None else wrapped
        self._kind: TrainerKind = kind
        self._rank, self._ranks = rank, ranks
        self._config = config
        self._learning_rate = config.learning_rate
        self._temperature = temperature
        self._updates = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._optimiser = torch.optim.AdamW(self._model.parameters(), lr=self._learning_rate, weight_decay=0.0, betas=(0.9, 0.99))
        self._reference = reference
        if config.kl_coefficient > 0.0 and reference is None:
            self._reference = copy_of(self._model)

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
            if len(index) < self._ranks:
                raise ConfigError(f"a minibatch must have a sample for each of {self._ranks} ranks, got {len(index)}")
            mine = index.tensor_split(self._ranks)[self._rank]
            tokens = int(batch.completions.mask[index].sum())
            parts.append(self._minibatch(batch.rows(mine), tokens))
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

    def _minibatch(self, batch: _Batch, tokens: int) -> tuple[LossParts, float]:
        """One optimiser step with this rank's rows of a minibatch that has `tokens` sampled tokens in all."""
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
        # The loss is a mean over this rank's tokens, the gradient a mean over ranks: together the mean over all tokens.
        share = float(mask.sum()) / tokens
        (parts.loss * (share * self._ranks)).backward()  # type: ignore[no-untyped-call]
        norm = clip_gradients(self._kind, self._model, self._config.max_grad_norm)
        self._optimiser.step()
        return self._over_all_ranks(parts, share), norm

    def _over_all_ranks(self, parts: LossParts, share: float) -> LossParts:
        if self._ranks == 1:
            return parts
        sums = torch.tensor([parts.loss.item(), parts.kl, parts.clip_fraction], dtype=torch.float64) * share
        largest = torch.tensor([parts.ratio_max], dtype=torch.float64)
        dist.all_reduce(sums)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        loss, kl, clip_fraction = sums.tolist()
        return LossParts(loss=torch.tensor(loss), kl=kl, clip_fraction=clip_fraction, ratio_max=largest.item())

    @property
    def optimiser(self) -> torch.optim.Optimizer:
        """Whose state is part of a checkpoint, and moves with the model."""
        return self._optimiser

    def state(self) -> dict[str, torch.Tensor | int]:
        """What a checkpoint needs besides model and optimiser."""
        return {"updates": self._updates, "generator": self._generator.get_state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self._updates = int(state["updates"])
        self._generator.set_state(state["generator"])


def copy_of(model: torch.nn.Module) -> torch.nn.Module:
    """A frozen copy, to compare with."""
    return copy.deepcopy(model).eval().requires_grad_(False)
