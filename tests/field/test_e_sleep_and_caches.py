"""Field reports, group E and the double resume: engines that sleep, lose what no sync sends, or are synced while they sleep."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightlift.errors import MissingParameter, OutOfOrder, TornWeights, WeightliftError
from weightlift.handoff import ModuleMemory, Sleeper
from weightlift.loaders import ModuleLoader
from weightlift.sources import MappingSource
from weightlift.testing.pair import Pair, pair


class Engine(torch.nn.Module):
    """Everything that lives in an engine's memory: parameters, buffers that are sent and that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.register_buffer("bias_correction", torch.zeros(4))
        self.register_buffer("inv_freq", torch.arange(5.0), persistent=False)


class Bed:
    """An engine with its sleeper, and a trainer that publishes everything a checkpoint has."""

    def __init__(self) -> None:
        self.engine = Engine().requires_grad_(False)
        self.kv_scale = torch.tensor([0.5, 0.25])
        self.adapter = torch.full((2, 2), 9.0)
        self.memory = ModuleMemory(self.engine, kv_bytes=64)
        self.sleeper = Sleeper(self.memory)
        self.trained = {name: torch.full_like(value, 1.0) for name, value in self.engine.state_dict().items()}
        self.loader = self.sleeper.loader(ModuleLoader(self.engine))

    def train(self, version: int) -> None:
        for value in self.trained.values():
            value.fill_(float(version))

    def serves(self, version: int) -> bool:
        return all(bool((value == version).all()) for value in self.engine.state_dict().values())


def sync(ends: Pair, bed: Bed, version: int) -> None:
    bed.train(version)
    ends.sync(version).raise_any()
    assert bed.serves(version)


def connected(bed: Bed):  # type: ignore[no-untyped-def]
    return pair(MappingSource(bed.trained), bed.loader)


def attach(ends: Pair, bed: Bed) -> None:
    (subscriber,) = ends.subscribers
    bed.sleeper.attach(subscriber)


def test_b37_a_discard_keeps_what_no_sync_sends() -> None:
    bed = Bed()
    with connected(bed) as ends:
        attach(ends, bed)
        sync(ends, bed, 1)
        for version in (2, 3):
            bed.sleeper.sleep(2)
            assert bed.memory.weight_bytes() == 0
            bed.sleeper.wake_weights()
            assert not bed.serves(version - 1), "discarded weights must not look like weights"
            sync(ends, bed, version)
            bed.sleeper.wake_kv_cache()
            assert bed.sleeper.ensure_ready() == version
            assert torch.equal(bed.engine.inv_freq, torch.arange(5.0))
            assert not any(value.isnan().any() for value in (*bed.engine.state_dict().values(), bed.engine.inv_freq))


def test_b37_what_lives_in_discarded_memory_is_kept_by_name() -> None:
    """Scales and adapter slots that are views of a discarded storage come back; others were never touched."""
    bed = Bed()
    shared = bed.engine.bias_correction[:2]
    shared.fill_(0.75)
    memory = ModuleMemory(bed.engine, keep={"kv_scale": shared, "adapter": bed.adapter})
    memory.discard_weights()
    memory.allocate_weights()
    assert torch.equal(shared, torch.tensor([0.75, 0.75]))
    assert bed.engine.bias_correction[2:].isnan().all()
    assert torch.equal(bed.adapter, torch.full((2, 2), 9.0))


def test_b39_a_sync_into_a_sleeping_engine_is_refused_before_any_byte() -> None:
    bed = Bed()
    with connected(bed) as ends:
        attach(ends, bed)
        sync(ends, bed, 1)
        for level in (1, 2):
            bed.sleeper.sleep(level)
            bed.train(2)
            with pytest.raises(OutOfOrder, match="weights are asleep"):
                ends.sync(10 * level).raise_any()
            bed.sleeper.wake_weights()
            if level == 1:
                assert bed.serves(1)
                bed.sleeper.wake_kv_cache()
                assert bed.sleeper.ensure_ready() == 1
            else:
                with pytest.raises(TornWeights, match="discarded"):
                    bed.sleeper.wake_kv_cache()
        sync(ends, bed, 30)
        bed.sleeper.wake_kv_cache()
        assert bed.sleeper.ensure_ready() == 30


def test_b39_an_unknown_name_is_refused_and_the_next_sync_works() -> None:
    bed = Bed()
    with connected(bed) as ends:
        attach(ends, bed)
        sync(ends, bed, 1)
        missing = bed.trained.pop("layer.bias")
        with pytest.raises(MissingParameter, match=r"layer\.bias"):
            ends.sync(2).raise_any()
        assert bed.sleeper.ensure_ready() == 1
        assert bed.serves(1)
        bed.trained["layer.bias"] = missing
        sync(ends, bed, 3)


def test_b39_an_engine_cannot_be_put_to_sleep_in_the_middle_of_a_round() -> None:
    bed = Bed()
    with connected(bed) as ends:
        attach(ends, bed)
        sync(ends, bed, 1)
        (subscriber,) = ends.subscribers
        raised: list[Exception] = []
        install = bed.loader.install

        def sleepy(bucket, memory):  # type: ignore[no-untyped-def]
            try:
                bed.sleeper.sleep(2)
            except WeightliftError as error:
                raised.append(error)
            install(bucket, memory)

        bed.loader.install = sleepy  # type: ignore[method-assign]
        bed.train(2)
        ends.sync(2).raise_any()
        assert raised
        assert "DISCARD is not possible" in str(raised[0])
        assert bed.serves(2)
        assert subscriber.version == 2


def test_e06_a_second_resume_does_nothing() -> None:
    bed = Bed()
    with connected(bed) as ends:
        attach(ends, bed)
        sync(ends, bed, 1)
        bed.sleeper.sleep(1)
        for _ in range(2):
            bed.sleeper.wake_weights()
        for _ in range(2):
            bed.sleeper.wake_kv_cache()
        assert bed.sleeper.ensure_ready() == 1
        assert bed.serves(1)


CALLS = st.sampled_from(["sleep 1", "sleep 2", "wake_weights", "wake_kv_cache", "sync", "fail"])


@settings(max_examples=40, deadline=None)
@given(calls=st.lists(CALLS, max_size=12))
def test_b37_b39_whatever_the_order_it_generates_from_a_whole_version_or_refuses(calls: list[str]) -> None:
    bed, version = Bed(), 0
    with connected(bed) as ends:
        attach(ends, bed)
        for call in calls:
            version += 1
            try:
                if call == "sync":
                    bed.train(version)
                    ends.sync(version).raise_any()
                elif call == "fail":
                    bias = bed.trained.pop("layer.bias")
                    try:
                        ends.sync(version).raise_any()
                    finally:
                        bed.trained["layer.bias"] = bias
                elif call.startswith("sleep"):
                    bed.sleeper.sleep(int(call[-1]))
                else:
                    getattr(bed.sleeper, call)()
            except WeightliftError:
                pass
            try:
                served = bed.sleeper.ensure_ready()
            except WeightliftError:
                continue
            assert bed.serves(served), (calls, call)
            assert torch.equal(bed.engine.inv_freq, torch.arange(5.0))
