"""Which transports exist, which can be used here, and why not.

Owns: names, lazy imports, remembered import failures, the choice. Must not know: how any transport works.
A transport's module is imported when it is asked for, not before; a failure of the import, of any kind, is remembered with its cause
and raised, chained, by `resolve`. Not asking prints nothing.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from weightlift.config import ShmConfig
from weightlift.errors import ConfigError, TransportUnavailable
from weightlift.liveness import host_identity
from weightlift.transports.base import Receiver, Sender
from weightlift.transports.endpoint import Endpoint

__all__ = ["Choice", "available", "choose", "explain", "make_receiver", "make_sender", "names", "register"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Backend:
    """How to make the two ends; `probe` returns why the transport cannot be used in this process, or ""."""

    module: str
    sender: Callable[[Any, Endpoint, ShmConfig], Sender]
    receiver: Callable[[Any, str], Receiver]
    probe: Callable[[Any], str]


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A transport and why it was taken."""

    name: str
    reason: str


def _probe_shm(_: Any) -> str:
    return "" if sys.platform == "linux" and os.path.isdir("/dev/shm") else "needs Linux with /dev/shm"


def _shm_sender(module: Any, endpoint: Endpoint, config: ShmConfig) -> Sender:
    if endpoint.directory is None:
        raise TransportUnavailable(
            f"shm needs an address on this host, got {endpoint.address}", remedy="use new_address() for both sides."
        )
    return module.ShmSender(endpoint.directory, config)  # type: ignore[no-any-return]


_BACKENDS: Final[dict[str, _Backend]] = {
    "memory": _Backend(
        "weightlift.transports.memory",
        lambda module, endpoint, config: module.MemorySender(capacity=config.slot_bytes),
        lambda module, peer: module.MemoryReceiver(peer),
        lambda module: "",
    ),
    "shm": _Backend("weightlift.transports.shm", _shm_sender, lambda module, peer: module.ShmReceiver(peer), _probe_shm),
}
_FAILURES: Final[dict[str, BaseException]] = {}


def register(
    name: str,
    module: str,
    *,
    sender: Callable[[Any, Endpoint, ShmConfig], Sender],
    receiver: Callable[[Any, str], Receiver],
    probe: Callable[[Any], str] = lambda module: "",
) -> None:
    """Add a transport of your own; ConfigError if the name is taken. The module is imported on first use."""
    if name in _BACKENDS:
        raise ConfigError(f"a transport's name must be new, got {name!r}")
    _BACKENDS[name] = _Backend(module, sender, receiver, probe)


def names() -> list[str]:
    """All registered transports."""
    return list(_BACKENDS)


def available() -> dict[str, str]:
    """Every transport with "" if it can be used in this process, else the reason why not."""
    result = {}
    for name in _BACKENDS:
        try:
            resolve(name)
            result[name] = ""
        except TransportUnavailable as error:
            result[name] = error.message if error.__cause__ is None else f"{error.message}: {error.__cause__!r}"
    return result


def explain() -> str:
    """`available()` as text, one line a transport."""
    return "\n".join(f"{name}: {reason or 'available'}" for name, reason in available().items())


def resolve(name: str) -> Any:
    """The imported module of a transport; ConfigError for an unknown name, TransportUnavailable (chained) if it cannot be used."""
    backend = _BACKENDS.get(name)
    if backend is None:
        raise ConfigError(f"transport must be one of auto, {', '.join(_BACKENDS)}, got {name!r}")
    if name not in _FAILURES:
        try:
            module = importlib.import_module(backend.module)
        except Exception as error:  # an import can fail with anything: ImportError, OSError of a library, RuntimeError
            _FAILURES[name] = error
        else:
            reason = backend.probe(module)
            if reason:
                raise TransportUnavailable(f"transport {name} cannot be used here: {reason}")
            return module
    raise TransportUnavailable(f"transport {name} could not be imported") from _FAILURES[name]


def choose(name: str, *, peers: Sequence[tuple[str, int]]) -> Choice:
    """The transport of a round. "auto" takes memory when every peer is in this process, else shm. peers: (host, pid)."""
    if name != "auto":
        resolve(name)
        return Choice(name, "asked for by name")
    if peers and set(peers) == {(host_identity(), os.getpid())}:
        return Choice("memory", "auto: every subscriber is in the publisher's process")
    resolve("shm")
    return Choice("shm", "auto: every subscriber is on the publisher's host")


def make_sender(name: str, endpoint: Endpoint, config: ShmConfig) -> Sender:
    """The publisher's end of a transport."""
    return _BACKENDS[name].sender(resolve(name), endpoint, config)


def make_receiver(name: str, peer: str) -> Receiver:
    """A subscriber's end of a transport."""
    module = resolve(name)
    return _BACKENDS[name].receiver(module, peer)
