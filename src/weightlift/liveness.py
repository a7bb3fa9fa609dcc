"""Whether a process is alive, without asking it.

Owns: pidfds, the identity of a host. Must not know: frames, peers' names.
A pidfd becomes readable when the process ends, however it ends, also while a child that it forked keeps its sockets open. It is
only valid on the same host and in the same pid namespace; other peers are watched by the heartbeats of the channel.
"""

from __future__ import annotations

import functools
import os
import pathlib
import select
import socket

__all__ = ["host_identity", "lives", "open_pidfd"]


@functools.cache
def host_identity() -> str:
    """Equal for two processes exactly when a pid means the same process to both: boot id and pid namespace."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"


def open_pidfd(pid: int, host: str) -> int | None:
    """A descriptor that becomes readable when the process ends; None where only heartbeats can tell (another host).

    A process that has ended already raises ProcessLookupError.
    """
    if host != host_identity() or not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (OSError, OverflowError):
        return None


def lives(pid: int) -> bool:
    """Whether a process of this host has not ended; a zombie has. True where that cannot be known."""
    try:
        pidfd = open_pidfd(pid, host_identity())
    except ProcessLookupError:
        return False
    if pidfd is None:
        return True
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return not poll.poll(0)
    finally:
        os.close(pidfd)
