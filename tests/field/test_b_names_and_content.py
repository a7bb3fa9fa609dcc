"""Field reports, group B: names, layout and content."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from weightlift.errors import DtypeMismatch, DuplicateParameter, ManifestError
from weightlift.loaders import MappingLoader, ModuleLoader
from weightlift.protocol.manifest import Entry, Manifest
from weightlift.sources import MappingSource, ModuleSource
from weightlift.testing.pair import pair

pytestmark = pytest.mark.usefixtures("nothing_left")


class Block(nn.Module):
    """A net with a genuine child that is called like a wrapper's."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.inner = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_b12_wrapped_trainer_bare_engine_and_the_reverse() -> None:
    def wrap(net: Block) -> nn.Module:
        net.inner[0] = checkpoint_wrapper(net.inner[0])
        return nn.DataParallel(torch.compile(net))

    for trainer_wrapped, engine_wrapped in ((True, False), (False, True), (True, True)):
        trainer, engine = Block(), Block()
        expected = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
        source = ModuleSource(wrap(trainer) if trainer_wrapped else trainer)
        loader = ModuleLoader(wrap(engine) if engine_wrapped else engine)
        bare = engine.state_dict() if not engine_wrapped else None
        with pair(source, loader) as ends:
            ends.sync(1).raise_any()
        got = (
            bare if bare is not None else {s.replace("_checkpoint_wrapped_module.", ""): t for s, t in engine.state_dict().items()}
        )
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def test_b15_duplicates_and_aliases_that_are_none() -> None:
    with pytest.raises(DuplicateParameter, match=r"attn\.q occurs twice"):
        Manifest([Entry("attn.q", "float32", (2,)), Entry("attn.k", "float32", (2,)), Entry("attn.q", "float32", (2,))])


@pytest.mark.parametrize("prefix", ["model.embed_tokens", "model.language_model.embed_tokens"])
@pytest.mark.parametrize("engine_tied", [True, False])
def test_b16_a_tied_head_reaches_every_engine(prefix: str, engine_tied: bool) -> None:
    embed = torch.rand(4, 2)
    held_embed = torch.zeros(4, 2)
    held = {f"{prefix}.weight": held_embed, "lm_head.weight": held_embed if engine_tied else torch.zeros(4, 2)}
    with pair(MappingSource({f"{prefix}.weight": embed, "lm_head.weight": embed}), MappingLoader(held)) as ends:
        ends.sync(1).raise_any()
    assert all(torch.equal(tensor, embed) for tensor in held.values())
    ties = {"lm_head.weight": f"{prefix}.weight"}
    for tensor in held.values():
        tensor.zero_()
    with pair(MappingSource({f"{prefix}.weight": embed}), MappingLoader(held, ties=ties)) as ends:
        ends.sync(1).raise_any()
    assert all(torch.equal(tensor, embed) for tensor in held.values())


def test_b16_untied_values_are_not_tied() -> None:
    sent = {"embed": torch.rand(4, 2), "head": torch.rand(4, 2)}
    held = {name: torch.zeros(4, 2) for name in sent}
    with pair(MappingSource(sent), MappingLoader(held, ties={"head": "embed"})) as ends:
        ends.sync(1).raise_any()
    assert torch.equal(held["head"], sent["head"])
    shared = torch.zeros(4, 2)
    with pair(MappingSource(sent), MappingLoader({"embed": shared, "head": shared})) as ends:
        assert type(ends.sync(1).error) is ManifestError
    assert not shared.any()


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))
        self.register_buffer("bias_corr", torch.zeros(4))
        self.register_buffer("running_mean", torch.zeros(2))
        self.register_buffer("num_batches", torch.tensor(0))
        self.register_buffer("inv_freq", torch.zeros(2), persistent=False)


def test_b18_persistent_buffers_are_part_of_a_sync() -> None:
    trainer, engine = Buffers(), Buffers()
    with torch.no_grad():
        for i, tensor in enumerate([*trainer.parameters(), *trainer.buffers()]):
            tensor.fill_(i + 1)
    with pair(ModuleSource(trainer), ModuleLoader(engine)) as ends:
        ends.sync(1).raise_any()
    assert (float(engine.w.detach()[0]), float(engine.bias_corr[0]), float(engine.running_mean[0]), int(engine.num_batches)) == (
        1,
        2,
        3,
        4,
    )
    assert not engine.inv_freq.any()


def test_b19_an_fp32_router_keeps_its_bits() -> None:
    bias = torch.linspace(6.817, 7.063, 238)
    sent = {"router.weight": torch.full((4,), 0.5) + 1e-4, "bias": bias, "w": torch.rand(4)}
    held = {name: torch.zeros_like(tensor) for name, tensor in sent.items()} | {"w": torch.zeros(4, dtype=torch.bfloat16)}
    with pair(MappingSource(sent, dtype="bf16"), MappingLoader(held)) as ends:
        outcome = ends.sync(1)
        assert type(outcome.error) is DtypeMismatch, "a blanket cast may not reach an fp32 destination"
        assert outcome.error.tensor == "router.weight"
    with pair(MappingSource(sent, dtype={"^w$": "bf16"}), MappingLoader(held)) as ends:
        ends.sync(1).raise_any()
    assert torch.equal(held["router.weight"], sent["router.weight"])
    assert len(held["bias"].unique()) == 238


def test_b42_storage_is_filled_and_never_replaced() -> None:
    engine = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    pointers = {name: tensor.data_ptr() for name, tensor in engine.state_dict().items()}
    view, captured = engine[0].weight.detach().view(-1), engine[0].weight
    trainer = copy.deepcopy(engine)
    with pair(ModuleSource(trainer), ModuleLoader(engine)) as ends:
        for version in (1, 2):
            with torch.no_grad():
                trainer[0].weight.add_(1)
            ends.sync(version).raise_any()
            assert torch.equal(view, trainer[0].weight.detach().view(-1))
            assert torch.equal(captured, trainer[0].weight)
    assert {name: tensor.data_ptr() for name, tensor in engine.state_dict().items()} == pointers


def test_syncing_never_changes_trainer_state() -> None:
    torch.manual_seed(0)
    trainer, engine = Buffers(), Buffers()
    optimizer = torch.optim.AdamW(trainer.parameters())
    trainer.w.sum().backward()
    optimizer.step()
    before = copy.deepcopy((trainer.state_dict(), optimizer.state_dict(), trainer.w.grad))
    with pair(ModuleSource(trainer, dtype="bf16"), ModuleLoader(engine)) as ends:
        assert ends.sync(1).error is not None
    with pair(ModuleSource(trainer), ModuleLoader(engine)) as ends:
        ends.sync(1).raise_any()
    after = (trainer.state_dict(), optimizer.state_dict(), trainer.w.grad)
    assert all(torch.equal(before[0][name], tensor) for name, tensor in after[0].items())
    assert str(before[1]) == str(after[1])
    assert torch.equal(before[2], after[2])
    assert trainer.w.requires_grad
