"""The loader for a vLLM worker: vLLM's own loading recorded once and replayed, its own reload where a replay cannot do.

Owns: which sent tensor is copied straight into a live parameter and which is put together for vLLM's layerwise reload; the epoch in
which that holds. Must not know: transports, schedulers, what is served.

    first round of an epoch   every module is reloaded by vLLM, and watched: what vLLM does after loading either changes nothing
                              (norms; on a GPU plain linears, too) or something (packed for the CPU, quantised, copies derived from it)
    every further round       the former are filled by copies, straight out of the bucket; the latter are reloaded again
    the epoch ends            with another manifest, another model, or when a live parameter is not where it was

Every rank of a tensor-parallel engine has a loader of its own: what it records are the slices that vLLM gives to that rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from weightlift.copies import CopyList
from weightlift.errors import LoaderError, ManifestError
from weightlift.loaders.match import CastPolicy
from weightlift.loaders.module import ResetHook
from weightlift.loaders.recording import Geometry, record
from weightlift.loaders.replay import LoadPlan, ModulePlan, check_used, checkpoint_names
from weightlift.loaders.staging import Staging
from weightlift.loaders.vllm_model import VLLMModel, unwrapped_loaders
from weightlift.modules import ModuleTensors
from weightlift.protocol.manifest import Manifest
from weightlift.protocol.plan import Bucket, Plan
from weightlift.tensors import Witnessed, bucket_view, tensor_view, torch_dtype

__all__ = ["LoadReport", "VLLMLoader"]


@dataclasses.dataclass(frozen=True, slots=True)
class LoadReport:
    """How the last round's tensors got in. modules: copied, reloaded. tensors, bytes: copied straight in, or staged for a reload.

    record_s: seconds that recording took, in the round that began the epoch, else 0. staged_peak_bytes: memory of half-built tensors.
    """

    modules_copied: int
    modules_reloaded: int
    tensors_copied: int
    tensors_staged: int
    bytes_copied: int
    bytes_staged: int
    staged_peak_bytes: int
    record_s: float
    copies_recorded: int


class _Part:
    """One of the engine's models (the model, the draft model) and its plan."""

    def __init__(self, engine: VLLMModel) -> None:
        self.engine = engine
        self.held = ModuleTensors(engine.model)
        self.plan: LoadPlan | None = None
        self.parameters: Mapping[str, torch.Tensor] = {}
        self.plain: dict[str, bool] = {}  # module path -> what is done after loading changes nothing

    @property
    def manifest(self) -> Manifest | None:
        return None if self.plan is None else self.plan.manifest

    def unchanged(self) -> bool:
        return self.plan is not None and self.held.unchanged()

    def record(self, manifest: Manifest, *, elsewhere: bool, cast: CastPolicy) -> frozenset[str]:
        """A new epoch. Returns the checkpoint names that this model takes."""
        twin = self.engine.twin()
        names = checkpoint_names(manifest)
        parameters = dict(twin.named_parameters(remove_duplicate=True))
        buffers = dict(twin.named_buffers(remove_duplicate=True))
        incoming = {
            names[e.name]: torch.empty(e.shape, dtype=torch_dtype(e.dtype), device="meta") for e in manifest.entries
        }  # fmt: skip
        with unwrapped_loaders(twin), self.engine.context():
            found = record(twin.load_weights, incoming, {**buffers, **parameters})  # type: ignore[arg-type]
        optional = {*buffers, *self.engine.optional(parameters)}
        self.plan = LoadPlan.of(manifest, found, {**buffers, **parameters}, optional=optional, elsewhere=elsewhere, cast=cast)
        self.parameters, self.plain = parameters, {}
        self.held.look()
        return found.used

    def copied(self, module: ModulePlan) -> bool:
        """Whether a module is filled by copies."""
        return module.whole is not None and self.plain.get(module.path, False) and self._alike(module)

    def _alike(self, module: ModulePlan) -> bool:
        """Whether the live parameters look like those that were recorded. One without its `weight_loader` was made anew after loading:
        it may hold something else in the same shape (experts packed for a kernel)."""
        live = self.engine.module(module.path)
        for target in {target for places in (module.whole or {}).values() for target, _ in places}:
            own = live._parameters.get(target.rpartition(".")[2])
            meta = self.parameters.get(target)
            if own is None or meta is None or (own.shape, own.stride(), own.dtype) != (meta.shape, meta.stride(), meta.dtype):
                return False
            if hasattr(meta, "weight_loader") and not hasattr(own, "weight_loader"):
                return False
        return True

    def places(self, module: ModulePlan, name: str) -> Iterator[torch.Tensor]:
        """Where a sent tensor goes: live views of its shape."""
        live = self.engine.module(module.path)
        for target, view in (module.whole or {})[name]:
            own = live._parameters[target.rpartition(".")[2]]
            assert own is not None, "looked at before"
            yield _view(own.detach(), view)


