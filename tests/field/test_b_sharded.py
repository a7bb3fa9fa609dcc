"""Field reports of groups A, B and "also seen" whose trainer is sharded; the layouts: tests/multiprocess/test_sharded_sources.py."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_crew import reference, stage
from weightlift.sources.gather import Spread
from weightlift.sources.layout import Cut, box_of, elements

# --- B21: uneven and empty shards -----------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Cut | None, ...]]:
    """Any shape on any mesh of up to three dimensions, cut in any way, several times along one axis as well."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    cut = st.none() | st.builds(Cut, st.integers(0, len(shape) - 1), st.booleans())
    return shape, mesh, tuple(draw(cut) for _ in mesh)


def by_chunking(whole: torch.Tensor, mesh: tuple[int, ...], cuts: tuple[Cut | None, ...], at: tuple[int, ...]) -> torch.Tensor:
    """What a rank holds, as a trainer makes it: torch.chunk after torch.chunk, what is marked as last after the others."""
    for last in (False, True):
        for size, cut, index in zip(mesh, cuts, at, strict=True):
            if cut is not None and cut.last is last:
                chunks = torch.chunk(whole, size, cut.axis)
                whole = chunks[index] if index < len(chunks) else whole.narrow(cut.axis, 0, 0)
    return whole


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_b21_every_element_is_where_chunking_puts_it_and_gathered_exactly_once(layout) -> None:  # type: ignore[no-untyped-def]
    shape, mesh, cuts = layout
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    places = list(itertools.product(*map(range, mesh)))
    spread = Spread(shape, mesh, cuts, tuple(range(len(places))))
    for rank, at in enumerate(places):
        part = by_chunking(whole, mesh, cuts, at)
        box = box_of(shape, mesh, cuts, at)
        assert elements(box) == part.numel()
        if part.numel():
            assert torch.equal(whole[tuple(slice(*one) for one in box)], part)
        gathered = torch.zeros(shape, dtype=torch.int64)
        for holder, held in spread.holders(rank).items():
            assert held == spread.box(holder)
            gathered[tuple(slice(*one) for one in held)] += 1
        assert bool((gathered == 1).all()), "an element is missing, or comes twice"


# --- whole trainers -------------------------------------------------------------------------------------------------------------


@pytest.mark.multiprocess
def test_b06_shapes_are_the_logical_ones_and_buckets_are_counted_by_them() -> None:
    """FSDP1 with original parameters: a rank sees empty views of what others hold."""
    with stage("fsdp1", 2) as (ranks, (engine,), model, _):
        engine.pull()
        answers = ranks.ask("publish", version=1)
        engine.join()
        assert {name: tuple(t.shape) for name, t in engine.held.items()} == {n: tuple(t.shape) for n, t in reference(model).items()}
        assert engine.wrong(reference(model)) == []
        least = -(-answers[0]["bytes"] // 512)  # slots of 512 bytes
        assert least <= answers[0]["buckets"] <= 2 * least
        ranks.end()


@pytest.mark.multiprocess
def test_b20_plain_tensors_among_sharded_ones_are_sent_as_they_are() -> None:
    with stage("fsdp2:ignored", 2) as (ranks, (engine,), model, _):
        engine.pull()
        ranks.ask("publish", version=1)
        engine.join()
        assert engine.wrong(reference(model)) == []
        assert {"module.weight", "blocks.0.calls", "head.weight"} <= set(engine.held)
        ranks.end()


@pytest.mark.multiprocess
def test_e03_a_shard_is_never_sent_as_if_it_were_whole() -> None:
    """Two ranks that hold other parts than the layout says are refused before any byte, on both."""
    with stage("fsdp2", 2, lie=True) as (ranks, (engine,), _model, _):
        engine.pull(5.0)
        errors = [answer["error"] for answer in ranks.ask("publish", version=1)]
        assert {error["type"] for error in errors} == {"SourceError"}, errors
        assert all("holds a part of shape" in error["text"] or "other parts" in error["text"] for error in errors), errors
        engine.join()
        assert engine.subscriber.version is None
        assert all(bool((value == 7).all()) for value in engine.held.values()), "nothing was written"


@pytest.mark.multiprocess
def test_e07_training_and_sync_use_communicators_of_their_own() -> None:
    """Fifty rounds while another thread of each rank trains on, at another pace."""
    with stage("fsdp2", 2) as (ranks, (engine,), model, _):
        ranks.tell("busy", rounds=50)
        for version in range(1, 51):
            engine.pull()
            assert engine.join().version == version
        for answer in ranks.hear():
            assert (answer["version"], answer["wrong"], answer["ended"]) == (50, [], True), answer
        assert engine.wrong(reference(model)) == []
        ranks.end()
