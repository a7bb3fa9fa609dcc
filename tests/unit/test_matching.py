"""loaders/match.py and modules.py: what fits what, before any byte; canonical names whatever the wrapping."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from weightlift.errors import ConfigError, DtypeMismatch, ManifestError, MissingParameter, ShapeMismatch, UnexpectedParameter
from weightlift.loaders.match import CastPolicy, Destinations, match
from weightlift.modules import walk
from weightlift.protocol.manifest import Entry, Manifest
from weightlift.sources import MappingSource, ModuleSource


def held(**tensors: torch.Tensor) -> Destinations:
    return Destinations(tensors)


W = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("entries", "own", "error", "text"),
    [
        ([Entry("w", "float32", (3, 2))], held(w=W), ShapeMismatch, r"\[3, 2\], the engine holds \[2, 3\]"),
        ([Entry("w", "float32", ())], held(w=W), ShapeMismatch, r"shape \[\]"),
        ([Entry("w", "float32", (1, 3))], held(w=torch.zeros(5, 3)), ShapeMismatch, r"\[1, 3\]"),
        ([Entry("w", "bfloat16", (2, 3))], held(w=W), DtypeMismatch, "sent as bfloat16, the engine holds float32"),
        ([Entry("w", "float32", (2, 3))], held(w=W, b=W.clone()), MissingParameter, "1 of the engine's 2 .*: b"),
        ([Entry("w", "float32", (2, 3)), Entry("x.w", "float32", (2, 3))], held(w=W), UnexpectedParameter, "1 of 2 .*: x.w"),
    ],
)
def test_refusals_name_the_tensor(entries: list[Entry], own: Destinations, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        match(Manifest(entries), own, "never")


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(2, 3, device="meta"), "has no storage"),
        (torch.zeros(1, 3).expand(2, 3), "is an expanded view"),
        (torch.zeros(()).expand(2, 3), "is an expanded view"),
    ],
)
def test_a_tensor_that_cannot_be_written_is_refused_before_any_byte(tensor: torch.Tensor, text: str) -> None:
    with pytest.raises(ManifestError, match=f"the engine's w .*{text}"):
        match(Manifest([Entry("w", "float32", (2, 3))]), held(w=tensor), "never")


def test_near_matches_are_listed() -> None:
    own = Destinations({"model.layers.0.q.weight": W})
    with pytest.raises(UnexpectedParameter, match=r"layers.0.q.weight \(near: model.layers.0.q.weight\)"):
        match(Manifest([Entry("layers.0.q.weight", "float32", (2, 3))]), own, "never")


@pytest.mark.parametrize(
    ("sent", "own", "allowed"),
    [
        ("bfloat16", torch.float32, {"lossless", "float"}),
        ("float16", torch.float64, {"lossless", "float"}),
        ("float32", torch.bfloat16, {"float"}),
        ("float16", torch.bfloat16, {"float"}),
        ("float32", torch.int8, set()),
        ("int32", torch.int64, set()),
        ("int64", torch.float32, set()),
        ("float8_e4m3fn", torch.bfloat16, set()),
        ("float32", torch.float32, {"never", "lossless", "float"}),
    ],
)
def test_cast_policy(sent: str, own: torch.dtype, allowed: set[CastPolicy]) -> None:
    manifest, policies = Manifest([Entry("w", sent, (2,))]), ("never", "lossless", "float")
    for policy in policies:
        if policy in allowed:
            match(manifest, held(w=torch.zeros(2, dtype=own)), policy)
        else:
            with pytest.raises(DtypeMismatch):
                match(manifest, held(w=torch.zeros(2, dtype=own)), policy)
    with pytest.raises(ConfigError):
        match(manifest, held(w=torch.zeros(2, dtype=own)), "always")  # type: ignore[arg-type]


EMBED, HEAD = torch.zeros(4, 2), torch.ones(4, 2)


@pytest.mark.parametrize("both_names", [True, False], ids=["both names sent", "one name sent"])
@pytest.mark.parametrize("tied", [True, False], ids=["engine tied", "engine holds two storages"])
def test_tied_weights_in_all_four_combinations(both_names: bool, tied: bool) -> None:
    entries = [Entry("embed", "float32", (4, 2))] + ([Entry("head", "float32", (4, 2), "embed")] if both_names else [])
    head = EMBED if tied else HEAD
    own = Destinations({"embed": EMBED, "head": head}, ties={"head": "embed"})
    targets = match(Manifest(entries), own, "never")
    assert list(targets) == ["embed"]
    assert [t.data_ptr() for t in targets["embed"]] == ([EMBED.data_ptr()] if tied else [EMBED.data_ptr(), HEAD.data_ptr()])


def test_untied_tensors_into_one_storage_are_refused() -> None:
    entries = [Entry("embed", "float32", (4, 2)), Entry("head", "float32", (4, 2))]
    with pytest.raises(ManifestError, match="head and embed are sent as two tensors, but the engine holds them in one storage"):
        match(Manifest(entries), held(embed=EMBED, head=EMBED), "never")


def test_one_undeclared_name_does_not_cover_the_other() -> None:
    with pytest.raises(MissingParameter, match="head"):
        match(Manifest([Entry("embed", "float32", (4, 2))]), held(embed=EMBED, head=HEAD), "never")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)  # a genuine child with a wrapper's name
        self.block = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.module(x))


def _checkpointed(net: Net) -> nn.Module:
    net.block[0] = checkpoint_wrapper(net.block[0])
    return net


WRAPPINGS: dict[str, Callable[[Net], nn.Module]] = {
    "bare": lambda net: net,
    "checkpoint inside": _checkpointed,
    "checkpoint outside": checkpoint_wrapper,
    "compile": torch.compile,
    "data parallel": nn.DataParallel,
    "data parallel of compile of checkpoint": lambda net: nn.DataParallel(torch.compile(_checkpointed(net))),
    "compile of checkpoint of data parallel": lambda net: torch.compile(checkpoint_wrapper(nn.DataParallel(net))),
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_names_are_canonical_whatever_the_wrapping(wrapping: str) -> None:
    expected = [name for name, _ in Net().named_parameters()]
    assert "module.weight" in expected
    assert [slot.name for slot in walk(WRAPPINGS[wrapping](Net()))] == expected


def test_a_source_follows_replaced_moved_added_and_removed_tensors() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    source = ModuleSource(net)
    first = source.manifest()
    net[0].weight.data = torch.full((2, 2), 5.0)
    assert source.manifest() is first
    assert source.tensors()[0][0, 0] == 5.0
    net[0].weight = nn.Parameter(torch.full((2, 2), 6.0))
    assert source.manifest() is first, "same structure, same object"
    assert source.tensors()[0][0, 0] == 6.0
    net.add_module("more", nn.Linear(2, 1))
    assert len(source.manifest().entries) == 4
    del net.more
    assert source.manifest() == first


def test_dtype_policy() -> None:
    tensors = {"router.weight": torch.zeros(2), "w": torch.zeros(2), "step": torch.tensor(3)}
    dtypes = [e.dtype for e in MappingSource(tensors, dtype="bf16").manifest().entries]
    assert dtypes == ["bfloat16", "bfloat16", "int64"]
    policy = {r"router": "fp32", r"^w$": torch.bfloat16}
    assert [e.dtype for e in MappingSource(tensors, dtype=policy).manifest().entries] == ["float32", "bfloat16", "int64"]


def test_a_mapping_of_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a mapping of str to tensors"):
        MappingSource({"a": 1}).manifest()  # type: ignore[dict-item]
