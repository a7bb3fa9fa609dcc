"""The contract of a source: where a trainer's tensors come from.

Owns: the protocols. Must not know: buckets, transports.
`manifest()` is static structure; it returns the same object while names, shapes, dtypes and aliases are unchanged. A source never
changes trainer state, and what it yields is only read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from weightlift.protocol.manifest import Manifest
from weightlift.sources.group import TrainerGroup

__all__ = ["GroupSource", "Source", "StableSource"]


class Source(Protocol):
    """Anything that can name its tensors and stream them."""

    def manifest(self) -> Manifest:
        """What the next version consists of."""

    def stream(self) -> Iterator[torch.Tensor]:
        """One full tensor for every entry that is not an alias, in manifest order; any strides, any device, detached.

        A tensor may be temporary: its memory may be used again as soon as the next one is asked for.
        """


@runtime_checkable
class StableSource(Source, Protocol):
    """A source whose full tensors stay where they are between rounds: copies can be planned once and repeated."""

    def tensors(self) -> Sequence[torch.Tensor]:
        """What `stream` yields, all at once, as of the last `manifest()`. The same tensor objects as then unless storage moved."""


@runtime_checkable
class GroupSource(Source, Protocol):
    """A source that is spread over several ranks, which all publish together.

    `stream` is called on every rank: it yields full tensors where `group.sends`, and takes part in the gathers on the others.
    Closing it early still takes part in the rest. A stable one (of ranks that hold full copies) needs no gather, and is not
    streamed.
    """

    group: TrainerGroup

    def sends(self) -> Mapping[int, bytes]:
        """Rank of the group -> a digest of all that `stream` sends to it here, as of the last `manifest()`; {} for nothing."""

    def expects(self) -> Mapping[int, bytes]:
        """Rank of the group -> a digest of all that `stream` expects from it here."""
