"""The hand-over of memory in one process: the order, the ledger, the simulated device, an engine asleep, a trainer on the host."""

import asyncio
import pathlib
import time

import pytest
import torch

import weightlift.handoff.offload as offload_module
from weightlift.errors import BarrierTimeout, ConfigError, HandoffError, OutOfDeviceMemory, OutOfOrder
from weightlift.handoff import (
    STEP_LAW,
    Barrier,
    FSDP1Offload,
    FSDP2Offload,
    Ledger,
    ModuleMemory,
    ModuleOffload,
    Reading,
    ShardSnapshot,
    SimulatedDevice,
    Sleeper,
    SleepLevel,
    StepEvent,
    StepOrder,
    StepStage,
    offload_for,
)

# --- the order ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", StepStage)
@pytest.mark.parametrize("event", StepEvent)
def test_every_cell_of_the_table(stage: StepStage, event: StepEvent) -> None:
    order = StepOrder(stage)
    if event in STEP_LAW[stage]:
        order.on(event)
        assert order.stage is STEP_LAW[stage][event]
        return
    with pytest.raises(OutOfOrder, match=event.name) as caught:
        order.on(event)
    assert order.stage is stage
    assert "possible now" in caught.value.remedy


def reach(stage: StepStage) -> set[StepStage]:
    found, todo = {stage}, [stage]
    while todo:
        for after in STEP_LAW[todo.pop()].values():
            if after not in found:
                found.add(after)
                todo.append(after)
    return found


def test_every_stage_can_be_reached_and_left_for_training_again() -> None:
    assert reach(StepStage.TRAINING) == set(StepStage)
    assert all(StepStage.TRAINING in reach(stage) for stage in StepStage)


def test_the_kv_cache_wakes_only_after_offload_settle_and_barrier() -> None:
    """On every path of the table: whatever leads to WAKE_KV has passed all three since the trainer was last on the device."""
    needed = (StepEvent.OFFLOAD, StepEvent.SETTLE, StepEvent.MEET)

    def paths(stage: StepStage, since: tuple[StepEvent, ...], depth: int) -> None:
        for event, after in STEP_LAW[stage].items():
            if event is StepEvent.WAKE_KV:
                assert tuple(e for e in since if e in needed) == needed, since
            if depth:
                paths(after, () if event is StepEvent.LOAD else (*since, event), depth - 1)

    paths(StepStage.TRAINING, (), 9)


def test_nothing_is_generated_with_after_a_discard_or_a_torn_sync_but_a_full_sync() -> None:
    assert StepEvent.REUSE not in STEP_LAW[StepStage.EMPTY]
    assert {e for e, after in STEP_LAW[StepStage.EMPTY].items() if after is StepStage.SYNCED} == {StepEvent.PUBLISH}


# --- the ledger and the simulated device ----------------------------------------------------------------------------------------


class Fixed:
    def __init__(self, *values: int) -> None:
        self.values = list(values)

    def read(self) -> Reading:
        return Reading(reserved=self.values.pop(0))


def test_a_promise_that_is_broken_raises_with_the_ledger_attached() -> None:
    ledger = Ledger(Fixed(10, 200, 20))
    ledger.book("wake_weights")
    with pytest.raises(OutOfDeviceMemory, match="200 bytes are reserved after release, at most 40 were promised") as caught:
        ledger.promise("release", most_bytes=40)
    assert "wake_weights" in caught.value.__notes__[0]
    ledger.promise("later", most_bytes=40)
    assert [entry.arrow for entry in ledger.take()] == ["wake_weights", "release", "later"]
    assert ledger.entries == []


def test_a_simulated_device_is_shared_and_has_an_end(tmp_path: pathlib.Path) -> None:
    trainer = SimulatedDevice(tmp_path / "device", "trainer-0", total_bytes=100)
    engine = SimulatedDevice(tmp_path / "device", "engine")
    trainer.hold("parameters", 60)
    engine.hold("weights", 40)
    with pytest.raises(OutOfDeviceMemory, match="engine asked for 1 bytes for kv; 100 of 100 are held") as caught:
        engine.hold("kv", 1)
    assert "trainer-0/parameters 60" in str(caught.value)
    assert engine.read().device_used == 100
    assert engine.read().allocated == 40
    trainer.hold("parameters", 0)
    engine.hold("kv", 50)
    assert engine.holders() == {"engine/weights": 40, "engine/kv": 50}
    assert engine.peak_bytes == 100


