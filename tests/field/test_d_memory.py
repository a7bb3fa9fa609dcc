"""Field reports, group D: memory that is woken too early, too much at once, or not given back. See docs/field-coverage.md."""

import gc
import pathlib
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightlift import LoaderError
from weightlift.errors import BarrierTimeout, HandoffError, OutOfDeviceMemory, OutOfOrder
from weightlift.handoff import (
    Barrier,
    ColocatedStep,
    Ledger,
    ModuleOffload,
    SimulatedDevice,
    SleepLevel,
    StepStage,
)
from weightlift.loaders import MappingLoader
from weightlift.sources import ModuleSource
from weightlift.testing.guards import no_full_collection
from weightlift.testing.pair import pair

BUDGET, TRAINER, WEIGHTS, KV = 100, 60, 40, 60


class Engine:
    """Books what it wakes."""

    def __init__(self, device: SimulatedDevice | None) -> None:
        self.device = device
        self.kv = KV
        self.calls: list[str] = []

    def _hold(self, what: str, size: int) -> None:
        if self.device is not None:
            self.device.hold(what, size)

    def sleep(self, level: SleepLevel) -> None:
        self.calls.append("sleep")
        self._hold("kv", 0)
        self._hold("weights", 0)

    def wake_weights(self) -> None:
        self.calls.append("wake_weights")
        self._hold("weights", WEIGHTS)

    def wake_kv_cache(self) -> None:
        self.calls.append("wake_kv_cache")
        self._hold("kv", self.kv)


class Trainer:
    """Holds its share of the device until it is offloaded, which may be slow, or fail."""

    def __init__(self, device: SimulatedDevice, size: int, *, slow_s: float = 0.0, failure: Exception | None = None) -> None:
        self.device, self.size, self.slow_s, self.failure = device, size, slow_s, failure
        self.offloaded = False
        device.hold("trainer", size)

    @property
    def host_bytes(self) -> int:
        return self.size if self.offloaded else 0

    def offload(self) -> int:
        time.sleep(self.slow_s)
        if self.failure is not None:
            raise self.failure
        self.device.hold("trainer", 0)
        self.offloaded = True
        return self.size

    def load(self) -> int:
        self.device.hold("trainer", self.size)
        self.offloaded = False
        return self.size


