"""The frames of the sample plane: what goes in comes out, and nothing else does."""

from __future__ import annotations

import msgspec
import pytest

from weightlift.errors import RemoteProtocolError
from weightlift.samples import (
    EngineHello,
    FailureReply,
    GenerateReply,
    GenerateRequest,
    Prompt,
    Sample,
    SamplingParams,
    ShutdownRequest,
    SyncReply,
    SyncRequest,
)
from weightlift.samples.messages import decode_from_engine, decode_from_trainer, encode

SAMPLING = SamplingParams(samples=2, max_new_tokens=4, temperature=0.7, greedy=False, seed=2**32 - 1)
SAMPLE = Sample(prompt_id=0, version=3, tokens=[5, 2], logprobs=[-0.1, -1e-8], finished=True)

FROM_TRAINER = [
    GenerateRequest(id=1, prompts=[Prompt(id=0, tokens=[1, 9])], sampling=SAMPLING),
    SyncRequest(id=2, version=7, timeout_s=1.5),
    ShutdownRequest(id=3),
]
FROM_ENGINE = [
    EngineHello(id=0, name="rollout-0", pid=77),
    GenerateReply(id=1, samples=[SAMPLE], seconds=0.5),
    SyncReply(id=2, version=7, seconds=0.1),
    FailureReply.of(ValueError("no"), id=2, version=None),
]


@pytest.mark.parametrize("frame", FROM_TRAINER, ids=lambda frame: type(frame).__name__)
def test_trainer_frames_round_trip(frame):
    assert decode_from_trainer(encode(frame)) == frame


@pytest.mark.parametrize("frame", FROM_ENGINE, ids=lambda frame: type(frame).__name__)
def test_engine_frames_round_trip(frame):
    assert decode_from_engine(encode(frame)) == frame


def test_a_frame_of_the_other_direction_is_refused():
    for frame in FROM_ENGINE:
        with pytest.raises(RemoteProtocolError):
            decode_from_trainer(encode(frame))
    for frame in FROM_TRAINER:
        with pytest.raises(RemoteProtocolError):
            decode_from_engine(encode(frame))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x80",
        msgspec.msgpack.encode({"type": "generated", "id": 1, "samples": [], "seconds": 0.0, "extra": 1}),
        msgspec.msgpack.encode({"type": "synced", "id": 1}),
        msgspec.msgpack.encode({"type": "synced", "id": "1", "version": 1, "seconds": 0.0}),
    ],
    ids=["empty", "not msgpack", "no kind", "unknown field", "missing field", "wrong type"],
)
def test_what_is_not_a_frame_is_refused(data):
    with pytest.raises(RemoteProtocolError):
        decode_from_engine(data)


def test_a_sample_without_a_version_cannot_be_sent_or_read():
    with pytest.raises(TypeError):
        Sample(prompt_id=0, tokens=[1], logprobs=[0.0], finished=True)
    raw = msgspec.msgpack.encode(
        {
            "type": "generated",
            "id": 1,
            "seconds": 0.0,
            "samples": [{"prompt_id": 0, "tokens": [1], "logprobs": [0.0], "finished": True}],
        }
    )
    with pytest.raises(RemoteProtocolError, match="version"):
        decode_from_engine(raw)