def test_an_early_engine_runs_another_rank_out_of_memory(tmp_path: pathlib.Path) -> None:
    """Budget 100: the trainer needs 60, a KV cache 60. Whoever is early is not the one who fails."""
    first = SimulatedDevice(tmp_path / "device", "rank-0", total_bytes=100)
    second = SimulatedDevice(tmp_path / "device", "rank-1")
    first.hold("kv", 60)
    with pytest.raises(OutOfDeviceMemory, match="rank-1 asked for 60 bytes"):
        second.hold("gather", 60)


# --- the barrier, alone ---------------------------------------------------------------------------------------------------------


def test_in_a_single_process_the_barrier_does_nothing() -> None:
    barrier = Barrier()
    start = time.monotonic()
    barrier.meet(60.0)
    asyncio.run(barrier.meet_async(60.0))
    assert time.monotonic() - start < 5.0
    with pytest.raises(ValueError, match="mine"):
        barrier.meet(1.0, failure=ValueError("mine"))
    with pytest.raises(ConfigError, match="timeout_s"):
        barrier.meet(0.0)
    barrier.close()


def test_the_barrier_names_all_who_are_missing_in_bounded_time_and_off_the_loop() -> None:
    store = torch.distributed.HashStore()
    barrier = Barrier("alone", index=0, size=3, store=store)

    async def run() -> int:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.01)

        ticking = asyncio.create_task(tick())
        with pytest.raises(BarrierTimeout, match="rank 1, rank 2 of 3 did not come"):
            await barrier.meet_async(0.5)
        ticking.cancel()
        return ticks

    assert asyncio.run(run()) > 10, "the event loop stood still"
    barrier.close()


def test_a_rank_that_failed_is_an_error_for_the_others_at_once() -> None:
    store = torch.distributed.HashStore()
    ends = [Barrier("failing", index=i, size=2, store=store) for i in range(2)]
    for end in ends:
        end._fabric._store = torch.distributed.PrefixStore("same", store)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="no room"):
        ends[1].meet(1.0, failure=RuntimeError("no room"))
    with pytest.raises(HandoffError, match="rank 1 cannot go on: RuntimeError: no room"):
        ends[0].meet(30.0)
    for end in ends:
        end.close()


# --- a trainer on the host ------------------------------------------------------------------------------------------------------


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 5, bias=False))
    model[2].weight = torch.nn.Parameter(model[0].weight.detach().t().contiguous())
    model.register_buffer("scratch", torch.ones(7), persistent=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(20.0).view(4, 5)).sum().backward()
    optimizer.step()


