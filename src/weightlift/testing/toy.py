"""A toy engine that remembers what real ones get wrong: which version computed what.

Owns: parameters, a prefix cache, admission, a version. Must not know: transports. For tests of what surrounds a sync.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weightlift.api import Subscriber
from weightlift.loaders.module import MappingLoader

__all__ = ["ToyEngine", "tagged"]


def tagged(version: int, names: tuple[str, ...] = ("a", "b", "c"), shape: tuple[int, ...] = (5, 3)) -> dict[str, torch.Tensor]:
    """Parameters whose every element is the version."""
    return {name: torch.full(shape, float(version)) for name in names}


class ToyEngine:
    """Generates "text" that tells which versions of its parameters it was computed with.

    `prefix_cache` maps a prompt to the version that computed it; a commit empties it.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor] | None = None) -> None:
        self.parameters = dict(parameters or tagged(-1))
        self.prefix_cache: dict[str, int] = {}
        self.resets = 0
        self.resettable = True
        self.loader = MappingLoader(self.parameters, on_commit=self._reset)
        self.subscriber: Subscriber | None = None

    def _reset(self, version: int) -> bool:
        self.resets += 1
        if self.resettable:
            self.prefix_cache.clear()
        return self.resettable

    def attach(self, subscriber: Subscriber) -> ToyEngine:
        """Serve under this subscriber's rule."""
        self.subscriber = subscriber
        return self

    def versions(self) -> set[float]:
        """The distinct values in the parameters: one for a whole version of `tagged`."""
        return {float(value) for tensor in self.parameters.values() for value in tensor.flatten().tolist()}

    def generate(self, prompt: str) -> tuple[int, int]:
        """(version stamped, version that computed the prompt's prefix). Raises what `ensure_serving` raises."""
        assert self.subscriber is not None, "attach comes first"
        version = self.subscriber.ensure_serving()
        assert self.versions() == {float(version)}, f"says {version}, computes with {self.versions()}"
        return version, self.prefix_cache.setdefault(prompt, version)
