"""What a callback keeps is its own bytes or is refused; a clean-up that raises hides nothing and leaves nothing."""

from collections.abc import Callable

import numpy
import pytest
import torch

from weightlift import LoaderError, State
from weightlift.errors import ManifestError, SourceError
from weightlift.loaders import CallbackLoader, MappingLoader
from weightlift.protocol.manifest import Manifest
from weightlift.protocol.plan import Bucket
from weightlift.sources import MappingSource
from weightlift.testing.contracts import odd_tensors, same_bits
from weightlift.testing.faults import FaultyLoader, FaultySource, fail_at, raising
from weightlift.testing.pair import pair
from weightlift.testing.toy import tagged
from weightlift.transports.views import lend

pytestmark = pytest.mark.usefixtures("nothing_left")
TRANSPORTS = pytest.mark.parametrize("transport", ["memory", "shm"])

KEEPS: dict[str, Callable[[torch.Tensor], object]] = {
    "the tensor": lambda memory: memory,
    "a slice": lambda memory: memory[8:16],
    "another dtype": lambda memory: memory[:64].view(torch.float32),
    "an array": lambda memory: memory.numpy(),
    "a memoryview": lambda memory: memory.numpy().data,
    "a closure": lambda memory: lambda: memory.sum(),
    "an autograd leaf": lambda memory: torch.nn.Parameter(memory.view(torch.float32), requires_grad=False),
}


class Keeper(MappingLoader):
    """An engine whose install keeps something of bucket 1."""

    caches_views = False

    def __init__(self, tensors: dict[str, torch.Tensor], keep: Callable[[torch.Tensor], object]) -> None:
        super().__init__(tensors)
        self._keep = keep
        self.kept: list[object] = []

    def install(self, bucket: Bucket, memory: torch.Tensor) -> None:
        super().install(bucket, memory)
        self._cached.clear()
        if bucket.number == 1:
            self.kept.append(self._keep(memory))


def test_every_way_of_keeping_is_counted() -> None:
    memory = torch.from_numpy(numpy.zeros(256, dtype=numpy.uint8))
    for name, keep in KEEPS.items():
        kept: list[object] = []
        with pytest.raises(LoaderError, match="kept a view"):
            lend(memory, lambda lent, keep=keep, kept=kept: kept.append(keep(lent)))  # type: ignore[misc]
        assert kept, name
    for copy in (lambda lent: lent.clone(), lambda lent: lent.tolist(), lambda lent: lent.numpy().tobytes(), lambda lent: lent + 1):
        lend(memory, lambda lent, copy=copy: kept.append(copy(lent)))  # type: ignore[misc]


@TRANSPORTS
@pytest.mark.parametrize("what", KEEPS)
def test_a_kept_view_is_refused_at_its_bucket(transport: str, what: str) -> None:
    sent, held = tagged(5, shape=(16, 16)), tagged(-1, shape=(16, 16))
    loader = Keeper(held, KEEPS[what])
    with pair(MappingSource(sent), loader, transport=transport, slot_bytes=1024) as ends:
        outcome = ends.sync(1)
        for error in (outcome.error, outcome.failed["engine"]):
            assert isinstance(error, LoaderError)
            assert "kept a view of a bucket" in error.message
            assert (error.phase, error.bucket, error.tensor, error.peer) == ("TRANSFER", 1, "b", "engine")
        assert ends.subscribers[0].state is State.TORN
        loader._keep = lambda memory: None
        ends.sync(1).raise_any()
        assert ends.subscribers[0].version == 1
        loader.kept.clear()


@TRANSPORTS
@pytest.mark.parametrize(("slot_bytes", "slots"), [(16, 2), (1000, 3), (1 << 20, 4)])
def test_a_callback_gets_whole_tensors_of_its_own(transport: str, slot_bytes: int, slots: int) -> None:
    sent = odd_tensors()
    kept: list[tuple[str, torch.Tensor]] = []
    loader = CallbackLoader(lambda name, tensor: kept.append((name, tensor)))
    with pair(MappingSource(sent), loader, transport=transport, slot_bytes=slot_bytes, slots=slots, verify="off") as ends:
        ends.sync(1).raise_any()
        first = dict(kept)
        assert [name for name, _ in kept] == list(sent)
        assert [name for name in sent if not same_bits(sent[name], first[name])] == []
        before = {name: tensor.clone() for name, tensor in first.items()}
        kept.clear()
        for tensor in sent.values():
            tensor.zero_()
        ends.sync(2).raise_any()
    assert [name for name in before if not same_bits(before[name], first[name])] == [], "what was kept is the application's own"
    assert not any(bool(tensor.float().any()) for _, tensor in kept if not tensor.is_complex())


