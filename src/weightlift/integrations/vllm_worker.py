"""What takes part in syncs inside one vLLM worker process, whichever way vLLM was told to load it.

Owns: a `Subscriber` with a `VLLMLoader`, this worker's place in its engine, answers that survive a `collective_rpc`. Must not know:
schedulers, HTTP, who asks. Called by vllm_plugin.py (the weight-transfer backend) and vllm_extension.py (the worker extension).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias, get_args

from weightlift import State, Subscriber
from weightlift.config import check_seconds, check_text
from weightlift.errors import ConfigError, LocalProtocolError, WeightliftError, error_class
from weightlift.loaders.vllm import VLLMLoader

__all__ = ["Answer", "DraftPolicy", "WorkerSettings", "WorkerSync", "describe_error", "rebuild_error"]


DraftPolicy: TypeAlias = Literal["refuse", "update", "keep"]
"""What becomes of a speculative draft model: a sync that would leave it behind is refused; it is updated from the same stream (which
must have all of it: multi-token-prediction heads); or it stays as it is, knowingly."""
_NO_WEIGHTS = {"ngram", "ngram_gpu", "suffix", "custom_class"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How a worker reaches the trainer. address: the publisher's. replica: name of this engine, unique among those of the trainer.

    token, curve: as of Subscriber.
    """

    address: str
    replica: str = "vllm"
    token: str = ""
    curve: str | None = None
    draft_policy: DraftPolicy = "refuse"

    def __post_init__(self) -> None:
        check_text("address", self.address, empty=False)
        check_text("replica", self.replica, empty=False)
        if self.draft_policy not in get_args(DraftPolicy):
            raise ConfigError(f"draft_policy must be one of {', '.join(get_args(DraftPolicy))}, got {self.draft_policy!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A worker's answer, as plain data. version: served now, -1 for none. state: SERVING, UPDATING, TORN. load: how the tensors
    got in. device: cpu, cuda, ...

    error: what went wrong, by field; None if nothing did.
    """

    rank: int
    version: int
    state: str
    device: str
    load: dict[str, Any] | None = None
    error: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """For a wire that knows dicts only."""
        return dataclasses.asdict(self)


class WorkerSync:
    """One worker's end. `worker`: a vLLM Worker, or what looks like one (`vllm_config`, `rank`, `model_runner`)."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self._settings: WorkerSettings | None = None
        self._subscriber: Subscriber | None = None
        self._loader: VLLMLoader | None = None

    @property
    def rank(self) -> int:
        """Of this worker in its engine."""
        return int(self.worker.rank)

    def connect(self, settings: WorkerSettings) -> None:
        """Subscribe; with other settings than before (a trainer that was restarted), again. The weights stay as they are."""
        if settings == self._settings and self._subscriber is not None:
            return
        torn = self._subscriber is not None and self._subscriber.state is State.TORN
        self.close()
        config = self.worker.vllm_config
        size = int(config.parallel_config.world_size)
        replica = settings.replica
        if config.parallel_config.data_parallel_size > 1:  # every data-parallel rank is an engine of its own
            replica = f"{replica}.dp{config.parallel_config.data_parallel_index}"
        loader = self._loader if self._loader is not None else self._make_loader(settings.draft_policy)
        self._subscriber = Subscriber(
            loader=loader,
            address=settings.address,
            name=replica if size == 1 else f"{replica}/rank{self.rank}",
            replica=replica,
            rank=self.rank,
            size=size,
            token=settings.token,
            curve=settings.curve,
        )
        if torn:
            self._subscriber.discard()
        self._loader, self._settings = loader, settings

    def _make_loader(self, policy: DraftPolicy) -> VLLMLoader:
        runner, config = self.worker.model_runner, self.worker.vllm_config
        speculative = getattr(config, "speculative_config", None)
        method = "" if speculative is None else str(getattr(speculative, "method", "unknown"))
        if not method or method in _NO_WEIGHTS or policy == "keep":
            return VLLMLoader(runner.get_model(), config)
        find = getattr(runner, "get_draft_model", None)
        model = find() if callable(find) else None
        draft_config = getattr(speculative, "draft_model_config", None)
        if policy == "update" and model is not None and draft_config is not None:
            return VLLMLoader(runner.get_model(), config, draft=(model, draft_config))
        why = "" if policy == "refuse" else ", which cannot be reached from here"
        return VLLMLoader(runner.get_model(), config, left_behind=f"a draft model (speculation by {method}){why}")

    def pull(self, timeout_s: float) -> Answer:
        """Take part in one round. Never raises a WeightliftError: it is in the answer."""
        try:
            check_seconds("timeout_s", timeout_s)
            if self._subscriber is None:
                raise LocalProtocolError("this worker is not connected to a trainer", remedy="connect it first.")
            self._subscriber.pull(timeout_s=timeout_s)
        except WeightliftError as error:
            return self.answer(error)
        return self.answer()

    def answer(self, error: WeightliftError | None = None) -> Answer:
        """What this worker serves now."""
        subscriber, loader = self._subscriber, self._loader
        version = None if subscriber is None else subscriber.version
        load = None if loader is None or loader.report is None else dataclasses.asdict(loader.report)
        return Answer(
            rank=self.rank,
            version=-1 if version is None else version,
            state=str(State.SERVING if subscriber is None else subscriber.state),
            device=str(next(self.worker.model_runner.get_model().parameters()).device.type),
            load=load,
            error=None if error is None else describe_error(error),
        )

    def ensure_serving(self) -> int:
        """The version that is served; TornWeights or LocalProtocolError if none may be."""
        if self._subscriber is None:
            raise LocalProtocolError("this worker is not connected to a trainer", remedy="connect it first.")
        return self._subscriber.ensure_serving()

    def discard(self) -> None:
        """The weights are about to be given away (sleep level 2)."""
        if self._subscriber is not None:
            self._subscriber.discard()

    def close(self) -> None:
        """Leave the trainer's roster; idempotent."""
        subscriber, self._subscriber, self._settings = self._subscriber, None, None
        if subscriber is not None:
            subscriber.close()


def describe_error(error: WeightliftError) -> dict[str, Any]:
    """A WeightliftError as plain data."""
    return {"kind": type(error).__name__, "message": error.message, "fields": error.fields()}


def rebuild_error(data: dict[str, Any]) -> WeightliftError:
    """What `describe_error` described."""
    kind = error_class(str(data.get("kind"))) or WeightliftError
    fields = {name: value for name, value in dict(data.get("fields") or {}).items() if name in _FIELDS}
    if kind is ConfigError:
        fields.setdefault("remedy", "")
    return kind(str(data.get("message")), **fields)


_FIELDS = {"version", "round", "phase", "peer", "bucket", "buckets", "tensor", "remedy", "still_works"}
