"""The trainer's side: where tensors come from, and how they get into buckets. Must not know transports."""

from weightlift.sources.base import Source, StableSource
from weightlift.sources.module import MappingSource, ModuleSource

__all__ = ["MappingSource", "ModuleSource", "Source", "StableSource"]
