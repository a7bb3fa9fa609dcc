"""Publisher and Subscriber: versions, late joiners and leavers, refusals, errors with their place, on memory and shm."""

import threading
import time
from collections.abc import Callable

import pytest
import torch

import weightlift
from weightlift import (
    ConfigError,
    Deadlines,
    LoaderError,
    PeerLost,
    Publisher,
    SourceError,
    State,
    Subscriber,
    TornWeights,
    TransferTimeout,
    new_address,
)
from weightlift.errors import LocalProtocolError, MissingParameter, RemoteProtocolError, ShapeMismatch
from weightlift.loaders import MappingLoader
from weightlift.observe.events import Event
from weightlift.sources import MappingSource
from weightlift.testing.faults import FaultyLoader, FaultySource, fail_at, raising, sleeping
from weightlift.testing.pair import FAST, pair
from weightlift.testing.toy import ToyEngine, tagged

pytestmark = pytest.mark.usefixtures("nothing_left")

TRANSPORTS = pytest.mark.parametrize("transport", ["memory", "shm"])
SHORT = Deadlines(announce_s=1.0, prepare_s=1.0, transfer_s=1.0, release_s=1.0, commit_s=1.0, cause_s=0.5)


def mapping(value: float) -> dict[str, torch.Tensor]:
    return tagged(int(value), names=("w0", "w1", "w2", "w3", "w4", "w5", "w6", "w7"), shape=(16, 16))


@TRANSPORTS
def test_versions_move_on_both_sides(transport: str) -> None:
    sent, held = mapping(0), mapping(-1)
    with pair(MappingSource(sent), MappingLoader(held), transport=transport) as ends:
        (engine,) = ends.subscribers
        assert (engine.version, engine.state, ends.publisher.version) == (None, State.SERVING, None)
        with pytest.raises(LocalProtocolError, match="no version was pulled yet"):
            engine.ensure_serving()
        for version in (3, 4, 10):
            for tensor in sent.values():
                tensor.fill_(version)
            outcome = ends.sync(version).raise_any()
            assert (engine.version, engine.ensure_serving(), ends.publisher.version) == (version, version, version)
            assert outcome.report is not None
            assert outcome.report.replicas == {"engine": version}
            assert outcome.pulled["engine"].version == version
            assert all(float(t.min()) == float(t.max()) == version for t in held.values())


@TRANSPORTS
@pytest.mark.parametrize("count", [1, 3])
def test_many_subscribers(transport: str, count: int) -> None:
    engines = {f"e{i}": ToyEngine() for i in range(count)}
    with pair(MappingSource(tagged(7)), {n: e.loader for n, e in engines.items()}, transport=transport) as ends:
        report = ends.sync(7).raise_any().report
        assert report is not None
        assert report.replicas == dict.fromkeys(engines, 7)
        for subscriber in ends.subscribers:
            assert engines[subscriber.name].attach(subscriber).generate("p") == (7, 7)


def test_the_report_says_what_happened() -> None:
    with pair(MappingSource(mapping(1)), MappingLoader(mapping(0)), slot_bytes=1024) as ends:
        report = ends.sync(1).raise_any().report
    assert report is not None
    assert (report.version, report.round, report.tensors, report.bytes, report.buckets) == (1, 1, 8, 8 * 1024, 8)
    assert report.committed
    assert report.fenced == {}
    assert report.transport == "shm"
    assert report.transport_reason == "asked for by name"
    assert report.host_bytes_retained == 2 * 4096, "two slots, rounded up to pages"
    phases = report.seconds
    assert 0 < phases.transfer <= phases.total
    assert 0 < phases.pack <= phases.transfer
    assert phases.load > 0
    assert report.to_dict()["seconds"]["total"] == phases.total
    assert report.gbps > 0


def test_auto_takes_memory_inside_one_process_and_says_why() -> None:
    with pair(MappingSource(mapping(1)), MappingLoader(mapping(0)), transport="auto") as ends:
        report = ends.sync(1).raise_any().report
    assert report is not None
    assert (report.transport, "every subscriber is in" in report.transport_reason) == ("memory", True)