class VLLMLoader:
    """Installs checkpoint tensors into the model of a vLLM worker.

    Args:
        model: `worker.model_runner.get_model()`. vllm_config: the worker's.
        draft: a speculative draft model and its ModelConfig, to be filled from the same stream, which must have all of it.
        left_behind: a model of this engine that a sync would leave behind, in words: no version is accepted while there is one.
        cast: what may happen when the sent dtype is not that of the parameter; see CastPolicy.
        on_commit: resets caches; see ResetHook.

    Raises (from `prepare`): the ManifestErrors of loaders.match; nothing has changed then.
    """

    caches_views = True

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config: Any,
        *,
        draft: tuple[torch.nn.Module, Any] | None = None,
        left_behind: str = "",
        cast: CastPolicy = "lossless",
        on_commit: ResetHook | None = None,
    ) -> None:
        self._parts = [_Part(VLLMModel(model, vllm_config))]
        if draft is not None:
            self._parts.append(_Part(VLLMModel(draft[0], vllm_config, draft[1])))
        self._left_behind = left_behind
        self._cast: CastPolicy = cast
        self._on_commit = on_commit
        self._device = next(model.parameters()).device
        self._plan: Plan | None = None
        self._targets: dict[str, list[torch.Tensor | Witnessed]] = {}
        self._cached: dict[int, tuple[int, CopyList]] = {}
        self._direct: dict[str, list[torch.Tensor]] = {}
        self._staging: Staging | None = None
        self._installed: set[int] = set()
        self._learned = False
        self._record_s = 0.0
        self.report: LoadReport | None = None
        """How the last committed round's tensors got in."""

    def prepare(self, plan: Plan) -> None:
        """See Loader. Records vLLM's loading when an epoch begins."""
        if self._left_behind:
            raise ManifestError(
                f"this engine has {self._left_behind}, which the sync would leave behind",
                remedy='draft_policy="update" sends it the same stream, "keep" leaves it as it is.',
            )
        self._installed.clear()
        self._record_s = 0.0
        known = plan is self._plan and all(part.unchanged() for part in self._parts)
        if not known:
            self._plan = None
            if not all(part.unchanged() and part.manifest is plan.manifest for part in self._parts):
                self._begin_epoch(plan.manifest)
        if not known or self._learned:
            self._map(plan)
        for tensors in self._targets.values():
            for one in tensors:
                if isinstance(one, Witnessed):
                    one.see = None
        self._ready()[1].begin()

    def _begin_epoch(self, manifest: Manifest) -> None:
        start = time.perf_counter()
        several = len(self._parts) > 1
        used: set[str] = set()
        for part in self._parts:
            used |= part.record(manifest, elsewhere=several or part.engine.spread, cast=self._cast)
        if several and not self._parts[0].engine.spread:
            names = checkpoint_names(manifest)
            check_used(manifest, names, frozenset(used), self._parts[0].parameters)
        self._record_s = time.perf_counter() - start

    def _map(self, plan: Plan) -> None:
        """Decide for every sent tensor: straight in, or staged for a reload."""
        self._cached.clear()
        self._learned = False
        direct: dict[str, list[torch.Tensor]] = {}
        groups: dict[str, list[str]] = {}
        owner = {e.name: e.alias_of or e.name for e in plan.manifest.entries}
        for number, part in enumerate(self._parts):
            assert part.plan is not None, "an epoch has begun"
            for module in part.plan.modules:
                if part.copied(module):
                    for name in module.names:
                        direct.setdefault(owner[name], []).extend(part.places(module, name))
                else:
                    groups[f"{number}:{module.path}"] = list(dict.fromkeys(owner[name] for name in module.names))
        entries = {entry.name: entry for entry in plan.manifest.entries}
        staged = {name for names in groups.values() for name in names}
        self._staging = Staging({name: entries[name] for name in staged}, groups, self._device, self._reload)
        self._direct = direct
        self._targets = {}
        for entry in plan.manifest.entries:
            if not entry.alias_of and entry.elements:
                shown: list[torch.Tensor | Witnessed] = list(direct.get(entry.name, ()))
                self._targets[entry.name] = shown or [Witnessed(torch_dtype(entry.dtype))]
        self._plan = plan

    def live(self) -> Mapping[str, Sequence[torch.Tensor | Witnessed]]:
        """See Loader. What vLLM repacks is shown before it does."""
        return self._targets

    def install(self, bucket: Bucket, memory: torch.Tensor) -> None:
        """See Loader."""
        plan, staging = self._ready()
        cached = self._cached.get(bucket.number)
        if cached is None or cached[0] != memory.data_ptr():
            cached = self._cached[bucket.number] = (memory.data_ptr(), CopyList(self._pairs(bucket, memory), live=True))
        cached[1].run()
        for piece in bucket.pieces:
            entry = plan.manifest.entries[piece.entry]
            if entry.name in staging:
                whole = staging.put(entry, piece, memory)
                if whole is not None:
                    self._show(entry.name, whole)
        staging.flush()
        self._installed.add(bucket.number)

    def _ready(self) -> tuple[Plan, Staging]:
        assert self._plan is not None, "prepare comes first"
        assert self._staging is not None, "made with the plan"
        return self._plan, self._staging

    def _pairs(self, bucket: Bucket, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        plan, _ = self._ready()
        for piece in bucket.pieces:
            entry = plan.manifest.entries[piece.entry]
            for target in self._direct.get(entry.name, ()):
                yield tensor_view(target, piece), bucket_view(memory, entry, piece)

    def _show(self, name: str, tensor: torch.Tensor) -> None:
        for one in self._targets[name]:
            if isinstance(one, Witnessed):
                one.show(tensor)

    def _reload(self, groups: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Complete modules go through vLLM's own loader."""
        for number, part in enumerate(self._parts):
            mine = {group.partition(":")[2]: tensors for group, tensors in groups.items() if group.startswith(f"{number}:")}
            if not mine:
                continue
            weights = self._named(part, mine)
            unknown = [path for path in mine if path not in part.plain]
            with part.engine.observed(unknown) if unknown else contextlib.nullcontext() as verdict:
                part.engine.reload(mine, weights)
            if verdict:
                part.plain.update(verdict)
                self._learned = True

    def _named(self, part: _Part, groups: Mapping[str, Mapping[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """(name for load_weights, tensor) of all groups, each name once, also under the names of its aliases."""
        assert part.plan is not None, "an epoch has begun"
        manifest = part.plan.manifest
        checkpoint = checkpoint_names(manifest)
        modules = {module.path: module for module in part.plan.modules}
        named: dict[str, torch.Tensor] = {}
        for path, tensors in groups.items():
            for name in modules[path].names:
                named[part.engine.loader_name(path, checkpoint[name])] = tensors[manifest.by_name[name].alias_of or name]
        return list(named.items())

    def finish(self) -> None:
        """See Loader."""
        plan, staging = self._ready()
        missing = [bucket.number for bucket in plan.buckets if bucket.number not in self._installed]
        if missing:
            raise LoaderError(f"{len(missing)} of {len(plan)} buckets were not installed", bucket=missing[0])
        staging.finish()
        for part in self._parts:
            part.engine.finish()
        self.report = self._count(plan, staging)
        staging.clear()

    def _count(self, plan: Plan, staging: Staging) -> LoadReport:
        entries = [entry for entry in plan.manifest.entries if not entry.alias_of]
        copied = [entry for entry in entries if entry.name in self._direct]
        staged = [entry for entry in entries if entry.name in staging]
        modules = [(part, module) for part in self._parts for module in (part.plan.modules if part.plan else ())]
        return LoadReport(
            modules_copied=len(modules) - len(staging.groups),
            modules_reloaded=len(staging.groups),
            tensors_copied=len(copied),
            tensors_staged=len(staged),
            bytes_copied=sum(entry.nbytes for entry in copied),
            bytes_staged=sum(entry.nbytes for entry in staged),
            staged_peak_bytes=staging.peak_bytes,
            record_s=self._record_s,
            copies_recorded=sum(part.plan.copies for part in self._parts if part.plan),
        )

    def commit(self, version: int) -> None:
        """See Loader."""
        if self._on_commit is not None and self._on_commit(version) is False:
            raise LoaderError("the engine's caches were not reset (the on_commit hook answered False)")

    def abort(self) -> None:
        """See Loader."""
        self._cached.clear()
        if self._staging is not None:
            self._staging.clear()


def _view(tensor: torch.Tensor, view: Geometry) -> torch.Tensor:
    return tensor.as_strided(view.shape, view.strides, tensor.storage_offset() + view.offset)
