"""Frames and manifests to bytes and back: MessagePack, typed, length-limited.

Owns: encoding, and the one place where foreign decoding errors become RemoteProtocolError. Must not know: sockets.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from weightlift.errors import RemoteProtocolError
from weightlift.protocol.manifest import Entry, Manifest
from weightlift.protocol.messages import Frame, FromPublisher, FromSubscriber

__all__ = [
    "MAX_FRAME_FROM_PUBLISHER",
    "MAX_FRAME_FROM_SUBSCRIBER",
    "decode_from_publisher",
    "decode_from_subscriber",
    "decode_manifest",
    "encode",
    "encode_manifest",
]

MAX_FRAME_FROM_SUBSCRIBER: Final = 1 << 22
"""Bytes. The largest honest frame is a Released with the digests of half a million tensors."""
MAX_FRAME_FROM_PUBLISHER: Final = 1 << 28
"""Bytes. The largest honest frame is a manifest: about 100 bytes a tensor."""

_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()
_from_subscriber: msgspec.msgpack.Decoder[FromSubscriber] = msgspec.msgpack.Decoder(FromSubscriber)
_from_publisher: msgspec.msgpack.Decoder[FromPublisher] = msgspec.msgpack.Decoder(FromPublisher)
_entries: msgspec.msgpack.Decoder[tuple[Entry, ...]] = msgspec.msgpack.Decoder(tuple[Entry, ...])


def encode(frame: Frame) -> bytes:
    """One frame as bytes."""
    return _encoder.encode(frame)


def decode_from_subscriber(data: bytes) -> FromSubscriber:
    """A frame that a publisher received; RemoteProtocolError if it is not one."""
    return _decode(_from_subscriber, data, MAX_FRAME_FROM_SUBSCRIBER)


def decode_from_publisher(data: bytes) -> FromPublisher:
    """A frame that a subscriber received; RemoteProtocolError if it is not one."""
    return _decode(_from_publisher, data, MAX_FRAME_FROM_PUBLISHER)


def encode_manifest(manifest: Manifest) -> bytes:
    """The entries, in order. The digest is not sent: the receiver computes it from what arrived."""
    return _encoder.encode(manifest.entries)


def decode_manifest(data: bytes) -> Manifest:
    """A manifest from `encode_manifest`; RemoteProtocolError or ManifestError if it is not a valid one."""
    entries: tuple[Entry, ...] = _decode(_entries, data, MAX_FRAME_FROM_PUBLISHER)
    return Manifest(entries)


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes, limit: int) -> _T:
    if len(data) > limit:
        raise RemoteProtocolError(f"a frame of {len(data)} bytes is over the limit of {limit} bytes")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"a frame of {len(data)} bytes could not be read: {error}") from error
