"""Settings: frozen, checked when made, read from nowhere by themselves.

Owns: the dataclasses and their checks. Must not know: torch, zmq, any room of the library.
Precedence everywhere: an argument beats an environment variable beats the default. Environment variables are read when an object
is made, never at import.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any, TypeVar

from weightlift.errors import ConfigError

__all__ = ["Deadlines", "ShmConfig", "check_int", "check_seconds", "check_text", "env", "from_mapping"]

_T = TypeVar("_T")
_MOST_SLOTS = 128
"""One doorbell frame a slot may wait unread; more than the socket's buffer holds would look like a reader that does not read."""


def check_seconds(name: str, value: object, *, zero: bool = False) -> None:
    """Raise ConfigError unless value is a finite, positive number of seconds (or zero, where allowed)."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or value < 0 or (value == 0 and not zero):  # type: ignore[operator]
        raise ConfigError(f"{name} must be a finite number of seconds above 0, got {value!r}")


def check_int(name: str, value: object, *, at_least: int) -> None:
    """Raise ConfigError unless value is an int of at least `at_least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigError(f"{name} must be an integer of at least {at_least}, got {value!r}")


def check_text(name: str, value: object, *, empty: bool = True) -> None:
    """Raise ConfigError unless value is a string, and not an empty one unless that is allowed. The value is shown by its type only
    where it may be a secret."""
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a string, got {type(value).__name__}")
    if not value and not empty:
        raise ConfigError(f"{name} must be a non-empty string, got {value!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long one side waits for the other, in seconds. The publisher's values rule the round; they travel with ANNOUNCE.

    announce_s: from ANNOUNCE to the peer's first answer; covers a peer that is still generating and has not called pull().
    prepare_s:  from the manifest to Ready or a refusal.
    transfer_s: between two signs of progress of one peer (an acknowledged bucket), not for the whole transfer.
    release_s:  from the last acknowledged bucket to Released.
    commit_s:   from Commit to Committed; covers the engine's cache reset.
    gather_s:   between ranks of one trainer: for one rank's part of one layer group, once both are at it.
    cause_s:    grace for the reason of a peer that closed its data plane, before it is called lost.
    """

    announce_s: float = 120.0
    prepare_s: float = 30.0
    transfer_s: float = 30.0
    release_s: float = 30.0
    commit_s: float = 30.0
    gather_s: float = 60.0
    cause_s: float = 2.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_seconds(f"Deadlines.{field.name}", getattr(self, field.name))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShmConfig:
    """The ring of the shared-memory transport.

    slot_bytes: capacity of one bucket. A few small slots stay in the processor's cache; big ones do not (docs/benchmarks/shm.md).
    slots: how many buckets may be under way at once.
    """

    slot_bytes: int = 4 * 1024 * 1024
    slots: int = 4

    def __post_init__(self) -> None:
        check_int("ShmConfig.slot_bytes", self.slot_bytes, at_least=16)
        check_int("ShmConfig.slots", self.slots, at_least=1)
        if self.slots > _MOST_SLOTS:
            raise ConfigError(f"ShmConfig.slots must be at most {_MOST_SLOTS}, got {self.slots}")


def from_mapping(cls: type[_T], values: dict[str, Any]) -> _T:
    """Build a config dataclass from a mapping; an unknown key raises ConfigError and lists the known ones."""
    known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(f"{cls.__name__} has no setting {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    return cls(**values)


def env(name: str, default: str) -> str:
    """The environment variable WEIGHTLIFT_<name>, or the default."""
    return os.environ.get(f"WEIGHTLIFT_{name}", default)