def test_a_callback_gets_a_tied_tensor_under_one_name_or_under_each() -> None:
    shared = torch.ones(3)
    for aliases, expected in ((False, ["embed"]), (True, ["embed", "head"])):
        names: list[str] = []
        loader = CallbackLoader(lambda name, tensor, names=names: names.append(name), aliases=aliases)  # type: ignore[misc]
        with pair(MappingSource({"embed": shared, "head": shared}), loader, verify="off") as ends:
            ends.sync(1).raise_any()
        assert names == expected


def test_a_callback_that_raises_names_the_tensor_and_one_that_refuses_keeps_the_old_version() -> None:
    sent = tagged(1, names=("a", "b", "c"))

    def load(name: str, tensor: torch.Tensor) -> None:
        if name == "b":
            raise ValueError("bad shape for b")

    def refuse(manifest: Manifest) -> None:
        raise ManifestError("this engine takes nothing", tensor="c")

    with pair(MappingSource(sent), CallbackLoader(load), verify="off", slot_bytes=64) as ends:
        error = ends.sync(1).error
        assert isinstance(error, LoaderError)
        assert (error.tensor, "bad shape for b" in str(error), ends.subscribers[0].state) == ("b", True, State.TORN)
    with pair(MappingSource(sent), CallbackLoader(load, check=refuse), verify="off") as ends:
        error = ends.sync(1).error
        assert type(error) is ManifestError
        assert (error.tensor, ends.subscribers[0].state) == ("c", State.SERVING)


def test_a_callback_is_verified_where_the_engine_shows_its_tensors() -> None:
    sent, held = tagged(1), tagged(-1)

    def load(name: str, tensor: torch.Tensor) -> None:
        held[name].copy_(tensor)

    loader = CallbackLoader(load, live=lambda: {name: [t] for name, t in held.items()})
    with pair(MappingSource(sent), loader, verify="full") as ends:
        report = ends.sync(1).raise_any().report
        assert report is not None
        assert report.verify == "full"
    with pair(MappingSource(sent), CallbackLoader(lambda name, t: None)) as ends:
        error = ends.sync(1).error
        assert isinstance(error, LoaderError)
        assert "live() does not show a" in error.message


@TRANSPORTS
@pytest.mark.parametrize("at", ["prepare", "install", "finish", "commit"])
def test_a_clean_up_that_raises_does_not_hide_the_first_cause(transport: str, at: str) -> None:
    faults = [fail_at(at, raising(KeyError("first"))), fail_at("abort", raising(RuntimeError("second")))]
    loader = FaultyLoader(MappingLoader(tagged(-1)), faults)
    with pair(MappingSource(tagged(1)), loader, transport=transport) as ends:
        outcome = ends.sync(1)
        for error in (outcome.error, outcome.failed["engine"]):
            assert isinstance(error, LoaderError)
            assert "KeyError: 'first'" in error.message
        (note,) = outcome.failed["engine"].__notes__
        assert note == "the clean-up afterwards raised RuntimeError: second"
        ends.sync(1).raise_any()


@TRANSPORTS
def test_a_source_whose_end_raises_does_not_hide_the_first_cause(transport: str) -> None:
    class Clinging(FaultySource):
        """Its generator raises when it is closed, too."""

        def stream(self):  # type: ignore[no-untyped-def]
            try:
                yield from super().stream()
            finally:
                raise RuntimeError("second")

    source = Clinging(MappingSource(tagged(1)), [fail_at("tensor", raising(KeyError("first")), bucket=1)])
    with pair(source, MappingLoader(tagged(-1)), transport=transport, verify="off") as ends:
        error = ends.sync(1).error
        assert isinstance(error, SourceError)
        assert "RuntimeError: second" in error.message
        assert isinstance(error.__cause__, RuntimeError)
        assert isinstance(error.__cause__.__context__, KeyError), "both are in the chain"
