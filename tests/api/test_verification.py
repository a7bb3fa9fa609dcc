"""verify= and check_finite=: what an engine holds is compared with what the trainer holds before anybody commits."""

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

from weightlift import Publisher, State, new_address
from weightlift.errors import ConfigError, DigestMismatch, LoaderError, NonFiniteTensor
from weightlift.loaders import MappingLoader
from weightlift.protocol.manifest import Manifest
from weightlift.protocol.plan import Bucket
from weightlift.sources import MappingSource
from weightlift.sources.base import Source
from weightlift.tensors import entry_of
from weightlift.testing.pair import pair

pytestmark = pytest.mark.usefixtures("nothing_left")


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(700, 12, generator=generator),
        "scale": torch.randn((), generator=generator),
        "q": torch.randn(40, 300, generator=generator).t(),
        "empty": torch.empty(0, 3),
        "steps": torch.arange(5) + seed,
    }


class Corrupting(MappingLoader):
    """An engine with a fault: `corrupt` is done to its tensors when everything is installed."""

    corrupt: Callable[[], None] | None = None

    def finish(self) -> None:
        super().finish()
        if self.corrupt is not None:
            self.corrupt()


class Streaming:
    """The same tensors from a source that makes each one anew."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors_ = tensors
        self._manifest = Manifest(entry_of(name, tensor) for name, tensor in tensors.items())

    def manifest(self) -> Manifest:
        return self._manifest

    def stream(self) -> Iterator[torch.Tensor]:
        for tensor in self.tensors_.values():
            yield tensor.clone()


SOURCES: dict[str, Callable[[Mapping[str, torch.Tensor]], Source]] = {"stable": MappingSource, "streaming": Streaming}
EITHER = pytest.mark.parametrize("kind", SOURCES)


def engine(dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """An engine's own tensors: NaN everywhere, other strides, and another dtype where asked for."""
    return {
        name: torch.full(t.shape, float("nan"), dtype=dtype or t.dtype) if t.is_floating_point() else torch.zeros_like(t)
        for name, t in weights().items()
    }


def flip(tensor: torch.Tensor, *index: int) -> Callable[[], None]:
    def corrupt() -> None:
        tensor[index] = 77.0

    return corrupt


@EITHER
@pytest.mark.parametrize("verify", ["off", "sample", "full"])
@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_without_a_fault_nothing_is_found(kind: str, verify: str, transport: str) -> None:
    sent, held = weights(), engine()
    with pair(SOURCES[kind](sent), MappingLoader(held), transport=transport, verify=verify) as ends:
        for version in (1, 2):
            sent["embed"][3, 1] += 1
            outcome = ends.sync(version).raise_any()
            assert outcome.report is not None
            assert (outcome.report.verify, outcome.pulled["engine"].verify) == (verify, verify)
            assert (outcome.report.seconds.verify > 0) == (verify != "off")
            assert all(torch.equal(held[name], sent[name]) for name in sent)


@EITHER
@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_one_changed_element_is_named_with_both_values(kind: str, transport: str) -> None:
    sent, held = weights(), engine()
    loader = Corrupting(held)
    with pair(SOURCES[kind](sent), loader, transport=transport, verify="full") as ends:
        ends.sync(1).raise_any()
        loader.corrupt = flip(held["q"], 270, 38)
        outcome = ends.sync(2)
        place = f"q[270, 38] is {sent['q'][270, 38].item()} in the trainer and 77.0 in engine"
        for error in (outcome.error, outcome.failed["engine"]):
            assert isinstance(error, DigestMismatch)
            assert place in error.message
            assert (error.tensor, error.peer, error.version, error.phase) == ("q", "engine", 2, "RELEASE")
        assert isinstance(outcome.error, DigestMismatch)
        assert outcome.error.report.replicas == {"engine": None}
        assert (ends.subscribers[0].state, ends.publisher.version) == (State.TORN, 1)
        loader.corrupt = None
        assert ends.sync(2).raise_any().report is not None, "and a full sync heals it"
        assert ends.subscribers[0].version == 2


def test_a_scalar_and_an_integer_are_named_too() -> None:
    for name, text in {"scale": "scale is ", "steps": "steps[2] is 2 in the trainer and 77 in engine"}.items():
        held = engine()
        loader = Corrupting(held)
        loader.corrupt = flip(held[name], *([2] if name == "steps" else []))
        with pair(MappingSource(weights()), loader, verify="full") as ends:
            error = ends.sync(1).error
            assert isinstance(error, DigestMismatch)
            assert text in error.message


def test_a_sample_finds_what_is_wrong_with_a_whole_tensor() -> None:
    held = engine()
    loader = Corrupting(held)
    stale = torch.randn(700, 12)
    for corrupt in (
        lambda: held["embed"].copy_(stale),
        lambda: held["embed"].copy_(held["embed"].flip(0)),
        lambda: held["q"].zero_(),
    ):
        loader.corrupt = corrupt
        with pair(MappingSource(weights()), loader, verify="sample") as ends:
            assert isinstance(ends.sync(1).error, DigestMismatch)


class Lazy(MappingLoader):
    """Says that it installed, and does nothing (field report E2)."""

    def install(self, bucket: Bucket, memory: torch.Tensor) -> None:
        self._written[bucket.number] += 1


