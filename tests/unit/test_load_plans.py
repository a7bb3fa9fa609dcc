"""loaders/replay.py: what is complete, what is refused, and which modules are replayed as plain copies."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from toy_engines import (
    CHECKPOINT,
    LAYOUT,
    LAYOUTS,
    Decoder,
    Layer,
    Weights,
    each,
    held,
    manifest_of,
    plain,
    planned,
    scaled,
    watched,
)
from weightlift.errors import (
    DtypeMismatch,
    DuplicateParameter,
    ManifestError,
    MissingParameter,
    UnexpectedParameter,
)
from weightlift.loaders.match import CastPolicy
from weightlift.loaders.replay import checkpoint_names
from weightlift.protocol.manifest import Entry, Manifest


@LAYOUT
def test_a_complete_checkpoint_passes(layout: str) -> None:
    plan = planned(LAYOUTS[layout], manifest_of(CHECKPOINT, lm_head="embed"))
    names = {module.path: module.names for module in plan.modules}
    assert names["qkv"] == ("q.weight", "k.weight", "v.weight")
    assert names["gate_up"] == ("gate.weight", "up.weight")
    assert names["experts"] == tuple(name for name in CHECKPOINT if name.startswith("experts."))
    assert names["embed"] == ("embed.weight",)
    assert ("lm_head" in names) == (layout != "tied")
    assert plan.copies == len(CHECKPOINT) - (layout == "tied")


def test_whole_tells_where_a_sent_tensor_lies() -> None:
    whole = {module.path: module.whole for module in planned(Decoder, manifest_of(CHECKPOINT)).modules}
    assert whole["qkv"] == {
        "q.weight": (("qkv.weight", (0, (6, 4), (4, 1))),),
        "k.weight": (("qkv.weight", (24, (2, 4), (4, 1))),),
        "v.weight": (("qkv.weight", (32, (2, 4), (4, 1))),),
    }
    assert whole["router"] == {"router.weight": (("router.weight", (0, (2, 4), (1, 2))),)}, "stored transposed"
    assert whole["embed"] == {"embed.weight": (("embed.weight", (0, (5, 4), (4, 1))),)}, "without the padding"
    assert whole["experts"] is not None
    assert whole["experts"]["experts.1.up.weight"] == (("experts.w13", (72, (6, 4), (4, 1))),)
    assert whole["experts"]["experts.1.down.weight"] == (("experts.w2", (24, (4, 6), (6, 1))),)


def test_whole_is_none_where_a_rank_takes_a_slice() -> None:
    whole = {m.path: m.whole for m in planned(LAYOUTS["rank 1 of 2"], manifest_of(CHECKPOINT)).modules}
    assert {path for path, places in whole.items() if places is not None} == {"router", "norm"}


def test_one_computed_parameter_makes_its_module_go_through_the_loader() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixed, self.simple = held(2), held(2)
            self.mixed.bias = nn.Parameter(torch.empty(2, dtype=torch.bfloat16), requires_grad=False)

        def load_weights(self, weights: Weights) -> None:
            for name, loaded in weights:
                self.get_parameter(name).data.copy_(loaded * 2 if name == "mixed.bias" else loaded)

    plan = planned(Two, manifest_of({"mixed.weight": (2,), "mixed.bias": (2,), "simple.weight": (2,)}))
    assert {m.path: m.whole is None for m in plan.modules} == {"mixed": True, "simple": False}


def test_a_tensor_that_fills_two_parameters_has_two_places() -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = held(2, 3)
            self.layer.copy = nn.Parameter(torch.empty(3, 2, dtype=torch.bfloat16), requires_grad=False)

        def load_weights(self, weights: Weights) -> None:
            for _, loaded in weights:
                self.layer.weight.data.copy_(loaded)
                self.layer.copy.data.copy_(loaded.t())

    (module,) = planned(Doubled, manifest_of({"layer.weight": (2, 3)})).modules
    assert module.whole == {"layer.weight": (("layer.weight", (0, (2, 3), (3, 1))), ("layer.copy", (0, (2, 3), (1, 2))))}


def test_a_name_that_the_loader_skips_in_silence_is_unexpected() -> None:
    manifest = manifest_of({**CHECKPOINT, "rotary.weight": (4,)})
    with pytest.raises(UnexpectedParameter, match=r"1 of 17 sent tensors are not taken .*rotary\.weight") as caught:
        planned(Decoder, manifest)
    assert caught.value.tensor == "rotary.weight"
    assert planned(Decoder, manifest, elsewhere=True).modules == planned(Decoder, manifest_of(CHECKPOINT)).modules


def test_an_empty_tensor_that_nobody_takes_is_not_missed() -> None:
    planned(Decoder, manifest_of({**CHECKPOINT, "rotary.weight": (0, 4)}))


@pytest.mark.parametrize(
    ("left_out", "parameter", "how"),
    [
        ("norm.weight", "norm.weight", "not sent"),
        ("k.weight", "qkv.weight", "sent in part only"),
        ("up.weight", "gate_up.weight", "sent in part only"),
        ("experts.1.gate.weight", "experts.w13", "sent in part only"),
        ("experts.0.down.weight", "experts.w2", "sent in part only"),
        ("embed.weight", "embed.weight", "not sent"),
    ],
)
@LAYOUT
def test_a_parameter_that_is_not_sent_or_in_part_only_is_missing(layout: str, left_out: str, parameter: str, how: str) -> None:
    manifest = manifest_of({name: shape for name, shape in CHECKPOINT.items() if name != left_out})
    with pytest.raises(MissingParameter, match=f"1 of the engine's .* parameters are {how}: {parameter}") as caught:
        planned(LAYOUTS[layout], manifest, elsewhere=True)
    assert caught.value.tensor == parameter


def test_an_optional_parameter_may_be_left_out_and_not_in_part() -> None:
    manifest = manifest_of({name: shape for name, shape in CHECKPOINT.items() if name not in ("norm.weight", "q.weight")})
    with pytest.raises(MissingParameter) as caught:
        planned(Decoder, manifest, optional={"norm.weight", "qkv.weight"})
    assert caught.value.tensor == "qkv.weight"


def test_a_loader_that_leaves_part_of_a_parameter_out_is_refused() -> None:
    load = each(lambda param, loaded: param[:, :2].copy_(loaded[:, :2]))
    with pytest.raises(MissingParameter, match=r"sent in part only: layer\.weight"):
        planned(lambda: Layer(load, 4, 3), manifest_of({"layer.weight": (4, 3)}, "float32"))


def _overlap(param: torch.Tensor, weights: Weights) -> None:
    (_, first), (_, second) = weights
    param[:3].copy_(first)
    param[2:].copy_(second)


def _flat_overlap(param: torch.Tensor, weights: Weights) -> None:
    """As many elements as there are, but one row twice and another not at all."""
    (_, first), (_, second) = weights
    param.view(-1)[:9].copy_(first.view(-1))
    param.view(-1)[6:9].copy_(second.view(-1)[:3])


@pytest.mark.parametrize("load", [_overlap, _flat_overlap])
def test_a_part_that_is_written_twice_is_refused(load: Callable[[torch.Tensor, Weights], object]) -> None:
    manifest = manifest_of({"layer.a": (3, 3), "layer.b": (2, 3)}, "float32")
    with pytest.raises(ManifestError, match=r"writes part of layer\.weight twice, once from layer\.[ab]") as caught:
        planned(lambda: Layer(load, 4, 3), manifest)
    assert type(caught.value) is ManifestError
    assert caught.value.tensor in manifest.by_name


def test_what_is_written_twice_is_named_as_it_was_sent() -> None:
    manifest = manifest_of({"layer.a.base_layer.weight": (3, 3), "layer.b.base_layer.weight": (2, 3)}, "float32")
    with pytest.raises(ManifestError, match="twice") as caught:
        planned(lambda: Layer(_overlap, 4, 3), manifest)
    assert caught.value.tensor in manifest.by_name


@pytest.mark.parametrize(
    ("sent", "own", "allowed"),
    [
        ("float32", torch.bfloat16, {"float"}),
        ("bfloat16", torch.float32, {"lossless", "float"}),
        ("float16", torch.bfloat16, {"float"}),
        ("float8_e4m3fn", torch.bfloat16, set()),
        ("int32", torch.float32, set()),
    ],
)
def test_a_dtype_that_the_engine_would_round_is_refused(sent: str, own: torch.dtype, allowed: set[CastPolicy]) -> None:
    manifest = manifest_of({"layer.weight": (4, 3)}, sent)
    policies: tuple[CastPolicy, ...] = ("never", "lossless", "float")
    for policy in policies:
        if policy in allowed:
            (module,) = planned(lambda: Layer(each(plain), 4, 3, dtype=own), manifest, cast=policy).modules
            assert module.whole is None, "the engine's own loader casts"
        else:
            with pytest.raises(DtypeMismatch, match=f"layer.weight is sent as {sent}, the engine holds") as caught:
                planned(lambda: Layer(each(plain), 4, 3, dtype=own), manifest, cast=policy)
            assert caught.value.tensor == "layer.weight"


def test_a_tensor_that_is_dequantised_is_not_said_to_be_sent_in_the_dtype_of_the_product() -> None:
    manifest = Manifest([Entry("layer.weight", "float8_e4m3fn", (4, 3)), Entry("layer.scale", "float32", (4, 1))])
    found, _ = watched(lambda: Layer(scaled, 4, 3, dtype=torch.bfloat16), manifest)
    assert found.computed == {"layer.weight": {"layer.weight", "layer.scale"}}
    assert ("layer.weight", "float32", "bfloat16") not in found.casts


def test_an_alias_that_a_tied_engine_ignores_loses_nothing() -> None:
    plan = planned(LAYOUTS["tied"], manifest_of(CHECKPOINT, lm_head="embed"))
    assert "lm_head" not in {module.path for module in plan.modules}


def test_an_own_tensor_that_a_tied_engine_ignores_is_lost() -> None:
    with pytest.raises(UnexpectedParameter) as caught:
        planned(LAYOUTS["tied"], manifest_of(CHECKPOINT))
    assert caught.value.tensor == "lm_head.weight"


@pytest.mark.parametrize("owner", ["embed", "lm_head"])
def test_an_alias_resolves_in_an_engine_that_holds_both(owner: str) -> None:
    alias = {"embed": "lm_head", "lm_head": "embed"}[owner]
    modules = {m.path: m for m in planned(Decoder, manifest_of(CHECKPOINT, **{alias: owner})).modules}
    for name in ("embed", "lm_head"):
        assert modules[name].names == (f"{name}.weight",)
        assert modules[name].whole == {f"{name}.weight": ((f"{name}.weight", (0, (5, 4), (4, 1))),)}


def test_a_tied_engine_may_take_the_bytes_under_the_name_of_the_alias() -> None:
    """Sent as lm_head, with embed as its alias: the engine knows embed only."""
    (module,) = [m for m in planned(LAYOUTS["tied"], manifest_of(CHECKPOINT, embed="lm_head")).modules if m.path == "embed"]
    assert module.names == ("embed.weight",)


# --- names of LoRA wrappers (field report B11) ----------------------------------------------------------------------------------


def wrapped(name: str) -> str:
    stem, _, leaf = name.rpartition(".")
    return f"{stem}.base_layer.{leaf}"


SENDERS: dict[str, Callable[[str], bool]] = {
    "plain": lambda name: False,
    "all linears": lambda name: "norm" not in name and "embed" not in name,
    "everything": lambda name: True,
    "mixed": lambda name: name.startswith(("q.", "router.", "experts.1.")),
}


@pytest.mark.parametrize("sender", SENDERS)
@LAYOUT
def test_names_with_and_without_base_layer_give_the_same_plan(sender: str, layout: str) -> None:
    sent = {name: wrapped(name) if SENDERS[sender](name) else name for name in CHECKPOINT}
    aliases = {sent["lm_head.weight"]: sent["embed.weight"]}
    manifest = Manifest(Entry(sent[n], "bfloat16", shape, aliases.get(sent[n], "")) for n, shape in CHECKPOINT.items())
    plan, expected = planned(LAYOUTS[layout], manifest), planned(LAYOUTS[layout], manifest_of(CHECKPOINT, lm_head="embed"))
    assert plan.copies == expected.copies
    for module, other in zip(plan.modules, expected.modules, strict=True):
        assert (module.path, module.names) == (other.path, tuple(sent[name] for name in other.names))
        assert module.whole == (None if other.whole is None else {sent[name]: places for name, places in other.whole.items()})


def test_one_segment_is_dropped_of_a_name_that_has_two() -> None:
    names = {
        "a.base_layer.b.base_layer.weight": "a.b.base_layer.weight",
        "a.base_layer.base_layer.weight": "a.base_layer.weight",
        "my_base_layer.weight": "my_base_layer.weight",
    }
    assert checkpoint_names(manifest_of(dict.fromkeys(names, (1,)))) == names


def test_a_name_that_is_sent_with_and_without_base_layer_is_refused() -> None:
    with pytest.raises(DuplicateParameter, match=r"norm\.weight is sent with and without \.base_layer") as caught:
        planned(Decoder, manifest_of({**CHECKPOINT, "norm.base_layer.weight": (4,)}))
    assert caught.value.tensor == "norm.weight"


def test_a_wrapped_name_that_resolves_to_nothing_lists_near_ones() -> None:
    with pytest.raises(UnexpectedParameter, match=r"near: norm\.weight"):
        planned(Decoder, manifest_of({**CHECKPOINT, "model.norm.base_layer.weight": (4,)}))