def test_publishing_to_nobody_is_not_a_success() -> None:
    with Publisher(MappingSource(mapping(1)), new_address()) as publisher:
        with pytest.raises(PeerLost, match="no subscriber is connected"):
            publisher.publish(1)
        assert publisher.version is None
        with pytest.raises(TransferTimeout, match=r"0 of 2 subscribers connected within 0\.2 s"):
            publisher.wait_for_peers(2, timeout_s=0.2)


def test_with_min_replicas_0_nobody_needs_to_be_there() -> None:
    with Publisher(MappingSource(mapping(1)), new_address(), min_replicas=0) as publisher:
        report = publisher.publish(1)
        assert report.replicas == {}
        assert publisher.version is None, "nobody serves it"


@pytest.mark.parametrize("version", [5, 4, 0])
def test_a_version_that_repeats_or_goes_back_is_refused(version: int) -> None:
    with pair(MappingSource(mapping(1)), MappingLoader(mapping(0))) as ends:
        ends.sync(5).raise_any()
        with pytest.raises(LocalProtocolError, match=f"version {version} was asked for, version 5 is published"):
            ends.publisher.publish(version)
        ends.sync(6).raise_any()


@pytest.mark.parametrize("version", [-1, 1.0, "1", True, None])
def test_a_version_of_the_wrong_type_is_refused(version: object) -> None:
    with (
        Publisher(MappingSource(mapping(1)), new_address()) as publisher,
        pytest.raises(ConfigError, match="version must be an int"),
    ):
        publisher.publish(version)  # type: ignore[arg-type]


def test_a_late_joiner_takes_part_from_the_next_round_on_and_a_leaver_no_more() -> None:
    address = new_address()
    with pair(MappingSource(mapping(1)), MappingLoader(mapping(0)), address=address) as ends:
        ends.sync(1).raise_any()
        late = Subscriber(MappingLoader(mapping(0)), address, "late")
        ends.subscribers.append(late)
        ends.publisher.wait_for_peers(2, timeout_s=20.0)
        report = ends.sync(2).raise_any().report
        assert report is not None
        assert report.replicas == {"engine": 2, "late": 2}
        ends.subscribers.pop(0).close()
        deadline = time.monotonic() + 20.0
        while ends.publisher.peers != ["late"] and time.monotonic() < deadline:
            time.sleep(0.01)
        report = ends.sync(3).raise_any().report
        assert report is not None
        assert report.replicas == {"late": 3}
        late.close()


def test_a_closed_publisher_can_be_followed_by_another_on_the_same_address() -> None:
    address = new_address()
    with Subscriber(MappingLoader(mapping(0)), address, "engine") as engine:
        for version in (1, 2):
            with Publisher(MappingSource(mapping(version)), address, deadlines=FAST) as publisher:
                errors: list[BaseException] = []
                thread = threading.Thread(target=_pull_into, args=(engine, errors))
                thread.start()
                publisher.wait_for_peers(1, timeout_s=20.0)
                assert publisher.publish(version).version == version
                thread.join(20.0)
                assert errors == []
        assert engine.version == 2


def _pull_into(engine: Subscriber, errors: list[BaseException]) -> None:
    try:
        engine.pull(timeout_s=20.0)
    except BaseException as error:
        errors.append(error)


