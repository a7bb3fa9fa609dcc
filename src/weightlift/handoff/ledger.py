"""Who holds how much memory, at every arrow of a step; and promises that raise.

Owns: `Ledger`, `Reading`, the meters of CUDA and of a simulated device. Must not know: phases, engines, trainers.
On a machine without a GPU the device is simulated: a budget that all processes of a run share, in a small file, in which each books
what it really holds. Booking beyond the budget raises, and names everybody who holds something.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

import torch

from weightlift.config import check_int, check_text
from weightlift.errors import HandoffError, OutOfDeviceMemory
from weightlift.liveness import lives

__all__ = ["CudaMeter", "Entry", "Ledger", "Meter", "Reading", "SimulatedDevice", "shared_memory_bytes"]


_LOCK_S: Final = 10.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Bytes at one moment, of this process unless said otherwise.

    reserved, allocated, active: of the device, as the caching allocator counts. device_used, device_total: of all processes.
    host: pinned or offloaded bytes. shared: shared memory mapped by this process.
    holders: who holds what, where it is known.
    """

    reserved: int = 0
    allocated: int = 0
    active: int = 0
    device_used: int = 0
    device_total: int = 0
    host: int = 0
    shared: int = 0
    holders: Mapping[str, int] = dataclasses.field(default_factory=dict)


class Meter(Protocol):
    """Reads memory; cheap enough for every arrow (no synchronisation, no collection)."""

    def read(self) -> Reading:
        """The bytes now."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One arrow: its name, when (seconds since the ledger was made), the bytes after it."""

    arrow: str
    at_s: float
    reading: Reading

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"arrow": self.arrow, "at_s": round(self.at_s, 4), **dataclasses.asdict(self.reading)}


class Ledger:
    """A book of readings.

    Args:
        meter: reads the device. keep: entries that are remembered; older ones are dropped.
    """

    def __init__(self, meter: Meter, *, keep: int = 256) -> None:
        check_int("keep", keep, at_least=1)
        self._meter = meter
        self._keep = keep
        self._start = time.monotonic()
        self.entries: list[Entry] = []

    def book(self, arrow: str, *, host_bytes: int = 0) -> Reading:
        """Read the memory after an arrow. host_bytes: what is on the host because it is not on the device."""
        reading = dataclasses.replace(self._meter.read(), host=host_bytes)
        self.entries.append(Entry(arrow, time.monotonic() - self._start, reading))
        del self.entries[: -self._keep]
        return reading

    def promise(self, arrow: str, *, most_bytes: int, what: str = "reserved") -> None:
        """Book an arrow, and raise OutOfDeviceMemory with this ledger if more than `most_bytes` of `what` are held after it."""
        held = int(getattr(self.book(arrow), what))
        if held > most_bytes:
            error = OutOfDeviceMemory(f"{held} bytes are {what} after {arrow}, at most {most_bytes} were promised")
            error.add_note(self.table())
            raise error

    def take(self) -> list[Entry]:
        """The entries so far; the book is empty afterwards."""
        entries, self.entries = self.entries, []
        return entries

    def table(self) -> str:
        """The entries as lines of text, MiB."""
        lines = [f"{'arrow':<28}{'reserved':>10}{'allocated':>10}{'used':>10}{'of':>10}{'host':>10}{'shared':>10}  holders"]
        for entry in self.entries:
            r = entry.reading
            numbers = (r.reserved, r.allocated, r.device_used, r.device_total, r.host, r.shared)
            holders = ", ".join(f"{name} {_mib(size)}" for name, size in r.holders.items())
            lines.append(f"{entry.arrow:<28}" + "".join(f"{_mib(n):>10}" for n in numbers) + f"  {holders}")
        return "\n".join(lines)


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f}"


