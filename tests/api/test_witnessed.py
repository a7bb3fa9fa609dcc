"""verify= with engines that hold a tensor in another form than it was sent: they show it on its way in (tensors.Witnessed)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from weightlift import State
from weightlift.errors import DigestMismatch, LoaderError
from weightlift.protocol.manifest import Manifest
from weightlift.protocol.plan import Bucket, Plan
from weightlift.sources import MappingSource
from weightlift.sources.base import Source
from weightlift.tensors import Witnessed, bucket_view, entry_of, tensor_view, torch_dtype
from weightlift.testing.pair import Pair, pair

pytestmark = pytest.mark.usefixtures("nothing_left")


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(70, 120, generator=generator).to(torch.bfloat16),
        "scale": torch.randn((), generator=generator),
        "q": torch.randn(40, 60, generator=generator).t(),
        "norm": torch.randn(33, generator=generator),
        "steps": torch.arange(5) + seed,
    }


class Streaming:
    """The same tensors from a source that makes each one anew."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._manifest = Manifest(entry_of(name, tensor) for name, tensor in tensors.items())

    def manifest(self) -> Manifest:
        return self._manifest

    def stream(self) -> Iterator[torch.Tensor]:
        for tensor in self._tensors.values():
            yield tensor.clone()


SOURCES: dict[str, Callable[[Mapping[str, torch.Tensor]], Source]] = {"stable": MappingSource, "streaming": Streaming}
EITHER = pytest.mark.parametrize("kind", SOURCES)
LEVELS = pytest.mark.parametrize("verify", ["sample", "full"])

Shown = Callable[[str, torch.Tensor], "torch.Tensor | None"]


class Packing:
    """An engine that packs some tensors (here: halves them, row by row from the last to the first) and keeps the others as sent.

    shown: what is shown of a packed tensor; None shows nothing. late: show in `finish` what else is shown when it is complete.
    """

    def __init__(self, packed: Sequence[str], *, late: bool = False) -> None:
        self.late = late
        self.shown: Shown = lambda name, tensor: tensor
        self.asked = 0
        self.packed: dict[str, torch.Tensor] = {}
        self.plain = {name: torch.zeros_like(t) for name, t in weights().items() if name not in packed}
        self.targets: dict[str, list[torch.Tensor | Witnessed]] = {
            name: [Witnessed(t.dtype)] if name in packed else [self.plain[name]] for name, t in weights().items()
        }
        self._plan: Plan | None = None
        self._half: dict[str, torch.Tensor] = {}
        self._left: dict[str, int] = {}

    def prepare(self, plan: Plan) -> None:
        self._plan = plan
        entries = plan.manifest.entries
        self._left = {entry.name: entry.nbytes for entry in entries}
        self._half = {e.name: torch.empty(e.shape, dtype=torch_dtype(e.dtype)) for e in entries if e.name not in self.plain}

    def live(self) -> Mapping[str, Sequence[torch.Tensor | Witnessed]]:
        self.asked += 1
        return self.targets

    def install(self, bucket: Bucket, memory: torch.Tensor) -> None:
        assert self._plan is not None
        for piece in bucket.pieces:
            entry = self._plan.manifest.entries[piece.entry]
            into = [t for t in self.targets[entry.name] if isinstance(t, torch.Tensor)]
            if entry.name in self._half:
                into.append(self._half[entry.name])
            for tensor in into:
                tensor_view(tensor, piece).copy_(bucket_view(memory, entry, piece))
            self._left[entry.name] -= piece.nbytes
            if not self._left[entry.name] and not self.late:
                self._pack(entry.name)

    def _pack(self, name: str) -> None:
        tensor = self._half.pop(name, None)
        if tensor is None:
            return
        seen = self.shown(name, tensor)
        for one in self.targets[name]:
            if isinstance(one, Witnessed) and seen is not None:
                one.show(seen)
        self.packed[name] = (tensor / 2).flip(0) if tensor.ndim else tensor / 2
        tensor.zero_()  # gone, as packing in place would have it

    def finish(self) -> None:
        if any(self._left.values()):
            raise LoaderError("a tensor did not arrive completely")
        for name in [*self._half]:
            self._pack(name)

    def commit(self, version: int) -> None:
        pass

    def abort(self) -> None:
        self._half.clear()

    def check(self, sent: Mapping[str, torch.Tensor]) -> None:
        """The engine holds these, in its own form."""
        for name, tensor in sent.items():
            own = self.plain.get(name)
            if own is None:
                own = self.packed[name].flip(0) * 2 if tensor.ndim else self.packed[name] * 2
            assert torch.equal(own, tensor), name


