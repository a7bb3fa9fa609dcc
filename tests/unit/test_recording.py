"""loaders/recording.py: what an engine's own loader does, seen on tensors without memory, and done again from what was seen."""

import dataclasses
from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from toy_engines import (
    CHECKPOINT,
    LAYOUT,
    LAYOUTS,
    Decoder,
    Layer,
    Loader,
    Weights,
    assert_same,
    copy_whole,
    each,
    manifest_of,
    plain,
    planned,
    replay,
    scaled,
    twice_loaded,
    values,
    watched,
)
from weightlift.errors import (
    ManifestError,
    MissingParameter,
    ShapeMismatch,
    UnexpectedParameter,
)
from weightlift.loaders.recording import Recording, record
from weightlift.loaders.replay import LoadPlan


@LAYOUT
def test_a_replay_of_the_recorded_copies_is_the_real_load(layout: str) -> None:
    manifest = manifest_of(CHECKPOINT)
    found, _ = watched(LAYOUTS[layout], manifest)
    loaded, replayed, sent = twice_loaded(LAYOUTS[layout], manifest)
    replay(found, sent, dict(replayed.named_parameters()))
    assert_same(replayed, loaded)
    assert not found.computed
    assert found.used == set(CHECKPOINT) - ({"lm_head.weight"} if layout == "tied" else set())


@LAYOUT
def test_whole_tensors_copied_into_their_views_are_the_real_load(layout: str) -> None:
    """What is not whole is filled by the engine's own loader, so that only the others are looked at."""
    manifest = manifest_of(CHECKPOINT, lm_head="embed")
    plan = planned(LAYOUTS[layout], manifest)
    loaded, copied, sent = twice_loaded(LAYOUTS[layout], manifest)
    copy_whole(plan, sent, dict(copied.named_parameters()))
    for module in plan.modules:
        if module.whole is not None:
            assert_same(copied.get_submodule(module.path), loaded.get_submodule(module.path))


@dataclasses.dataclass(frozen=True)
class Box:
    """A box of a parameter, and how it is cut out of the tensor that is sent for it.

    order: the axes of the sent tensor, in those of the parameter. parts, part: each axis is cut in so many equal parts, as for the
    ranks of an engine. before, after: more that is left out on each axis. stack: 0, or how many are stacked along a further axis.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    parts: tuple[int, ...]
    part: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    stack: int

    @property
    def uncut(self) -> bool:
        return not self.stack and not any((*self.before, *self.after)) and set(self.parts) == {1}

    @property
    def sent_shape(self) -> tuple[int, ...]:
        axes = range(len(self.order))
        sizes = [(self.sizes[a] + self.before[a] + self.after[a]) * self.parts[a] for a in axes]
        shape = tuple(sizes[axis] for axis in self.order)
        return (self.stack, *shape) if self.stack else shape

    def load(self, param: torch.Tensor, sent: torch.Tensor) -> None:
        loaded = sent[self.stack - 1] if self.stack else sent
        loaded = loaded.permute(sorted(range(len(self.order)), key=self.order.__getitem__))
        for axis, size in enumerate(self.sizes):
            loaded = loaded.chunk(self.parts[axis], axis)[self.part[axis]].narrow(axis, self.before[axis], size)
            param = param.narrow(axis, self.starts[axis], size)
        param.copy_(loaded)


@st.composite
def slicings(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Box]]:
    """(shape of a parameter, order of its axes in memory, boxes that cover it once)."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    ndim = len(shape)
    tiles: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((0,) * ndim, shape)]
    for _ in range(draw(st.integers(0, 4))):
        starts, sizes = tiles.pop(draw(st.integers(0, len(tiles) - 1)))
        axis = draw(st.integers(0, ndim - 1))
        cut = draw(st.integers(0, sizes[axis]))
        for start, size in ((0, cut), (cut, sizes[axis] - cut)):
            if size:
                one = ((*starts[:axis], starts[axis] + start, *starts[axis + 1 :]), (*sizes[:axis], size, *sizes[axis + 1 :]))
                tiles.append(one)
    axes = st.permutations(range(ndim)).map(tuple)
    clean = draw(st.booleans())
    margins = st.just((0,) * ndim) if clean else st.tuples(*[st.integers(0, 2)] * ndim)
    counts = st.just((1,) * ndim) if clean else st.tuples(*[st.integers(1, 2)] * ndim)
    boxes = []
    for starts, sizes in tiles:
        parts = draw(counts)
        part = tuple(draw(st.integers(0, count - 1)) for count in parts)
        stack = 0 if clean else draw(st.integers(0, 2))
        boxes.append(Box(starts, sizes, draw(axes), parts, part, draw(margins), draw(margins), stack))
    return shape, draw(axes), boxes


