"""integrations/vllm_plugin.py on recorded interfaces of vLLM: one backend for the forms that its releases ask for."""

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from recorded_vllm import ENGINE, Recorded, released
from weightlift.errors import LocalProtocolError, ShapeMismatch, TornWeights, TransportUnavailable
from weightlift.integrations.vllm_worker import Answer, WorkerSettings, describe_error


class Sync:
    """WorkerSync, as far as the backend looks at it."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.settings: WorkerSettings | None = None
        self.waits: list[float] = []
        self.held, self.error, self.closed = 1, None, False

    def connect(self, settings: WorkerSettings) -> None:
        self.settings = settings

    def pull(self, timeout_s: float) -> Answer:
        self.waits.append(timeout_s)
        state = "SERVING" if self.error is None else "TORN"
        error = None if self.error is None else describe_error(self.error)
        return Answer(rank=0, version=self.held, state=state, device="cpu", error=error)

    def ensure_serving(self) -> int:
        if self.error is not None:
            raise TornWeights("torn")
        return self.held

    def close(self) -> None:
        self.closed = True


CONFIG = types.SimpleNamespace(parallel_config=types.SimpleNamespace(rank=3, world_size=4), model_config="the model's")


class Model(nn.Module):
    """A module that vLLM compiles keeps vLLM's configuration."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        if config is not None:
            self.inner.vllm_config = config


@pytest.fixture(params=ENGINE)
def release(request: pytest.FixtureRequest) -> Iterator[tuple[Recorded, Any]]:
    with released(request.param) as (recorded, plugin):
        plugin.WorkerSync = Sync
        plugin.register()
        yield recorded, plugin


def made(recorded: Recorded, model: nn.Module) -> Any:
    """As the release's worker makes it."""
    given = {"config": "weight_transfer_config", "parallel_config": CONFIG.parallel_config, "vllm_config": CONFIG}
    given |= {"device": torch.device("cpu"), "model": model}
    return recorded.engines.create_engine("weightlift", *(given[name] for name in ENGINE[recorded.release]["__init__"][1:]))


def update(recorded: Recorded, engine: Any, info: dict[str, Any]) -> None:
    """One round, in the steps of the release's worker."""
    if recorded.release == "0.24.0":
        recorded.modules["vllm.model_executor.model_loader.reload"].initialize_layerwise_reload(engine.model)
        engine.receive_weights(engine.parse_update_info(info), load_weights=lambda weights: None)
        recorded.modules["vllm.model_executor.model_loader.reload"].finalize_layerwise_reload(engine.model, None)
    else:
        engine.start_weight_update()
        engine.update_weights(info)
        engine.finish_weight_update()


def test_the_backend_is_complete_and_knows_its_worker(release: tuple[Recorded, Any]) -> None:
    recorded, _ = release
    model = Model(CONFIG)
    engine = made(recorded, model)  # TypeError if an abstract method is missing
    worker = engine._sync.worker
    assert (worker.vllm_config, worker.rank, worker.model_runner.get_model()) == (CONFIG, 3, model)
    engine.shutdown()
    assert engine._sync.closed


def test_one_round_is_one_pull(release: tuple[Recorded, Any]) -> None:
    recorded, _ = release
    engine = made(recorded, Model(CONFIG))
    engine.init_transfer_engine(engine.parse_init_info({"address": "a", "replica": "r", "draft_policy": "keep"}))
    assert engine._sync.settings == WorkerSettings(address="a", replica="r", draft_policy="keep")
    update(recorded, engine, {"version": 1, "timeout_s": 7.0})
    assert engine._sync.waits == [7.0]
    # 0.24 opens its reload before we know whether there is anything to load: the live tensors are put back before the round begins.
    assert recorded.reloads == (["initialize", "finalize", "finalize"] if recorded.release == "0.24.0" else [])


def test_a_round_that_fails_or_brings_another_version_raises(release: tuple[Recorded, Any]) -> None:
    recorded, _ = release
    engine = made(recorded, Model(CONFIG))
    with pytest.raises(LocalProtocolError, match="version 1, and vLLM was told to expect 2"):
        update(recorded, engine, {"version": 2})
    engine._sync.error = ShapeMismatch("w has another shape", tensor="w")
    with pytest.raises(ShapeMismatch) as caught:
        update(recorded, engine, {"version": 1})
    assert caught.value.tensor == "w"


def test_registering_twice_is_nothing(release: tuple[Recorded, Any]) -> None:
    recorded, plugin = release
    plugin.register()
    assert [*recorded.engines._registry] == ["weightlift"]
    assert [*recorded.trainers._registry] == (["weightlift"] if recorded.release == "0.32.0" else [])


def test_an_engine_that_holds_no_version_does_not_finish() -> None:
    with released("0.32.0") as (recorded, plugin):
        plugin.WorkerSync = Sync
        plugin.register()
        engine = made(recorded, Model(CONFIG))
        engine._sync.error = TornWeights("torn")
        with pytest.raises(TornWeights):
            engine.finish_weight_update()


def test_a_release_that_hides_its_configuration_is_refused_with_the_other_way() -> None:
    with released("0.24.0") as (recorded, plugin):
        plugin.register()
        with pytest.raises(TransportUnavailable, match="Model") as caught:
            made(recorded, Model(None))
        assert "worker_extension_cls" in caught.value.remedy


def test_the_old_way_to_send_names_the_new_one() -> None:
    with released("0.24.0") as (_, plugin), pytest.raises(TransportUnavailable) as caught:
        plugin.WeightliftEngine.trainer_send_weights(iter(()), {})
    assert "publish" in caught.value.remedy
