"""What a sync did: the report that publish and pull return, that the run log keeps and the benchmark prints.

Owns: `SyncReport`, `PhaseSeconds`, the stop-watch that fills it. Must not know: how anything is done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

__all__ = ["PhaseSeconds", "StopWatch", "SyncReport"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeconds:
    """Wall seconds of one round.

    announce and prepare: until every peer answered. transfer: from the first bucket to the last acknowledgement; gather and pack are
    the publisher's part of it (overlapping the readers' load). load: the slowest peer's copying. verify: this side's digests, while the
    other side computes its own. release, commit: until every peer confirmed. total: the whole call.
    """

    announce: float = 0.0
    prepare: float = 0.0
    gather: float = 0.0
    pack: float = 0.0
    transfer: float = 0.0
    load: float = 0.0
    verify: float = 0.0
    release: float = 0.0
    commit: float = 0.0
    total: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One round, as one side saw it.

    version: what was published. round: its number. committed: whether enough replicas serve it.
    bytes, tensors, buckets: of one copy of the weights; tensors counts names, aliases included.
    replicas: replica -> version that it serves; None for nothing (fenced, torn, or not synced yet).
    fenced: replica -> the first cause why it does not serve this version.
    host_bytes_peak, host_bytes_retained: memory of the transport on the host, during and after; device_* likewise.
    verify: how much of the installed bytes was compared with the trainer's before anybody committed: off, sample or full.
    transport, transport_reason: what carried the bytes, and why it was chosen.
    """

    version: int
    round: int
    committed: bool
    bytes: int
    tensors: int
    buckets: int
    seconds: PhaseSeconds
    replicas: dict[str, int | None] = dataclasses.field(default_factory=dict)
    fenced: dict[str, str] = dataclasses.field(default_factory=dict)
    host_bytes_peak: int = 0
    host_bytes_retained: int = 0
    device_bytes_peak: int = 0
    device_bytes_retained: int = 0
    verify: str = "off"
    transport: str = ""
    transport_reason: str = ""

    @property
    def gbps(self) -> float:
        """10^9 bytes of one copy of the weights per second of the whole call."""
        return self.bytes / self.seconds.total / 1e9 if self.seconds.total > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, `gbps` included."""
        return {**dataclasses.asdict(self), "gbps": self.gbps}


class StopWatch:
    """Adds up seconds by name."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._sums: dict[str, float] = {}

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time spent inside the with block to `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to a name."""
        self._sums[name] = self._sums.get(name, 0.0) + seconds

    def seconds(self, **more: float) -> PhaseSeconds:
        """Everything so far; `total` runs from the making of this watch."""
        return PhaseSeconds(**{**self._sums, **more, "total": time.perf_counter() - self._start})
