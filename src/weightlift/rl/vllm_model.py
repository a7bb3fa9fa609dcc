"""What a run gives to vLLM: a folder with the model's configuration, and the options of its engine.

Owns: that folder, the options that the offline engine and the server share. Must not know: processes, requests.
The folder has no weights. vLLM starts with random ones, so that whatever it answers came through a sync.
"""

from __future__ import annotations

import pathlib
from typing import Any

from weightlift.rl.config import TrainConfig
from weightlift.rl.models import TextModel

__all__ = ["engine_options", "longest_sequence", "write_shell"]

_MOST_TOKENS = 2048


def write_shell(model: Any, folder: pathlib.Path, *, dtype: str) -> pathlib.Path:
    """A folder that vLLM can build the model from, without its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config.__class__.from_dict(model.config.to_dict())
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    return folder


def longest_sequence(text_model: TextModel) -> int:
    """Tokens of the longest sequence that the model takes; at most so many that a small KV cache holds one."""
    return min(int(text_model.model.config.max_position_embeddings), _MOST_TOKENS)  # type: ignore[union-attr, arg-type]


def engine_options(config: TrainConfig, longest: int) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM; the server's command line says the same (rl/served.py).

    longest: tokens of the longest sequence, prompt and completion.
    """
    options = config.engine_options
    return {
        "dtype": options.dtype,
        "tensor_parallel_size": options.tensor_parallel,
        "max_num_seqs": options.max_sequences,
        "max_model_len": longest,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from: with the temperature
        "seed": config.seed,
    }