@TRANSPORTS
@pytest.mark.parametrize(
    ("sent", "error", "tensor"),
    [
        (lambda: {k: v for k, v in mapping(1).items() if k != "w3"}, MissingParameter, "w3"),
        (lambda: mapping(1) | {"w3": torch.zeros(16, 15)}, ShapeMismatch, "w3"),
        (lambda: mapping(1) | {"x9": torch.zeros(1)}, weightlift.errors.UnexpectedParameter, "x9"),
        (lambda: mapping(1) | {"w3": torch.zeros(16, 16, dtype=torch.float16)}, weightlift.errors.DtypeMismatch, "w3"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_any_byte_on_both_sides(
    transport: str, sent: Callable[[], dict[str, torch.Tensor]], error: type[Exception], tensor: str
) -> None:
    good, held = mapping(1), mapping(0)
    source = {"now": good}

    class Switch(MappingSource):
        pass

    with pair(Switch(good), MappingLoader(held), transport=transport) as ends:
        ends.sync(1).raise_any()
        source["now"] = sent()
        good.clear()
        good.update(source["now"])
        outcome = ends.sync(2)
        assert type(outcome.error) is error
        assert type(outcome.failed["engine"]) is error
        assert outcome.error.tensor == tensor
        assert (outcome.error.phase, outcome.error.peer, outcome.error.version) == ("PREPARE", "engine", 2)
        (engine,) = ends.subscribers
        assert (engine.version, engine.state, ends.publisher.version) == (1, State.SERVING, 1)
        assert all(float(t.mean()) == 1.0 for t in held.values())
        assert outcome.error.report.replicas == {"engine": 1}
        good.clear()
        good.update(mapping(2))
        ends.sync(2).raise_any()
        assert engine.version == 2


@TRANSPORTS
@pytest.mark.parametrize("bucket", [0, 3, 7])
def test_a_loader_that_raises_is_named_on_both_sides_and_the_engine_is_torn(transport: str, bucket: int) -> None:
    loader = FaultyLoader(
        MappingLoader(mapping(0)), [fail_at("install", raising(ValueError("bad shape for w7")), bucket=bucket, round=2)]
    )
    with pair(MappingSource(mapping(1)), loader, transport=transport, slot_bytes=1024) as ends:
        ends.sync(1).raise_any()
        (engine,) = ends.subscribers
        outcome = ends.sync(2)
        for error in (outcome.error, outcome.failed["engine"]):
            assert type(error) is LoaderError
            assert "ValueError: bad shape for w7" in str(error)
            assert (error.bucket, error.tensor, error.peer, error.version, error.phase) == (
                bucket,
                f"w{bucket}",
                "engine",
                2,
                "TRANSFER",
            )
            assert "ValueError" in repr(error.__cause__)
        assert (engine.version, engine.state) == (None, State.TORN)
        with pytest.raises(TornWeights):
            engine.ensure_serving()
        assert ends.publisher.version == 1
        assert outcome.error is not None
        assert outcome.error.report.replicas == {"engine": None}
        assert loader.calls[-1] == "abort"
        ends.sync(2).raise_any()
        assert engine.ensure_serving() == 2


@TRANSPORTS
@pytest.mark.parametrize("at", ["finish", "commit"])
def test_a_failure_after_the_last_bucket_is_not_a_hang(transport: str, at: str) -> None:
    loader = FaultyLoader(MappingLoader(mapping(0)), [fail_at(at, raising(RuntimeError("cleanup")), round=2)])
    with pair(MappingSource(mapping(1)), loader, transport=transport) as ends:
        ends.sync(1).raise_any()
        outcome = ends.sync(2)
        assert type(outcome.error) is LoaderError
        assert outcome.error.phase == {"finish": "RELEASE", "commit": "COMMIT"}[at]
        assert "RuntimeError: cleanup" in str(outcome.failed["engine"])
        assert ends.subscribers[0].state is State.TORN
        assert ends.publisher.version == 1
        ends.sync(3).raise_any()


@TRANSPORTS
@pytest.mark.parametrize("position", [0, 3, 7])
def test_a_source_that_raises_is_raised_on_all_sides(transport: str, position: int) -> None:
    source = FaultySource(MappingSource(mapping(1)), [fail_at("tensor", raising(KeyError("gone")), bucket=position, round=2)])
    loaders = {"a": MappingLoader(mapping(0)), "b": MappingLoader(mapping(0))}
    with pair(source, loaders, transport=transport, slot_bytes=1024) as ends:
        ends.sync(1).raise_any()
        outcome = ends.sync(2)
        assert type(outcome.error) is SourceError
        assert isinstance(outcome.error.__cause__, KeyError)
        assert (outcome.error.tensor, outcome.error.bucket) == (f"w{position}", position)
        assert {type(error) for error in outcome.failed.values()} == {SourceError}
        expected = State.SERVING if position == 0 else State.TORN
        assert {s.state for s in ends.subscribers} == {expected}, "before the first byte nothing is torn"
        assert ends.publisher.version == 1
        ends.sync(2).raise_any()
        assert {s.version for s in ends.subscribers} == {2}


@TRANSPORTS
def test_one_of_three_fails_and_the_others_are_committed(transport: str) -> None:
    engines = {f"e{i}": ToyEngine() for i in range(3)}
    loaders = {n: e.loader for n, e in engines.items()} | {
        "e1": FaultyLoader(engines["e1"].loader, [fail_at("install", raising(OSError("disk")), round=2)])
    }
    sent = tagged(1)
    with pair(MappingSource(sent), loaders, transport=transport, min_replicas=2, slot_bytes=64) as ends:
        ends.sync(1).raise_any()
        for tensor in sent.values():
            tensor.fill_(2.0)
        outcome = ends.sync(2)
        assert outcome.error is None
        assert outcome.report is not None
        assert outcome.report.replicas == {"e0": 2, "e1": None, "e2": 2}
        assert list(outcome.report.fenced) == ["e1"]
        assert "OSError: disk" in outcome.report.fenced["e1"]
        assert [s.state for s in ends.subscribers] == [State.SERVING, State.TORN, State.SERVING]
        for tensor in sent.values():
            tensor.fill_(3.0)
        report = ends.sync(3).raise_any().report
        assert report is not None
        assert report.replicas == {"e0": 3, "e1": 3, "e2": 3}
        for subscriber in ends.subscribers:
            assert engines[subscriber.name].attach(subscriber).generate("p") == (3, 3)


def test_a_replica_of_two_ranks_commits_together_or_not_at_all() -> None:
    address = new_address()
    held = [mapping(0), mapping(0)]
    bad = FaultyLoader(MappingLoader(held[1]), [fail_at("finish", raising(RuntimeError("rank 1")), round=2)])
    with Publisher(MappingSource(mapping(1)), address, deadlines=FAST, transport="shm") as publisher:
        ranks = [
            Subscriber(MappingLoader(held[0]), address, "r0", replica="x", rank=0, size=2),
            Subscriber(bad, address, "r1", replica="x", rank=1, size=2),
        ]
        publisher.wait_for_peers(2, timeout_s=20.0)
        ends = weightlift.testing.pair.Pair(publisher, ranks)
        assert ends.sync(1).raise_any().report.replicas == {"x": 1}  # type: ignore[union-attr]
        outcome = ends.sync(2)
        assert type(outcome.error) is LoaderError
        assert [rank.state for rank in ranks] == [State.TORN, State.TORN]
        assert [rank.version for rank in ranks] == [None, None]
        ends.sync(3).raise_any()
        assert [rank.version for rank in ranks] == [3, 3]
        for rank in ranks:
            rank.close()


def test_an_incomplete_replica_is_not_addressed() -> None:
    address = new_address()
    half = Subscriber(MappingLoader(mapping(0)), address, "r0", replica="x", rank=0, size=2)
    with Publisher(MappingSource(mapping(1)), address) as publisher, half:
        with pytest.raises(TransferTimeout, match="0 of 1 subscribers"):
            publisher.wait_for_peers(1, timeout_s=0.5)
        with pytest.raises(PeerLost):
            publisher.publish(1)


def test_a_peer_that_does_not_pull_is_given_up_and_the_announcement_is_superseded() -> None:
    seen: list[Event] = []
    with pair(MappingSource(mapping(1)), MappingLoader(mapping(0)), deadlines=SHORT, subscriber={"sink": seen.append}) as ends:
        outcome = ends.sync(1, pulling=[])
        assert type(outcome.error) is TransferTimeout
        assert (outcome.error.peer, outcome.error.phase) == ("engine", "ANNOUNCE")
        assert ends.publisher.version is None
        with pytest.raises(TransferTimeout, match=r"no round was announced within 0.2 s; a publisher is connected"):
            ends.subscribers[0].pull(timeout_s=0.2)
        assert ends.subscribers[0].state is State.SERVING
        report = ends.sync(3).raise_any().report
        assert report is not None
        assert report.replicas == {"engine": 3}
    assert "Superseded" in {type(event).__name__ for event in seen}


@TRANSPORTS
def test_a_peer_that_stalls_is_named_with_its_bucket_and_torn_when_it_wakes(transport: str) -> None:
    loader = FaultyLoader(MappingLoader(mapping(0)), [fail_at("install", sleeping(3.0), bucket=4, round=2)])
    with pair(MappingSource(mapping(1)), loader, transport=transport, slot_bytes=1024, deadlines=SHORT) as ends:
        ends.sync(1).raise_any()
        start = time.monotonic()
        outcome = ends.sync(2)
        assert time.monotonic() - start < 20.0
        assert type(outcome.error) is TransferTimeout
        assert (outcome.error.peer, outcome.error.phase, outcome.error.bucket, outcome.error.tensor) == (
            "engine",
            "TRANSFER",
            4,
            "w4",
        )
        assert "did not acknowledge bucket 4/8 within 1.0 s" in str(outcome.error)
        assert type(outcome.failed["engine"]) is TransferTimeout
        assert ends.subscribers[0].state is State.TORN
        ends.sync(3).raise_any()


@TRANSPORTS
def test_a_publisher_that_stalls_is_a_timeout_at_the_engine(transport: str) -> None:
    source = FaultySource(MappingSource(mapping(1)), [fail_at("tensor", sleeping(4.0), bucket=4, round=2)])
    with pair(source, MappingLoader(mapping(0)), transport=transport, slot_bytes=1024, deadlines=SHORT) as ends:
        ends.sync(1).raise_any()
        outcome = ends.sync(2)
        assert type(outcome.failed["engine"]) is TransferTimeout
        assert outcome.failed["engine"].bucket == 4
        assert type(outcome.error) in (TransferTimeout, PeerLost)
        assert ends.subscribers[0].state is State.TORN
        ends.sync(3).raise_any()


def test_caches_are_reset_at_commit_and_a_refused_reset_tears() -> None:
    engine = ToyEngine()
    sent = tagged(1)
    with pair(MappingSource(sent), engine.loader) as ends:
        engine.attach(ends.subscribers[0])
        ends.sync(1).raise_any()
        assert engine.generate("p") == (1, 1)
        for tensor in sent.values():
            tensor.fill_(2.0)
        ends.sync(2).raise_any()
        assert engine.generate("p") == (2, 2), "a prefix of version 1 must not serve version 2"
        engine.resettable = False
        outcome = ends.sync(3)
        assert type(outcome.error) is LoaderError
        assert "caches were not reset" in str(outcome.error)
        with pytest.raises(TornWeights):
            engine.generate("p")


def test_two_publishers_on_one_address_are_refused() -> None:
    address = new_address()
    with Publisher(MappingSource(mapping(1)), address), pytest.raises(ConfigError, match="in use by another publisher"):
        Publisher(MappingSource(mapping(1)), address)


def test_two_subscribers_of_one_name_are_refused_and_the_first_goes_on() -> None:
    address = new_address()
    with pair(MappingSource(mapping(1)), MappingLoader(mapping(0)), address=address) as ends:
        with Subscriber(MappingLoader(mapping(0)), address, "engine") as second:
            time.sleep(0.2)
            assert ends.publisher.peers == ["engine"]
            with pytest.raises(ConfigError, match="the name 'engine' is taken by a live process"):
                second.pull(timeout_s=10.0)
        ends.sync(1).raise_any()


def test_a_wrong_token_is_refused_on_the_right_side() -> None:
    address = new_address()
    seen: list[Event] = []
    with Publisher(MappingSource(mapping(1)), address, token="right", sink=seen.append) as publisher:
        with Subscriber(MappingLoader(mapping(0)), address, "e", token="wrong") as engine:
            with pytest.raises(TransferTimeout):
                publisher.wait_for_peers(1, timeout_s=0.5)
            with pytest.raises(RemoteProtocolError, match="did not show the token"):
                engine.pull(timeout_s=10.0)
        assert [type(event).__name__ for event in seen] == ["PeerRejected"]


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:{port}", "tcp://[::1]:{port}", "tcp://::1:{port}", "tcp://localhost:{port}"])
def test_a_tcp_address_carries_a_whole_sync(address: str, free_port: int) -> None:
    where = address.format(port=free_port)
    with pair(MappingSource(mapping(1)), MappingLoader(mapping(0)), transport="memory", address=where) as ends:
        report = ends.sync(1).raise_any().report
        assert report is not None
        assert report.replicas == {"engine": 1}


def test_closing_twice_is_fine_and_using_afterwards_is_an_error() -> None:
    address = new_address()
    publisher = Publisher(MappingSource(mapping(1)), address)
    subscriber = Subscriber(MappingLoader(mapping(0)), address, "e")
    for end in (subscriber, publisher):
        end.close()
        end.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        publisher.publish(1)
    with pytest.raises(LocalProtocolError, match="closed"):
        subscriber.pull()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Publisher(MappingSource({}), "nowhere"), "address must be ipc"),
        (lambda: Publisher(MappingSource({}), "ipc://relative"), "absolute directory"),
        (lambda: Publisher(MappingSource({}), "tcp://host"), "must be host:port"),
        (lambda: Publisher(MappingSource({}), new_address(), transport="pigeon"), "transport must be one of auto, memory, shm"),
        (lambda: Publisher(MappingSource({}), new_address(), min_replicas=-1), "min_replicas must be an integer of at least 0"),
        (lambda: Subscriber(MappingLoader({}), new_address(), ""), "name must be a non-empty string"),
        (lambda: Subscriber(MappingLoader({}), new_address(), "x", rank=2, size=2), "rank must be below size 2, got 2"),
        (lambda: Deadlines(transfer_s=0), "Deadlines.transfer_s must be a finite number of seconds above 0, got 0"),
        (lambda: Deadlines(transfer_s=float("inf")), "above 0, got inf"),
        (lambda: weightlift.ShmConfig(slots=0), "ShmConfig.slots must be an integer of at least 1, got 0"),
        (lambda: weightlift.ShmConfig(slot_bytes=0), "ShmConfig.slot_bytes must be an integer of at least 16, got 0"),
    ],
)
def test_wrong_values_are_config_errors(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()


def test_a_ring_that_does_not_fit_into_shared_memory_says_how_much_there_is() -> None:
    with pair(MappingSource(mapping(1)), MappingLoader(mapping(0)), slot_bytes=1 << 50) as ends:
        outcome = ends.sync(1, timeout_s=1.0)
        assert type(outcome.error) is weightlift.errors.TransportUnavailable
        assert "bytes free, the ring needs" in str(outcome.error)
        assert "ShmConfig" in outcome.error.remedy
        assert ends.subscribers[0].state is State.SERVING


def test_a_source_that_cannot_name_its_tensors_is_a_source_error_before_anybody_is_told() -> None:
    source = FaultySource(MappingSource(mapping(1)), [fail_at("manifest", raising(KeyError("gone")), round=2)])
    with pair(source, MappingLoader(mapping(0))) as ends:
        ends.sync(1).raise_any()
        with pytest.raises(SourceError, match="KeyError: 'gone'") as caught:
            ends.publisher.publish(2)
        assert isinstance(caught.value.__cause__, KeyError)
        assert (caught.value.phase, caught.value.version) == ("ANNOUNCE", 2)
        assert ends.subscribers[0].ensure_serving() == 1
        ends.sync(2).raise_any()


def test_ctrl_c_in_the_middle_of_a_transfer_is_told_to_the_engines() -> None:
    source = FaultySource(MappingSource(mapping(1)), [fail_at("tensor", raising(KeyboardInterrupt()), bucket=3, round=2)])
    with pair(source, MappingLoader(mapping(0)), slot_bytes=1024) as ends:
        ends.sync(1).raise_any()
        outcome = ends.sync(2)
        assert type(outcome.error) is KeyboardInterrupt
        assert "interrupted by KeyboardInterrupt" in str(outcome.failed["engine"])
        assert ends.subscribers[0].state is State.TORN
        ends.sync(3).raise_any()


def test_ctrl_c_in_the_middle_of_a_load_is_told_to_the_publisher() -> None:
    loader = FaultyLoader(MappingLoader(mapping(0)), [fail_at("install", raising(KeyboardInterrupt()), bucket=3, round=2)])
    with pair(MappingSource(mapping(1)), loader, slot_bytes=1024) as ends:
        ends.sync(1).raise_any()
        outcome = ends.sync(2)
        assert type(outcome.failed["engine"]) is KeyboardInterrupt
        assert "KeyboardInterrupt" in str(outcome.error)
        assert ends.subscribers[0].state is State.TORN
        ends.sync(3).raise_any()
