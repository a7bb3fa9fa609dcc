"""The loader for a Hugging Face model that generates with `model.generate`.

Owns: what such a model needs beyond its parameters: ties by configuration, caches that `generate` keeps. Must not know: transports.
transformers is not imported here: the model brings all that is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from weightlift.loaders.match import CastPolicy
from weightlift.loaders.module import ModuleLoader, ResetHook

__all__ = ["HuggingFaceLoader"]


class HuggingFaceLoader(ModuleLoader):
    """A ModuleLoader that knows the model's tied weights and drops the KV caches that the model keeps between calls.

    Args:
        model: a transformers.PreTrainedModel, possibly wrapped.
        cast: see CastPolicy.
        on_commit: a further hook, called after the caches were dropped.
    """

    def __init__(self, model: torch.nn.Module, *, cast: CastPolicy = "never", on_commit: ResetHook | None = None) -> None:
        super().__init__(model, cast=cast, ties=dict(_declared_ties(model)), on_commit=on_commit)

    def commit(self, version: int) -> None:
        """See Loader."""
        for module in self.module.modules():
            # `generate` keeps a static cache on the model under this name; its keys and values were computed with older weights.
            if "_cache" in vars(module) and type(module._cache).__module__.startswith("transformers."):
                module._cache = None  # type: ignore[assignment]
        super().commit(version)


def _declared_ties(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """(tied name, name of its source), where the configuration says that they are tied."""
    for prefix, module in model.named_modules():
        config: Any = getattr(module, "config", None)
        ties = getattr(module, "all_tied_weights_keys", None) or getattr(module, "_tied_weights_keys", None)
        if not isinstance(ties, dict) or not getattr(config, "tie_word_embeddings", False):
            continue
        # Ties are named from the outermost pretrained model on; inner ones repeat them with shorter names.
        start = f"{prefix}." if prefix and not _wraps(prefix) else ""
        for name, target in ties.items():
            yield start + name, start + target
        return


def _wraps(prefix: str) -> bool:
    """Whether a module path consists of wrapper segments only, which canonical names do not have."""
    return set(prefix.split(".")) <= {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
