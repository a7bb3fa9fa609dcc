"""Loaders that write straight into live tensors: a torch.nn.Module, or a mapping of preallocated tensors.

Owns: `ModuleLoader`, `MappingLoader`, the cached copy lists, the count of written bytes. Must not know: transports.
Storage is filled in place and never replaced: captured graphs, views and closures see the new values.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from weightlift.copies import CopyList
from weightlift.errors import DuplicateParameter, LoaderError
from weightlift.loaders.match import CastPolicy, Destinations, match
from weightlift.modules import HeldTensors, MappingTensors, ModuleTensors
from weightlift.protocol.plan import Bucket, Plan
from weightlift.tensors import bucket_view, tensor_view

__all__ = ["MappingLoader", "ModuleLoader", "ResetHook"]

ResetHook = Callable[[int], "bool | None"]
"""Called with the version at commit; returning False says that the caches could not be reset."""


class _InPlaceLoader:
    """What both loaders share: live tensors that are looked at before each round."""

    caches_views = True

    def __init__(self, held: HeldTensors, *, cast: CastPolicy, ties: Mapping[str, str] | None, on_commit: ResetHook | None) -> None:
        self._held = held
        self._cast: CastPolicy = cast
        self._ties = dict(ties or {})
        self._on_commit = on_commit
        self._plan: Plan | None = None
        self._targets: dict[str, list[torch.Tensor]] = {}
        self._cached: dict[int, tuple[int, CopyList]] = {}
        self._written: collections.Counter[int] = collections.Counter()

    def prepare(self, plan: Plan) -> None:
        """See Loader. The match and the cached copies are kept as long as plan, tensors and storage are the same."""
        self._written.clear()
        if plan is self._plan and self._held.unchanged():
            return
        self._cached.clear()
        self._plan = None
        named = self._held.look()
        own = dict(named)
        if len(own) != len(named):
            twice = next(name for name, count in collections.Counter(name for name, _ in named).items() if count > 1)
            raise DuplicateParameter(f"the engine has two tensors of the name {twice}", tensor=twice)
        self._targets = match(plan.manifest, Destinations(own, self._ties), self._cast)
        self._plan = plan

    def install(self, bucket: Bucket, memory: torch.Tensor) -> None:
        """See Loader."""
        cached = self._cached.get(bucket.number)
        if cached is None or cached[0] != memory.data_ptr():
            cached = self._cached[bucket.number] = (memory.data_ptr(), CopyList(self._pairs(bucket, memory), live=True))
        cached[1].run()
        self._written[bucket.number] += 1

    def _pairs(self, bucket: Bucket, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        assert self._plan is not None, "prepare comes before install"
        for piece in bucket.pieces:
            entry = self._plan.manifest.entries[piece.entry]
            view = bucket_view(memory, entry, piece)
            for target in self._targets[entry.name]:
                yield tensor_view(target.detach(), piece), view

    def live(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """See Loader."""
        return self._targets

    def finish(self) -> None:
        """See Loader. The plan covers every byte of every sent tensor once (tested), so whole buckets are counted."""
        assert self._plan is not None, "prepare comes before finish"
        wrong = [bucket.number for bucket in self._plan.buckets if self._written[bucket.number] != 1]
        if wrong:
            raise LoaderError(
                f"{len(wrong)} of {len(self._plan)} buckets were not installed exactly once",
                bucket=wrong[0],
                buckets=len(self._plan),
                tensor=self._plan.names(wrong[0]),
            )

    def commit(self, version: int) -> None:
        """See Loader. LoaderError if the hook answers False: a cache that may hold an older version must not be served from."""
        if self._on_commit is not None and self._on_commit(version) is False:
            raise LoaderError("the engine's caches were not reset (the on_commit hook answered False)")

    def abort(self) -> None:
        """See Loader."""
        self._cached.clear()
        self._written.clear()


class ModuleLoader(_InPlaceLoader):
    """Installs into a module's parameters and persistent buffers, under canonical names.

    Args:
        module: the engine's model; wrappers are seen through, as in ModuleSource.
        cast: what may happen when the sent dtype is not the held one; see CastPolicy.
        ties: name -> name, for a tensor stored apart that must always equal another one.
        on_commit: resets caches; see ResetHook.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        cast: CastPolicy = "never",
        ties: Mapping[str, str] | None = None,
        on_commit: ResetHook | None = None,
    ) -> None:
        super().__init__(ModuleTensors(module), cast=cast, ties=ties, on_commit=on_commit)
        self.module = module


class MappingLoader(_InPlaceLoader):
    """Installs into a mapping of preallocated tensors (any strides); the tensors are filled, the mapping is not changed.

    Args: as of ModuleLoader.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        cast: CastPolicy = "never",
        ties: Mapping[str, str] | None = None,
        on_commit: ResetHook | None = None,
    ) -> None:
        super().__init__(MappingTensors(tensors), cast=cast, ties=ties, on_commit=on_commit)
