"""`vllm serve` as a child process, with what a sync needs of it.

Owns: the command line, the environment, the log, starting and ending. Must not know: weights, requests.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Final, Self

from weightlift.config import check_seconds
from weightlift.errors import ConfigError, PeerLost, TransferTimeout

__all__ = ["CPU_ENVIRONMENT", "EXTENSION", "GUARD", "ServerProcess"]

EXTENSION: Final = "weightlift.integrations.vllm_extension.WeightliftExtension"
GUARD: Final = "weightlift.integrations.vllm_guard.Guard"
CPU_ENVIRONMENT: Final[Mapping[str, str]] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # trainer and engine take turns on the same cores
    "VLLM_SLEEP_WHEN_IDLE": "1",  # else its processes spin while the trainer trains
}
_POLL_S: Final = 0.25
_TAIL_BYTES: Final = 2_000


def _serve(model: str) -> list[str]:
    """`vllm serve MODEL`, or its older form: the command asks for the version of a package called vllm, and the CPU build's is not."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]


class ServerProcess:
    """A server on the loopback interface of this host.

    Args:
        model: folder or name, as vLLM takes it. log_path: gets standard output and error.
        port: on 127.0.0.1; or socket: path of a Unix socket, in a directory that only this user can enter.
        arguments: further ones of `vllm serve`. environment: on top of this process's.
    """

    def __init__(
        self,
        model: str,
        *,
        log_path: pathlib.Path,
        port: int | None = None,
        socket: pathlib.Path | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if (port is None) == (socket is None):
            raise ConfigError(f"port or socket must be given, and only one of them, got {port!r} and {socket!r}")
        self.url = "http://localhost" if port is None else f"http://127.0.0.1:{port}"
        self.socket = socket
        self.log_path = log_path
        command = _serve(model)
        command += ["--uds", str(socket)] if port is None else ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--worker-extension-cls", EXTENSION, "--middleware", GUARD, *arguments]
        # The control calls of a sync are among those that vLLM serves in this mode only: the port must not be open to strangers.
        own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
        with log_path.open("wb") as log:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **own, **(environment or {})},
            )

    @property
    def pid(self) -> int:
        """Of the server; its engine and workers are in its process group."""
        return self._child.pid

    def check(self) -> None:
        """PeerLost if the server has ended."""
        code = self._child.poll()
        if code is not None:
            raise PeerLost(
                f"vllm serve (pid {self.pid}) ended with {code}; its log ends:\n{self._tail()}\n ",
                peer="vllm",
                remedy=f"read {self.log_path}.",
            )

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Until it answers /health; PeerLost if it ends first, TransferTimeout if it does not come up in time."""
        import httpx

        check_seconds("timeout_s", timeout_s)
        deadline = time.monotonic() + timeout_s
        transport = None if self.socket is None else httpx.HTTPTransport(uds=str(self.socket))
        with httpx.Client(timeout=5.0, trust_env=False, transport=transport) as client:
            while time.monotonic() < deadline:
                self.check()
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(f"{self.url}/health").status_code == 200:
                        return
                time.sleep(_POLL_S)
        raise TransferTimeout(f"vllm serve was not up within {timeout_s:g} s", peer="vllm", remedy=f"read {self.log_path}.")

    def close(self, timeout_s: float = 15.0) -> None:
        """End the server and all that it started. Idempotent."""
        for number, patience_s in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, 5.0)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(patience_s)
                break
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # workers that outlived their server

    def _tail(self) -> str:
        try:
            return self.log_path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").rstrip()
        except OSError:
            return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
