"""`weightlift train`: the command around rl/loop.py: progress on the terminal, signals, exit codes.

Owns: what is printed, what a signal does. Must not know: how a step is made. `cli/main.py` parses a `TrainConfig` and calls `run`.

Exit codes: 0 done, 1 a WeightliftError, 2 a wrong value, 130 Ctrl-C, 143 SIGTERM. Whichever it is, the rollout process is gone before
this one: orderly where there is time, by its own watch on its parent where this process is killed.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import sys
from types import FrameType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from weightlift.errors import ConfigError, WeightliftError
from weightlift.rl.config import TrainConfig
from weightlift.rl.loop import RunResult, train
from weightlift.rl.runlog import StepRecord, default_directory

__all__ = ["TrainConfig", "run"]

EXIT_ERROR = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM

_PLAIN_EVERY = 10
_RECENT = 10


class _Stopped(BaseException):
    """A signal asked for the end. Not an Exception: nothing on the way out may take it for a failure and go on."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def run(config: TrainConfig) -> int:
    """One training run; returns the exit code. Prints errors without a traceback; the run's files stay in any case."""
    # The embedded default never downloads; set before anything imports the hub's client.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    console, errors = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)
    directory = config.out or default_directory()
    before = {number: signal.signal(number, _stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        result = _train(config, directory, console)
    except _Stopped as stopped:
        errors.print(f"stopped; both processes are gone, the files so far are in {directory}", highlight=False)
        return stopped.code
    except WeightliftError as error:
        errors.print(f"{type(error).__name__}: {error}", highlight=False, markup=False)
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_ERROR
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    _print_result(result, console)
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    """End the run once: later signals are ignored while the processes are stopped, which takes a few seconds at most."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise _Stopped(128 + number)


def _train(config: TrainConfig, directory: pathlib.Path, console: Console) -> RunResult:
    config = dataclasses.replace(config, out=directory)
    if not console.is_terminal:
        return train(config, PlainReporter())
    with Live(console=console, refresh_per_second=8, transient=False) as live:
        return train(config, LiveReporter(live))


class PlainReporter:
    """One line now and then, for logs."""

    def phase(self, text: str) -> None:
        """A line for each phase."""
        self._line(text)

    def warm_start(self, step: int, steps: int, loss: float) -> None:
        """A line for every 20th step."""
        if step % 20 == 0 or step == steps:
            self._line(f"warm start {step}/{steps}  loss {loss:.3f}")

    def step(self, record: StepRecord, steps: int) -> None:
        """A line for the first step, every tenth and the last."""
        if record.step == 1 or record.step % _PLAIN_EVERY == 0 or record.step == steps:
            self._line(
                f"step {record.step}/{steps}  reward {record.reward_mean:.3f}  serves version {record.version}  {_sync(record)}"
                + _agreement(record)
            )

    def _line(self, text: str) -> None:
        print(text, flush=True)


class LiveReporter:
    """One small table that is redrawn in place."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._rewards: list[float] = []

    def phase(self, text: str) -> None:
        """A line above the table."""
        self._live.console.print(text, style="dim")

    def warm_start(self, step: int, steps: int, loss: float) -> None:
        """The warm start's progress in the table's place."""
        self._live.update(f"warm start {step}/{steps}  loss {loss:.3f}")

    def step(self, record: StepRecord, steps: int) -> None:
        """The table of this step."""
        self._rewards.append(record.reward_mean)
        recent = self._rewards[-_RECENT:]
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(style="dim")
        table.add_column()
        table.add_row("step", f"{record.step}/{steps}  ({record.seconds['total']:.2f} s)")
        table.add_row("mean reward", f"{record.reward_mean:.3f}  [dim]mean of {len(recent)}[/dim] {sum(recent) / len(recent):.3f}")
        table.add_row("", _bar(sum(recent) / len(recent)))
        table.add_row("version served", str(record.version))
        table.add_row("sync", _sync(record) + _agreement(record))
        self._live.update(table)


def _sync(record: StepRecord) -> str:
    if record.sync_seconds is None or record.sync_gbps is None:
        return "no sync"
    return f"sync {1000 * record.sync_seconds:.1f} ms, {record.sync_gbps:.2f} GB/s"


def _agreement(record: StepRecord) -> str:
    return "" if record.agreement is None else f", logprobs differ by {record.agreement:.4f}"


def _bar(share: float, width: int = 40) -> str:
    full = round(share * width)
    return "█" * full + "░" * (width - full)


def _agreements(summary: dict[str, Any]) -> list[str]:
    worst = summary.get("agreement_worst")
    if worst is None:
        return []
    return [f"engine and trainer differ by at most {worst:.4f} nats on a token (tolerance {summary['agreement_tolerance']:g})"]


def _print_result(result: RunResult, console: Console) -> None:
    summary = result.summary
    edge = summary["edge_steps"]
    lines = [
        f"mean reward: {summary['reward_first']:.3f} in the first {edge} steps, {summary['reward_last']:.3f} in the last {edge}",
        f"held-out problems right (greedy): {summary['held_out_before']:.3f} before, {summary['held_out_after']:.3f} after",
        *_agreements(summary),
        f"{summary['steps']} steps in {summary['seconds']:.0f} s, warm start included",
        f"files: {result.directory}/ (metrics.jsonl, summary.json, plot.png, config.json, *.log)",
        *([f"trainer against engine: weightlift verify --out {result.directory}"] if result.snapshot else []),
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False)


if __name__ == "__main__":
    import tyro

    sys.exit(run(tyro.cli(TrainConfig)))