SOME = ("embed", "scale", "norm")
WHICH = pytest.mark.parametrize("packed", [SOME, ("q",), tuple(name for name in weights() if name != "steps")], ids="+".join)


def synced(kind: str, loader: Packing, verify: str, **more: Any) -> Any:
    return pair(SOURCES[kind](weights()), loader, verify=verify, **more)


def mismatch(ends: Pair, version: int, tensor: str) -> DigestMismatch:
    """A round that ends with a DigestMismatch of one tensor, on both sides, and nothing served."""
    outcome = ends.sync(version)
    for error in (outcome.error, outcome.failed["engine"]):
        assert isinstance(error, DigestMismatch)
        assert f"{tensor} has other bytes in engine than in the trainer" in error.message
        assert (error.tensor, error.peer, error.version, error.phase) == (tensor, "engine", version, "RELEASE")
    assert ends.subscribers[0].state is State.TORN
    assert isinstance(outcome.error, DigestMismatch)
    return outcome.error


@EITHER
@LEVELS
@WHICH
@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_a_good_round_commits_and_so_does_the_next(kind: str, verify: str, packed: Sequence[str], transport: str) -> None:
    sent, loader = weights(), Packing(packed)
    with pair(SOURCES[kind](sent), loader, transport=transport, verify=verify) as ends:
        for version in (1, 2, 3):
            for name, tensor in weights(version).items():
                sent[name].copy_(tensor)
            outcome = ends.sync(version).raise_any()
            assert outcome.report is not None
            assert (outcome.report.verify, outcome.pulled["engine"].verify, loader.asked) == (verify, verify, version)
            assert ends.subscribers[0].version == version
            loader.check(sent)


@LEVELS
def test_what_is_shown_in_finish_is_in_time(verify: str) -> None:
    loader = Packing(SOME, late=True)
    with synced("stable", loader, verify) as ends:
        ends.sync(1).raise_any()
        loader.shown = lambda name, tensor: tensor + 1 if name == "norm" else tensor
        mismatch(ends, 2, "norm")


@EITHER
@LEVELS
@pytest.mark.parametrize("name", SOME)
def test_other_bytes_than_were_sent_are_named_and_a_full_sync_heals(kind: str, verify: str, name: str) -> None:
    loader = Packing(SOME)
    with synced(kind, loader, verify) as ends:
        ends.sync(1).raise_any()
        loader.shown = lambda which, tensor: tensor + 1 if which == name else tensor
        error = mismatch(ends, 2, name)
        assert "so have" not in error.message
        assert error.report.replicas == {"engine": None}
        assert ends.publisher.version == 1
        loader.shown = lambda which, tensor: tensor
        assert ends.sync(2).raise_any().report is not None
        assert (ends.subscribers[0].state, ends.subscribers[0].version) == (State.SERVING, 2)
        loader.check(weights())


