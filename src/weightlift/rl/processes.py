"""The other processes of a run as the loop's process sees them: started, watched, stopped, each in bounded time.

Owns: one child process and its log file. Must not know: requests, weights. Called by rl/engine.py (rollout) and rl/team.py (trainer
ranks).

The child gets a session of its own, so that Ctrl-C in a terminal reaches the trainer only, which then ends the child in
an orderly way. A parent that is killed cannot do that: the child watches it (rl/rollout.py).
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

import msgspec

from weightlift.errors import PeerLost

__all__ = ["ChildProcess"]

_KILL_S: Final = 5.0
_TAIL_BYTES: Final = 2_000


class ChildProcess:
    """One running process.

    Args:
        environment: on top of this process's.
        what: for errors: "rollout process rollout-0". peer: its name in errors.
        module: run as `python -m <module>`.
        settings: passed as JSON on the child's standard input: nothing shows in the process list, nothing is pickled.
        log_path: the child's standard output and error.
    """

    def __init__(
        self,
        what: str,
        peer: str,
        module: str,
        settings: msgspec.Struct,
        *,
        log_path: pathlib.Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.what: Final = what
        self.peer: Final = peer
        self.log_path: Final = log_path
        with log_path.open("wb") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **(environment or {})},
            )
        assert self._child.stdin is not None  # stdin=PIPE
        try:
            self._child.stdin.write(msgspec.json.encode(settings))
            self._child.stdin.close()
        except BrokenPipeError:
            self.check()

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    def check(self) -> None:
        """Raise PeerLost if the process has ended; the error says how, and shows the end of its log."""
        code = self._child.poll()
        if code is None:
            return
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        tail = self._tail()
        raise PeerLost(
            f"the {self.what} (pid {self.pid}) {how}" + (f"; its log ends:\n{tail}\n " if tail else ""),
            peer=self.peer,
            remedy=f"read {self.log_path}.",
        )

    def stop(self, *, timeout_s: float) -> None:
        """Wait for the process to end by itself (it was asked to), then terminate it, then kill it. Never raises for a
        dead one."""
        for signal_it, patience_s in ((None, timeout_s), (self._child.terminate, 1.0), (self._child.kill, _KILL_S)):
            if signal_it is not None:
                signal_it()
            try:
                self._child.wait(patience_s)
                return
            except subprocess.TimeoutExpired:
                continue

    def _tail(self) -> str:
        try:
            return self.log_path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").rstrip()
        except OSError:
            return ""
