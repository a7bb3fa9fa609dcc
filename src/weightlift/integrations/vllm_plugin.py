"""A vLLM weight-transfer backend: `weight_transfer_config={"backend": "weightlift"}`, for LLM, AsyncLLM and `vllm serve` alike.

Owns: registration (entry point `vllm.general_plugins`), the engine side of vLLM's interface, the shim over its two forms. The trainer
side is vllm_trainer.py. Must not know: how a sync works.

    vLLM 0.24          engine(config, parallel_config, model); the worker owns the layerwise reload around `receive_weights(info, load)`
    vLLM 0.25 and on   engine(config, vllm_config, device, model); the engine owns it, in start / update / finish

One class answers both: which form it is in is seen from what the constructor is given. The worker's `update_weights` is the whole
transaction: it returns when this worker has committed, and raises when it has not.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from weightlift.config import check_seconds
from weightlift.errors import LocalProtocolError, TransportUnavailable
from weightlift.integrations.vllm_worker import WorkerSettings, WorkerSync, rebuild_error

__all__ = ["BACKEND", "WeightliftEngine", "WeightliftInitInfo", "WeightliftUpdateInfo", "register"]

BACKEND = "weightlift"


@dataclasses.dataclass
class WeightliftInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """How the workers reach the trainer; as of WorkerSettings."""

    address: str
    replica: str = "vllm"
    token: str = ""
    curve: str | None = None
    draft_policy: str = "refuse"


@dataclasses.dataclass(kw_only=True)  # what 0.24's class has of its own stands before `version`, and has defaults
class WeightliftUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One round. version: that the trainer publishes; timeout_s: for all of it. update_kind: what vLLM 0.24 looks at."""

    version: int
    timeout_s: float = 300.0
    update_kind: str = "dense"

    def __post_init__(self) -> None:
        check_seconds("timeout_s", self.timeout_s)


class WeightliftEngine(WeightTransferEngine):  # type: ignore[misc]
    """One worker's end of a sync, behind vLLM's interface."""

    init_info_cls = WeightliftInitInfo
    update_info_cls = WeightliftUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, *arguments: Any) -> None:
        super().__init__(config, *arguments)
        model = arguments[-1]
        vllm_config = arguments[0] if hasattr(arguments[0], "parallel_config") else _config_inside(model)
        self._sync = WorkerSync(_Worker(vllm_config, model))

    def init_transfer_engine(self, init_info: WeightliftInitInfo) -> None:
        """Subscribe to the trainer."""
        self._sync.connect(WorkerSettings(**dataclasses.asdict(init_info)))

    def start_weight_update(self) -> None:
        """Nothing changes before the trainer has announced a version and this worker has checked it."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """One round, as vLLM 0.25 and later ask for it. (Their own form ends in a device-wide wait that a CPU does not have.)"""
        self._pull(self.parse_update_info(update_info))

    def receive_weights(self, update_info: WeightliftUpdateInfo, load_weights: Any = None) -> None:
        """One round, as vLLM 0.24 asks for it, which has put the model into its reload before."""
        if load_weights is not None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            # Nothing was loaded yet: this puts the live tensors back. The worker's own call afterwards finds nothing to do.
            finalize_layerwise_reload(self.model, self._sync.worker.vllm_config.model_config)
        self._pull(update_info)

    def _pull(self, info: WeightliftUpdateInfo) -> None:
        answer = self._sync.pull(info.timeout_s)
        if answer.error is not None:
            raise rebuild_error(answer.error)
        if answer.version != info.version:
            raise LocalProtocolError(
                f"the trainer published version {answer.version}, and vLLM was told to expect {info.version}",
                version=answer.version,
            )

    def finish_weight_update(self) -> None:
        """TornWeights or LocalProtocolError unless a version is held completely."""
        self._sync.ensure_serving()

    def shutdown(self) -> None:
        """Leave the trainer's roster."""
        self._sync.close()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """vLLM 0.24 asks for it: a trainer of that release publishes by itself."""
        raise TransportUnavailable(
            "the weightlift backend sends from a weightlift.Publisher", remedy="call publisher.publish(version)."
        )


class _Worker:
    """What WorkerSync needs of a worker, seen from inside an engine that was not given one."""

    def __init__(self, vllm_config: Any, model: torch.nn.Module) -> None:
        self.vllm_config = vllm_config
        self.rank = int(vllm_config.parallel_config.rank)
        self.model_runner = self
        self._model = model

    def get_model(self) -> torch.nn.Module:
        """The worker's model."""
        return self._model


def _config_inside(model: torch.nn.Module) -> Any:
    """vLLM 0.24 does not hand its configuration over; the modules that it may compile keep it."""
    for module in model.modules():
        found = getattr(module, "vllm_config", None)
        if found is not None and hasattr(found, "parallel_config"):
            return found
    raise TransportUnavailable(
        f"the configuration of vLLM is not found in its model {type(model).__name__}",
        remedy='use worker_extension_cls="weightlift.integrations.vllm_extension.WeightliftExtension" instead.',
    )


def register() -> None:
    """vLLM calls this in each of its processes, possibly more than once."""
    _ask_for_tiles()
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "weightlift.integrations.vllm_plugin", "WeightliftEngine")
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    except ImportError:
        return  # vLLM 0.24 has no trainer engines
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(BACKEND, "weightlift.integrations.vllm_trainer", "WeightliftTrainerEngine")


def _ask_for_tiles() -> None:
    """Linux gives a process the tile unit (AMX) of a CPU only when it asks. vLLM 0.32's CPU attention uses it without asking: unless
    another library happened to ask first, the worker dies of SIGILL at its first short prompt."""
    if not torch.cuda.is_available() and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
