"""Models and tokenizers: the embedded one, built in code from a seed, or any local Hugging Face folder.

Owns: the character tokenizer, the tiny decoder, loading a folder, sequences as padded tensors, log-probabilities of
tokens. Must not know: tasks, rewards, processes, weight sync. Called by rl/learner.py, rl/warmstart.py and, in the
other process, rl/rollout.py.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import string
from collections.abc import Sequence
from typing import Any, Final

import torch

from weightlift.errors import ConfigError
from weightlift.rl.config import TinyModelConfig

__all__ = ["Padded", "TextModel", "build_tiny", "load_folder", "pad_left", "pad_right", "sequence_logprobs", "token_logprobs"]

_SPECIAL: Final = ("<pad>", "<bos>", "<eos>")
_ALPHABET: Final = tuple(string.digits + string.ascii_letters + string.punctuation + " \n")


@dataclasses.dataclass(slots=True)
class TextModel:
    """A causal LM with what is needed to put text into it and take text out of it."""

    model: torch.nn.Module
    tokenizer: Any
    pad_id: int
    eos_ids: tuple[int, ...]

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a prompt: through the chat template where the tokenizer has one, else begin-of-sequence and the
        text."""
        if getattr(self.tokenizer, "chat_template", None):
            messages = [{"role": "user", "content": text}]
            encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            return [int(token) for token in encoded["input_ids"]]
        return [int(token) for token in self.tokenizer(text)["input_ids"]]

    def encode_answer(self, text: str) -> list[int]:
        """Token ids of a completion: the text and the end-of-sequence token."""
        tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*(int(token) for token in tokens), self.eos_ids[0]]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a completion, without special tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


def build_tiny(config: TinyModelConfig, *, seed: int) -> TextModel:
    """The embedded model: weights random from the seed, float32. The caller's random state is left alone."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _character_tokenizer()
    settings = Qwen3Config(
        vocab_size=len(_SPECIAL) + len(_ALPHABET),
        hidden_size=config.hidden_size,
        intermediate_size=4 * config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        head_dim=config.hidden_size // config.heads,
        max_position_embeddings=config.max_tokens,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(settings)  # type: ignore[no-untyped-call]
    return TextModel(model, tokenizer, int(tokenizer.pad_token_id), (int(tokenizer.eos_token_id),))


def load_folder(path: pathlib.Path) -> TextModel:
    """A causal LM and its tokenizer from a local folder, float32, never from a hub.

    Raises:
        ConfigError: the folder holds no causal LM with a tokenizer; the library's own error is chained.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    # Two processes load at once, and one of them owns the terminal: progress bars would draw over each other.
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(str(path), local_files_only=True, dtype=torch.float32)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"model must be a folder with a Hugging Face causal LM, got {str(path)!r}: {error}") from error
    eos_ids = _eos_ids(model, tokenizer)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0]
    return TextModel(model, tokenizer, int(pad_id), eos_ids)


@dataclasses.dataclass(frozen=True, slots=True)
class Padded:
    """Rows of different lengths as one tensor: tokens [B, T] int64, mask [B, T] int64 with 1 for a token and 0 for
    padding."""

    tokens: torch.Tensor
    mask: torch.Tensor


def pad_left(rows: Sequence[Sequence[int]], pad_id: int) -> Padded:
    """Pad prompts on the left, so that every row ends where its completion begins."""
    width = max(map(len, rows))
    return Padded(
        torch.tensor([[pad_id] * (width - len(row)) + list(row) for row in rows]),
        torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    )


def pad_right(rows: Sequence[Sequence[int]], pad_id: int) -> Padded:
    """Pad completions on the right."""
    width = max(map(len, rows))
    return Padded(
        torch.tensor([list(row) + [pad_id] * (width - len(row)) for row in rows]),
        torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
    )


def token_logprobs(model: torch.nn.Module, prompts: Padded, completions: Padded, *, temperature: float) -> torch.Tensor:
    """Log-probabilities of the completions' tokens under the model: [B, T] float32 for completions [B, T], with
    gradient.

    Positions count tokens and skip padding, exactly as `generate` counts them in the engine: both sides see the same
    input.
    """
    tokens = torch.cat([prompts.tokens, completions.tokens], dim=1)
    mask = torch.cat([prompts.mask, completions.mask], dim=1)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    width = completions.tokens.shape[1]
    output = model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=width + 1)
    # The logits at a position predict the next token: the last prompt position predicts the first token of the
    # completion.
    logits = output.logits[:, :-1].float() / temperature
    return torch.log_softmax(logits, dim=-1).gather(-1, completions.tokens.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def sequence_logprobs(model: torch.nn.Module, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probabilities of every sequence's tokens but the first: what the model says of a text that somebody else wrote.

    One forward pass a sequence, without padding: exactly what an engine computes for a prompt.
    """
    found = []
    for tokens in sequences:
        ids = torch.tensor([list(tokens)])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        found.append([float(v) for v in torch.log_softmax(logits, dim=-1).gather(-1, ids[0, 1:, None])[:, 0]])
    return found


def _character_tokenizer() -> Any:
    """One token a character: printable ASCII; anything else is dropped."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*_SPECIAL, *_ALPHABET))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )


def _eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a completion; a chat model's generation config may name several."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    if declared is None:
        declared = tokenizer.eos_token_id
    if declared is None:
        raise ConfigError("model must name an end-of-sequence token in its generation config or tokenizer, got None")
    return tuple(int(token) for token in declared) if isinstance(declared, (list, tuple)) else (int(declared),)
