"""The loader for an engine that takes whole tensors: hands them to a function one after the other, in bytes of their own.

Owns: putting pieces together, at most one tensor at a time. Must not know: transports, what the function does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from weightlift.errors import LoaderError
from weightlift.loaders.module import ResetHook
from weightlift.protocol.manifest import Entry, Manifest
from weightlift.protocol.plan import Bucket, Plan
from weightlift.tensors import bucket_view, tensor_view, torch_dtype

__all__ = ["CallbackLoader"]


class CallbackLoader:
    """Calls `load(name, tensor)` once for every sent tensor, in manifest order.

    The tensor is contiguous, in host memory, in the sent dtype, and the callee's own: it may keep it. Extra memory is that one tensor.

    Args:
        load: takes a tensor into the engine. What it raises ends the round for this engine.
        check: called with the manifest before any byte moves; raises a ManifestError if the engine cannot take it.
        aliases: whether a tied tensor is handed over under each of its names, or under the first only.
        live: name -> the engine's live tensors, for `verify`; see Loader.live. Without it, publish with verify="off".
        on_commit: resets caches; see ResetHook.
    """

    def __init__(
        self,
        load: Callable[[str, torch.Tensor], None],
        *,
        check: Callable[[Manifest], None] | None = None,
        aliases: bool = False,
        live: Callable[[], Mapping[str, Sequence[torch.Tensor]]] | None = None,
        on_commit: ResetHook | None = None,
    ) -> None:
        self._load = load
        self._check = check
        self._aliases = aliases
        self._live = live
        self._on_commit = on_commit
        self._plan: Plan | None = None
        self._waiting: list[tuple[int, Entry]] = []
        self._also: dict[str, list[str]] = {}
        self._current: torch.Tensor | None = None
        self._missing = 0

    def prepare(self, plan: Plan) -> None:
        """See Loader."""
        if self._check is not None:
            self._check(plan.manifest)
        self._plan = plan
        self._also = {}
        for entry in plan.manifest.entries:
            if self._aliases and entry.alias_of:
                self._also.setdefault(entry.alias_of, []).append(entry.name)
        self._waiting = [(number, entry) for number, entry in enumerate(plan.manifest.entries) if not entry.alias_of][::-1]
        self._current = None

    def install(self, bucket: Bucket, memory: torch.Tensor) -> None:
        """See Loader."""
        assert self._plan is not None, "prepare comes before install"
        for piece in bucket.pieces:
            entry = self._plan.manifest.entries[piece.entry]
            if self._current is None:
                self._hand_over_empty(until=piece.entry)
                self._current = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
                self._missing = entry.nbytes
            tensor_view(self._current, piece).copy_(bucket_view(memory, entry, piece))
            self._missing -= piece.nbytes
            if self._missing == 0:
                self._hand_over(self._current)
                self._current = None

    def _hand_over_empty(self, *, until: int) -> None:
        """Tensors without elements have no piece: they come when it is their turn. Anything else that is skipped is an error."""
        while self._waiting and self._waiting[-1][0] != until:
            entry = self._waiting[-1][1]
            if entry.elements:
                raise LoaderError(f"{entry.name} did not arrive", tensor=entry.name)
            self._hand_over(torch.empty(entry.shape, dtype=torch_dtype(entry.dtype)))

    def _hand_over(self, tensor: torch.Tensor) -> None:
        _, entry = self._waiting.pop()
        for name in (entry.name, *self._also.get(entry.name, ())):
            try:
                self._load(name, tensor)
            except Exception as error:
                raise LoaderError(f"load raised {type(error).__name__}: {error}", tensor=name) from error

    def live(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """See Loader."""
        return {} if self._live is None else self._live()

    def finish(self) -> None:
        """See Loader."""
        self._hand_over_empty(until=-1)
        if self._current is not None:
            raise LoaderError("the last tensor did not arrive completely")

    def commit(self, version: int) -> None:
        """See Loader."""
        if self._on_commit is not None and self._on_commit(version) is False:
            raise LoaderError("the engine's caches were not reset (the on_commit hook answered False)")

    def abort(self) -> None:
        """See Loader."""
        self._current = None
        self._waiting = []
