"""From a source's tensors into buckets, in few launches.

Owns: the packer and its cached copy lists. Must not know: transports, where the memory comes from.
For a stable source the list of copies of each bucket is made once and repeated: a steady round costs one fused launch a bucket. A
streaming source is walked once a round; at most one of its tensors is alive at a time, plus the bucket.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch

from weightlift.copies import CopyList, check_storage
from weightlift.errors import SourceError, WeightliftError
from weightlift.protocol.plan import Bucket, Plan
from weightlift.sources.base import Source, StableSource
from weightlift.tensors import bucket_view, tensor_view, torch_dtype

__all__ = ["Look", "Packer"]

Look: TypeAlias = Callable[[int, torch.Tensor], None]
"""look(entry, tensor): called with every tensor of a streaming source when it comes, before a byte of it is packed."""


class Packer:
    """Fills the buckets of one plan from one source. `fill` must be called for bucket 0, 1, 2, ... of every round, in order.

    Raises (from `fill`): SourceError, chained to what the source raised, with bucket and tensor.
    """

    def __init__(self, source: Source, plan: Plan) -> None:
        self.plan = plan
        self._source = source
        self._cached: dict[int, tuple[int, CopyList]] = {}
        self._tensors: tuple[torch.Tensor, ...] = ()
        self._owner = _owners(plan)
        self._stream: Iterator[torch.Tensor] | None = None
        self._current: tuple[int, torch.Tensor] | None = None
        self._look: Look | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...] | None:
        """The tensors of a stable source, the same object as long as they are; None of a streaming one."""
        return self._tensors if self._stream is None else None

    def begin(self, look: Look | None = None) -> None:
        """Start a round: look whether the source's tensors are still where the cached copies expect them."""
        self._stream, self._current, self._look = None, None, look
        if not isinstance(self._source, StableSource):
            self._stream = self._source.stream()
            return
        tensors = tuple(self._source.tensors())
        if len(tensors) != len(self._owner):
            raise SourceError(f"the source yields {len(tensors)} tensors, its manifest has {len(self._owner)}")
        if len(tensors) != len(self._tensors) or any(new is not old for new, old in zip(tensors, self._tensors, strict=True)):
            for entry, position in self._owner.items():
                # Now, and not in the bucket where it would be found: by then every engine is touched.
                try:
                    check_storage(tensors[position])
                except RuntimeError as error:
                    name = self.plan.manifest.entries[entry].name
                    raise SourceError(f"{name} cannot be sent: {error}", tensor=name) from error
            self._tensors = tensors
            self._cached.clear()

    @torch.no_grad()
    def fill(self, bucket: int, memory: torch.Tensor) -> None:
        """Write bucket `bucket` into `memory` (uint8, 1-D)."""
        wanted = self.plan.buckets[bucket]
        try:
            if self._stream is None:
                self._copies(wanted, memory).run()
            else:
                self._fill_from_stream(wanted, memory)
                if bucket == len(self.plan) - 1:
                    self._exhaust()
        except WeightliftError as error:
            if error.bucket not in (None, bucket):  # an object of an earlier round, raised again
                raise SourceError(f"the source raised {type(error).__name__}: {error.message}", bucket=bucket) from error
            error.fill(bucket=bucket, buckets=len(self.plan))
            raise
        except Exception as error:
            raise SourceError(
                f"the source raised {type(error).__name__}: {error}", bucket=bucket, buckets=len(self.plan)
            ) from error

    def _copies(self, bucket: Bucket, memory: torch.Tensor) -> CopyList:
        cached = self._cached.get(bucket.number)
        if cached is not None and cached[0] == memory.data_ptr():
            return cached[1]
        entries = self.plan.manifest.entries
        copies = CopyList(
            (
                bucket_view(memory, entries[piece.entry], piece),
                tensor_view(self._tensors[self._owner[piece.entry]], piece),
            )
            for piece in bucket.pieces
        )
        self._cached[bucket.number] = (memory.data_ptr(), copies)
        return copies

    def _fill_from_stream(self, bucket: Bucket, memory: torch.Tensor) -> None:
        for piece in bucket.pieces:
            entry = self.plan.manifest.entries[piece.entry]
            tensor = self._from_stream(piece.entry)
            if tuple(tensor.shape) != entry.shape:
                raise SourceError(
                    f"{entry.name} came with shape {list(tensor.shape)}, its manifest says {list(entry.shape)}",
                    tensor=entry.name,
                )
            sent = torch_dtype(entry.dtype)
            if tensor.dtype != sent and not (tensor.is_floating_point() and sent.is_floating_point):
                raise SourceError(f"{entry.name} came as {tensor.dtype}, its manifest says {entry.dtype}", tensor=entry.name)
            bucket_view(memory, entry, piece).copy_(tensor_view(tensor, piece))

    def _from_stream(self, entry: int) -> torch.Tensor:
        """The tensor of an entry; the stream is advanced to it. Entries without elements have no piece and are skipped over."""
        assert self._stream is not None, "begin comes before fill"
        wanted = self._owner[entry]
        while self._current is None or self._current[0] < wanted:
            position = -1 if self._current is None else self._current[0]
            self._current = None  # the source may free its temporary before it makes the next one
            name = self.plan.manifest.entries[entry].name
            try:
                self._current = (position + 1, next(self._stream).detach())
            except StopIteration:
                raise SourceError(f"the source ended before {name}", tensor=name) from None
            except WeightliftError:
                raise
            except Exception as error:
                raise SourceError(f"the source raised {type(error).__name__}: {error}", tensor=name) from error
            if self._look is not None and position + 1 == wanted:
                self._look(entry, self._current[1])
        return self._current[1]

    def _exhaust(self) -> None:
        """Nothing may be left in the stream but tensors without elements: a tensor that is not in the manifest would be lost."""
        assert self._stream is not None, "a stream is exhausted"
        position = -1 if self._current is None else self._current[0]
        self._current = None
        left = sum(1 for _ in self._stream) - (len(self._owner) - 1 - position)
        if left > 0:
            raise SourceError(f"the source yields {left} tensors more than its manifest has")

    def end(self) -> None:
        """The round's transfer is over: let a streaming source finish (it may hold gathered memory), and drop its last tensor.

        What it raises then is logged: the round has its outcome already.
        """
        stream, self._current = self._stream, None
        if stream is None:
            return
        self._stream = iter(())
        try:
            getattr(stream, "close", lambda: None)()
        except Exception as error:
            logging.getLogger("weightlift.sources").warning("the source raised when its stream was closed: %r", error)

    def recall(self, position: int) -> torch.Tensor:
        """The tensor at a position of the stream once more, after the round; a streaming source is asked from its start."""
        if isinstance(self._source, StableSource):
            return self._tensors[position]
        return next(itertools.islice(self._source.stream(), position, None)).detach()

    def close(self) -> None:
        """Drop every view of a bucket and of the source's tensors, also where a traceback keeps this packer alive. Idempotent."""
        self._cached.clear()
        self._tensors = ()
        self._stream, self._current, self._look = None, None, None


def _owners(plan: Plan) -> dict[int, int]:
    """Entry index -> position in the stream, which has no aliases."""
    return {entry: i for i, entry in enumerate(k for k, e in enumerate(plan.manifest.entries) if not e.alias_of)}
