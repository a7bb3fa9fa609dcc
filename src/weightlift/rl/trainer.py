"""One rank of the trainer: its part of the model, its learner, its publisher, its side of the hand-over.

Owns: `TrainerRank`: what one rank can do. Must not know: who asks (rl/team.py), where samples come from. Every rank does the same
things in the same order; that is all that the collectives inside need.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from weightlift import Deadlines, Publisher, SyncReport
from weightlift.errors import RemoteProtocolError
from weightlift.handoff import Barrier, ColocatedStep, CudaMeter, Ledger, SimulatedDevice, SleepLevel, offload_for
from weightlift.handoff.phases import StepStage
from weightlift.rl import checkpoint
from weightlift.rl.booked import BookedOffload
from weightlift.rl.config import TrainConfig
from weightlift.rl.engine import Engine
from weightlift.rl.learner import Learner, UpdateStats, copy_of
from weightlift.rl.models import TextModel, sequence_logprobs
from weightlift.rl.parallel import source_for, wrap
from weightlift.samples import Sample
from weightlift.sources import TrainerGroup, checkpoint_source

__all__ = ["TrainerRank"]


class TrainerRank:
    """One rank; `first` of rl/team.py is the one in the loop's process.

    config: resolved. text_model: whole, with the same weights on every rank.
    address: of the publisher. device: file of the simulated device, where trainer and engine share one that does not exist.
    engine: on the first rank, whose part it is to reach it; None on the others.
    """

    def __init__(
        self,
        config: TrainConfig,
        text_model: TextModel,
        *,
        address: str,
        device: pathlib.Path | None,
        engine: Engine | None,
    ) -> None:
        together = dist.is_initialized()
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        self._config = config
        self._engine = engine
        self._stack = contextlib.ExitStack()
        # A reference is copied before the model is cut up.
        reference = copy_of(text_model.model) if config.grpo.kl_coefficient > 0.0 else None
        self.model = wrap(config.trainer, text_model.model)
        self.learner = Learner(
            text_model,
            config.grpo,
            temperature=config.sampling.temperature,
            seed=config.seed,
            kind=config.trainer,
            rank=self.rank,
            ranks=self.ranks,
            wrapped=self.model,
            reference=reference,
        )
        self._group = TrainerGroup() if together else None
        if self._group is not None:
            self._stack.callback(self._group.close)
        limit_s = config.timeouts.sync_s
        limits = Deadlines(**dict.fromkeys(("announce_s", "prepare_s", "transfer_s", "release_s", "commit_s", "gather_s"), limit_s))
        plain = config.engine == "huggingface"
        source = source_for(config.trainer, self.model, self._group, dtype=None if plain else config.engine_options.dtype)
        if not plain:  # vLLM knows the names of checkpoints
            source = checkpoint_source(text_model.model, source)
        self.publisher = self._stack.enter_context(
            Publisher(source, address, transport=config.transport, deadlines=limits, verify=config.verify)
        )
        self._booked: BookedOffload | None = None
        self.step: ColocatedStep | None = None
        if config.colocate:
            self.step = self._colocated(device)

    def _colocated(self, path: pathlib.Path | None) -> ColocatedStep:
        device = None if path is None else SimulatedDevice(path, f"trainer-{self.rank}")
        ledger = Ledger(CudaMeter() if device is None else device)
        self._booked = BookedOffload(offload_for(self.model, self.learner.optimiser), device)
        barrier = Barrier("kv-wake-up")
        self._stack.callback(barrier.close)
        level = SleepLevel(self._config.sleep_level)
        return ColocatedStep(self._booked, barrier, ledger, self._engine, level=level, barrier_s=self._config.timeouts.sync_s)

    def update(self, prompts: Sequence[Sequence[int]], groups: Sequence[Sequence[Sample]], rewards: torch.Tensor) -> UpdateStats:
        """One update with everybody's samples; with a colocated engine, after it has gone to sleep and this rank has come back."""
        if self.step is not None and self.step.order.stage is not StepStage.TRAINING:
            self.step.back_to_training()
        stats = self.learner.update(prompts, groups, rewards)
        if self._booked is not None:
            self._booked.book()
            assert self.step is not None, "booked where memory is shared"
            self.step.ledger.book("update")
        return stats

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """What the model says of some texts; every rank takes part, all get the same answer."""
        return sequence_logprobs(self.model, sequences)

    def publish(self, version: int) -> SyncReport:
        """One sync; with a colocated engine, between waking its weights and waking its KV cache."""
        if self.step is None:
            return self._sync(version)
        self.step.wake_weights()
        report = self.step.publish(lambda: self._sync(version))
        self.step.wake_kv_cache()
        return report

    def _sync(self, version: int) -> SyncReport:
        """The engine is told to pull, then all ranks publish, then the engine confirms what it serves."""
        if self._engine is None:
            return self.publisher.publish(version)
        ticket = self._engine.begin_sync(version)
        report = self.publisher.publish(version)
        served = self._engine.finish_sync(ticket)
        if served != version:
            raise RemoteProtocolError(f"the engine serves version {served} after a round of version {version}", version=version)
        return report

    def reuse(self) -> None:
        """No sync: with a colocated engine the devices go to it, and it generates with what it has."""
        if self.step is not None:
            self.step.reuse()

    def ledger(self) -> list[dict[str, Any]]:
        """The arrows since this was asked last."""
        return [] if self.step is None else [entry.to_dict() for entry in self.step.ledger.take()]

    def save(self, path: pathlib.Path) -> None:
        """This rank's part of a checkpoint."""
        checkpoint.save_shards(path, self.model, self.learner)

    def load(self, path: pathlib.Path) -> None:
        """This rank's part of a checkpoint, and where the learner stood."""
        checkpoint.load_shards(path, self.model, self.learner)
        self.learner.restore(checkpoint.read_state(path)["learner"])
        if self._booked is not None:
            self._booked.book()  # optimizer state came with it

    def close(self) -> None:
        """Give back everything. Idempotent."""
        self._stack.close()
