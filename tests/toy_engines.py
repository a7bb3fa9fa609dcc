"""Engines of a few lines whose `load_weights` cuts, stacks and pads as vLLM's does, and what tests do with their loading."""

from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
from torch import nn

from weightlift.loaders.match import CastPolicy
from weightlift.loaders.recording import Recording, record
from weightlift.loaders.replay import LoadPlan, checkpoint_names
from weightlift.protocol.manifest import Entry, Manifest
from weightlift.tensors import torch_dtype

Tensors = Mapping[str, torch.Tensor]
Weights = Iterable[tuple[str, torch.Tensor]]


def held(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A layer with one parameter."""
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    return layer


class Decoder(nn.Module):
    """One layer of a language model, as tensor-parallel rank `rank` of `ranks` holds it."""

    def __init__(self, *, tied: bool = False, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.tied, self.rank, self.ranks = tied, rank, ranks
        self.embed = held(8 // ranks, 4)
        self.qkv = held(10 // ranks, 4)
        self.o = held(4, 6 // ranks)
        self.gate_up = held(12 // ranks, 4)
        self.experts = nn.Module()
        self.experts.w13 = nn.Parameter(torch.empty(2, 12 // ranks, 4, dtype=torch.bfloat16), requires_grad=False)
        self.experts.w2 = nn.Parameter(torch.empty(2, 4, 6 // ranks, dtype=torch.bfloat16), requires_grad=False)
        self.router = held(4, 2)
        self.norm = held(4)
        self.lm_head = self.embed if tied else held(8 // ranks, 4)

    def load_weights(self, weights: Weights) -> None:
        mine = dict(self.named_parameters())
        for name, loaded in weights:
            match name.split("."):
                case ["lm_head", _] if self.tied:
                    continue
                case [("lm_head" | "embed"), _]:
                    self._vocabulary(mine[name], loaded)
                case [("q" | "k" | "v") as part, _]:
                    sizes = [6 // self.ranks, 2 // self.ranks, 2 // self.ranks]
                    mine["qkv.weight"].data.split(sizes)["qkv".index(part)].copy_(self._cut(loaded, 0))
                case [("gate" | "up") as part, _]:
                    self._half(mine["gate_up.weight"].data, part, loaded)
                case ["experts", number, ("gate" | "up") as part, _]:
                    self._half(mine["experts.w13"].data[int(number)], part, loaded)
                case ["experts", number, "down", _]:
                    mine["experts.w2"].data[int(number)].copy_(self._cut(loaded, 1))
                case ["o", _]:
                    mine[name].data.copy_(self._cut(loaded, 1))
                case ["router", _]:
                    mine[name].data.copy_(loaded.t())
                case _ if "rotary" not in name:
                    param = mine[name]
                    assert param.shape == loaded.shape, f"{list(loaded.shape)} into {list(param.shape)}"
                    param.data.copy_(loaded)

    def _cut(self, loaded: torch.Tensor, axis: int) -> torch.Tensor:
        size = loaded.shape[axis] // self.ranks
        return loaded.narrow(axis, self.rank * size, size)

    def _half(self, stacked: torch.Tensor, part: str, loaded: torch.Tensor) -> None:
        stacked.chunk(2)[part == "up"].copy_(self._cut(loaded, 0))

    def _vocabulary(self, param: nn.Parameter, loaded: torch.Tensor) -> None:
        rows = param.shape[0]
        loaded = loaded[self.rank * rows : (self.rank + 1) * rows]
        param.data[: loaded.shape[0]].copy_(loaded)
        param.data[loaded.shape[0] :].fill_(0)


CHECKPOINT = {
    "embed.weight": (5, 4),
    "q.weight": (6, 4),
    "k.weight": (2, 4),
    "v.weight": (2, 4),
    "o.weight": (4, 6),
    "gate.weight": (6, 4),
    "up.weight": (6, 4),
    **{f"experts.{e}.{part}.weight": (6, 4) for e in range(2) for part in ("gate", "up")},
    **{f"experts.{e}.down.weight": (4, 6) for e in range(2)},
    "router.weight": (2, 4),
    "norm.weight": (4,),
    "lm_head.weight": (5, 4),
}
LAYOUTS = {
    "one rank": Decoder,
    "tied": lambda: Decoder(tied=True),
    "rank 0 of 2": lambda: Decoder(rank=0, ranks=2),
    "rank 1 of 2": lambda: Decoder(rank=1, ranks=2),
}
LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)


class Layer(nn.Module):
    """One layer that `load` fills from everything that is sent."""

    def __init__(self, load: Callable[[torch.Tensor, Weights], object], *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layer = held(*shape, dtype=dtype)
        self._load = load

    def load_weights(self, weights: Weights) -> None:
        self._load(self.layer.weight.data, weights)


Loader = Callable[[torch.Tensor, torch.Tensor], object]


def each(load: Loader) -> Callable[[torch.Tensor, Weights], object]:
    """A loader that sees one tensor at a time."""
    return lambda param, weights: [load(param, loaded) for _, loaded in weights]


def plain(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.copy_(loaded)


def scaled(param: torch.Tensor, weights: Weights) -> None:
    """Waits for weight and scale, as a loader that dequantises does."""
    sent = dict(weights)
    param.copy_(sent["layer.weight"].to(torch.float32) * sent["layer.scale"])


def manifest_of(shapes: Mapping[str, tuple[int, ...]], dtype: str = "bfloat16", **alias_of: str) -> Manifest:
    aliases = {f"{name}.weight": f"{owner}.weight" for name, owner in alias_of.items()}
    return Manifest(Entry(name, dtype, shape, aliases.get(name, "")) for name, shape in shapes.items())


def watched(make: Callable[[], nn.Module], manifest: Manifest) -> tuple[Recording, dict[str, torch.Tensor]]:
    """What a twin on the meta device does with the tensors of a manifest, and the twin's parameters."""
    with torch.device("meta"):
        twin = make()
    names = checkpoint_names(manifest)
    incoming = {names[e.name]: torch.empty(e.shape, dtype=torch_dtype(e.dtype), device="meta") for e in manifest.entries}
    parameters = dict(twin.named_parameters())
    return record(twin.load_weights, incoming, parameters), parameters


def planned(
    make: Callable[[], nn.Module],
    manifest: Manifest,
    *,
    optional: Iterable[str] = (),
    elsewhere: bool = False,
    cast: CastPolicy = "lossless",
) -> LoadPlan:
    found, parameters = watched(make, manifest)
    return LoadPlan.of(manifest, found, parameters, optional=frozenset(optional), elsewhere=elsewhere, cast=cast)


def values(manifest: Manifest, seed: int) -> dict[str, torch.Tensor]:
    """Real tensors for a manifest."""
    generator = torch.Generator().manual_seed(seed)
    return {e.name: torch.randn(e.shape, generator=generator).to(torch_dtype(e.dtype)) for e in manifest.entries}


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist())


