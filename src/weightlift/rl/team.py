"""All ranks of the trainer, as the loop sees them: asked once, done by all.

    first rank (the loop's process)          other ranks (rl/rank.py), started here
      task/1 in the store ------------------> do it, too
      does it itself                          ... the collectives inside meet
      task/2 ...

Owns: the other ranks' processes, the order of tasks. Must not know: what a task does. A rank that fails leaves its reason in the
store and ends; whatever the first rank is waiting for then breaks off, and the reason is what is raised.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
import torch
import torch.distributed as dist

from weightlift.errors import PeerLost, WeightliftError
from weightlift.fabric import Fabric
from weightlift.observe.report import SyncReport
from weightlift.protocol.failure import describe, revive
from weightlift.protocol.messages import ErrorInfo
from weightlift.rl.config import TrainConfig
from weightlift.rl.engine import Engine
from weightlift.rl.learner import UpdateStats
from weightlift.rl.models import TextModel
from weightlift.rl.processes import ChildProcess
from weightlift.rl.trainer import TrainerRank
from weightlift.samples import Sample

__all__ = ["Load", "Publish", "RankSettings", "Reuse", "Save", "Score", "Stop", "Task", "Team", "Update", "join", "task_from"]

_T = TypeVar("_T")


class Update(msgspec.Struct, frozen=True, tag="update"):
    """TrainerRank.update."""

    prompts: list[list[int]]
    groups: list[list[Sample]]
    rewards: list[float]


class Score(msgspec.Struct, frozen=True, tag="score"):
    """TrainerRank.score."""

    sequences: list[list[int]]


class Publish(msgspec.Struct, frozen=True, tag="publish"):
    """TrainerRank.publish."""

    version: int


class Reuse(msgspec.Struct, frozen=True, tag="reuse"):
    """TrainerRank.reuse."""


class Save(msgspec.Struct, frozen=True, tag="save"):
    """TrainerRank.save."""

    path: str


class Load(msgspec.Struct, frozen=True, tag="load"):
    """TrainerRank.load."""

    path: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The run is over."""


Task: TypeAlias = Update | Score | Publish | Reuse | Save | Load | Stop
_task: Final = msgspec.msgpack.Decoder(Task)
_info: Final = msgspec.msgpack.Decoder(ErrorInfo)


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a further rank is told, as one JSON object on its standard input."""

    rank: int
    ranks: int
    port: int
    parent_pid: int
    address: str
    device: str | None
    config: dict[str, Any]


def join(store: Any, rank: int, ranks: int, config: TrainConfig) -> Fabric:
    """Become one of the ranks: the default process group, and the line of tasks."""
    limit = datetime.timedelta(seconds=config.timeouts.generate_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    return Fabric("tasks", rank, ranks, silence_s=_SILENCE_S)


_SILENCE_S: Final = 20.0


def task_from(fabric: Fabric, number: int) -> Task:
    """The next task, waited for as long as the first rank lives."""
    return _task.decode(fabric.get(f"task/{number}", of=0, doing="give the next task", timeout_s=_SILENCE_S))


def perform(rank: TrainerRank, task: Task) -> Any:
    """Do a task on this rank."""
    match task:
        case Update(prompts=prompts, groups=groups, rewards=rewards):
            return rank.update(prompts, groups, torch.tensor(rewards))
        case Score(sequences=sequences):
            return rank.score(sequences)
        case Publish(version=version):
            return rank.publish(version)
        case Reuse():
            return rank.reuse()
        case Save(path=path):
            return rank.save(pathlib.Path(path))
        case Load(path=path):
            return rank.load(pathlib.Path(path))
        case Stop():
            return None


def confess(fabric: Fabric, error: BaseException) -> None:
    """Leave the reason for the first rank to find."""
    with contextlib.suppress(WeightliftError):
        fabric.put(f"failed/{fabric.index}", msgspec.msgpack.encode(describe(error)))


def synchronise(model: torch.nn.Module) -> None:
    """Every rank gets the first one's weights; buffers too."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, src=0)
            tensor.copy_(whole)