def bits(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return [t.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors if t is not None]


def test_offload_frees_everything_and_brings_every_bit_back_into_the_same_tensors() -> None:
    model, optimizer = trained()
    before, objects, views = bits(model, optimizer), [id(p) for p in model.parameters()], model[0].weight.view(-1)
    offload = offload_for(model, optimizer)
    assert isinstance(offload, ModuleOffload)
    resident = offload.resident_bytes()
    # Weights, their gradients, two moments each, running statistics, step counters, the scratch buffer: all of it.
    assert resident > 4 * sum(p.numel() * 4 for p in model.parameters())
    assert offload.offload() == resident == offload.host_bytes
    assert offload.resident_bytes() == 0
    assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
    with pytest.raises(HandoffError, match="already"):
        offload.offload()
    offload.load()
    assert bits(model, optimizer) == before
    assert [id(p) for p in model.parameters()] == objects
    assert torch.equal(views, model[0].weight.view(-1))
    with pytest.raises(HandoffError, match="not on the host"):
        offload.load()
    step(model, optimizer)  # and it trains on


def test_memory_that_belongs_to_somebody_else_is_refused_before_anything_moves() -> None:
    model, optimizer = trained()
    model[0].weight.detach().numpy()
    before = bits(model, optimizer)
    offload = ModuleOffload(model, optimizer)
    with pytest.raises(HandoffError, match="belongs to somebody else"):
        offload.offload()
    assert not offload.offloaded
    assert bits(model, optimizer) == before


def test_an_offload_that_runs_out_of_host_memory_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    before, count = bits(model, optimizer), 0
    plain = offload_module.to_host

    def short(storage: torch.UntypedStorage) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == 4:
            raise MemoryError("no host memory left")
        return plain(storage)

    monkeypatch.setattr(offload_module, "to_host", short)
    offload = ModuleOffload(model, optimizer)
    with pytest.raises(MemoryError):
        offload.offload()
    assert not offload.offloaded
    assert bits(model, optimizer) == before


@pytest.mark.parametrize("handler", [FSDP1Offload, FSDP2Offload])
def test_a_handler_refuses_another_representation(handler: type) -> None:
    with pytest.raises(ConfigError, match="got a plain module") as caught:
        handler(torch.nn.Linear(2, 2))
    assert "ModuleOffload" in caught.value.remedy


def test_a_snapshot_restores_every_bit_and_removes_what_came_later() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    offload = ModuleOffload(model, optimizer)
    first = ShardSnapshot(offload)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    assert optimizer.state
    first.restore(offload)
    assert not optimizer.state
    assert all(torch.equal(model.state_dict()[k], v) for k, v in weights.items())
    optimizer.step()
    second, kept = ShardSnapshot(offload), bits(model, optimizer)
    optimizer.step()
    assert bits(model, optimizer) != kept
    second.restore(offload)
    assert bits(model, optimizer) == kept
    assert second.nbytes > 0
    model.add_module("more", torch.nn.Linear(2, 2))
    with pytest.raises(HandoffError, match=r"more\.bias"):
        second.restore(offload)


# --- an engine asleep -----------------------------------------------------------------------------------------------------------


class Serves:
    """A subscriber's part in this: what it may generate with."""

    def __init__(self) -> None:
        self.version: int | None = 3

    def discard(self) -> None:
        self.version = None

    def ensure_serving(self) -> int:
        if self.version is None:
            raise OutOfOrder("discarded")
        return self.version


class Engine(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.register_buffer("bias_correction", torch.full((4,), 2.0))
        self.register_buffer("inv_freq", torch.full((5,), 3.0), persistent=False)


@pytest.mark.parametrize("level", SleepLevel)
def test_an_engine_sleeps_and_wakes(level: SleepLevel) -> None:
    engine, serves = Engine(), Serves()
    memory = ModuleMemory(engine, kv_bytes=1000)
    sleeper = Sleeper(memory, serves)
    values = {k: v.clone() for k, v in engine.state_dict().items()}
    resident = memory.weight_bytes()
    assert sleeper.ensure_ready() == 3
    sleeper.sleep(level)
    assert (memory.weight_bytes(), memory.kv_resident) == (0, 0)
    with pytest.raises(OutOfOrder, match="weights are asleep"):
        sleeper.ensure_ready()
    with pytest.raises(OutOfOrder, match="before the weights"):
        sleeper.wake_kv_cache()
    with pytest.raises(OutOfOrder, match="asleep already"):
        sleeper.sleep(level)
    sleeper.wake_weights()
    sleeper.wake_weights()  # a second wake-up of the same request wave does no harm
    assert (memory.weight_bytes(), memory.kv_resident) == (resident, 0)
    assert torch.equal(engine.inv_freq, torch.full((5,), 3.0)), "no sync sends it: it must survive"
    with pytest.raises(OutOfOrder):
        sleeper.ensure_ready()
    if level is SleepLevel.OFFLOAD:
        assert all(torch.equal(engine.state_dict()[k], v) for k, v in values.items())
        sleeper.wake_kv_cache()
        assert sleeper.ensure_ready() == 3
        return
    assert all(v.isnan().all() for v in engine.state_dict().values()), "content that nobody sent must not look like weights"
    with pytest.raises(OutOfOrder, match="discarded"):
        sleeper.wake_kv_cache()
    engine.load_state_dict(values)
    serves.version = 4
    sleeper.wake_kv_cache()
    assert sleeper.ensure_ready() == 4
    assert memory.kv_resident == 1000


def test_levels_are_1_and_2() -> None:
    with pytest.raises(ConfigError, match=r"level must be 1 \(offload\) or 2 \(discard\), got 3"):
        Sleeper(ModuleMemory(Engine())).sleep(3)
