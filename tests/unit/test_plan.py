"""protocol/plan.py: every byte of every tensor lies in exactly one place, aligned, in order, for any capacity."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightlift.errors import ConfigError
from weightlift.protocol.manifest import ITEM_BYTES, Entry, Manifest
from weightlift.protocol.plan import ALIGNMENT, Plan
from weightlift.tensors import bucket_view, tensor_view

entries = st.lists(
    st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 9), max_size=4)), min_size=1, max_size=12
).map(lambda items: [Entry(f"t{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(items)])


@settings(max_examples=300, deadline=None)
@given(entries, st.integers(16, 700))
def test_pieces_cover_every_tensor_once_in_order(manifest_entries: list[Entry], capacity: int) -> None:
    plan = Plan(Manifest(manifest_entries), capacity=capacity)
    covered: dict[int, list[int]] = {}
    for number, bucket in enumerate(plan.buckets):
        assert bucket.number == number
        assert 0 < bucket.nbytes <= capacity
        end = 0
        for piece in bucket.pieces:
            entry = manifest_entries[piece.entry]
            assert piece.offset % ALIGNMENT == 0
            assert end <= piece.offset < end + ALIGNMENT
            end = piece.offset + piece.nbytes
            index = torch.arange(entry.elements).view(entry.shape)
            part = tensor_view(index, piece)
            assert part.numel() * ITEM_BYTES[entry.dtype] == piece.nbytes
            covered.setdefault(piece.entry, []).extend(part.flatten().tolist())
        assert end == bucket.nbytes
    expected = {i: list(range(e.elements)) for i, e in enumerate(manifest_entries) if e.elements}
    assert covered == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40), st.integers(256, 4096))
def test_buckets_are_filled_to_the_end(sizes: list[int], capacity: int) -> None:
    plan = Plan(Manifest([Entry(f"t{i}", "uint8", (n,)) for i, n in enumerate(sizes)]), capacity=capacity)
    padding = sum(ALIGNMENT for _ in sizes) + ALIGNMENT * len(plan)
    assert len(plan) <= math.ceil((sum(sizes) + padding) / capacity) + 1
    assert len(plan) >= math.ceil(sum(sizes) / capacity)


def test_a_piece_of_a_bucket_has_the_entry_dtype_and_the_piece_shape() -> None:
    entry = Entry("w", "float32", (3, 40))
    plan = Plan(Manifest([entry]), capacity=64)
    memory = torch.zeros(64, dtype=torch.uint8)
    shapes = [tuple(bucket_view(memory, entry, piece).shape) for bucket in plan.buckets for piece in bucket.pieces]
    assert shapes == [(16,), (16,), (8,)] * 3


def test_the_same_three_values_give_the_same_plan() -> None:
    manifest = Manifest([Entry("a", "bfloat16", (100, 7)), Entry("b", "float32", ())])
    assert Plan(manifest, capacity=128).buckets == Plan(manifest, capacity=128).buckets


def test_a_bucket_that_cannot_hold_one_element_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one element of 16 bytes, got a capacity of 8"):
        Plan(Manifest([Entry("z", "complex128", (1,))]), capacity=8)
    with pytest.raises(ConfigError, match="alignment must be a multiple of 4 bytes, got 6"):
        Plan(Manifest([Entry("z", "float32", (1,))]), capacity=64, alignment=6)