def sliced(boxes: Iterable[tuple[int, Box]], param: torch.Tensor) -> Callable[[Weights], None]:
    def load(weights: Weights) -> None:
        sent = dict(weights)
        for number, box in boxes:
            box.load(param, sent[f"w{number}"])

    return load


def laid_out(shape: tuple[int, ...], order: tuple[int, ...], device: str = "cpu") -> torch.Tensor:
    """A tensor of zeros whose axes lie in memory in some order."""
    memory = torch.zeros([shape[axis] for axis in order], device=device)
    return memory.permute(sorted(range(len(order)), key=order.__getitem__))


@settings(max_examples=150, deadline=None)
@given(slicings(), st.data())
def test_any_slicing_is_recorded_exactly_and_judged_right(
    slicing: tuple[tuple[int, ...], tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, order, boxes = slicing
    manifest = manifest_of({f"w{number}": box.sent_shape for number, box in enumerate(boxes)}, "float32")
    sent = values(manifest, 1)
    incoming = {name: tensor.to("meta") for name, tensor in sent.items()}
    twin = {"layer.weight": laid_out(shape, order, "meta")}

    def plan_of(boxes: list[tuple[int, Box]]) -> tuple[Recording, LoadPlan]:
        found = record(sliced(boxes, twin["layer.weight"]), incoming, twin)
        return found, LoadPlan.of(manifest, found, twin, elsewhere=True)

    numbered = list(enumerate(boxes))
    found, plan = plan_of(numbered)
    loaded, replayed, copied = (laid_out(shape, order) for _ in range(3))
    sliced(numbered, loaded)(sent.items())
    replay(found, sent, {"layer.weight": replayed})
    assert torch.equal(replayed, loaded)
    if all(box.uncut for box in boxes):
        assert plan.modules[0].whole is not None
    if plan.modules[0].whole is not None:
        copy_whole(plan, sent, {"layer.weight": copied})
        assert torch.equal(copied, loaded)
    which = data.draw(st.sampled_from(numbered))
    with pytest.raises(ManifestError, match="twice") as caught:
        plan_of([*numbered, which])
    assert type(caught.value) is ManifestError
    with pytest.raises(MissingParameter):
        plan_of([one for one in numbered if one != which])


@pytest.mark.parametrize(
    ("load", "sent", "dtype"),
    [
        (each(lambda param, loaded: param.copy_(loaded.to(torch.float32))), {"layer.weight": (4, 3)}, "bfloat16"),
        (lambda param, weights: param.copy_(torch.cat([w for _, w in weights])), {"layer.a": (2, 3), "layer.b": (2, 3)}, "float32"),
        (scaled, {"layer.weight": (4, 3), "layer.scale": (4, 1)}, "float32"),
    ],
    ids=["casts", "concatenates", "dequantises"],
)
def test_what_a_loader_computes_is_followed_by_name(
    load: Callable[[torch.Tensor, Weights], object], sent: dict[str, tuple[int, ...]], dtype: str
) -> None:
    found, parameters = watched(lambda: Layer(load, 4, 3), manifest_of(sent, dtype))
    assert (found.copies, found.computed) == ((), {"layer.weight": set(sent)})
    assert (found.used, found.feeds()) == (set(sent), {"layer.weight": set(sent)})
    plan = LoadPlan.of(manifest_of(sent, dtype), found, parameters)
    assert [(module.path, module.names, module.whole) for module in plan.modules] == [("layer", tuple(sent), None)]


def _transform(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.copy_(loaded)
    param.copy_(-torch.exp(param.float()))  # vLLM's composed_weight_loader


def _shift(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.copy_(loaded)
    param.add_(1.0)


def _change_sent(param: torch.Tensor, loaded: torch.Tensor) -> None:
    loaded.mul_(2.0)
    param.copy_(loaded)


def _pad(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param[:1].fill_(0.0)
    param[1:3].copy_(loaded)
    param[3:].fill_(1.0)


def _mask(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.copy_(loaded)
    param[0].zero_()


def _repeat(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param[:2].copy_(loaded)
    param[2:].copy_(param[:2])


SUBTLE: dict[str, tuple[Loader, tuple[int, ...], torch.dtype, str]] = {
    "copies": (plain, (4, 3), torch.float32, "float32"),
    "clears first": (lambda param, loaded: param.zero_().copy_(loaded), (4, 3), torch.float32, "float32"),
    "pads on both sides": (_pad, (2, 3), torch.float32, "float32"),
    "casts": (plain, (4, 3), torch.float32, "bfloat16"),
    "makes it contiguous": (lambda param, loaded: param.copy_(loaded.t().contiguous()), (3, 4), torch.float32, "float32"),
    "computes": (lambda param, loaded: param.copy_(loaded + 1.0), (4, 3), torch.float32, "float32"),
    "spreads one row": (plain, (3,), torch.float32, "float32"),
    "copies by index": (lambda param, loaded: param.__setitem__([2, 0, 3, 1], loaded), (4, 3), torch.float32, "float32"),
    "copies in one kernel": (lambda param, loaded: torch._foreach_copy_([param], [loaded]), (4, 3), torch.float32, "float32"),
    "transforms the parameter afterwards": (_transform, (4, 3), torch.float32, "float32"),
    "changes the parameter in place": (_shift, (4, 3), torch.float32, "float32"),
    "changes the sent tensor in place": (_change_sent, (4, 3), torch.float32, "float32"),
    "sets a row to a constant afterwards": (_mask, (4, 3), torch.float32, "float32"),
    "copies one part of a parameter to another": (_repeat, (2, 3), torch.float32, "float32"),
    "sees the bytes as another dtype": (
        lambda param, loaded: param.copy_(loaded.view(torch.uint8)),
        (4, 3),
        torch.uint8,
        "float8_e4m3fn",
    ),
    "sees the bytes of both sides as a third dtype": (
        lambda param, loaded: param.view(torch.uint8).copy_(loaded.view(torch.uint8)),
        (4, 3),
        torch.float8_e4m3fn,
        "int8",
    ),
}


@pytest.mark.parametrize("how", SUBTLE)
def test_a_module_is_replayed_only_where_that_gives_what_the_loader_gives(how: str) -> None:
    load, shape, own, sent_as = SUBTLE[how]

    def make() -> nn.Module:
        return Layer(each(load), 4, 3, dtype=own)

    manifest = manifest_of({"layer.weight": shape}, sent_as)
    plan = planned(make, manifest)
    if plan.modules[0].whole is None:
        return  # the engine's own loader does it
    loaded, copied, _ = twice_loaded(make, manifest)
    copy_whole(plan, values(manifest, 2), dict(copied.named_parameters()))
    assert_same(copied, loaded)


def test_a_write_into_a_parameter_that_is_named_as_out_is_followed() -> None:
    load = each(lambda param, loaded: torch.add(loaded, 1.0, out=param))
    found, _ = watched(lambda: Layer(load, 4, 3), manifest_of({"layer.weight": (4, 3)}, "float32"))
    assert found.computed == {"layer.weight": {"layer.weight"}}


def test_a_constant_is_counted_and_comes_from_nobody() -> None:
    found, _ = watched(Decoder, manifest_of(CHECKPOINT))
    assert found.constants == {"embed.weight": 12, "lm_head.weight": 12}
    assert found.feeds()["embed.weight"] == {"embed.weight"}


def _by_name(param: torch.Tensor, weights: Weights) -> None:
    own = {"layer.weight": param}
    for name, loaded in weights:
        own[name].copy_(loaded)


def _strict(param: torch.Tensor, weights: Weights) -> None:
    for name, _ in weights:
        if name != "layer.weight":
            raise ValueError(f"There is no module or parameter named {name!r} in Layer")


@pytest.mark.parametrize("load", [_by_name, _strict])
def test_a_name_that_the_loader_does_not_know_is_unexpected_and_near_ones_are_listed(
    load: Callable[[torch.Tensor, Weights], object],
) -> None:
    manifest = manifest_of({"layer.weight": (4, 3), "model.layer.weight": (4, 3), "layer.z": (4, 3)}, "float32")
    with pytest.raises(UnexpectedParameter, match=r"refused model\.layer\.weight: .*; near: layer\.weight") as caught:
        planned(lambda: Layer(load, 4, 3), manifest)
    assert caught.value.tensor == "model.layer.weight"
    assert isinstance(caught.value.__cause__, KeyError | ValueError)


@pytest.mark.parametrize(
    ("shape", "text"), [((5,), r"AssertionError: \[5\] into \[4\].*shape \[5\]"), ((1, 4), r"AssertionError: .*shape \[1, 4\]")]
)
def test_a_shape_that_the_loader_asserts_against_is_named(shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(ShapeMismatch, match=f"(?s)refused norm.weight: {text}") as caught:
        planned(Decoder, manifest_of({**CHECKPOINT, "norm.weight": shape}))
    assert caught.value.tensor == "norm.weight"


def test_a_shape_that_does_not_fit_into_its_slice_is_named() -> None:
    with pytest.raises(ShapeMismatch, match=r"refused k.weight: RuntimeError: .*shape \[3, 4\]") as caught:
        planned(Decoder, manifest_of({**CHECKPOINT, "k.weight": (3, 4)}))
    assert caught.value.tensor == "k.weight"


READS: dict[str, Loader] = {
    "item": lambda param, loaded: param.fill_(loaded[0, 0].item()),
    "truth": lambda param, loaded: param.copy_(loaded) if (loaded > 0).any() else None,
    "array": lambda param, loaded: param.copy_(torch.from_numpy(loaded.numpy())),
    "list": lambda param, loaded: param.copy_(torch.tensor(loaded.tolist())),
    "to the host": lambda param, loaded: param.copy_(loaded.to("cpu")),
    "comparison": lambda param, loaded: param.copy_(loaded) if torch.equal(loaded, loaded) else None,
}


@pytest.mark.parametrize("how", READS)
def test_a_loader_that_reads_values_is_refused_and_no_shape_is_blamed(how: str) -> None:
    with pytest.raises(ManifestError, match=r"layer\.weight") as caught:
        planned(lambda: Layer(each(READS[how]), 4, 3), manifest_of({"layer.weight": (4, 3)}, "float32"))
    assert (type(caught.value), caught.value.tensor) == (ManifestError, "layer.weight")


def test_a_tensor_that_was_only_the_last_to_come_is_not_blamed() -> None:
    """Some loaders gather everything first; whatever they raise afterwards is about any of the tensors."""

    def load(param: torch.Tensor, weights: Weights) -> None:
        _by_name(param, list(weights))

    manifest = manifest_of({"layer.z": (4, 3), "layer.weight": (4, 3)}, "float32")
    with pytest.raises(ManifestError, match=r"layer\.z") as caught:
        planned(lambda: Layer(load, 4, 3), manifest)
    assert caught.value.tensor != "layer.weight"
