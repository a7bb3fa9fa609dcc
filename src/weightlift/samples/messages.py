"""The frames of the sample plane. Every frame carries the id of the request it belongs to; nothing else is ever sent on
it.

Owns: the structs and their way to bytes and back (MessagePack, typed, length-limited). Must not know: sockets, models.

Who sends what:

    trainer -> engine   GenerateRequest, ScoreRequest, SyncRequest, SaveRequest, MemoryRequest, ShutdownRequest
    engine  -> trainer  EngineHello (once, id 0), GenerateReply, ScoreReply, SyncReply, SaveReply, MemoryReply, FailureReply

A version is a published version of the weights, an integer >= 0. A sample without one does not exist: `Sample.version`
is taken from the engine when it dispatches the request, so that a reply that arrives late still says which weights it
came from.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, TypeVar

import msgspec

from weightlift.errors import RemoteProtocolError
from weightlift.protocol.failure import describe
from weightlift.protocol.messages import ErrorInfo

__all__ = [
    "MAX_FRAME_BYTES",
    "EngineHello",
    "FailureReply",
    "FromEngine",
    "FromTrainer",
    "GenerateReply",
    "GenerateRequest",
    "Prompt",
    "Sample",
    "SamplingParams",
    "ScoreReply",
    "ScoreRequest",
    "SaveReply",
    "SaveRequest",
    "ShutdownRequest",
    "SyncReply",
    "SyncRequest",
    "MemoryReply",
    "MemoryRequest",
    "decode_from_engine",
    "decode_from_trainer",
    "encode",
]

MAX_FRAME_BYTES: Final = 1 << 28
"""Bytes of one frame, either way: 256 MiB is about 10 million sampled tokens with their log-probabilities."""


class _Frame(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything on this plane: unknown fields and missing fields are refused."""


class Prompt(_Frame, frozen=True, kw_only=True):
    """One prompt as token ids (never as text: two tokenisations could differ). `id` is unique within its request."""

    id: int
    tokens: list[int]


class SamplingParams(_Frame, frozen=True, kw_only=True):
    """How to sample. `greedy` ignores the temperature for the choice, not for the log-probabilities.

    samples: completions per prompt. max_new_tokens: longest completion in tokens, the end-of-sequence token included.
    temperature: divides the logits. seed: of the engine's random generator, so that a run can be repeated.
    """

    samples: int
    max_new_tokens: int
    temperature: float
    greedy: bool
    seed: int


class Sample(_Frame, frozen=True, kw_only=True):
    """One completion.

    version: the weights that made it. tokens: sampled ids, the end-of-sequence token included where there is one.
    logprobs: natural logarithms, one a token, of the distribution that was sampled from (temperature applied, no
    truncation).
    finished: it ended by itself (False: cut at max_new_tokens).
    """

    prompt_id: int
    version: int
    tokens: list[int]
    logprobs: list[float]
    finished: bool


class GenerateRequest(_Frame, tag="generate", frozen=True, kw_only=True):
    """Complete these prompts with the weights that are served now."""

    id: int
    prompts: list[Prompt]
    sampling: SamplingParams


class ScoreRequest(_Frame, tag="score", frozen=True, kw_only=True):
    """How likely are these sequences under the weights that are served now?"""

    id: int
    sequences: list[list[int]]


class SyncRequest(_Frame, tag="sync", frozen=True, kw_only=True):
    """The trainer is about to publish `version`: take part in that round, for at most `timeout_s` seconds."""

    id: int
    version: int
    timeout_s: float


class SaveRequest(_Frame, tag="save", frozen=True, kw_only=True):
    """Write the tensors that are held now to a safetensors file on the engine's host."""

    id: int
    path: str


class MemoryRequest(_Frame, tag="memory", frozen=True, kw_only=True):
    """Move the engine's memory: sleep (release the KV cache; weights offloaded at level 1, discarded at 2), or wake a part of it."""

    id: int
    action: Literal["sleep", "wake_weights", "wake_kv_cache"]
    level: int = 0


class ShutdownRequest(_Frame, tag="shutdown", frozen=True, kw_only=True):
    """End in an orderly way. There is no reply; the process exits with code 0."""

    id: int


class EngineHello(_Frame, tag="hello", frozen=True, kw_only=True):
    """The first frame of an engine: its model is built, it holds no version yet."""

    id: int
    name: str
    pid: int


class GenerateReply(_Frame, tag="generated", frozen=True, kw_only=True):
    """`samples` per prompt for every prompt, in the order of the request. seconds: spent in the engine."""

    id: int
    samples: list[Sample]
    seconds: float


class ScoreReply(_Frame, tag="scored", frozen=True, kw_only=True):
    """Log-probabilities of every sequence's tokens but the first, without temperature, under weights `version`."""

    id: int
    version: int
    logprobs: list[list[float]]


class SyncReply(_Frame, tag="synced", frozen=True, kw_only=True):
    """The round is over and the engine serves `version`. seconds: spent in the engine, the wait for the publisher
    included."""

    id: int
    version: int
    seconds: float


class SaveReply(_Frame, tag="saved", frozen=True, kw_only=True):
    """The file is written. `version` is what the engine serves, -1 for nothing."""

    id: int
    version: int


class MemoryReply(_Frame, tag="moved", frozen=True, kw_only=True):
    """It is done. Bytes that are resident now; `version` is what may be generated with, -1 for nothing."""

    id: int
    version: int
    weight_bytes: int
    kv_bytes: int


class FailureReply(_Frame, tag="failed", frozen=True, kw_only=True):
    """The request raised in the engine. `version` is what it serves now, -1 for nothing."""

    id: int
    version: int
    error: ErrorInfo

    @classmethod
    def of(cls, error: BaseException, *, id: int, version: int | None) -> FailureReply:
        """The reply for an exception; its class, place and cause arrive at the trainer."""
        return cls(id=id, version=-1 if version is None else version, error=describe(error))


FromTrainer: TypeAlias = GenerateRequest | ScoreRequest | SyncRequest | SaveRequest | MemoryRequest | ShutdownRequest
FromEngine: TypeAlias = EngineHello | GenerateReply | ScoreReply | SyncReply | SaveReply | MemoryReply | FailureReply

_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()
_from_trainer: msgspec.msgpack.Decoder[FromTrainer] = msgspec.msgpack.Decoder(FromTrainer)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(frame: FromTrainer | FromEngine) -> bytes:
    """One frame as bytes."""
    return _encoder.encode(frame)


def decode_from_trainer(data: bytes) -> FromTrainer:
    """A frame that an engine received; RemoteProtocolError if it is not one."""
    return _decode(_from_trainer, data)


def decode_from_engine(data: bytes) -> FromEngine:
    """A frame that the trainer received; RemoteProtocolError if it is not one."""
    return _decode(_from_engine, data)


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    if len(data) > MAX_FRAME_BYTES:
        raise RemoteProtocolError(f"a frame of {len(data)} bytes is over the sample plane's limit of {MAX_FRAME_BYTES}")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"a sample-plane frame of {len(data)} bytes could not be read: {error}") from error
