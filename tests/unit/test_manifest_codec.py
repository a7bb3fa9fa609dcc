"""protocol/manifest.py, codec.py, failure.py: what is checked when it is made, and what survives the wire."""

import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightlift import errors
from weightlift.errors import (
    ConfigError,
    DuplicateParameter,
    LoaderError,
    ManifestError,
    RemoteCause,
    RemoteProtocolError,
    WeightliftError,
)
from weightlift.protocol import codec, messages
from weightlift.protocol.failure import describe, revive
from weightlift.protocol.manifest import Entry, Manifest, canonical_dtype, near_matches


def test_manifest_round_trip_keeps_the_digest() -> None:
    manifest = Manifest([Entry("a", "float32", (2, 3)), Entry("b", "float32", (2, 3), "a"), Entry("s", "bfloat16", ())])
    again = codec.decode_manifest(codec.encode_manifest(manifest))
    assert again == manifest
    assert again.entries == manifest.entries
    assert (manifest.total_bytes, manifest.tensors) == (26, 3)


@pytest.mark.parametrize(
    ("entries", "error", "text"),
    [
        ([], ManifestError, "no tensor"),
        ([Entry("", "float32", ())], ManifestError, "empty name"),
        ([Entry("a", "float32", ()), Entry("a", "float32", ())], DuplicateParameter, "a occurs twice"),
        ([Entry("a", "int4", ())], ManifestError, "int4"),
        ([Entry("a", "float32", (-1,))], ManifestError, "shape"),
        ([Entry("a", "float32", (), "b")], ManifestError, "alias of b, which is not sent"),
        ([Entry("a", "float32", (2,)), Entry("b", "float32", (3,), "a")], ManifestError, "another dtype or shape"),
    ],
)
def test_manifest_refuses(entries: list[Entry], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Manifest(entries)


def test_order_names_and_shapes_are_in_the_digest() -> None:
    a, b = Entry("a", "float32", (2,)), Entry("b", "float32", (2,))
    digests = {
        Manifest(e).digest for e in ([a, b], [b, a], [a], [a, Entry("b", "float16", (2,))], [a, Entry("b", "float32", (3,))])
    }
    assert len(digests) == 5
    assert all(len(digest) == 16 for digest in digests)


@pytest.mark.parametrize("name", ["float32", "torch.float32", "fp32", "float"])
def test_dtype_names(name: str) -> None:
    assert canonical_dtype(name) == "float32"


def test_unknown_dtype_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="got 'qint8'"):
        canonical_dtype("qint8")


def test_near_matches_prefer_the_same_ending() -> None:
    names = ["model.layers.0.q.weight", "model.layers.1.q.weight", "lm_head.weight"]
    assert near_matches("layers.0.q.weight", names)[0] == "model.layers.0.q.weight"


def frames() -> list[messages.Frame]:
    info = describe(LoaderError("no", bucket=3, tensor="w"))
    limits = messages.Limits(announce_s=1, prepare_s=1, transfer_s=1, release_s=1, commit_s=1, cause_s=1)
    samples: dict[type, object] = {
        int: 1,
        str: "x",
        bytes: b"x",
        bool: True,
        float: 0.5,
        messages.ErrorInfo: info,
        messages.Limits: limits,
    }
    named = {"transports": ("shm",), "held": ((1, ("float32", "bfloat16")),), "verify": "full", "digest": "lanes"}
    made = []
    for cls in messages.Frame.__subclasses__():
        fields = {f.name: named.get(f.name, samples.get(f.type)) for f in msgspec.structs.fields(cls)}
        made.append(cls(**fields))
    return made


@pytest.mark.parametrize("frame", frames(), ids=lambda f: type(f).__name__)
def test_every_frame_survives_the_wire_in_its_direction(frame: messages.Frame) -> None:
    data = codec.encode(frame)
    decoders = {messages.FromSubscriber: codec.decode_from_subscriber, messages.FromPublisher: codec.decode_from_publisher}
    directions = [decode for union, decode in decoders.items() if isinstance(frame, union)]
    assert directions, f"{type(frame).__name__} belongs to no direction"
    for decode in directions:
        assert decode(data) == frame
    for decode in set(decoders.values()) - set(directions):
        with pytest.raises(RemoteProtocolError):
            decode(data)


@given(st.binary(max_size=300))
def test_bytes_that_are_no_frame_are_a_remote_protocol_error(data: bytes) -> None:
    for decode in (codec.decode_from_subscriber, codec.decode_from_publisher):
        try:
            decode(data)
        except RemoteProtocolError:
            continue


def test_an_unknown_field_is_refused() -> None:
    data = msgspec.msgpack.encode({"kind": "Ready", "round": 1, "version": 1, "extra": 1})
    with pytest.raises(RemoteProtocolError, match="extra"):
        codec.decode_from_subscriber(data)


def test_an_oversized_frame_is_refused_before_it_is_read() -> None:
    with pytest.raises(RemoteProtocolError, match="over the limit"):
        codec.decode_from_subscriber(b"\x00" * (codec.MAX_FRAME_FROM_SUBSCRIBER + 1))


def test_an_error_keeps_class_place_and_cause_over_the_wire() -> None:
    try:
        try:
            raise ValueError("bad shape for w7")
        except ValueError as cause:
            raise LoaderError("install raised", bucket=2, buckets=9, tensor="w7", phase="TRANSFER") from cause
    except LoaderError as error:
        info = msgspec.msgpack.decode(msgspec.msgpack.encode(describe(error, peer="rollout-0")), type=messages.ErrorInfo)
    again = revive(info, version=5, round=2, peer="rollout-0")
    assert type(again) is LoaderError
    assert (again.bucket, again.tensor, again.peer, again.phase, again.version) == (2, "w7", "rollout-0", "TRANSFER", 5)
    assert isinstance(again.__cause__, RemoteCause)
    assert again.__cause__.type_name == "ValueError"
    assert "bad shape for w7" in str(again.__cause__)
    assert "test_an_error_keeps_class" in again.__cause__.traceback
    third = revive(describe(again), version=5, round=2, peer="x")
    assert isinstance(third.__cause__, RemoteCause)
    assert third.__cause__.type_name == "ValueError"


def test_an_unknown_error_class_is_a_remote_protocol_error() -> None:
    info = messages.ErrorInfo(error="SystemExit", message="boom")
    assert type(revive(info, version=1, round=1, peer="p")) is RemoteProtocolError


@pytest.mark.parametrize("name", [n for n in errors.__all__ if n not in ("RemoteCause", "drop_frames", "error_class")])
def test_errors_pickle_with_their_fields(name: str) -> None:
    cls = getattr(errors, name)
    error = cls("what", version=3, round=1, phase="TRANSFER", peer="p", bucket=1, buckets=4, tensor="w", remedy="do")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert again.fields() == error.fields()
    assert str(again) == "what (version 3, phase TRANSFER, peer p, bucket 1/4, tensor w)\n  Remedy: do"
    assert isinstance(again, WeightliftError)