class Team:
    """The first rank's handle on all of them. A context manager; leaving it ends the others.

    Args:
        config: resolved. directory: gets `trainer-<rank>.log`. device: as of TrainerRank.
    """

    def __init__(self, config: TrainConfig, *, address: str, directory: pathlib.Path, device: pathlib.Path | None) -> None:
        self._config = config
        self._address = address
        self._device = device
        self._others: list[ChildProcess] = []
        self._fabric: Fabric | None = None
        self._alive = contextlib.ExitStack()
        self._tasks = 0
        self.first: TrainerRank | None = None
        if config.trainer == "single":
            return
        store = dist.TCPStore("127.0.0.1", 0, config.trainer_processes, True, wait_for_workers=False)  # type: ignore[attr-defined]
        try:
            for rank in range(1, config.trainer_processes):
                self._start(rank, store.port, directory)
            self._fabric = join(store, 0, config.trainer_processes, config)
            self._alive.enter_context(self._fabric.alive())
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, port: int, directory: pathlib.Path) -> None:
        settings = RankSettings(
            rank=rank,
            ranks=self._config.trainer_processes,
            port=port,
            parent_pid=os.getpid(),
            address=self._address,
            device=None if self._device is None else str(self._device),
            config=self._config.to_dict(),
        )
        log_path = directory / f"trainer-{rank}.log"
        self._others.append(
            ChildProcess(f"trainer rank {rank}", f"trainer rank {rank}", "weightlift.rl.rank", settings, log_path=log_path)
        )

    def build(self, text_model: TextModel, engine: Engine) -> TrainerRank:
        """Give all ranks the first one's weights, and make them trainers."""
        if self._fabric is not None:
            synchronise(text_model.model)
        self.first = TrainerRank(self._config, text_model, address=self._address, device=self._device, engine=engine)
        return self.first

    def update(self, prompts: Sequence[Sequence[int]], groups: Sequence[Sequence[Sample]], rewards: torch.Tensor) -> UpdateStats:
        """See TrainerRank."""
        task = Update([list(p) for p in prompts], [list(g) for g in groups], rewards.tolist())
        return self._all(task, lambda rank: rank.update(prompts, groups, rewards))

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See TrainerRank."""
        return self._all(Score([list(tokens) for tokens in sequences]), lambda rank: rank.score(sequences))

    def publish(self, version: int) -> SyncReport:
        """See TrainerRank."""
        return self._all(Publish(version), lambda rank: rank.publish(version))

    def reuse(self) -> None:
        """See TrainerRank.reuse."""
        self._all(Reuse(), lambda rank: rank.reuse())

    def save(self, path: pathlib.Path) -> None:
        """See TrainerRank."""
        self._all(Save(str(path)), lambda rank: rank.save(path))

    def load(self, path: pathlib.Path) -> None:
        """See TrainerRank."""
        self._all(Load(str(path)), lambda rank: rank.load(path))

    def _all(self, task: Task, own: Callable[[TrainerRank], _T]) -> _T:
        assert self.first is not None, "build comes first"
        self._give(task)
        try:
            return own(self.first)
        except WeightliftError:
            raise  # publishes, barriers and what is around them name the first cause by themselves
        except Exception as error:
            self._blame(error)
            raise

    def _give(self, task: Task) -> None:
        if self._fabric is not None:
            self._tasks += 1
            self._fabric.put(f"task/{self._tasks}", msgspec.msgpack.encode(task))
            self._fabric.drop([f"task/{self._tasks - 2}"])

    def _blame(self, error: Exception) -> None:
        """A collective of the training itself broke off: if another rank failed first, or has ended, that is the reason."""
        for number, child in enumerate(self._others, start=1):
            info = self._reason(number)
            if info is not None:
                raise revive(info, version=-1, round=0, peer=child.peer) from error
        for child in self._others:
            try:
                child.check()
            except PeerLost as lost:
                raise lost from error

    def _reason(self, number: int) -> ErrorInfo | None:
        assert self._fabric is not None, "there are other ranks"
        deadline = time.monotonic() + 1.0  # it says why before it ends, but perhaps after its connections have broken
        with contextlib.suppress(WeightliftError):
            while time.monotonic() < deadline:
                if self._fabric.has(f"failed/{number}"):
                    return _info.decode(self._fabric.get(f"failed/{number}", of=number, doing="say why"))
                time.sleep(0.02)
        return None

    def close(self) -> None:
        """End the other ranks: asked, then terminated. Idempotent."""
        with contextlib.suppress(WeightliftError):
            self._give(Stop())
        if self.first is not None:
            self.first.close()
        self._alive.close()
        for child in self._others:
            child.stop(timeout_s=self._config.timeouts.stop_s)
        if self._fabric is not None:
            self._fabric.close()
            self._fabric = None
        if dist.is_initialized() and self._config.trainer != "single":
            dist.destroy_process_group()
