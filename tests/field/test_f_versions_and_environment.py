"""Field reports, group F and "also seen": versions, environment, false success. Numbers are those of docs/field-coverage.md."""

import os
import pathlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightlift import Publisher, Subscriber, new_address
from weightlift.config import Deadlines
from weightlift.errors import DigestMismatch, TransportUnavailable, WeightliftError
from weightlift.loaders import MappingLoader
from weightlift.protocol.plan import Bucket, Plan
from weightlift.sources import MappingSource
from weightlift.testing.faults import FaultyLoader, fail_at, raising
from weightlift.testing.pair import pair
from weightlift.testing.toy import ToyEngine, tagged
from weightlift.transports import registry
from weightlift.transports.base import ReceiveJob
from weightlift.transports.endpoint import join_host_port, parse_address, split_host_port
from weightlift.transports.memory import MemoryReceiver

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_b45_the_version_is_read_when_the_request_starts() -> None:
    engine = ToyEngine()
    sent = tagged(3)
    with pair(MappingSource(sent), engine.loader) as ends:
        engine.attach(ends.subscribers[0])
        ends.sync(3).raise_any()
        started_with = ends.subscribers[0].ensure_serving()
        for tensor in sent.values():
            tensor.fill_(4.0)
        ends.sync(4).raise_any()
        assert (started_with, ends.subscribers[0].ensure_serving()) == (3, 4)
        assert engine.generate("asked after the update")[0] == 4


@settings(max_examples=20, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(["ok", "install", "finish", "commit"]), st.integers(1, 3)), min_size=1, max_size=6))
def test_b47_the_kind_the_trainers_version_is_always_one_that_somebody_serves(steps: list[tuple[str, int]]) -> None:
    """Any sequence of good and failed updates: the version never runs ahead, never goes back, and is what the engine says."""
    sent, held = tagged(0), tagged(-1)
    loader = FaultyLoader(MappingLoader(held))
    version = 0
    with pair(MappingSource(sent), loader, transport="memory", slot_bytes=64) as ends:
        (engine,) = ends.subscribers
        for what, jump in steps:
            version += jump
            for tensor in sent.values():
                tensor.fill_(float(version))
            loader.faults = [] if what == "ok" else [fail_at(what, raising(ValueError("no")))]
            before = ends.publisher.version
            outcome = ends.sync(version)
            assert (outcome.error is None) == (what == "ok")
            assert ends.publisher.version == (version if what == "ok" else before)
            try:
                assert {float(t.min()) for t in held.values()} == {float(engine.ensure_serving())}
            except WeightliftError:
                assert what != "ok"


