"""The engine's side: how arrived buckets become live parameters. Must not know transports."""

from weightlift.loaders.base import Loader
from weightlift.loaders.callback import CallbackLoader
from weightlift.loaders.huggingface import HuggingFaceLoader
from weightlift.loaders.module import MappingLoader, ModuleLoader

__all__ = ["CallbackLoader", "HuggingFaceLoader", "Loader", "MappingLoader", "ModuleLoader"]
