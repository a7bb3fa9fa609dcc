"""Ranks of a sharded trainer as real processes over Gloo, driven line by line by a test; the engines live in the test's process.

A rank builds the same full model from a seed, wraps it in the way its `kind` says, and obeys commands: step, publish, digest. The
unwrapped model of the same seed, trained on the same numbers, is the reference.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import weightlift
from weightlift import Deadlines, Publisher, ShmConfig, Subscriber
from weightlift.loaders import MappingLoader
from weightlift.modules import walk
from weightlift.testing.processes import Worker, say

LIMITS = {
    "announce_s": 20.0,
    "prepare_s": 5.0,
    "transfer_s": 3.0,
    "release_s": 5.0,
    "commit_s": 5.0,
    "gather_s": 4.0,
    "cause_s": 1.0,
}


class Block(nn.Module):
    """Sizes that two and four ranks do not divide, a bias, a buffer."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding tied to its head, blocks, a child that is really called `module`, a one-row and a scalar-like parameter."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(8, inner) for inner in (5, 13, 7)])
        self.module = nn.Linear(8, 1)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.module(x)


def net(seed: int, *, tied: bool = True) -> Net:
    """The same weights on every rank and in the test."""
    torch.manual_seed(seed)
    return Net(tied=tied)


def reference(model: nn.Module) -> dict[str, torch.Tensor]:
    """Canonical names with copies of the values, ties left in."""
    return {slot.name: slot.tensor.detach().clone() for slot in walk(model)}


IDS = torch.arange(22).view(2, 11) % 11
"""The same batch on every rank: gradients are averaged over equal ones, so the reference needs no ranks."""


def train_step(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """One step; SGD with momentum, so that there is optimizer state."""
    optimiser.zero_grad(set_to_none=True)
    torch.nn.functional.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten().roll(1)).backward()
    optimiser.step()


