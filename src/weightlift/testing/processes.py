"""Real processes for tests: start, talk to by JSON lines, stop, kill, and see what they left behind.

Owns: `Worker`, `Leftovers`. Must not know: pytest, what a worker does.
A worker is a function in a file, run by `python -m weightlift.testing.child`. It gets its arguments as JSON and reports by `say(...)`.
A wait that ends without an answer dumps every thread of the worker and raises with the dump.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from types import TracebackType
from typing import Any, Self

from weightlift.transports.endpoint import run_directories

__all__ = ["Leftovers", "Worker", "say"]


def say(**message: Any) -> None:
    """Inside a worker: report to the test."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


class Worker:
    """A child process in a process group of its own.

    Args:
        file: the Python file that has the function. function: its name. arguments: passed as keywords; plain JSON values.
    """

    def __init__(self, file: str | pathlib.Path, function: str, /, **arguments: Any) -> None:
        self.name = f"{function}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        command = [sys.executable, "-m", "weightlift.testing.child", str(file), function, json.dumps(arguments)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, stdin=subprocess.PIPE, start_new_session=True
        )
        self.pid = self._process.pid
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name=f"worker-{self.pid}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None, "stdout is a pipe"
        for line in self._process.stdout:
            with contextlib.suppress(json.JSONDecodeError):
                self._messages.put(json.loads(line))
        self._messages.put(None)

    def hear(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """The next message; AssertionError with the worker's log if it ends first or says nothing."""
        try:
            message = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"{self.name} said nothing for {timeout_s} s\n{self.dump()}") from None
        if message is None:
            self._messages.put(None)
            raise AssertionError(f"{self.name} ended with {self.wait()}\n{self.log()}")
        return message

    def tell(self, line: str = "go") -> None:
        """A line on the worker's standard input."""
        assert self._process.stdin is not None, "stdin is a pipe"
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def dump(self) -> str:
        """The stacks of all threads of the worker, and its log."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
            os.kill(self.pid, signal.SIGUSR1)  # child.py has faulthandler registered on it
            time.sleep(0.5)
        return self.log()

    def log(self) -> str:
        """What the worker wrote to stderr."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-8000:]

    def signal(self, number: int) -> None:
        """Send a signal to the worker alone."""
        os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to the worker and all it started."""
        os.killpg(self.pid, number)

    def wait(self, timeout_s: float = 30.0) -> int:
        """The exit status, negative for a signal; AssertionError if it does not end."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end\n{self.dump()}") from None

    def close(self) -> None:
        """End the worker, whatever it does. Idempotent."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(30.0)
        self._reader.join(10.0)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Leftovers:
    """What is there before and after: shared memory, run directories, descriptors and threads of this process.

    `check()` raises AssertionError that lists what is new.
    """

    def __init__(self, *, run_root: pathlib.Path | None = None) -> None:
        self._root = run_root or run_directories()
        self._before = self._look()

    def _look(self) -> dict[str, set[str]]:
        return {
            "shared memory": {p.name for p in pathlib.Path("/dev/shm").iterdir() if p.name.startswith("weightlift")},
            "run files": {str(p) for p in self._root.rglob("*")} if self._root.exists() else set(),
            "descriptors": _descriptors(),
            "threads": {str(t.ident) for t in threading.enumerate()},
        }

    def new(self) -> dict[str, set[str]]:
        """What is there now and was not before."""
        now = self._look()
        return {kind: more for kind in now if (more := now[kind] - self._before[kind])}

    def check(self, *, ignore: tuple[str, ...] = (), grace_s: float = 3.0) -> None:
        """Nothing is new, after at most `grace_s` (threads of libzmq and of a closing worker need a moment)."""
        deadline = time.monotonic() + grace_s
        while (new := {k: v for k, v in self.new().items() if k not in ignore}) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not new, f"left behind: {new}"


def _descriptors() -> set[str]:
    """Open descriptors with what they point to; the one that reads the list is left out."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if not target.endswith("/fd"):
                found.add(f"{fd} -> {target}")
    return found