def replay(found: Recording, sent: Tensors, parameters: Tensors) -> None:
    """Do with real tensors what was recorded with empty ones."""
    for copy in found.copies:
        out_of = sent[copy.source].as_strided(copy.out_of.shape, copy.out_of.strides, copy.out_of.offset)
        parameters[copy.target].data.as_strided(copy.into.shape, copy.into.strides, copy.into.offset).copy_(out_of)


def copy_whole(plan: LoadPlan, sent: Tensors, parameters: Tensors) -> None:
    """Fill every module that a plan says is made of whole tensors."""
    for module in plan.modules:
        for name, places in (module.whole or {}).items():
            for target, view in places:
                parameters[target].data.as_strided(view.shape, view.strides, view.offset).copy_(sent[name])


def twice_loaded(make: Callable[[], nn.Module], manifest: Manifest) -> tuple[nn.Module, nn.Module, dict[str, torch.Tensor]]:
    """An engine with version 2 from its own loader; one with version 1; the tensors of version 2."""
    engines = make(), make()
    for engine in engines:
        engine.load_weights(values(manifest, 1).items())
    sent = values(manifest, 2)
    engines[0].load_weights(sent.items())
    return *engines, sent


def assert_same(one: nn.Module, other: nn.Module) -> None:
    theirs = dict(other.named_parameters())
    differ = [name for name, param in one.named_parameters() if bits(param) != bits(theirs[name])]
    assert not differ
