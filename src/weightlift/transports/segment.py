"""A POSIX shared-memory segment that never outlives its users.

Owns: creating, checking for room, mapping, slicing into slots. Must not know: peers, rounds.
The segment gets an unguessable name below /dev/shm, and loses it before anything is written to it: readers receive the open file over
their doorbell. From then on only open descriptors and mappings keep it, so the kernel frees it whichever way the processes end.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pathlib
import secrets
from typing import Final

import numpy
import torch

from weightlift.errors import LoaderError, TransportUnavailable

__all__ = ["SHM_ROOT", "Segment", "free_bytes"]

SHM_ROOT: Final = pathlib.Path("/dev/shm")


def free_bytes(root: pathlib.Path = SHM_ROOT) -> int:
    """Free bytes of the shared-memory file system; TransportUnavailable where there is none."""
    try:
        status = os.statvfs(root)
    except OSError as error:
        raise TransportUnavailable(f"there is no shared memory at {root}: {error}") from error
    return status.f_bavail * status.f_frsize


class Segment:
    """A mapped segment of `slots` slots of `slot_bytes` each; `memory(i)` is slot i as a uint8 tensor of shape [slot_bytes].

    The tensors are views of the mapping: `close` raises LoaderError while somebody holds one.
    """

    def __init__(self, descriptor: int, *, slots: int, slot_bytes: int, identity: str) -> None:
        self.descriptor = descriptor
        self.identity = identity
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._stride = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(descriptor, self._stride * slots)
        flat = torch.from_numpy(numpy.frombuffer(self._map, dtype=numpy.uint8))
        self._slots = [flat[i * self._stride : i * self._stride + slot_bytes] for i in range(slots)]

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory."""
        return self._stride * self.slots

    @classmethod
    def create(cls, *, slots: int, slot_bytes: int) -> Segment:
        """Make and reserve a segment; TransportUnavailable with the free and the needed bytes if there is no room."""
        stride = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        needed, free = stride * slots, free_bytes()
        too_small = TransportUnavailable(
            f"{SHM_ROOT} has {free} bytes free, the ring needs {needed} ({slots} slots of {slot_bytes} bytes)",
            remedy="smaller slots (ShmConfig), or a larger /dev/shm (docker run --shm-size=1g).",
        )
        if needed > free:
            raise too_small
        identity = f"weightlift-{secrets.token_hex(16)}"
        path = SHM_ROOT / identity
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            path.unlink()
            # Reserves the pages: a full file system is an error here, not a SIGBUS in the middle of a copy.
            os.posix_fallocate(descriptor, 0, needed)
            return cls(descriptor, slots=slots, slot_bytes=slot_bytes, identity=identity)
        except OSError as error:
            os.close(descriptor)
            raise too_small from error

    def memory(self, slot: int) -> torch.Tensor:
        """Slot `slot`, the same tensor object every time."""
        return self._slots[slot]

    def close(self) -> None:
        """Unmap and close. Idempotent. LoaderError if a view is still held elsewhere: it stays valid, and so does the memory."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor < 0:
            return
        os.close(descriptor)
        self._slots.clear()
        try:
            self._map.close()
        except BufferError as error:
            raise LoaderError(
                "a view of a bucket is still held after the transfer",
                remedy="copy what you keep: memory passed to a loader is valid only until the call returns.",
            ) from error

    def discard(self) -> None:
        """`close` for a clean-up that must not fail: a view that somebody holds keeps its memory until it is dropped."""
        with contextlib.suppress(LoaderError):
            self.close()