def optimiser_of(model: nn.Module) -> torch.optim.Optimizer:
    """Momentum makes state."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


# --- in a rank ------------------------------------------------------------------------------------------------------------------


def wrap(kind: str, model: Net) -> nn.Module:
    """The model in one of the ways trainers wrap it. FSDP1 on the CPU needs a device id."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    family, _, variant = kind.partition(":")
    cpu = torch.device("cpu")
    if family == "ddp":
        # Buffers count calls: they are not broadcast, all ranks do the same.
        wrapped = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
        return torch.compile(wrapped, backend="eager") if variant == "compile" else wrapped  # type: ignore[return-value]
    if family == "fsdp1":
        strategy = {
            "grad_op": ShardingStrategy.SHARD_GRAD_OP,
            "no_shard": ShardingStrategy.NO_SHARD,
            "hybrid": ShardingStrategy.HYBRID_SHARD,
        }.get(variant, ShardingStrategy.FULL_SHARD)
        options: dict[str, Any] = {"device_id": cpu, "sharding_strategy": strategy, "use_orig_params": variant != "flat"}
        if variant == "hybrid":
            options["device_mesh"] = init_device_mesh("cpu", (2, 2))
        if variant == "ignored":
            options["ignored_modules"] = [model.module]
        inner = {k: v for k, v in options.items() if k != "ignored_modules"}
        for number, block in enumerate(model.blocks):
            child = checkpoint_wrapper(block) if variant == "checkpoint" else block
            if variant == "nested":
                block.up = FullyShardedDataParallel(block.up, **inner)
            model.blocks[number] = FullyShardedDataParallel(child, **inner)
        return FullyShardedDataParallel(model, **options)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options = {"mesh": mesh}
    if variant == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if variant == "tp":
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for block in model.blocks:
            parallelize_module(block, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        options["mesh"] = both["dp"]
    if variant == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if variant == "shard1":
        options["shard_placement_fn"] = lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % dist.get_world_size() == 0 else Shard(0)
    if variant == "ignored":
        options["ignored_params"] = set(model.module.parameters())
    for number, block in enumerate(model.blocks):
        if variant == "checkpoint":
            model.blocks[number] = checkpoint_wrapper(block)
        if variant != "whole":
            fully_shard(model.blocks[number], **{k: v for k, v in options.items() if k != "ignored_params"})
    fully_shard(model, **options)
    return torch.compile(model, backend="eager") if variant == "compile" else model  # type: ignore[return-value]


def local_parts(model: nn.Module, optimiser: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Everything that a sync must not change on this rank."""
    for slot in walk(model):
        yield slot.tensor
    for state in optimiser.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def digest(model: nn.Module, optimiser: torch.optim.Optimizer) -> str:
    """Of all bits on this rank, at rest."""
    for module in model.modules():
        getattr(module, "reshard", lambda: None)()
    found = hashlib.sha256()
    for tensor in local_parts(model, optimiser):
        local = getattr(tensor, "to_local", lambda tensor=tensor: tensor)()
        found.update(local.detach().clone().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def source_of(kind: str, model: nn.Module, group: Any, **options: Any) -> Any:
    """The source for a kind."""
    from weightlift import sources

    name = {"ddp": "DDPSource", "fsdp1": "FSDP1Source", "fsdp2": "FSDP2Source"}[kind.partition(":")[0]]
    return getattr(sources, name)(model, group=group, **options)


def shrink(source: Any) -> None:
    """This rank's part of the first weight comes with a row too few."""
    plain = source._named

    def named(slot: Any, alias: Any) -> Any:
        found = plain(slot, alias)
        if found.name.endswith("up.weight") and found.shard is not None:
            local = found.shard.local
            found = dataclasses.replace(found, shard=dataclasses.replace(found.shard, local=lambda: local()[:-1]))
        return found

    source._named = named


class Strike:
    """A fault at one layer group of this rank's next stream: raise, stall, die."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.at: int | None = None
        self.act = ""
        self.seen = 0

    def arm(self, at: int, act: str) -> None:
        self.at, self.act, self.seen = at, act, 0

    def __call__(self) -> None:
        if self.at is None:
            return
        if self.seen < self.at:
            self.seen += 1
            return
        act, self.at = self.act, None
        if act == "raise":
            raise ValueError("cosmic ray in the shard")
        say(striking=act)
        if act == "kill":
            os.kill(os.getpid(), 9)
        if act == "stop":
            os.kill(os.getpid(), 19)
        if act == "hang":
            time.sleep(8)


def rank_main(rank: int, size: int, kind: str, address: str, seed: int, senders: str = "first", **options: Any) -> None:
    """A rank: joins the others, builds its part, obeys."""
    torch.set_num_threads(1)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, True, wait_for_workers=False)
        say(port=store.port)
    else:
        port = int(json.loads(sys.stdin.readline())["port"])
        store = dist.TCPStore("127.0.0.1", port, size, False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=30))
    from weightlift.sources import TrainerGroup

    model = wrap(kind, net(seed, tied=options.pop("tied", True)))
    optimiser = optimiser_of(model)
    group = TrainerGroup(senders=senders)  # type: ignore[arg-type]
    limits = {**LIMITS, **options.pop("limits", {})}
    lie, finite = options.pop("lie", False), options.pop("check_finite", False)
    source = source_of(kind, model, group, **options)
    if lie and rank == 1:
        shrink(source)
    strike = Strike(source)
    armed(source, strike)
    publisher = Publisher(
        source, address, deadlines=Deadlines(**limits), verify="full", check_finite=finite, shm=ShmConfig(slot_bytes=512, slots=2)
    )
    say(ready=True)
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        if do == "end":
            break
        try:
            say(**{"done": do, **obey(do, command, model, optimiser, publisher, source, strike)})
        except Exception as error:
            say(done=do, error=told(error), version=publisher.version)
    publisher.close()
    group.close()
    dist.destroy_process_group()
    say(ended=True)


def obey(
    do: str, command: dict[str, Any], model: nn.Module, optimiser: Any, publisher: Publisher, source: Any, strike: Strike
) -> dict[str, Any]:
    if do == "step":
        train_step(model, optimiser)
    elif do == "eval":
        with torch.no_grad():
            model(IDS)
    elif do == "nan":
        with torch.no_grad():
            parts = [getattr(p, "to_local", lambda p=p: p)() for p in model.parameters()]
            next(part for part in parts if part.numel()).view(-1)[0] = float("nan")
    elif do == "arm":
        strike.arm(command["at"], command["act"])
    elif do == "wait":
        publisher.wait_for_peers(command["count"], timeout_s=20.0)
    elif do in ("offload", "load", "snapshot", "restore", "meet"):
        return hand_over(do, command, model, optimiser)
    elif do == "busy":
        return busy(command["rounds"], publisher)
    elif do == "digest":
        return {"digest": digest(model, optimiser)}
    elif do == "publish":
        time.sleep(command.get("late_s", 0.0))
        report = publisher.publish(command["version"])
        threads = [thread.name for thread in threading.enumerate() if "pulse" in thread.name]
        return {
            "version": report.version,
            "bytes": report.bytes,
            "buckets": report.buckets,
            "peak": getattr(source, "peak_bytes", 0),
            "pulses": threads,
        }
    return {}


def busy(rounds: int, publisher: Publisher) -> dict[str, Any]:
    """Publish while another thread of this rank uses the trainer's own communicator, both at their own pace."""
    wrong: list[int] = []
    done = threading.Event()

    def train() -> None:
        number = 0
        agreed = torch.zeros(1)
        while not agreed.item():  # every rank stops after the same collective
            value = torch.full((64,), float(number))
            dist.all_reduce(value)
            if not torch.equal(value, torch.full((64,), float(number * dist.get_world_size()))):
                wrong.append(number)
            agreed = torch.tensor([float(done.is_set())])
            dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
            number += 1
            time.sleep(0.0005 * ((number * 7919 + dist.get_rank()) % 5))

    thread = threading.Thread(target=train)
    thread.start()
    for version in range(1, rounds + 1):
        time.sleep(0.001 * ((version * 104729 + 3 * dist.get_rank()) % 7))
        publisher.publish(version)
    done.set()
    thread.join(30.0)
    return {"version": publisher.version, "wrong": wrong, "ended": not thread.is_alive()}


KEPT: dict[str, Any] = {}


def hand_over(do: str, command: dict[str, Any], model: nn.Module, optimiser: Any) -> dict[str, Any]:
    """The trainer's side of the hand-over of memory."""
    from weightlift.handoff import Barrier, ShardSnapshot, offload_for

    handler = KEPT.setdefault("offload", offload_for(model, optimiser))
    barrier = KEPT.setdefault("barrier", Barrier("test"))
    if do == "offload":
        before = handler.resident_bytes()
        return {"moved": handler.offload(), "before": before, "left": handler.resident_bytes(), "handler": type(handler).__name__}
    if do == "load":
        return {"moved": handler.load()}
    if do == "meet":
        time.sleep(command.get("late_s", 0.0))
        barrier.meet(command["timeout_s"], failure=RuntimeError(command["failure"]) if "failure" in command else None)
        return {"at": time.monotonic()}
    if do == "snapshot":
        if command.get("failure"):
            handler.parameters = lambda: 1 / 0
        try:
            KEPT["snapshot"] = ShardSnapshot(handler, barrier=barrier, timeout_s=20.0)
        finally:
            handler.__dict__.pop("parameters", None)
    else:
        KEPT["snapshot"].restore(handler)
    return {}


def armed(source: Any, strike: Strike) -> None:
    """Every part that this rank makes or sends goes past the strike."""
    from weightlift.sources import gather

    plain = gather._Walk.post

    def post(self: Any, number: int) -> None:
        pack = self._pack

        def struck(*arguments: Any) -> None:
            strike()
            pack(*arguments)

        if number == self._posted and number < len(self._of._groups):
            self._pack = struck
        try:
            plain(self, number)
        finally:
            self.__dict__.pop("_pack", None)

    gather._Walk.post = post  # type: ignore[method-assign]


def told(error: BaseException) -> dict[str, Any]:
    cause = error.__cause__
    return {
        "type": type(error).__name__,
        "text": str(error),
        "peer": getattr(error, "peer", None),
        "tensor": getattr(error, "tensor", None),
        "phase": getattr(error, "phase", None),
        "cause": None
        if cause is None
        else f"{getattr(cause, 'type_name', type(cause).__name__)}: {getattr(cause, 'message', cause)}",
    }


# --- in the test ----------------------------------------------------------------------------------------------------------------


def engine_main(address: str) -> None:
    """An engine in a process of its own, that says when its first bucket comes, and then takes its time."""
    held = {key: torch.zeros_like(value) for key, value in reference(net(0)).items()}
    loader = MappingLoader(held)
    install = loader.install

    def slowly(bucket: Any, memory: torch.Tensor) -> None:
        say(installing=bucket.number)
        time.sleep(30.0)
        install(bucket, memory)

    loader.install = slowly  # type: ignore[method-assign]
    with Subscriber(loader, address, "lost") as subscriber:
        say(ready=True)
        subscriber.pull(60.0)


class Ranks:
    """The processes of one trainer."""

    def __init__(self, kind: str, size: int, addresses: list[str], *, seed: int = 0, **options: Any) -> None:
        arguments = {"size": size, "kind": kind, "seed": seed, **options}
        self.workers: list[Worker] = []
        try:
            for rank in range(size):
                address = addresses[min(rank, len(addresses) - 1)]
                self.workers.append(Worker(__file__, "rank_main", rank=rank, address=address, **arguments))
            port = self.workers[0].hear()["port"]
            for worker in self.workers[1:]:
                worker.tell(json.dumps({"port": port}))
            for worker in self.workers:
                assert worker.hear(90.0) == {"ready": True}
        except BaseException:
            self.close()
            raise

    def tell(self, do: str, ranks: list[int] | None = None, **command: Any) -> None:
        for rank in range(len(self.workers)) if ranks is None else ranks:
            self.workers[rank].tell(json.dumps({"do": do, **command}))

    def hear(self, ranks: list[int] | None = None, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        return [self.workers[rank].hear(timeout_s) for rank in (range(len(self.workers)) if ranks is None else ranks)]

    def ask(self, do: str, ranks: list[int] | None = None, **command: Any) -> list[dict[str, Any]]:
        self.tell(do, ranks, **command)
        return self.hear(ranks)

    def end(self) -> None:
        """An orderly end: every rank ends with 0."""
        self.tell("end")
        assert [answer.get("ended") for answer in self.hear()] == [True] * len(self.workers)
        assert [worker.wait() for worker in self.workers] == [0] * len(self.workers)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


class Engine:
    """A subscriber in the test's process, pulling in a thread when told to."""

    def __init__(self, address: str, like: dict[str, torch.Tensor], name: str = "engine-0", *, slow_s: float = 0.0) -> None:
        self.name = name
        self.held = {key: torch.full_like(value, 7) for key, value in like.items()}
        self.loader = MappingLoader(self.held)
        self.before_install = threading.Event()
        self.fault: BaseException | None = None
        self.slow_s = slow_s
        install = self.loader.install

        def struck(bucket: Any, memory: torch.Tensor) -> None:
            self.before_install.set()
            if self.fault is not None:
                raise self.fault
            time.sleep(self.slow_s)
            install(bucket, memory)

        self.loader.install = struck  # type: ignore[method-assign]
        self.subscriber = Subscriber(self.loader, address, name)
        self.outcome: Any = None
        self._thread: threading.Thread | None = None

    def pull(self, timeout_s: float = 40.0) -> None:
        def run() -> None:
            try:
                self.outcome = self.subscriber.pull(timeout_s)
            except Exception as error:
                self.outcome = error

        self.outcome = None
        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def join(self, timeout_s: float = 60.0) -> Any:
        assert self._thread is not None
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "pull() did not end"
        return self.outcome

    def wrong(self, want: dict[str, torch.Tensor]) -> list[str]:
        return [name for name, value in want.items() if not torch.equal(self.held[name], value.to(self.held[name].dtype))]

    def close(self) -> None:
        self.subscriber.close()


@contextlib.contextmanager
def stage(
    kind: str, size: int, *, tied: bool = True, engines: int = 1, **options: Any
) -> Iterator[tuple[Ranks, list[Engine], Net, Any]]:
    """Ranks, their engines (one an address where each rank sends), the reference model and its optimizer."""
    each = options.get("senders") == "each"
    addresses = [weightlift.new_address() for _ in range(size if each else 1)]
    model = net(0, tied=tied)
    crew: list[Engine] = []
    ranks = Ranks(kind, size, addresses, tied=tied, **options)
    try:
        for number in range(size if each else engines):
            crew.append(Engine(addresses[number if each else 0], reference(model), f"engine-{number}"))
        ranks.ask("wait", count=1 if each else engines)
        yield ranks, crew, model, optimiser_of(model)
    finally:
        ranks.close()
        for engine in crew:
            engine.close()
