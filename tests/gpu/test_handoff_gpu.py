"""The hand-over on a real device: memory goes and comes back, to the bit, and the ledger sees it. Run by hand on a GPU machine."""

import datetime

import pytest
import torch
import torch.distributed as dist

from weightlift.handoff import (
    Barrier,
    ColocatedStep,
    CudaMeter,
    FSDP1Offload,
    FSDP2Offload,
    Ledger,
    ModuleMemory,
    ModuleOffload,
    ShardSnapshot,
    SleepLevel,
    offload_for,
)
from weightlift.loaders import ModuleLoader
from weightlift.sources import ModuleSource, TrainerGroup
from weightlift.testing.pair import pair

if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)

MIB = 2**20
SLACK = 72 * MIB
"""cuBLAS keeps a workspace of 32 MiB on such GPUs, and a segment that it shares stays reserved. A model here has 64 MiB, four times."""


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(16))).cuda()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 1024, device="cuda")).square().mean().backward()
    optimizer.step()


def bits(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone().cpu() for p in (q.to_local() if hasattr(q, "to_local") else q for q in model.parameters())]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """A process group of one: the sharded representations exist, and nothing needs a second GPU."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=datetime.timedelta(seconds=60))
    yield
    dist.destroy_process_group()


def wrapped(kind: str) -> torch.nn.Module:
    model = model_of(0)
    if kind == "plain":
        return model
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, device_id=torch.cuda.current_device(), use_orig_params=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cuda", (1,)))
    return model


@pytest.mark.parametrize("kind", ["plain", "fsdp1", "fsdp2"])
def test_offload_gives_the_device_back_and_brings_every_bit_back(one_rank: None, kind: str) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    model = wrapped(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer)
    offload = offload_for(model, optimizer)
    assert isinstance(offload, {"plain": ModuleOffload, "fsdp1": FSDP1Offload, "fsdp2": FSDP2Offload}[kind])
    kept, snapshot = bits(model), ShardSnapshot(offload)
    train(model, optimizer)
    snapshot.restore(offload)
    assert all(torch.equal(a, b) for a, b in zip(bits(model), kept, strict=True))
    moved = offload.offload()
    assert moved >= 4 * 64 * MIB, "weights, gradients, two moments"
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before <= SLACK, "nothing of the model is left"
    assert all(one.host.is_pinned() for one in offload._away)
    offload.load()
    assert all(torch.equal(a, b) for a, b in zip(bits(model), kept, strict=True))
    train(model, optimizer)


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_a_sharded_source_on_the_device_yields_what_the_model_holds(one_rank: None, kind: str) -> None:
    from weightlift.sources.fsdp1 import FSDP1Source
    from weightlift.sources.fsdp2 import FSDP2Source

    model = wrapped(kind)
    source = (FSDP1Source if kind == "fsdp1" else FSDP2Source)(model, group=TrainerGroup())
    want = {name: value.detach() for name, value in model_of(0).state_dict().items()}
    seen = {name: bool(torch.equal(tensor, want[name])) and tensor.device.type == "cuda" for name, tensor in source.export()}
    assert seen == dict.fromkeys(want, True)
    source.group.close()


@pytest.mark.parametrize("level", SleepLevel)
def test_a_colocated_step_on_the_device(level: SleepLevel) -> None:
    torch.cuda.empty_cache()
    model = model_of(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = model_of(1).requires_grad_(False)
    memory = ModuleMemory(engine)
    released: list[int] = []

    class Control:
        def sleep(self, level: SleepLevel) -> None:
            memory.discard_weights() if level is SleepLevel.DISCARD else memory.offload_weights()
            torch.cuda.empty_cache()

        def wake_weights(self) -> None:
            memory.allocate_weights()

        def wake_kv_cache(self) -> None:
            released.append(torch.cuda.memory_allocated())

    control, ledger = Control(), Ledger(CudaMeter())
    control.sleep(level)
    step = ColocatedStep(ModuleOffload(model, optimizer), Barrier(), ledger, control, level=level)
    with pair(ModuleSource(model), ModuleLoader(engine)) as ends:
        for version in range(1, 4):
            train(model, optimizer)
            step.wake_weights()
            step.publish(lambda version=version: ends.sync(version).raise_any())
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), engine.parameters(), strict=True))
            step.wake_kv_cache()
            step.back_to_training()
    arrows = [entry.arrow for entry in ledger.entries[-9:]]
    wake = "wake_empty" if level is SleepLevel.DISCARD else "wake_weights"
    assert arrows == ["release", wake, "publish", "offload", "settle", "meet", "wake_kv", "sleep", "load"]
    at = {entry.arrow: entry.reading for entry in ledger.entries[-9:]}
    weights = memory.weight_bytes() or sum(p.numel() * 4 for p in model.parameters())
    assert at["settle"].allocated < at["publish"].allocated - 3 * weights, "the trainer has left"
    assert at["settle"].reserved <= at["settle"].allocated + SLACK
    assert at["sleep"].allocated < at["wake_kv"].allocated, "the engine has left"
    print(ledger.table())