class CudaMeter:
    """The caching allocator's counts of one device, and what the driver says of all processes."""

    def __init__(self, device: int | None = None) -> None:
        self._device = torch.cuda.current_device() if device is None else device

    def read(self) -> Reading:
        """See Meter."""
        stats = torch.cuda.memory_stats(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        reserved = stats.get("reserved_bytes.all.current", 0)
        return Reading(
            reserved=reserved,
            allocated=stats.get("allocated_bytes.all.current", 0),
            active=stats.get("active_bytes.all.current", 0),
            device_used=total - free,
            device_total=total,
            shared=shared_memory_bytes(),
            holders={"this process": reserved, "all others": max(0, total - free - reserved)},
        )


class SimulatedDevice:
    """A device of a fixed size that several processes share, for machines without one.

    Args:
        path: a file, the same in all processes. total_bytes: the budget; None joins a device that another process made.
        name: who books here, unique among the processes.

    Books of processes that have ended are dropped: their memory is free again.
    """

    def __init__(self, path: pathlib.Path, name: str, total_bytes: int | None = None) -> None:
        check_text("name", name, empty=False)
        self._path = path
        self.name = name
        if total_bytes is not None:
            check_int("total_bytes", total_bytes, at_least=1)
            with self._open() as book:
                book["total"] = total_bytes

    @contextlib.contextmanager
    def _open(self) -> Iterator[dict[str, Any]]:
        """The book, locked; written back when the context ends without an exception."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(descriptor, self._path)
            data = os.pread(descriptor, 1 << 20, 0)
            book: dict[str, Any] = json.loads(data) if data else {"total": 0, "held": {}}
            book["held"] = {who: row for who, row in book["held"].items() if lives(row[0])}
            yield book
            text = json.dumps(book).encode()
            os.pwrite(descriptor, text, 0)
            os.ftruncate(descriptor, len(text))
        finally:
            os.close(descriptor)

    def hold(self, what: str, nbytes: int) -> None:
        """From now on this process holds so many bytes for `what`; 0 for none. OutOfDeviceMemory if they do not fit: nothing
        changes.

        What does not fit is the memory of whoever asks, also where another process took too much before.
        """
        with self._open() as book:
            key = f"{self.name}/{what}"
            others = sum(row[1] for who, row in book["held"].items() if who != key)
            if nbytes and others + nbytes > book["total"]:
                holders = ", ".join(f"{who} {row[1]}" for who, row in book["held"].items())
                raise OutOfDeviceMemory(
                    f"{self.name} asked for {nbytes} bytes for {what}; {others} of {book['total']} are held: {holders}",
                    remedy="somebody woke before somebody else had left: see docs/handoff.md for the order.",
                )
            if nbytes:
                book["held"][key] = [os.getpid(), nbytes]
            else:
                book["held"].pop(key, None)
            book["peak"] = max(book.get("peak", 0), others + nbytes)

    def holders(self) -> dict[str, int]:
        """Who holds what now."""
        with self._open() as book:
            return {who: row[1] for who, row in book["held"].items()}

    @property
    def peak_bytes(self) -> int:
        """The most that was ever held at once."""
        with self._open() as book:
            return int(book.get("peak", 0))

    def read(self) -> Reading:
        """See Meter."""
        with self._open() as book:
            held = {who: row[1] for who, row in book["held"].items()}
            total = int(book["total"])
        own = sum(size for who, size in held.items() if who.startswith(f"{self.name}/"))
        used = sum(held.values())
        return Reading(
            reserved=own,
            allocated=own,
            active=own,
            device_used=used,
            device_total=total,
            shared=shared_memory_bytes(),
            holders=held,
        )


def _lock(descriptor: int, path: pathlib.Path) -> None:
    """The book is held for microseconds; a process that was stopped at the wrong moment holds it for longer."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                message = f"the simulated device {path} was locked by another process for {_LOCK_S} s"
                raise HandoffError(message, remedy="is a process of this run stopped (state T)?") from error
            time.sleep(0.001)


def shared_memory_bytes() -> int:
    """Bytes of shared memory that this process has resident, from the kernel."""
    try:
        status = pathlib.Path("/proc/self/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * 1024
    return 0
