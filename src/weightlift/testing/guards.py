"""Guards for what must not happen on a path.

Owns: `no_full_collection`. Must not know: which path. For users' tests as well: a full collection between two wake-ups of an engine
costs hundreds of milliseconds in a real trainer, frees nothing, and hides who holds what.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["no_full_collection"]


@contextlib.contextmanager
def no_full_collection() -> Iterator[None]:
    """AssertionError where `gc.collect` is called inside the context, by whomever; Python's own collections go on."""
    plain = gc.collect

    def forbidden(generation: int = 2) -> int:
        raise AssertionError(f"gc.collect({generation}) was called on a path that must not need it")

    gc.collect = forbidden
    try:
        yield
    finally:
        gc.collect = plain
