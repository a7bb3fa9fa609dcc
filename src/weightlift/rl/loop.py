"""The synchronous loop: every step samples, learns, and publishes once.

    trainer (this process)                       rollout process
    warm start                                   builds its model
    publish version 0      -- weights -->        pull
    step n: prompts        -- sample plane -->   generate with version n-1
            samples        <-- sample plane --
            rewards, advantages, update
            publish version n -- weights -->     pull

The two take turns; `_publish` is the only place where both work at once: the engine is told first, because publisher
and subscriber have to be in the round together. With `sync=False` only version 0 is ever published.

Owns: the order of things. Must not know: how samples or weights travel. Called by cli/train.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from typing import Any, Protocol

import torch

import weightlift
from weightlift import Deadlines, Publisher, SyncReport
from weightlift.errors import RemoteProtocolError
from weightlift.rl.collect import Collector
from weightlift.rl.config import TrainConfig
from weightlift.rl.engine import Engine, RolloutEngine
from weightlift.rl.learner import Learner
from weightlift.rl.models import build_tiny, load_folder
from weightlift.rl.runlog import RunLog, StepRecord, Stopwatch, default_directory
from weightlift.rl.snapshots import Snapshots
from weightlift.rl.tasks import ReasoningGymTask
from weightlift.rl.warmstart import warm_start
from weightlift.sources import ModuleSource

__all__ = ["Reporter", "RunResult", "train"]


class Reporter(Protocol):
    """Who is told how far the run is. Called from the loop, so it must not block."""

    def phase(self, text: str) -> None: ...
    def warm_start(self, step: int, steps: int, loss: float) -> None: ...
    def step(self, record: StepRecord, steps: int) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class RunResult:
    """Where the files are, and what summary.json says."""

    directory: pathlib.Path
    summary: dict[str, Any]
    snapshot: bool


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """The parts of a run."""

    engine: Engine
    publisher: Publisher
    collector: Collector
    learner: Learner
    snapshots: Snapshots | None


def train(config: TrainConfig, reporter: Reporter) -> RunResult:
    """One whole run. Raises a WeightliftError in bounded time; whatever ends it, the rollout process is gone when this
    returns."""
    started = time.perf_counter()
    config = config.resolved()
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    directory = config.out or default_directory()
    with RunLog(directory, config.to_dict()) as log, contextlib.ExitStack() as stack:
        run = _prepare(config, directory, stack, reporter)
        first = _publish(run, version=0)
        reporter.phase("evaluating the held-out problems")
        before = run.collector.evaluate()
        for step in range(1, config.steps + 1):
            record = _step(run, step, sync=config.sync)
            log.step(record)
            reporter.step(record, config.steps)
        reporter.phase("evaluating the held-out problems again")
        after = run.collector.evaluate()
        summary = log.finish(
            {
                "held_out_before": before,
                "held_out_after": after,
                "first_sync": first.to_dict(),
                "seconds": time.perf_counter() - started,
            }
        )
    return RunResult(directory, summary, config.snapshot)


def _prepare(config: TrainConfig, directory: pathlib.Path, stack: contextlib.ExitStack, reporter: Reporter) -> _Run:
    """Everything up to version 0. The rollout process starts before the warm start, so that it imports and builds meanwhile."""
    task = ReasoningGymTask(config.task or "", config.problems, seed=config.seed)
    address = weightlift.new_address()
    reporter.phase("starting the rollout process")
    engine = stack.enter_context(contextlib.closing(RolloutEngine(config, weights_address=address, directory=directory)))
    text_model = build_tiny(config.tiny, seed=config.seed) if config.model is None else load_folder(config.model)
    limit_s = config.timeouts.sync_s
    limits = Deadlines(announce_s=limit_s, prepare_s=limit_s, transfer_s=limit_s, release_s=limit_s, commit_s=limit_s)
    source = ModuleSource(text_model.model)
    publisher = stack.enter_context(Publisher(source, address, transport=config.transport, deadlines=limits, verify=config.verify))
    steps = config.warm_start.steps or 0
    warm_start(
        text_model,
        task,
        config.warm_start,
        seed=config.seed,
        progress=lambda step, loss: reporter.warm_start(step, steps, loss),
    )
    reporter.phase("waiting for the rollout process")
    engine.wait_ready()
    publisher.wait_for_peers(1, timeout_s=config.timeouts.start_s)
    collector = Collector(engine, task, text_model, config.sampling, seed=config.seed)
    learner = Learner(text_model, config.grpo, temperature=config.sampling.temperature, seed=config.seed)
    snapshots = stack.enter_context(Snapshots(directory, text_model.model, engine)) if config.snapshot else None
    return _Run(engine, publisher, collector, learner, snapshots)


def _step(run: _Run, step: int, *, sync: bool) -> StepRecord:
    watch = Stopwatch()
    experience = run.collector.collect()
    watch.lap("generate")
    update = run.learner.update(experience.prompts, experience.groups, experience.rewards)
    watch.lap("update")
    report = _publish(run, version=step) if sync else None
    watch.lap("sync")
    versions = experience.versions()
    return StepRecord(
        step=step,
        version=max(versions) if report is None else report.version,
        reward_mean=experience.rewards.mean().item(),
        sample_versions=versions,
        sync=None if report is None else report.to_dict(),
        sync_seconds=None if report is None else report.seconds.total,
        sync_gbps=None if report is None else report.gbps,
        seconds=watch.seconds(),
        **dataclasses.asdict(update),
    )


def _publish(run: _Run, *, version: int) -> SyncReport:
    """One round: the engine is told to pull, then this side publishes, then the engine confirms what it serves."""
    if run.snapshots is not None:
        run.snapshots.version(version)
    ticket = run.engine.begin_sync(version)
    report = run.publisher.publish(version=version)
    served = run.engine.finish_sync(ticket)
    if served != version:
        raise RemoteProtocolError(f"the engine serves version {served} after a round of version {version}", version=version)
    return report
