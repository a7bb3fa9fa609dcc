"""Source and loader contracts, and bit-exactness of every odd tensor through the real path, over every transport."""

import pytest
import torch
from torch import nn

from weightlift.loaders import MappingLoader, ModuleLoader
from weightlift.sources import MappingSource, ModuleSource
from weightlift.testing.contracts import LoaderContract, SourceContract, odd_tensors, same_bits
from weightlift.testing.pair import pair


class Tied(nn.Module):
    """A small language model in outline: tied head, a frozen parameter, all kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("inv_freq", torch.arange(3.0), persistent=False)


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    skipped = {"inv_freq"}
    named = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    return {name: tensor for name, tensor in named.items() if name not in skipped}


class TestModuleSource(SourceContract):
    def source(self) -> tuple[ModuleSource, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        module = Tied()
        source = ModuleSource(module)
        expected = tensors_of(module)
        return source, {name: expected[name] for name in source.manifest().by_name}


class TestMappingSource(SourceContract):
    def source(self) -> tuple[MappingSource, dict[str, torch.Tensor]]:
        tensors = odd_tensors()
        return MappingSource(tensors), tensors


class TestModuleSourceWithCast(SourceContract):
    def source(self) -> tuple[ModuleSource, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        module = Tied()
        source = ModuleSource(module, dtype="bf16")
        expected = tensors_of(module)
        return source, {name: expected[name] for name in source.manifest().by_name}


class TestMappingLoader(LoaderContract):
    def loader(self, tensors: dict[str, torch.Tensor]) -> MappingLoader:
        return MappingLoader(tensors)


class TestModuleLoader(LoaderContract):
    def loader(self, tensors: dict[str, torch.Tensor]) -> ModuleLoader:
        module = nn.Module()
        for name, tensor in tensors.items():
            module.register_buffer(name, tensor)
        return ModuleLoader(module)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("transport", ["memory", "shm"])
@pytest.mark.parametrize(("slot_bytes", "slots"), [(16, 1), (64, 2), (1000, 3), (1 << 20, 4)])
def test_odd_tensors_arrive_bit_for_bit(transport: str, slot_bytes: int, slots: int) -> None:
    sent = odd_tensors()
    held = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in sent.items()}
    with pair(MappingSource(sent), MappingLoader(held), transport=transport, slot_bytes=slot_bytes, slots=slots) as ends:
        for version in (1, 2):
            for tensor in held.values():
                tensor.zero_()
            report = ends.sync(version).raise_any().report
            assert report is not None
            assert report.transport == transport
            wrong = [name for name in sent if not same_bits(sent[name], held[name])]
            assert wrong == []


@pytest.mark.usefixtures("nothing_left")
def test_strided_destinations_are_filled_in_place() -> None:
    sent = {"a": torch.rand(6, 4), "b": torch.rand(5)}
    base_a, base_b = torch.zeros(4, 6), torch.zeros(10)
    held = {"a": base_a.t(), "b": base_b[::2]}
    with pair(MappingSource(sent), MappingLoader(held)) as ends:
        ends.sync(1).raise_any()
    assert torch.equal(base_a.t(), sent["a"])
    assert torch.equal(base_b[::2], sent["b"])
    assert not base_b[1::2].any()


@pytest.mark.usefixtures("nothing_left")
def test_a_module_arrives_whole_and_in_place() -> None:
    torch.manual_seed(0)
    trainer = Tied()
    torch.manual_seed(1)
    engine = Tied()
    engine.inv_freq.fill_(-1.0)
    pointers = {name: tensor.data_ptr() for name, tensor in tensors_of(engine).items()}
    view = engine.embed.weight.view(-1)
    with pair(ModuleSource(trainer), ModuleLoader(engine)) as ends:
        for version in (1, 2):
            with torch.no_grad():
                for tensor in tensors_of(trainer).values():
                    tensor.add_(1)
            ends.sync(version).raise_any()
            assert all(same_bits(a, b) for a, b in zip(tensors_of(trainer).values(), tensors_of(engine).values(), strict=True))
    assert {name: tensor.data_ptr() for name, tensor in tensors_of(engine).items()} == pointers
    assert torch.equal(view, trainer.embed.weight.view(-1))
    assert engine.head.weight is engine.embed.weight
    assert torch.equal(engine.inv_freq, torch.full((3,), -1.0)), "a non-persistent buffer is not part of a sync"
