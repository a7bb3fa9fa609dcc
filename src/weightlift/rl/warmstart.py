"""The supervised warm start: a few steps on right answers, done by the command itself.

Owns: the loop over demonstrations. Must not know: processes, weight sync, rewards. Called by rl/loop.py.

Reinforcement learning from random weights would wait for ever for the first right answer to reinforce. The warm start ends
early on purpose, when about a third of the samples are right: the rest is for GRPO to learn. Only train problems are shown.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Sequence

import torch

from weightlift.rl.config import WarmStartConfig
from weightlift.rl.models import TextModel, pad_left, pad_right, token_logprobs
from weightlift.rl.tasks import Problem, Task

__all__ = ["warm_start"]

_RAMP_STEPS = 20
_WINDOW = 10


def warm_start(
    text_model: TextModel, task: Task, config: WarmStartConfig, *, seed: int, progress: Callable[[int, float], None]
) -> None:
    """Train `text_model` in place until `config.until_loss`, for `config.steps` steps at most.

    Ending by the loss and not by a count gives every seed about the same start.
    `progress(step, loss)` is called after each step: steps from 1, loss in nats a token.
    """
    steps = config.steps or 0
    generator = random.Random(seed)
    model = text_model.model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.01, betas=(0.9, 0.95))
    losses: collections.deque[float] = collections.deque(maxlen=_WINDOW)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = config.learning_rate * min(1.0, (step + 1) / _RAMP_STEPS)
        loss = _imitation_loss(text_model, generator.choices(task.train, k=config.batch_size))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
        progress(step + 1, losses[-1])
        if len(losses) == _WINDOW and sum(losses) / _WINDOW < config.until_loss:
            break
    optimiser.zero_grad(set_to_none=True)  # FSDP1 would look for a shard of gradients that are whole


def _imitation_loss(text_model: TextModel, problems: Sequence[Problem]) -> torch.Tensor:
    """Mean cross-entropy over the answers' tokens; the prompts' tokens are not learned."""
    prompts = pad_left([text_model.encode_prompt(problem.prompt) for problem in problems], text_model.pad_id)
    answers = pad_right([text_model.encode_answer(problem.answer) for problem in problems], text_model.pad_id)
    logprobs = token_logprobs(text_model.model, prompts, answers, temperature=1.0)
    return -(logprobs * answers.mask).sum() / answers.mask.sum()
