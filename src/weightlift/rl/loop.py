"""The synchronous loop: every step samples, learns, and publishes once.

    trainer (this process)                       rollout process
    warm start                                   builds its model
    publish version 0      -- weights -->        pull
    step n: prompts        -- sample plane -->   generate with version n-1
            samples        <-- sample plane --
            rewards, advantages, update
            publish version n -- weights -->     pull

The two take turns; a publish is the only time when both work at once: the engine is told first, because publisher
and subscriber have to be in the round together (rl/trainer.py). With `sync=False` only version 0 is ever published. The trainer may
be several ranks (rl/team.py), and with `colocate` the two also hand memory to each other (handoff/step.py): the order of this loop
stays the same.

Owns: the order of things. Must not know: how samples or weights travel. Called by cli/train.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import time
from typing import Any, Protocol

import torch

import weightlift
from weightlift import SyncReport
from weightlift.errors import ConfigError
from weightlift.handoff import SimulatedDevice, SleepLevel
from weightlift.rl import checkpoint
from weightlift.rl.agreement import Agreement
from weightlift.rl.collect import Collector
from weightlift.rl.config import TrainConfig
from weightlift.rl.engine import Engine, engine_for
from weightlift.rl.models import TextModel, build_tiny, load_folder
from weightlift.rl.rollout import Colocated
from weightlift.rl.runlog import RunLog, StepRecord, Stopwatch, default_directory
from weightlift.rl.snapshots import Snapshots
from weightlift.rl.tasks import ReasoningGymTask
from weightlift.rl.team import Team
from weightlift.rl.warmstart import warm_start

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
    """The parts of a run. start: the step that was finished last, 0 at the beginning."""

    config: TrainConfig
    directory: pathlib.Path
    engine: Engine
    team: Team
    collector: Collector
    snapshots: Snapshots | None
    agreement: Agreement | None
    start: int


def train(config: TrainConfig, reporter: Reporter) -> RunResult:
    """One whole run. Raises a WeightliftError in bounded time; whatever ends it, the rollout process and the other trainer ranks
    are gone when this returns."""
    started = time.perf_counter()
    config = _resumed(config).resolved()
    torch.set_num_threads(max(1, (config.threads or 1) // config.trainer_processes))
    torch.manual_seed(config.seed)
    directory = config.out or default_directory()
    with RunLog(directory, config.to_dict()) as log, contextlib.ExitStack() as stack:
        run = _prepare(config, directory, stack, reporter)
        _score(run)
        first = _publish(run, version=run.start)
        gaps = [_compare(run, run.start, synced=True)]
        reporter.phase("evaluating the held-out problems")
        before = run.collector.evaluate()
        for step in range(run.start + 1, config.steps + 1):
            record = _step(run, step)
            log.step(record)
            reporter.step(record, config.steps)
            gaps.append(record.agreement)
        reporter.phase("evaluating the held-out problems again")
        after = run.collector.evaluate()
        summary = log.finish(
            {
                "held_out_before": before,
                "held_out_after": after,
                "first_sync": first.to_dict(),
                "agreement_worst": max((gap for gap in gaps if gap is not None), default=None),
                "agreement_tolerance": None if run.agreement is None else config.engine_options.tolerance,
                "seconds": time.perf_counter() - started,
                **_device_summary(run),
            }
        )
    return RunResult(directory, summary, run.snapshots is not None)


def _resumed(config: TrainConfig) -> TrainConfig:
    """The settings of the run that is resumed, or the given ones."""
    if config.resume is None:
        return config
    try:
        data = json.loads((config.resume / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"resume must be the directory of a run, got {str(config.resume)!r}: {error}") from error
    stored = TrainConfig.from_dict(data)
    return dataclasses.replace(stored, out=config.out, steps=config.steps, resume=config.resume)


def _prepare(config: TrainConfig, directory: pathlib.Path, stack: contextlib.ExitStack, reporter: Reporter) -> _Run:
    """Everything up to the first version. The other processes start before the warm start, so that they import and build meanwhile."""
    task = ReasoningGymTask(config.task or "", config.problems, seed=config.seed)
    address = weightlift.new_address()
    text_model = build_tiny(config.tiny, seed=config.seed) if config.model is None else load_folder(config.model)
    shared = _shared_device(config, text_model.model, directory)
    reporter.phase(f"starting the rollout engine ({config.engine})")
    engine = stack.enter_context(
        contextlib.closing(
            engine_for(config, weights_address=address, directory=directory, text_model=text_model, colocated=shared)
        )
    )
    device = None if shared is None or shared.device is None else pathlib.Path(shared.device)
    team = stack.enter_context(contextlib.closing(Team(config, address=address, directory=directory, device=device)))
    if config.resume is None:
        _warm_start(config, text_model, task, reporter)
    reporter.phase("waiting for the rollout engine")
    engine.wait_ready()
    if config.colocate:
        engine.sleep(SleepLevel.DISCARD)  # what it was built with is never served
    first = team.build(text_model, engine)
    first.publisher.wait_for_peers(1, timeout_s=config.timeouts.start_s)
    collector = Collector(engine, task, text_model, config.sampling, seed=config.seed)
    start = 0
    if config.resume is not None:
        path = checkpoint.latest(config.resume)
        state = checkpoint.read_state(path)
        team.load(path)
        collector.restore(state["collector"])
        start = int(state["step"])
        reporter.phase(f"resuming after step {start}")
    # Elsewhere no process holds the whole model at the end, or none holds it as it was sent.
    whole = config.trainer in ("single", "ddp") and not config.colocate and config.engine == "huggingface"
    snapshots = stack.enter_context(Snapshots(directory, text_model.model, engine)) if config.snapshot and whole else None
    return _Run(config, directory, engine, team, collector, snapshots, _agreement(config, text_model, task), start)


def _agreement(config: TrainConfig, text_model: TextModel, task: ReasoningGymTask) -> Agreement | None:
    options = config.engine_options
    if not options.check_texts:
        return None
    assert options.tolerance is not None, "resolved"
    return Agreement(text_model, task, count=options.check_texts, tolerance=options.tolerance)


def _warm_start(config: TrainConfig, text_model: TextModel, task: ReasoningGymTask, reporter: Reporter) -> None:
    steps = config.warm_start.steps or 0
    warm_start(
        text_model,
        task,
        config.warm_start,
        seed=config.seed,
        progress=lambda step, loss: reporter.warm_start(step, steps, loss),
    )


def _shared_device(config: TrainConfig, model: torch.nn.Module, directory: pathlib.Path) -> Colocated | None:
    """What trainer and engine share. Without a GPU: a budget that holds the engine with its KV cache, or the engine's weights with
    all of the trainer, and not all three: whoever wakes early runs somebody out of memory."""
    if not config.colocate:
        return None
    weights = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    copies = 1 if config.trainer in ("single", "fsdp1", "fsdp2") else config.trainer_processes
    trainer = copies * _TRAINER_COPIES * weights * 11 // 10 + config.trainer_processes * 2**20  # padding of shards, step counters
    if torch.cuda.is_available():
        return Colocated(device=None, kv_bytes=0)
    path = directory / "device.json"
    SimulatedDevice(path, "run", total_bytes=weights + trainer)
    return Colocated(device=str(path.absolute()), kv_bytes=trainer)


_TRAINER_COPIES = 4
"""Weights, gradients, and two moments of AdamW."""


def _device_summary(run: _Run) -> dict[str, Any]:
    path = run.directory / "device.json"
    if not run.config.colocate or not path.exists():
        return {}
    device = SimulatedDevice(path, "run")
    return {"device_bytes": device.read().device_total, "device_bytes_peak": device.peak_bytes}


def _step(run: _Run, step: int) -> StepRecord:
    watch = Stopwatch()
    experience = run.collector.collect()
    watch.lap("generate")
    update = run.team.update(experience.prompts, experience.groups, experience.rewards)
    watch.lap("update")
    _keep(run, step)
    _score(run)
    watch.lap("score")
    report: SyncReport | None = None
    if run.config.sync:
        report = _publish(run, version=step)
    else:
        run.team.reuse()
    watch.lap("sync")
    gap = _compare(run, step, synced=report is not None)
    watch.lap("check")
    versions = experience.versions()
    assert run.team.first is not None, "built before the first step"
    return StepRecord(
        step=step,
        version=max(versions) if report is None else report.version,
        reward_mean=experience.rewards.mean().item(),
        sample_versions=versions,
        sync=None if report is None else report.to_dict(),
        sync_seconds=None if report is None else report.seconds.total,
        sync_gbps=None if report is None else report.gbps,
        seconds=watch.seconds(),
        handoff=run.team.first.ledger(),
        agreement=gap,
        **dataclasses.asdict(update),
    )


def _keep(run: _Run, step: int) -> None:
    """A checkpoint, where one is due: after the update and before its version is published, while the trainer has its memory."""
    every = run.config.checkpoint_every
    if not every or step % every:
        return
    path = checkpoint.directory_of(run.directory, step)
    run.team.save(path)
    assert run.team.first is not None, "built before the first step"
    learner = run.team.first.learner.state()
    checkpoint.write_state(path, {"step": step, "learner": learner, "collector": run.collector.state()})


def _score(run: _Run) -> None:
    """What the trainer says of the fixed texts: before it publishes, while its parameters are where they are trained."""
    if run.agreement is not None:
        run.agreement.trainer = run.team.score(run.agreement.sequences)


def _compare(run: _Run, version: int, *, synced: bool) -> float | None:
    """How far the engine is from that; an error after a sync if it is too far. Without syncs it is what they would have brought."""
    if run.agreement is None:
        return None
    gap = run.agreement.gap(run.engine.score(run.agreement.sequences))
    if synced:
        run.agreement.check(gap, version)
    return gap


def _publish(run: _Run, *, version: int) -> SyncReport:
    if run.snapshots is not None:
        run.snapshots.version(version)
    return run.team.publish(version)
