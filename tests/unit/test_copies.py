"""copies.py: joined moves, kernels by kind, and addresses that may not be used."""

import pytest
import torch

from weightlift import SourceError
from weightlift.copies import CopyList
from weightlift.protocol.plan import Plan
from weightlift.sources import MappingSource
from weightlift.sources.packing import Packer


def test_neighbours_on_both_sides_become_one_move() -> None:
    source, target = torch.arange(30.0), torch.zeros(30)
    pairs = [(target[i : i + 10], source[i : i + 10]) for i in (0, 10, 20)]
    copies = CopyList(pairs)
    assert len(copies._moves) == 1
    copies.run()
    assert torch.equal(source, target)
    assert len(CopyList([pairs[0], pairs[2]])._moves) == 2
    assert len(CopyList([(target[10:20], source[0:10]), (target[0:10], source[10:20])])._moves) == 2


def test_casts_strides_and_lazy_signs_are_left_to_torch() -> None:
    target = torch.zeros(3, dtype=torch.bfloat16)
    lazy = torch.tensor([1 + 2j, 3 - 1j]).conj()
    imaginary = torch.zeros(2)
    copies = CopyList([(target, torch.ones(3)), (torch.zeros(2, dtype=torch.complex64), lazy), (imaginary, lazy.imag)])
    assert copies._moves == []
    copies.run()
    assert target.tolist() == [1.0, 1.0, 1.0]
    assert imaginary.tolist() == [-2.0, 1.0]


def test_a_list_runs_again_and_again() -> None:
    source, target = torch.zeros(4), torch.ones(4)
    copies = CopyList([(target, source)])
    for value in (1.0, 2.0):
        source.fill_(value)
        copies.run()
        assert target.tolist() == [value] * 4


def test_a_freed_storage_is_an_error_and_not_a_read_of_address_zero() -> None:
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="was freed"):
        CopyList([(torch.zeros(1000), freed)])
    with pytest.raises(RuntimeError, match="was freed"):
        CopyList([(freed, torch.zeros(1000))])


def test_a_storage_that_is_freed_between_two_rounds_is_a_source_error() -> None:
    tensors = {"w": torch.ones(1000)}
    source = MappingSource(tensors)
    plan = Plan(source.manifest(), capacity=1 << 14)
    packer = Packer(source, plan)
    memory = torch.zeros(1 << 14, dtype=torch.uint8)
    packer.begin()
    packer.fill(0, memory)
    tensors["w"].untyped_storage().resize_(0)
    assert source.manifest() is plan.manifest
    with pytest.raises(SourceError, match=r"w cannot be sent.*was freed"):
        packer.begin()  # before a round is announced, not in the middle of it