@pytest.mark.parametrize("verify", ["sample", "full"])
def test_success_is_not_reported_for_bytes_that_never_arrived(verify: str) -> None:
    held = engine()
    with pair(MappingSource(weights()), Lazy(held), verify=verify) as ends:
        outcome = ends.sync(1)
        assert isinstance(outcome.error, DigestMismatch)
        assert "nan in engine" in outcome.error.message
        assert "so have" not in outcome.error.message
        assert ends.publisher.version is None


def test_off_is_off() -> None:
    with pair(MappingSource(weights()), Lazy(engine()), verify="off") as ends:
        ends.sync(1).raise_any()


@EITHER
@pytest.mark.parametrize(("wire", "own", "cast"), [("bfloat16", "float32", "lossless"), ("float32", "bfloat16", "float")])
def test_a_declared_cast_is_no_difference(kind: str, wire: str, own: str, cast: str) -> None:
    floats = {name: t for name, t in weights().items() if name != "steps"}
    sent = {name: t.to(getattr(torch, wire)) for name, t in floats.items()}
    held = {name: t.to(getattr(torch, own)) for name, t in floats.items()}
    loader = Corrupting(held, cast=cast)  # type: ignore[arg-type]
    with pair(SOURCES[kind](sent), loader, verify="full") as ends:
        ends.sync(1).raise_any()
        loader.corrupt = flip(held["embed"], 600, 11)
        error = ends.sync(2).error
        assert isinstance(error, DigestMismatch)
        assert "embed[600, 11]" in error.message
        assert own in error.message


def test_rounding_on_the_wire_is_followed() -> None:
    held = {name: t for name, t in engine().items() if name != "steps"}
    sent = {name: t for name, t in weights().items() if name != "steps"}
    with pair(MappingSource(sent, dtype="bfloat16"), MappingLoader(held, cast="lossless"), verify="full") as ends:
        ends.sync(1).raise_any()
    assert torch.equal(held["embed"], sent["embed"].bfloat16().float())


def test_a_tied_tensor_that_is_stored_apart_is_compared_twice() -> None:
    shared = torch.randn(9, 4)
    held = {"embed": torch.zeros(9, 4), "head": torch.zeros(9, 4)}
    loader = Corrupting(held)
    with pair(MappingSource({"embed": shared, "head": shared}), loader, verify="full") as ends:
        ends.sync(1).raise_any()
        loader.corrupt = flip(held["head"], 8, 3)
        error = ends.sync(2).error
        assert isinstance(error, DigestMismatch)
        assert "embed[8, 3]" in error.message


def test_the_other_replica_commits() -> None:
    held, good = engine(), engine()
    loader = Corrupting(held)
    loader.corrupt = flip(held["embed"], 0, 0)
    with pair(MappingSource(weights()), {"bad": loader, "good": MappingLoader(good)}, min_replicas=1, verify="full") as ends:
        report = ends.sync(1).report
        assert report is not None
        assert report.replicas == {"bad": None, "good": 1}
        assert "embed[0, 0]" in report.fenced["bad"]


class Blind(MappingLoader):
    def live(self) -> dict[str, list[torch.Tensor]]:
        return {}


def test_a_loader_that_shows_nothing_is_refused_before_any_byte() -> None:
    held = engine()
    with pair(MappingSource(weights()), Blind(held), verify="sample") as ends:
        outcome = ends.sync(1)
        assert isinstance(outcome.error, LoaderError)
        assert (outcome.error.tensor, outcome.error.phase) == ("embed", "PREPARE")
        assert bool(held["embed"].isnan().all())


def test_a_wrong_level_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="verify must be off, sample or full, got 'all'"):
        Publisher(MappingSource(weights()), new_address(), verify="all")  # type: ignore[arg-type]


# --- check_finite ---------------------------------------------------------------------------------------------------------------


@EITHER
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("name", ["embed", "q", "scale"])
def test_a_value_that_is_not_finite_is_not_published(kind: str, value: float, name: str) -> None:
    sent, held = weights(), engine()
    with pair(SOURCES[kind](sent), MappingLoader(held), check_finite=True, verify="full") as ends:
        ends.sync(1).raise_any()
        index = {"embed": (699, 11), "q": (3, 4), "scale": ()}[name]
        before, sent[name][index] = sent[name][index].clone(), value
        outcome = ends.sync(2, timeout_s=1.0 if kind == "stable" else 10.0)
        assert isinstance(outcome.error, NonFiniteTensor)
        assert outcome.error.tensor == name
        assert f"{name}{list(index) if index else ''} is {value}" in outcome.error.message
        if kind == "stable":
            assert (ends.subscribers[0].version, ends.subscribers[0].state) == (1, State.SERVING), "nobody was told of a round"
        sent[name][index] = before
        ends.sync(2).raise_any()


def test_without_the_check_it_arrives_and_is_the_same_on_both_sides() -> None:
    sent, held = weights(), engine()
    sent["embed"][1, 1] = float("nan")
    with pair(MappingSource(sent), MappingLoader(held), verify="full") as ends:
        ends.sync(1).raise_any()
    assert bool(held["embed"][1, 1].isnan())
