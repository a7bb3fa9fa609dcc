"""Lending bucket memory to a loader, and seeing whether it came back.

Owns: the loan and the look afterwards. Must not know: buckets, loaders, what follows.
A bucket is written again for a later round: a view that an application keeps would silently show other values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.utils.dlpack

from weightlift.copies import uses
from weightlift.errors import LoaderError
from weightlift.loaders.base import Loader
from weightlift.protocol.plan import Bucket

__all__ = ["installer", "lend"]


def lend(memory: torch.Tensor, use: Callable[[torch.Tensor], None]) -> None:
    """Call `use` with an alias of `memory`; LoaderError if afterwards anybody still refers to it."""
    # Over DLPack the alias gets a storage object of its own, on any device: whoever else reads the same bucket is not counted.
    alias = torch.utils.dlpack.from_dlpack(memory)
    before = uses(alias)
    use(alias[:])
    if uses(alias) > before:
        raise LoaderError(
            "install kept a view of a bucket, which is going to be written again",
            remedy="copy what you keep (tensor.clone()): bucket memory is valid only until the call returns.",
        )


def installer(loader: Loader) -> Callable[[Bucket, torch.Tensor], None]:
    """`loader.install`, with memory that is lent, unless the loader says that it plans its copies once."""
    if getattr(loader, "caches_views", False):
        return loader.install
    return lambda bucket, memory: lend(memory, lambda lent: loader.install(bucket, lent))
