"""loaders/staging.py: whole tensors out of pieces, in memory that is used again."""

import itertools
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

from toy_engines import Tensors, bits
from weightlift.errors import (
    LoaderError,
)
from weightlift.loaders.staging import FLUSH_BYTES, Staging
from weightlift.protocol.manifest import Manifest
from weightlift.protocol.plan import Bucket, Plan
from weightlift.tensors import bucket_view, entry_of, tensor_view


class Taker:
    """Takes groups, as an engine's reload does: their values are remembered, and where they lay."""

    def __init__(self) -> None:
        self.calls: list[dict[str, dict[str, torch.Tensor]]] = []
        self.places: list[int] = []
        self.error: Exception | None = None

    def __call__(self, groups: Mapping[str, Tensors]) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append({group: {name: t.clone() for name, t in tensors.items()} for group, tensors in groups.items()})
        self.places += [t.data_ptr() for tensors in groups.values() for t in tensors.values()]

    @property
    def groups(self) -> list[str]:
        return [group for call in self.calls for group in call]


def layers(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of 240 bytes, all of one size."""
    generator = torch.Generator().manual_seed(seed)
    return {f"{number}.weight": torch.randn(6, 10, generator=generator) for number in range(count)}


class Feed:
    """A staging area, and the tensors that go through it in buckets."""

    def __init__(
        self, tensors: Tensors, groups: Mapping[str, tuple[str, ...]], take: Callable[..., None], capacity: int = 100
    ) -> None:
        self.plan = Plan(Manifest(entry_of(name, t) for name, t in tensors.items()), capacity=capacity)
        self.staging = Staging(self.plan.manifest.by_name, groups, torch.device("cpu"), take)

    def buckets(self, tensors: Tensors) -> Iterator[tuple[Bucket, torch.Tensor]]:
        entries = self.plan.manifest.entries
        for bucket in self.plan.buckets:
            memory = torch.zeros(self.plan.capacity, dtype=torch.uint8)
            for piece in bucket.pieces:
                bucket_view(memory, entries[piece.entry], piece).copy_(tensor_view(tensors[entries[piece.entry].name], piece))
            yield bucket, memory

    def put(self, bucket: Bucket, memory: torch.Tensor) -> list[str]:
        """The names that are complete with this bucket."""
        entries = self.plan.manifest.entries
        wanted = [piece for piece in bucket.pieces if entries[piece.entry].name in self.staging]
        return [entries[p.entry].name for p in wanted if self.staging.put(entries[p.entry], p, memory) is not None]

    def round(self, tensors: Tensors, *, at_least: int = 0) -> None:
        self.staging.begin()
        for bucket, memory in self.buckets(tensors):
            self.put(bucket, memory)
            memory.fill_(0xFF)  # the transport uses it again
            self.staging.flush(at_least=at_least)
        self.staging.finish()


def own_groups(tensors: Tensors) -> dict[str, tuple[str, ...]]:
    return {name.partition(".")[0]: (name,) for name in tensors}


VARIED = {
    "a": torch.randn(5, 7),
    "b": torch.randn(3, 4, 5).to(torch.bfloat16),
    "c": torch.randn(()),
    "d": torch.arange(40).view(8, 5),
    "e": torch.randn(30, 4).t(),
    "f": torch.randn(9).to(torch.complex64),
    "g": torch.tensor([True, False, True]),
}


@pytest.mark.parametrize("capacity", [8, 24, 100, 256, 1 << 16])
def test_tensors_are_put_together_out_of_pieces_in_any_number_of_buckets(capacity: int) -> None:
    take = Taker()
    feed = Feed(VARIED, {"all": tuple(VARIED)}, take, capacity)
    feed.round(VARIED)
    ((call,),) = [[*call.values()] for call in take.calls]
    assert {name: (t.dtype, bits(t)) for name, t in call.items()} == {n: (t.dtype, bits(t)) for n, t in VARIED.items()}


def test_a_tensor_is_given_back_when_its_last_piece_is_there() -> None:
    tensors = layers(2)
    feed = Feed(tensors, own_groups(tensors), Taker(), capacity=120)
    feed.staging.begin()
    complete = [feed.put(bucket, memory) for bucket, memory in feed.buckets(tensors)]
    assert (len(complete) > 2, [*itertools.chain(*complete)]) == (True, ["0.weight", "1.weight"])


def test_names_without_a_group_are_not_staged() -> None:
    tensors = layers(3)
    take = Taker()
    feed = Feed(tensors, {"one": ("1.weight",)}, take)
    assert [name in feed.staging for name in tensors] == [False, True, False]
    assert feed.staging.groups == ("one",)
    feed.round(tensors)
    assert take.groups == ["one"]


def test_a_group_is_handed_over_when_it_is_complete_and_not_before() -> None:
    tensors = layers(4)
    take = Taker()
    feed = Feed(tensors, {"outer": ("0.weight", "3.weight"), "inner": ("1.weight", "2.weight")}, take, capacity=240)
    feed.staging.begin()
    seen = []
    for bucket, memory in feed.buckets(tensors):
        feed.put(bucket, memory)
        feed.staging.flush(at_least=0)
        seen.append([*take.groups])
    assert seen == [[], [], ["inner"], ["inner", "outer"]]
    assert all(torch.equal(t, tensors[name]) for call in take.calls for group in call.values() for name, t in group.items())


def test_small_groups_are_gathered_until_they_are_worth_a_call() -> None:
    tensors = layers(5)
    take = Taker()
    Feed(tensors, own_groups(tensors), take, capacity=240).round(tensors, at_least=480)
    assert [[*call] for call in take.calls] == [["0", "1"], ["2", "3"], ["4"]]
    take.calls.clear()
    Feed(tensors, own_groups(tensors), take, capacity=240).round(tensors, at_least=FLUSH_BYTES)
    assert [[*call] for call in take.calls] == [["0", "1", "2", "3", "4"]], "finish hands over what is left"


def test_a_name_in_two_groups_is_there_for_both() -> None:
    tensors = layers(3)
    take = Taker()
    feed = Feed(tensors, {"early": ("0.weight", "1.weight"), "late": ("0.weight", "2.weight")}, take, capacity=240)
    for _ in range(2):
        take.calls.clear()
        feed.round(tensors)
        assert [[*call] for call in take.calls] == [["early"], ["late"]], "in two calls"
        for call in take.calls:
            for group in call.values():
                assert all(torch.equal(tensor, tensors[name]) for name, tensor in group.items())
    take.calls.clear()
    feed.round(tensors, at_least=FLUSH_BYTES)
    assert [[*call] for call in take.calls] == [["early", "late"]], "in one call"


def test_a_tensor_without_elements_is_handed_over_though_no_piece_of_it_comes() -> None:
    tensors = {"w": torch.randn(4, 3), "none": torch.empty(0, 3), "nor": torch.empty(2, 0, dtype=torch.int64)}
    take = Taker()
    feed = Feed(tensors, {"both": ("w", "none"), "empty": ("none", "nor")}, take)
    for _ in range(2):
        take.calls.clear()
        feed.round(tensors)
        got = {group: {n: (t.shape, t.dtype) for n, t in named.items()} for call in take.calls for group, named in call.items()}
        assert got == {
            "both": {name: (tensors[name].shape, tensors[name].dtype) for name in ("w", "none")},
            "empty": {name: (tensors[name].shape, tensors[name].dtype) for name in ("none", "nor")},
        }


def test_a_tensor_that_is_not_complete_is_an_error_and_nothing_of_its_group_is_handed_over() -> None:
    tensors = layers(2)
    take = Taker()
    feed = Feed(tensors, own_groups(tensors), take, capacity=120)
    feed.staging.begin()
    for bucket, memory in [*feed.buckets(tensors)][:-1]:
        feed.put(bucket, memory)
        feed.staging.flush(at_least=0)
    with pytest.raises(LoaderError, match="1 tensors did not arrive completely") as caught:
        feed.staging.finish()
    assert (caught.value.tensor, take.groups) == ("1.weight", ["0"])


def test_a_piece_that_comes_twice_is_an_error() -> None:
    tensors = layers(1)
    feed = Feed(tensors, own_groups(tensors), Taker(), capacity=240)
    feed.staging.begin()
    for bucket, memory in [*feed.buckets(tensors)] * 2:
        feed.put(bucket, memory)
    with pytest.raises(LoaderError) as caught:
        feed.staging.finish()
    assert caught.value.tensor == "0.weight"


@pytest.mark.parametrize("broken", ["half of it", "the taker raised"])
def test_after_begin_a_round_works_whatever_became_of_the_last_one(broken: str) -> None:
    first, second = layers(3, seed=1), layers(3, seed=2)
    take = Taker()
    feed = Feed(first, own_groups(first), take)
    if broken == "half of it":
        feed.staging.begin()
        for bucket, memory in [*feed.buckets(first)][: len(feed.plan) // 2]:
            feed.put(bucket, memory)
    else:
        take.error = OSError("no")
        with pytest.raises(OSError, match="no"):
            feed.round(first)
    take.error = None
    for tensors in (second, first):
        take.calls.clear()
        feed.round(tensors)
        assert take.groups == ["0", "1", "2"]
        assert all(torch.equal(call[g][n], tensors[n]) for call in take.calls for g in call for n in call[g])


def test_a_layer_is_put_together_in_the_memory_of_the_last_one() -> None:
    tensors = layers(8)
    take = Taker()
    feed = Feed(tensors, own_groups(tensors), take, capacity=240)
    feed.round(tensors)
    assert (len(set(take.places)), feed.staging.peak_bytes) == (1, 240)
    take.places.clear()
    feed.round(tensors)
    assert (len(set(take.places)), feed.staging.peak_bytes) == (1, 240), "and so is the next round"


@pytest.mark.parametrize("capacity", [64, 100, 1000])
def test_the_memory_is_bounded_by_what_is_open_and_not_by_the_model(capacity: int) -> None:
    tensors = layers(40)
    feed = Feed(tensors, own_groups(tensors), Taker(), capacity)
    feed.round(tensors)
    open_at_once = 1 + -(-capacity // 240)
    assert 240 <= feed.staging.peak_bytes <= 240 * open_at_once
    feed.round(tensors, at_least=480)
    assert feed.staging.peak_bytes <= 240 * (open_at_once + 2)


def test_memory_of_a_size_that_does_not_come_again_is_not_kept() -> None:
    tensors = {f"{rows}.weight": torch.randn(rows, 10) for rows in range(1, 21)}
    feed = Feed(tensors, own_groups(tensors), Taker(), capacity=800)
    feed.round(tensors)
    assert feed.staging.peak_bytes <= 3 * 800, "all of them are 8400 bytes"


def test_pairs_of_unequal_tensors_are_reused_by_size() -> None:
    tensors = {f"{n}.{part}": torch.randn(size, 4) for n in range(6) for part, size in (("a", 4), ("b", 12))}
    take = Taker()
    feed = Feed(tensors, {str(n): (f"{n}.a", f"{n}.b") for n in range(6)}, take, capacity=256)
    feed.round(tensors)
    assert feed.staging.peak_bytes <= 2 * (64 + 192)
    assert all(torch.equal(t, tensors[n]) for call in take.calls for group in call.values() for n, t in group.items())


KEEPS: dict[str, Callable[[torch.Tensor], object]] = {
    "the tensor": lambda tensor: tensor,
    "a view": lambda tensor: tensor[2:, 1],
    "an array": lambda tensor: tensor.numpy(),
}


@pytest.mark.parametrize("what", KEEPS)
def test_memory_that_the_taker_kept_is_not_written_again(what: str) -> None:
    """It may keep nothing; if it does all the same, its values stay."""
    tensors = layers(6)
    kept: list[object] = []

    def take(groups: Mapping[str, Tensors]) -> None:
        kept.extend(KEEPS[what](tensor) for group, named in groups.items() for tensor in named.values() if group in "03")

    feed = Feed(tensors, own_groups(tensors), take, capacity=240)
    for _ in range(2):
        feed.round(tensors)
    for number, own in zip("0303", kept, strict=True):
        assert torch.equal(torch.as_tensor(own), torch.as_tensor(KEEPS[what](tensors[f"{number}.weight"])))


def test_clear_gives_the_memory_back() -> None:
    tensors = layers(3)
    feed = Feed(tensors, own_groups(tensors), Taker())
    feed.round(tensors)
    feed.staging.clear()
    assert not feed.staging._free
    assert not feed.staging._held
    feed.round(tensors)
