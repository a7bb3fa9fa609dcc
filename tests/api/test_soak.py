"""Many rounds with random faults on the same objects: descriptors, threads, memory and shared memory end as they began.

WEIGHTLIFT_SOAK_ROUNDS sets the number of rounds (default 2000, bounded to four minutes).
"""

import gc
import os
import pathlib
import random
import threading
import time

import pytest
import torch

from weightlift import Deadlines, State, WeightliftError
from weightlift.loaders import MappingLoader
from weightlift.sources import MappingSource
from weightlift.testing.faults import Fault, FaultyLoader, FaultySource, fail_at, raising
from weightlift.testing.pair import pair

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(400), pytest.mark.slow]

ROUNDS = int(os.environ.get("WEIGHTLIFT_SOAK_ROUNDS", "2000"))
DEADLINES = Deadlines(announce_s=5.0, prepare_s=5.0, transfer_s=5.0, release_s=5.0, commit_s=5.0, cause_s=2.0)
BUCKETS = 6


def parameters(value: float) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((16, 16), value) for i in range(BUCKETS)}


def resident_bytes() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def random_fault(dice: random.Random) -> tuple[str, Fault] | None:
    """Whose fault, and which; None for a healthy round (two of three)."""
    if dice.random() < 0.66:
        return None
    if dice.random() < 0.3:
        return "source", fail_at(dice.choice(["tensor", "manifest"]), raising(RuntimeError("source")), bucket=None)
    at = dice.choice(["prepare", "install", "finish", "commit"])
    bucket = dice.randrange(BUCKETS) if at == "install" else None
    return dice.choice(["e0", "e1", "e2"]), fail_at(at, raising(OSError("loader")), bucket=bucket)


@pytest.mark.parametrize("transport", ["shm", "memory"])
def test_soak(transport: str) -> None:
    dice = random.Random(7)
    sent = parameters(0.0)
    held = {f"e{i}": parameters(-1.0) for i in range(3)}
    loaders = {name: FaultyLoader(MappingLoader(tensors)) for name, tensors in held.items()}
    source = FaultySource(MappingSource(sent))
    deadline = time.monotonic() + 120.0
    before: tuple[int, int, int] | None = None
    struck = rounds = 0
    with pair(source, loaders, transport=transport, slot_bytes=1024, deadlines=DEADLINES, min_replicas=1) as ends:
        for version in range(1, ROUNDS + 1):
            if time.monotonic() > deadline:
                break
            rounds = version
            for tensor in sent.values():
                tensor.fill_(float(version))
            fault = random_fault(dice)
            for name, loader in loaders.items():
                loader.faults = [fault[1]] if fault is not None and fault[0] == name else []
                loader.calls.clear()
            source.faults = [fault[1]] if fault is not None and fault[0] == "source" else []
            named = fault is not None and fault[1].at == "manifest"
            outcome = ends.sync(version, pulling=[] if named else None)
            struck += fault is not None
            assert outcome.error is None or isinstance(outcome.error, WeightliftError)
            assert (outcome.error is not None) == (fault is not None and fault[0] == "source")
            for subscriber in ends.subscribers:
                values = {float(v) for t in held[subscriber.name].values() for v in t.unique().tolist()}
                if subscriber.state is State.SERVING and subscriber.version is not None:
                    assert values == {float(subscriber.version)}
            del outcome
            if version == 100:
                gc.collect()
                before = (descriptors(), threading.active_count(), resident_bytes())
        gc.collect()
        after = (descriptors(), threading.active_count(), resident_bytes())
    assert rounds > 150, "the machine is too slow to tell anything"
    assert struck > rounds // 5
    assert before is not None
    assert after[0] <= before[0] + 12, "at most the connections of one failed round that the next will replace"
    assert after[1] <= before[1]
    assert after[2] <= before[2] + (32 << 20)