@EITHER
def test_a_single_element_is_enough_for_a_full_comparison(kind: str) -> None:
    def altered(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "embed":
            tensor[69, 119] = 77.0
        return tensor

    loader = Packing(SOME)
    loader.shown = altered
    with synced(kind, loader, "full") as ends:
        mismatch(ends, 1, "embed")


@EITHER
@LEVELS
def test_what_is_never_shown_is_a_difference(kind: str, verify: str) -> None:
    loader = Packing(SOME)
    loader.shown = lambda name, tensor: None if name == "scale" else tensor
    with synced(kind, loader, verify) as ends:
        mismatch(ends, 1, "scale")


@EITHER
@LEVELS
def test_what_was_shown_in_an_earlier_round_does_not_count(kind: str, verify: str) -> None:
    """The same values again: only that nothing was shown tells the rounds apart."""
    loader = Packing(SOME)
    with synced(kind, loader, verify) as ends:
        ends.sync(1).raise_any()
        loader.shown = lambda name, tensor: None if name == "norm" else tensor
        mismatch(ends, 2, "norm")


@EITHER
def test_nothing_shown_at_all_is_a_difference(kind: str) -> None:
    loader = Packing([*weights()])
    loader.shown = lambda name, tensor: None
    with synced(kind, loader, "full") as ends:
        mismatch(ends, 1, "embed")


@EITHER
def test_off_asks_nobody_and_sees_nothing(kind: str) -> None:
    loader = Packing(SOME)
    loader.shown = lambda name, tensor: tensor + 1
    with synced(kind, loader, "off") as ends:
        for version in (1, 2):
            ends.sync(version).raise_any()
    assert loader.asked == 0
    assert all(one.see is None for shown in loader.targets.values() for one in shown if isinstance(one, Witnessed))
    loader.check(weights())


@EITHER
@pytest.mark.parametrize("strides", [lambda t: t.t().contiguous().t(), lambda t: t.repeat_interleave(2, 0)[::2]])
def test_strides_do_not_matter(kind: str, strides: Callable[[torch.Tensor], torch.Tensor]) -> None:
    loader = Packing(SOME)
    loader.shown = lambda name, tensor: strides(tensor) if name == "embed" else tensor
    with synced(kind, loader, "full") as ends:
        ends.sync(1).raise_any()


@EITHER
def test_a_tensor_that_is_kept_as_it_is_and_packed_as_well_is_compared_twice(kind: str) -> None:
    loader = Packing(SOME)
    copy = torch.zeros(70, 120, dtype=torch.bfloat16)
    loader.targets["embed"].append(copy)
    with synced(kind, loader, "full") as ends:
        ends.sync(1).raise_any()
        assert torch.equal(copy, weights()["embed"])
        loader.shown = lambda name, tensor: tensor + 1 if name == "embed" else tensor
        mismatch(ends, 2, "embed")
        loader.shown = lambda name, tensor: tensor
        ends.sync(3).raise_any()
        moved = torch.zeros_like(copy)
        loader.targets = {**loader.targets, "embed": [loader.targets["embed"][0], moved]}
        copy.fill_(7)
        ends.sync(4).raise_any()
        assert torch.equal(moved, weights()["embed"])


@EITHER
@pytest.mark.parametrize(("name", "index"), [("q", (59, 39)), ("steps", (4,))])
def test_a_live_tensor_among_witnessed_ones_is_still_named_with_its_place(kind: str, name: str, index: tuple[int, ...]) -> None:
    class Corrupting(Packing):
        def finish(self) -> None:
            super().finish()
            self.plain[name][index] = 77

    with synced(kind, Corrupting(SOME), "full") as ends:
        error = ends.sync(1).error
        assert isinstance(error, DigestMismatch)
        assert error.tensor == name
        assert f"{name}{[*index]} is {weights()[name][index].item()} in the trainer and 77" in error.message


@EITHER
def test_the_other_replica_commits(kind: str) -> None:
    bad, good = Packing(SOME), Packing(["q"])
    bad.shown = lambda name, tensor: tensor + 1
    with pair(SOURCES[kind](weights()), {"bad": bad, "good": good}, min_replicas=1, verify="full") as ends:
        report = ends.sync(1).report
        assert report is not None
        assert report.replicas == {"bad": None, "good": 1}
        assert "embed has other bytes in bad than in the trainer" in report.fenced["bad"]
        good.check(weights())
