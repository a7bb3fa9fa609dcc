"""A call that this process does not wait for longer than it said.

Owns: `in_background`, `bounded`. Must not know: what is called.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

from weightlift.errors import TransferTimeout

__all__ = ["bounded", "in_background"]


def in_background(call: Callable[..., Any], *arguments: Any, **keywords: Any) -> concurrent.futures.Future[Any]:
    """A call in a daemon thread: an engine that does not answer must not keep this process from ending."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments, **keywords))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weightlift-background", daemon=True).start()
    return future


def bounded(timeout_s: float, what: str, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """The result of a call, or TransferTimeout: vLLM's client has no deadline of its own where its engine process only stands still."""
    future = in_background(call, *arguments, **keywords)
    try:
        return future.result(timeout_s)
    except concurrent.futures.TimeoutError:
        if future.done():
            raise  # the call's own
        raise TransferTimeout(f"{what} did not answer within {timeout_s:g} s", peer="vllm") from None
