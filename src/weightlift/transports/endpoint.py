"""Addresses, and the private directory of a run.

Owns: `new_address`, parsing, the run directory with its sockets and its lock, the sweep of directories that dead runs left behind.
Must not know: frames, transports' memory.

An `ipc://` address is a directory below `<tmp>/weightlift-<uid>/`, mode 0700, with an unguessable name. Every process of the run holds
a shared lock on its `lock` file; the kernel drops it when the process ends, however it ends. A directory whose lock nobody holds
belongs to a dead run and is removed by the next `new_address()`.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import ipaddress
import os
import pathlib
import re
import secrets
import stat
import tempfile
import time
from typing import Final, NamedTuple

import xxhash

from weightlift.config import env
from weightlift.errors import ConfigError

__all__ = ["Endpoint", "RunDirectory", "new_address", "parse_address", "run_directories"]

_MAX_SOCKET_PATH: Final = 107
"""Bytes of sockaddr_un.sun_path on Linux, without the final zero."""
_LONGEST_NAME: Final = len("/data-00000000")
_LOCK_S: Final = 10.0
"""Locks are held for the time of a bind, or of the removal of a few files."""
_SWEEP_AGE_S: Final = 60.0
"""A directory is left alone for this long after it was made: its run may still be starting."""


class Endpoint(NamedTuple):
    """A parsed address. `zmq` is what the control channel binds or connects to; `directory` holds this run's sockets."""

    address: str
    zmq: str
    directory: pathlib.Path | None
    run_id: str

    @property
    def remote(self) -> bool:
        """Whether peers may be on other hosts."""
        return self.directory is None


def new_address() -> str:
    """A fresh address for one run on this host, as a string to hand to the other processes.

    Side effects: makes the run directory, holds it until this process ends, and removes directories of dead runs.
    """
    root = run_directories()
    sweep(root)
    directory = root / secrets.token_hex(8)
    if not _HELD:
        atexit.register(release_addresses)
    _HELD.append(RunDirectory(directory))
    return f"ipc://{directory}"


def parse_address(address: str) -> Endpoint:
    """`ipc:///directory` or `tcp://host:port` (IPv4, a name, or IPv6 with or without brackets). ConfigError otherwise."""
    if "://" not in str(address):
        raise ConfigError(f"address must be ipc:///directory or tcp://host:port, got {address!r}")
    scheme, rest = address.split("://", 1)
    if scheme == "ipc":
        if not rest.startswith("/"):
            raise ConfigError(f"an ipc address must name an absolute directory, got {address!r}")
        directory = _short(pathlib.Path(rest))
        return Endpoint(address, f"ipc://{directory}/control", directory, directory.name)
    if scheme == "tcp":
        host, port = split_host_port(rest)
        return Endpoint(address, f"tcp://{join_host_port(host, port)}", None, f"tcp-{port}")
    raise ConfigError(f"address must be ipc:///directory or tcp://host:port, got {address!r}")


def split_host_port(text: str) -> tuple[str, int]:
    """("::1", 80) from "[::1]:80" or "::1:80"; the last colon parts host and port. ConfigError if there is no port."""
    match = re.fullmatch(r"\[(?P<six>[^\]]+)\]:(?P<p6>\d+)|(?P<host>.+):(?P<port>\d+)", text)
    if match is None:
        raise ConfigError(f"a tcp address must be host:port, got {text!r}")
    host, port = (match["six"] or match["host"]), int(match["p6"] or match["port"])
    if not 0 < port <= 65535:
        raise ConfigError(f"a port must be between 1 and 65535, got {port}")
    if ":" in host:
        try:
            ipaddress.IPv6Address(host.split("%", 1)[0])
        except ValueError as error:
            raise ConfigError(f"{host!r} is not an IPv6 address: {error}") from error
    return host, port


def join_host_port(host: str, port: int) -> str:
    """The one place that formats host and port: IPv6 literals get brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class RunDirectory:
    """A held run directory. `close` drops the hold; whoever drops the last one removes the directory.

    Args:
        path: made with mode 0700 if it is not there.
    Raises:
        ConfigError: it belongs to another user, others may enter it, or it holds files that are not a run's.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(f"the run directory {path} must belong to this user with mode 0700")
        if not (path / "lock").exists() and any(path.iterdir()):
            raise ConfigError(f"the run directory {path} must be empty or a run directory: its files are not ours to remove")
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        lock_within(self._lock, fcntl.LOCK_SH, path)

    def close(self) -> None:
        """Drop the hold. Idempotent."""
        lock, self._lock = self._lock, -1
        if lock < 0:
            return
        try:
            _remove_if_unused(self.path, lock)
        finally:
            os.close(lock)


_HELD: Final[list[RunDirectory]] = []
"""Directories made by `new_address`: held until this process ends, so that they survive the time before the publisher starts."""


def release_addresses() -> None:
    """Drop the holds of every `new_address` of this process (at exit; a test may call it earlier)."""
    while _HELD:
        _HELD.pop().close()


def sweep(root: pathlib.Path, *, older_than_s: float = _SWEEP_AGE_S) -> list[pathlib.Path]:
    """Remove the run directories of dead runs below `root`; returns what was removed. Live runs are not touched."""
    removed = []
    for path in root.iterdir():
        try:
            if time.time() - path.stat().st_mtime < older_than_s:
                continue
            lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if _remove_if_unused(path, lock):
                removed.append(path)
        finally:
            os.close(lock)
    return removed


def lock_within(descriptor: int, mode: int, path: pathlib.Path, *, limit_s: float = _LOCK_S) -> None:
    """flock with a deadline; ConfigError if somebody holds it for longer: a process that was stopped at the wrong moment can."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"the run directory {path} was locked by another process for {limit_s} s",
                    remedy="is a process of this user stopped (state T)? End it, or take another address.",
                ) from error
            time.sleep(0.01)


def _remove_if_unused(path: pathlib.Path, lock: int) -> bool:
    """Remove the directory if no other process holds its lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    # Only what weightlift made: the address may name a directory in which the caller keeps files of his own.
    for made in (path / "control", path / "s", path / "binding", *path.glob("data-*"), path / "lock"):
        with contextlib.suppress(OSError):
            made.unlink()
    with contextlib.suppress(OSError):
        path.rmdir()
    return True


def run_directories() -> pathlib.Path:
    """The parent of all run directories of this user, made if needed. A temporary directory with a long path is replaced by /tmp."""
    base = env("RUN_DIR", tempfile.gettempdir())
    root = pathlib.Path(base) / f"weightlift-{os.geteuid()}"
    if len(os.fsencode(root)) + 17 + _LONGEST_NAME > _MAX_SOCKET_PATH:
        root = pathlib.Path("/tmp") / f"weightlift-{os.geteuid()}"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if root.stat().st_uid != os.geteuid():
        raise ConfigError(f"{root} belongs to another user", remedy="set WEIGHTLIFT_RUN_DIR to a directory of your own.")
    return root


def _short(directory: pathlib.Path) -> pathlib.Path:
    """The directory itself, or, where a socket in it would be too long for the kernel, a digest of it below the root.

    Both ends compute the same digest from the same address; two long addresses that differ stay different.
    """
    if len(os.fsencode(directory)) + _LONGEST_NAME <= _MAX_SOCKET_PATH:
        return directory
    return run_directories() / f"long-{xxhash.xxh3_64_hexdigest(os.fsencode(directory))}"


def discard(path: pathlib.Path) -> None:
    """Unlink a socket file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
