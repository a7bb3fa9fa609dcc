"""A further rank of the trainer: `python -m weightlift.rl.rank < settings.json`. Started and ended by rl/team.py.

Owns: this process. It does every task that the first rank does, in the same order, and ends when there is none any more: told to
(exit code 0), by an error (1, the reason in the store and in the log), or because the first rank is gone (3).
"""

from __future__ import annotations

import pathlib
import sys

import msgspec
import torch
import torch.distributed as dist

from weightlift.rl.config import TrainConfig
from weightlift.rl.models import build_tiny, load_folder
from weightlift.rl.rollout import watch_parent
from weightlift.rl.team import RankSettings, Stop, confess, join, perform, synchronise, task_from
from weightlift.rl.trainer import TrainerRank

__all__ = ["main"]


def main() -> int:
    """Run until told to end; returns the exit code."""
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=RankSettings)
    watch_parent(settings.parent_pid, lambda: None)
    config = TrainConfig.from_dict(settings.config)
    torch.set_num_threads(max(1, (config.threads or 1) // settings.ranks))
    torch.manual_seed(config.seed)
    text_model = build_tiny(config.tiny, seed=config.seed) if config.model is None else load_folder(config.model)
    store = dist.TCPStore("127.0.0.1", settings.port, settings.ranks, False, wait_for_workers=False)  # type: ignore[attr-defined]
    fabric = join(store, settings.rank, settings.ranks, config)
    device = None if settings.device is None else pathlib.Path(settings.device)
    try:
        with fabric.alive():
            synchronise(text_model.model)
            rank = TrainerRank(config, text_model, address=settings.address, device=device, engine=None)
            number = 1
            while not isinstance(task := task_from(fabric, number), Stop):
                perform(rank, task)
                number += 1
            rank.close()
    except Exception as error:
        confess(fabric, error)
        raise
    fabric.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