@pytest.mark.parametrize("length", [90, 107, 150])
@pytest.mark.parametrize("letter", ["x", "ä", "深"])
def test_b52_a_sync_works_from_a_temporary_directory_of_any_length(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, length: int, letter: str
) -> None:
    room = length - len(os.fsencode(tmp_path)) - 1
    long = tmp_path / (letter * max(1, room // len(letter.encode())))
    long.mkdir()
    monkeypatch.setenv("WEIGHTLIFT_RUN_DIR", str(long))
    with pair(MappingSource(tagged(1)), MappingLoader(tagged(-1))) as ends:
        ends.sync(1).raise_any()


def test_b52_long_run_names_do_not_collide(tmp_path: pathlib.Path) -> None:
    common = "r" * 100
    addresses = [f"ipc://{tmp_path}/{common}{tail * 100}" for tail in ("a", "b", "ä")]
    sockets = [parse_address(address).zmq for address in addresses]
    assert len(set(sockets)) == 3
    assert all(len(os.fsencode(socket.removeprefix("ipc://"))) <= 107 for socket in sockets)
    for number, address in enumerate(addresses):
        held = tagged(-1)
        with pair(MappingSource(tagged(number)), MappingLoader(held), address=address) as ends:
            ends.sync(1).raise_any()
        assert {float(t.min()) for t in held.values()} == {float(number)}


@pytest.mark.parametrize("host", ["::1", "[::1]", "127.0.0.1", "localhost"])
def test_b53_every_way_of_writing_a_host(host: str, free_port: int) -> None:
    with pair(MappingSource(tagged(1)), MappingLoader(tagged(-1)), address=f"tcp://{host}:{free_port}", transport="memory") as ends:
        ends.sync(1).raise_any()


HOSTS = st.one_of(
    st.ip_addresses(v=6).map(str),
    st.ip_addresses(v=4).map(str),
    st.just("fe80::1%eth0"),
    st.from_regex(r"[a-z][a-z0-9.-]{0,30}", fullmatch=True),
)


@given(host=HOSTS, port=st.integers(1, 65535))
def test_b53_the_kind_host_and_port_survive_the_round_trip(host: str, port: int) -> None:
    text = join_host_port(host, port)
    assert split_host_port(text) == (host, port)
    assert (":" in host) == text.startswith("[")
    if "%" not in host and ":" in host:
        assert split_host_port(f"{host}:{port}") == (host, port), "bare, too"


@pytest.mark.parametrize("error", ["ImportError('no module')", "OSError('libcudart.so.12')", "RuntimeError('driver too old')"])
def test_b55_a_broken_backend_says_why_when_it_is_asked_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: str
) -> None:
    name = f"broken_{abs(hash(error))}"
    (tmp_path / f"{name}.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))
    monkeypatch.setattr(registry, "_FAILURES", {})
    registry.register("broken", name, sender=None, receiver=None)  # type: ignore[arg-type]
    with pair(MappingSource(tagged(1)), MappingLoader(tagged(-1))) as ends:
        ends.sync(1).raise_any()
    assert capfd.readouterr() == ("", ""), "nobody asked for it: nobody hears of it"
    with pytest.raises(TransportUnavailable) as refused:
        Publisher(MappingSource(tagged(1)), new_address(), transport="broken")
    assert repr(refused.value.__cause__) == error


class Nothing(MemoryReceiver):
    """A data plane that moves no byte and says that it did."""

    def receive(self, job: ReceiveJob) -> None:
        assert self._link is not None
        for bucket in range(len(job.plan)):
            self._link.buckets.get(timeout=job.stall_s)
            memory = torch.empty(job.plan.capacity, dtype=torch.uint8)
            job.install(bucket, memory.random_(0, 255))
            self._link.done.put(bucket)


@pytest.mark.parametrize("verify", ["sample", "full"])
def test_e2_a_transport_that_moves_nothing_is_not_a_success(monkeypatch: pytest.MonkeyPatch, verify: str) -> None:
    monkeypatch.setattr("weightlift.transports.memory.MemoryReceiver", Nothing)
    sent = {f"w{i}": torch.randn(30, 30) for i in range(3)}
    held = {name: torch.full((30, 30), float("nan")) for name in sent}
    with pair(MappingSource(sent), MappingLoader(held), transport="memory", verify=verify) as ends:
        outcome = ends.sync(1)
        assert isinstance(outcome.error, DigestMismatch)
        assert outcome.error.tensor == "w0"
        assert "so have" not in outcome.error.message, "the verdict names the element"
        assert ends.publisher.version is None
        assert ends.subscribers[0].version is None


class Skipping(MappingLoader):
    """Forgets one bucket, and counts it all the same."""

    def install(self, bucket: Bucket, memory: torch.Tensor) -> None:
        if bucket.number == 1:
            self._written[1] += 1
        else:
            super().install(bucket, memory)


@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_e2_a_loader_that_forgets_a_bucket_is_not_a_success(transport: str) -> None:
    sent = {f"w{i}": torch.randn(16) for i in range(4)}
    held = {name: torch.zeros(16) for name in sent}
    with pair(MappingSource(sent), Skipping(held), transport=transport, slot_bytes=64) as ends:
        error = ends.sync(1).error
    assert isinstance(error, DigestMismatch)
    assert error.tensor == "w1"


def test_a_stale_peer_is_told_so_in_the_next_version_and_in_the_next_run(free_port: int) -> None:
    """An engine that was stopped through a round, and one of a run that ended, are both told what they are."""
    short = Deadlines(announce_s=0.6, prepare_s=1, transfer_s=1, release_s=1, commit_s=1, cause_s=0.3)
    held = tagged(-1)
    with pair(MappingSource(tagged(1)), MappingLoader(held), deadlines=short) as ends:
        ends.sync(1).raise_any()
        ends.sync(2, pulling=[])
        with pytest.raises(WeightliftError, match="no round was announced"):
            ends.subscribers[0].pull(timeout_s=0.3)
        ends.sync(3).raise_any()
        assert ends.subscribers[0].version == 3
    address = f"tcp://127.0.0.1:{free_port}"
    with (
        Subscriber(MappingLoader(tagged(-1)), address, "old", token="first run") as old,
        Publisher(MappingSource(tagged(1)), address, token="second run", transport="memory") as publisher,
    ):
        with pytest.raises(WeightliftError):
            publisher.wait_for_peers(1, timeout_s=2.0)
        with pytest.raises(WeightliftError, match="token of this run"):
            old.pull(timeout_s=10)


def plan_of(tensors: dict[str, torch.Tensor]) -> Plan:
    return Plan(MappingSource(tensors).manifest(), capacity=64)


@given(st.permutations(range(4)), st.lists(st.integers(0, 3), max_size=3))
def test_the_kind_of_e2_only_each_bucket_exactly_once_is_covered(order: list[int], again: list[int]) -> None:
    """Buckets in any order are fine for a loader; one that is missing or comes twice is not."""
    held = {f"w{i}": torch.zeros(16) for i in range(4)}
    plan = plan_of(held)
    loader = MappingLoader(held)
    for came in (order, order[:-1], [*order, *again]):
        loader.prepare(plan)
        for number in came:
            loader.install(plan.buckets[number], torch.zeros(64, dtype=torch.uint8))
        if sorted(came) == [0, 1, 2, 3]:
            loader.finish()
        else:
            with pytest.raises(WeightliftError, match="not installed exactly once"):
                loader.finish()
        loader.abort()
