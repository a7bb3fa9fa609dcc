"""The contract of a loader: how arrived buckets become an engine's live parameters.

Owns: the protocol. Must not know: transports, rounds. The subscriber's driver calls, in this order, from one thread:

    prepare(plan)              may raise a ManifestError: nothing has changed, the old version stays in force
    live()                     shows where the bytes will go, where the publisher verifies
    install(bucket, memory)    once per bucket, in order; the first call is the point of no return
    finish()                   proves that every destination byte was written, and post-processes
    commit(version)            resets caches that hold older versions; EngineBusy if the engine refuses
    abort()                    a round ended early: drop every view of a bucket

`memory` is the transport's: it may be read until `install` returns. Keeping a view of it is refused with a LoaderError. A loader that
plans its copies once and repeats them says `caches_views = True`: it reads its views inside `install` only, and `abort` drops them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from weightlift.protocol.plan import Bucket, Plan
from weightlift.tensors import Witnessed

__all__ = ["Loader"]


class Loader(Protocol):
    """Installs versions into one engine."""

    def prepare(self, plan: Plan) -> None:
        """Compare the manifest with the own parameters, names, shapes, dtypes and aliases; change nothing."""

    def install(self, bucket: Bucket, memory: torch.Tensor) -> None:
        """Copy a bucket out of `memory` (uint8, 1-D)."""

    def live(self) -> Mapping[str, Sequence[torch.Tensor | Witnessed]]:
        """Every sent name with bytes -> the live tensors that it fills, in the sent shape, any dtype and strides.

        Asked for after `prepare`; the same object as long as nothing moved. The tensors are read between `finish` and `commit`, and
        their values must be those that were sent, up to a declared cast. What the engine holds in another form is a `Witnessed`: the
        loader shows it in `install` or `finish`.
        """

    def finish(self) -> None:
        """Prove coverage; raise LoaderError where a destination was not written exactly once."""

    def commit(self, version: int) -> None:
        """The weights are this version from now on: reset whatever was computed with older ones."""

    def abort(self) -> None:
        """Drop what was cached for the round."""
