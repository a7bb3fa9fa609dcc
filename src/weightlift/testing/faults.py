"""Scripted faults that read as a sentence: `fail_at("install", bucket=3, do=kill)`.

Owns: the script, and loaders and sources that follow it. Must not know: transports, pytest.
A fault happens inside the process that it strikes, at an exact point, so a test never has to guess when to shoot.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from weightlift.loaders.base import Loader
from weightlift.loaders.module import MappingLoader
from weightlift.protocol.manifest import Manifest
from weightlift.protocol.plan import Bucket, Plan
from weightlift.sources.base import Source

__all__ = ["Fault", "FaultyLoader", "FaultySource", "KeepingLoader", "fail_at", "kill", "kill_group", "raising", "sleeping", "stop"]

Act: TypeAlias = Callable[[], None]


def kill() -> None:
    """SIGKILL for this process."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal is delivered before this returns; a process must not go on past its own end


def kill_group() -> None:
    """SIGKILL for this process and all of its process group."""
    os.killpg(os.getpgid(0), signal.SIGKILL)
    time.sleep(60)


def stop() -> None:
    """SIGSTOP for this process; it goes on from here when somebody sends SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)


def raising(error: BaseException) -> Act:
    """Raise that error."""

    def act() -> None:
        raise error

    return act


def sleeping(seconds: float) -> Act:
    """Be slow."""
    return lambda: time.sleep(seconds)


@dataclasses.dataclass
class Fault:
    """What happens at which call. `round_` counts from 1; None strikes in every round. Strikes once unless `times` says otherwise."""

    at: str
    do: Act
    bucket: int | None = None
    round_: int | None = None
    times: int = 1
    struck: int = 0

    def strike(self, at: str, *, round_: int, bucket: int | None = None) -> None:
        """Act, if this is the point."""
        here = at == self.at and self.bucket in (None, bucket) and self.round_ in (None, round_)
        if here and self.struck < self.times:
            self.struck += 1
            self.do()


def fail_at(at: str, do: Act, *, bucket: int | None = None, round: int | None = None, times: int = 1) -> Fault:
    """A fault at a loader's or a source's call: prepare, install, finish, commit, abort; manifest, tensor.

    bucket: for install, the bucket's number; for tensor, the position in the stream. None: the first that comes.
    """
    return Fault(at, do, bucket=bucket, round_=round, times=times)


class FaultyLoader:
    """A loader around another one that follows a script. `calls` is what was called, in order."""

    def __init__(self, loader: Loader, faults: Sequence[Fault] = ()) -> None:
        self.loader = loader
        self.faults = list(faults)
        self.calls: list[str] = []
        self.rounds = 0

    def _strike(self, at: str, bucket: int | None = None) -> None:
        self.calls.append(at if bucket is None else f"{at} {bucket}")
        for fault in self.faults:
            fault.strike(at, round_=self.rounds, bucket=bucket)

    def prepare(self, plan: Plan) -> None:
        self.rounds += 1
        self._strike("prepare")
        self.loader.prepare(plan)

    def install(self, bucket: Bucket, memory: torch.Tensor) -> None:
        self._strike("install", bucket.number)
        self.loader.install(bucket, memory)

    def finish(self) -> None:
        self._strike("finish")
        self.loader.finish()

    def commit(self, version: int) -> None:
        self._strike("commit")
        self.loader.commit(version)

    def abort(self) -> None:
        self._strike("abort")
        self.loader.abort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class KeepingLoader(FaultyLoader):
    """Plans no copies, and keeps the memory of bucket `keep`: what a careless application does. `kept` holds it."""

    caches_views = False

    def __init__(self, loader: MappingLoader, faults: Sequence[Fault] = ()) -> None:
        super().__init__(loader, faults)
        self.keep: int | None = None
        self.kept: list[torch.Tensor] = []
        self._plain = loader

    def install(self, bucket: Bucket, memory: torch.Tensor) -> None:
        super().install(bucket, memory)
        self._plain._cached.clear()
        if bucket.number == self.keep:
            self.kept.append(memory)


class FaultySource:
    """A streaming source around another one that follows a script."""

    def __init__(self, source: Source, faults: Sequence[Fault] = ()) -> None:
        self.source = source
        self.faults = list(faults)
        self.rounds = 0

    def _strike(self, at: str, bucket: int | None = None) -> None:
        for fault in self.faults:
            fault.strike(at, round_=self.rounds, bucket=bucket)

    def manifest(self) -> Manifest:
        self.rounds += 1
        self._strike("manifest")
        return self.source.manifest()

    def stream(self) -> Iterator[torch.Tensor]:
        for position, tensor in enumerate(self.source.stream()):
            self._strike("tensor", position)
            yield tensor
