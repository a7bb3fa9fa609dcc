"""The trainer's side: where tensors come from, and how they get into buckets. Must not know transports.

`FSDP1Source` and `FSDP2Source` are in modules of their own, which import torch.distributed's wrappers: they are loaded when asked
for.
"""

from typing import Any

from weightlift.sources.base import GroupSource, Source, StableSource
from weightlift.sources.group import TrainerGroup
from weightlift.sources.huggingface import HuggingFaceSource, checkpoint_source
from weightlift.sources.module import DDPSource, MappingSource, ModuleSource

__all__ = [
    "DDPSource",
    "FSDP1Source",
    "FSDP2Source",
    "GroupSource",
    "HuggingFaceSource",
    "MappingSource",
    "ModuleSource",
    "Source",
    "StableSource",
    "TrainerGroup",
    "checkpoint_source",
]


def __getattr__(name: str) -> Any:
    if name == "FSDP1Source":
        from weightlift.sources.fsdp1 import FSDP1Source

        return FSDP1Source
    if name == "FSDP2Source":
        from weightlift.sources.fsdp2 import FSDP2Source

        return FSDP2Source
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
