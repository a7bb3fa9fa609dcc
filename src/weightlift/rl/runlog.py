"""The files of a run: `config.json`, `metrics.jsonl` (one object a step), `summary.json`, `plot.png`.

Owns: the run directory. Must not know: how a step is made. Called by rl/loop.py. A line is flushed when its step is
over, so that an interrupted run leaves whole lines; the other files are written under another name first and then
renamed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final

from weightlift.errors import ConfigError

__all__ = ["RunLog", "StepRecord", "Stopwatch", "default_directory"]

_EDGE_STEPS: Final = 10
"""Steps at either end whose mean reward the summary compares."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step, as it goes into metrics.jsonl.

    step: from 1. version: served by the engine after the step's sync. reward_mean: over the step's samples, 0 to 1.
    sample_versions: version -> number of the step's samples that it made. sync: the SyncReport as a dict, None without
    a sync.
    seconds: per phase of the step (generate with rewards, update, score, sync, check) and `total`.
    agreement: nats a token by which engine and trainer differ on some fixed texts after the step (rl/agreement.py).
    handoff: with --colocate, the ledger of the first rank: bytes after every arrow of the step (handoff/ledger.py).
    """

    step: int
    version: int
    reward_mean: float
    sample_versions: dict[int, int]
    sync: dict[str, Any] | None
    sync_seconds: float | None
    sync_gbps: float | None
    loss: float
    kl: float
    clip_fraction: float
    ratio_max: float
    grad_norm: float
    silent_groups: float
    tokens: int
    seconds: dict[str, float]
    agreement: float | None = None
    handoff: list[dict[str, Any]] = dataclasses.field(default_factory=list)


class Stopwatch:
    """Seconds between laps, by name."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Book the time since the last lap (or the start) under `name`."""
        now = time.perf_counter()
        self._laps[name] = now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        """The laps, and `total` from the start to the last lap."""
        return {**self._laps, "total": self._last - self._start}


def default_directory() -> pathlib.Path:
    """runs/<local time>, with a number behind it where two runs start within one second."""
    base = pathlib.Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


class RunLog:
    """Writes the files of one run. A context manager; leaving it closes `metrics.jsonl`.

    Args:
        directory: made if needed; ConfigError if it already holds a run or cannot be written.
        config: JSON-able, goes into config.json.
    """

    def __init__(self, directory: pathlib.Path, config: Mapping[str, Any]) -> None:
        self.directory: Final = directory
        self.records: list[StepRecord] = []
        self._config = config
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # "x": the metrics of an earlier run are never mixed with this one's.
            self._metrics = (directory / "metrics.jsonl").open("x", encoding="utf-8")
        except FileExistsError:
            raise ConfigError(f"out must be a directory without a run in it, got {str(directory)!r}") from None
        except OSError as error:
            raise ConfigError(f"out must be a directory that can be written, got {str(directory)!r}: {error}") from error
        self._write_json("config.json", config)

    def step(self, record: StepRecord) -> None:
        """Append one line, and flush it."""
        self.records.append(record)
        self._metrics.write(json.dumps(dataclasses.asdict(record), default=str) + "\n")
        self._metrics.flush()

    def finish(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Write summary.json and plot.png from the records so far; returns the summary."""
        rewards = [record.reward_mean for record in self.records]
        syncs = [record.sync_seconds for record in self.records if record.sync_seconds is not None]
        summary: dict[str, Any] = {
            "steps": len(rewards),
            "edge_steps": min(_EDGE_STEPS, len(rewards)),
            "reward_first": _mean(rewards[:_EDGE_STEPS]),
            "reward_last": _mean(rewards[-_EDGE_STEPS:]),
            "sync_seconds_mean": _mean(syncs),
            **extra,
        }
        self._write_json("summary.json", summary)
        if self.records:
            self._plot()
        return summary

    def close(self) -> None:
        """Close metrics.jsonl. Safe to call again."""
        self._metrics.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and self.records:
            self.finish({"ended_by": type(error).__name__})
        self.close()

    def _write_json(self, name: str, data: Mapping[str, Any]) -> None:
        partial = self.directory / f".{name}.partial"
        partial.write_text(json.dumps(data, indent=2, default=str) + "\n", encoding="utf-8")
        os.replace(partial, self.directory / name)

    def _plot(self) -> None:
        # The object interface with the Agg canvas: pyplot would keep state for the process and may look for a display.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 5), layout="constrained")
        FigureCanvasAgg(figure)
        reward_axes, sync_axes = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
        steps = [record.step for record in self.records]
        rewards = [record.reward_mean for record in self.records]
        reward_axes.plot(steps, rewards, color="tab:blue", alpha=0.35, label="step")
        reward_axes.plot(steps, _running_mean(rewards, _EDGE_STEPS), color="tab:blue", label=f"mean of {_EDGE_STEPS}")
        reward_axes.set(ylabel="mean reward", ylim=(0, 1), title="reward on the engine's samples")
        reward_axes.legend(loc="lower right")
        synced = [record for record in self.records if record.sync_seconds is not None]
        milliseconds = [1000 * (record.sync_seconds or 0.0) for record in synced]
        sync_axes.plot([record.step for record in synced], milliseconds, ".", color="tab:orange", markersize=3)
        sync_axes.set(xlabel="step", ylabel="sync, ms", ylim=(0, None))
        if not synced:
            sync_axes.text(0.5, 0.5, "no syncs", ha="center", va="center", transform=sync_axes.transAxes)
        for axes in (reward_axes, sync_axes):
            axes.grid(alpha=0.3)
        figure.savefig(self.directory / "plot.png", dpi=120)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of the last `width` values at each place, of fewer at the start."""
    means = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - width) : end]
        means.append(sum(window) / len(window))
    return means
