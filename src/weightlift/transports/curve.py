"""CURVE: an encrypted control channel whose publisher proves who it is.

Owns: the keys, how a socket gets them, what a failed handshake is called. Must not know: frames, peers.
CURVE (RFC 26 of ZeroMQ, after CurveCP by D. J. Bernstein) encrypts every frame with keys of the connection, so what was recorded
cannot be replayed. The subscriber knows the publisher by its public key; the publisher knows the subscriber by the run's token,
which travels encrypted.
"""

from __future__ import annotations

import dataclasses
from typing import Final, Self

import zmq
import zmq.utils.z85

from weightlift.errors import ConfigError

__all__ = ["HANDSHAKE_FAILURES", "CurveKeys", "check_public_key", "failure_text"]

_KEY_CHARACTERS: Final = 40
HANDSHAKE_FAILURES: Final = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""Both sides are there and do not agree. Not among them: a connection that was closed in its handshake, which has many reasons."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """A publisher's key pair, in Z85 (40 characters each). The public one is what subscribers are given."""

    public: str
    secret: str = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        check_public_key("CurveKeys.public", self.public)
        check_public_key("CurveKeys.secret", self.secret)
        if zmq.curve_public(self.secret.encode()) != self.public.encode():
            raise ConfigError("CurveKeys.public must belong to CurveKeys.secret, got keys of two pairs")

    @classmethod
    def generate(cls) -> Self:
        """A fresh pair."""
        public, secret = zmq.curve_keypair()
        return cls(public=public.decode(), secret=secret.decode())


def check_public_key(name: str, key: object) -> None:
    """ConfigError unless `key` is a key in Z85. The key itself is not shown: it may be the secret one."""
    try:
        if isinstance(key, str) and len(key) == _KEY_CHARACTERS and len(zmq.utils.z85.decode(key.encode("ascii"))) == 32:
            return
    except (KeyError, ValueError):
        pass
    raise ConfigError(f"{name} must be a key of {_KEY_CHARACTERS} characters in Z85 (CurveKeys.generate()), got something else")


def failure_text(event: int, value: int) -> str:
    """A failed handshake in words."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return "one side uses CURVE and the other does not"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return "the peer was given another publisher's public key"
    return f"the other side is no weightlift, or another one (libzmq's code {value:#x})"