def ranks(path: pathlib.Path, store: Any, **second: Any) -> tuple[list[ColocatedStep], Engine]:
    """Two ranks that share a device of 100: each holds 30 of a trainer, the engine's KV cache needs 60."""
    SimulatedDevice(path, "run", total_bytes=BUDGET)
    engine = Engine(SimulatedDevice(path, "engine"))
    steps = []
    for rank in range(2):
        device = SimulatedDevice(path, f"trainer-{rank}")
        barrier = Barrier("kv", index=rank, size=2, store=store)
        assert barrier._fabric is not None
        barrier._fabric._store = torch.distributed.PrefixStore("one", store)  # two ranks in one process count their barriers alike
        trainer = Trainer(device, TRAINER // 2, **(second if rank else {}))
        steps.append(ColocatedStep(trainer, barrier, Ledger(device), engine if not rank else None, barrier_s=5.0))
    return steps, engine


def together(*calls: Any) -> list[BaseException | None]:
    """Run one call a thread; what each raised."""
    raised: list[BaseException | None] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            calls[number]()
        except Exception as error:
            raised[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return raised


def test_b32_the_kv_cache_waits_for_a_rank_that_offloads_slowly(tmp_path: pathlib.Path) -> None:
    steps, engine = ranks(tmp_path / "device", torch.distributed.HashStore(), slow_s=0.5)
    for step in steps:
        step.wake_weights()
        step.publish(lambda: None)
    assert together(*(step.wake_kv_cache for step in steps)) == [None, None]
    assert engine.calls == ["wake_weights", "wake_kv_cache"]
    assert engine.device.peak_bytes <= BUDGET
    assert {step.order.stage for step in steps} == {StepStage.GENERATING}
    assert together(*(step.back_to_training for step in steps)) == [None, None]
    assert engine.device.holders() == {"trainer-0/trainer": 30, "trainer-1/trainer": 30}


def test_b32_without_the_barrier_the_same_step_runs_out_of_memory(tmp_path: pathlib.Path) -> None:
    """The twin: what the barrier prevents does happen when the leader does not wait."""
    steps, engine = ranks(tmp_path / "device", torch.distributed.HashStore())
    steps[0].wake_weights()
    steps[0]._offload.offload()
    with pytest.raises(OutOfDeviceMemory, match="engine asked for 60 bytes for kv"):
        engine.wake_kv_cache()


def test_b32_a_rank_that_fails_to_offload_reaches_the_others_as_an_error(tmp_path: pathlib.Path) -> None:
    steps, engine = ranks(tmp_path / "device", torch.distributed.HashStore(), failure=RuntimeError("pinned memory is used up"))
    for step in steps:
        step.wake_weights()
        step.publish(lambda: None)
    first, second = together(*(step.wake_kv_cache for step in steps))
    assert isinstance(first, HandoffError)
    assert "rank 1 cannot go on: RuntimeError: pinned memory is used up" in str(first)
    assert isinstance(second, RuntimeError)
    assert engine.calls == ["wake_weights"], "the KV cache must stay asleep"
    assert engine.device.peak_bytes <= BUDGET


def test_b32_a_rank_that_does_not_come_is_named_in_bounded_time(tmp_path: pathlib.Path) -> None:
    (step, _), engine = ranks(tmp_path / "device", torch.distributed.HashStore())
    step._barrier_s = 0.5
    step.wake_weights()
    step.publish(lambda: None)
    with pytest.raises(BarrierTimeout, match="rank 1 of 2 did not come"):
        step.wake_kv_cache()
    assert engine.calls == ["wake_weights"]
    with pytest.raises(BarrierTimeout, match="rank 1 of 2 did not come"):
        step.wake_kv_cache()  # tried again, it goes on at the barrier: the trainer has left already
    assert step.order.stage is StepStage.SETTLED


@settings(max_examples=20, deadline=None)
@given(delays=st.lists(st.floats(0, 0.03), min_size=2, max_size=2), steps=st.integers(1, 3))
def test_b32_whatever_the_delays_the_budget_holds(
    tmp_path_factory: pytest.TempPathFactory, delays: list[float], steps: int
) -> None:
    path = tmp_path_factory.mktemp("device") / "device"
    both, engine = ranks(path, torch.distributed.HashStore())
    for step, delay in zip(both, delays, strict=True):
        step._offload.slow_s = delay
    for _ in range(steps):
        for step in both:
            step.wake_weights()
            step.publish(lambda: None)
        assert together(*(step.wake_kv_cache for step in both)) == [None, None]
        assert together(*(step.back_to_training for step in both)) == [None, None]
    assert engine.device.peak_bytes <= BUDGET
    for step in both:
        step._barrier.close()


# --- B33 ------------------------------------------------------------------------------------------------------------------------


def colocated(path: pathlib.Path) -> tuple[ColocatedStep, Engine, SimulatedDevice]:
    """One rank, a device of 100: trainer 50, engine weights 40, KV cache 50, buckets of 5."""
    SimulatedDevice(path, "run", total_bytes=BUDGET)
    device = SimulatedDevice(path, "trainer-0")
    engine = Engine(SimulatedDevice(path, "engine"))
    engine.kv = 50
    return ColocatedStep(Trainer(device, 50), Barrier(), Ledger(device), engine), engine, device


def test_b33_nothing_is_woken_before_there_is_room(tmp_path: pathlib.Path) -> None:
    step, engine, device = colocated(tmp_path / "device")

    def publish() -> None:
        device.hold("bucket", 5)
        device.hold("bucket", 0)

    for _ in range(3):
        step.wake_weights()
        step.publish(publish)
        step.wake_kv_cache()
        step.back_to_training()
    assert device.peak_bytes == 95
    order = [entry.arrow for entry in step.ledger.entries]
    assert order == ["release", "wake_empty", "publish", "offload", "settle", "meet", "wake_kv", "sleep", "load"] * 3
    assert engine.calls == ["wake_weights", "wake_kv_cache", "sleep"] * 3
    settled = next(e for e in step.ledger.entries if e.arrow == "settle")
    assert settled.reading.allocated == 0, "the release returned before the memory was free"
    assert settled.reading.host == 50


def test_b33_a_failed_sync_does_not_wake_the_kv_cache(tmp_path: pathlib.Path) -> None:
    step, engine, _ = colocated(tmp_path / "device")
    step.wake_weights()

    def publish() -> None:
        raise LoaderError("bad shape for w7")

    with pytest.raises(LoaderError):
        step.publish(publish)
    assert step.order.stage is StepStage.EMPTY
    with pytest.raises(OutOfOrder, match="WAKE_KV is not possible"):
        step.wake_kv_cache()
    assert engine.calls == ["wake_weights"]
    step.publish(lambda: None)  # the next full sync heals it
    step.wake_kv_cache()
    assert engine.calls == ["wake_weights", "wake_kv_cache"]


def test_no_full_collection_between_the_two_wake_ups(tmp_path: pathlib.Path) -> None:
    """With a real sync in between. The guard itself is shown to work first."""
    with no_full_collection(), pytest.raises(AssertionError, match="must not need it"):
        gc.collect()
    gc.collect()
    torch.manual_seed(0)
    model = torch.nn.Linear(7, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    SimulatedDevice(tmp_path / "device", "run", total_bytes=1 << 20)
    device = SimulatedDevice(tmp_path / "device", "trainer-0")
    step = ColocatedStep(ModuleOffload(model, optimizer), Barrier(), Ledger(device), Engine(None))
    held = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    with pair(ModuleSource(model), MappingLoader(held)) as ends:
        for version in range(1, 4):
            model(torch.ones(7)).sum().backward()
            optimizer.step()
            with no_full_collection():
                step.wake_weights()
                step.publish(lambda version=version: ends.sync(version).raise_any())
                step.wake_kv_cache()
            step.back_to_training()
            assert all(torch.equal(held[name], value) for name, value in model.state_dict().items())
