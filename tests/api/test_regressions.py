"""Faults that a review of the library found in it, each in its smallest form. Real processes where the fault needs them."""

import contextlib
import fcntl
import gc
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch

from weightlift import ConfigError, Deadlines, PeerLost, Publisher, SourceError, State, Subscriber, TransferTimeout, new_address
from weightlift.config import ShmConfig
from weightlift.copies import check_storage
from weightlift.errors import DigestMismatch, DuplicateParameter, LoaderError, ManifestError, RemoteProtocolError
from weightlift.liveness import host_identity, open_pidfd
from weightlift.loaders import CallbackLoader, HuggingFaceLoader, MappingLoader, ModuleLoader
from weightlift.protocol.failure import describe
from weightlift.protocol.manifest import Entry, Manifest
from weightlift.protocol.messages import Hello, PeerId, Welcome
from weightlift.sources import MappingSource, ModuleSource
from weightlift.tensors import entry_of
from weightlift.testing.faults import FaultyLoader, FaultySource, fail_at, raising
from weightlift.testing.pair import pair
from weightlift.testing.toy import tagged
from weightlift.transports import registry
from weightlift.transports.endpoint import RunDirectory, lock_within, parse_address
from weightlift.transports.roster import Roster

pytestmark = pytest.mark.usefixtures("nothing_left")
SHORT = Deadlines(announce_s=2, prepare_s=3, transfer_s=3, release_s=3, commit_s=3, cause_s=1)


# --- the source and the engine change under the library -------------------------------------------------------------------------


def net(value: float) -> torch.nn.Sequential:
    made = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(value)
    return made


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_a_child_module_that_is_replaced_is_seen(side: str) -> None:
    trainer, engine = net(1.0), net(0.0)
    with pair(ModuleSource(trainer), ModuleLoader(engine), verify="full") as ends:
        ends.sync(1).raise_any()
        (trainer if side == "trainer" else engine)[1] = torch.nn.Linear(4, 4)
        ends.sync(2).raise_any()
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(trainer.parameters(), engine.parameters(), strict=True))


def test_a_layout_that_changes_at_the_same_address_is_seen() -> None:
    sent, held = {"w": torch.arange(4.0).view(2, 2)}, {"w": torch.zeros(2, 2)}
    with pair(MappingSource(sent), MappingLoader(held), verify="off") as ends:
        ends.sync(1).raise_any()
        sent["w"].t_()
        ends.sync(2).raise_any()
        assert torch.equal(held["w"], sent["w"])
        sent["w"].resize_(1, 2)
        assert isinstance(ends.sync(3).error, ManifestError)
    trainer, engine = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    with pair(ModuleSource(trainer), ModuleLoader(engine), verify="off") as ends:
        ends.sync(1).raise_any()
        engine.weight.data = engine.weight.data.t()
        ends.sync(2).raise_any()
        assert torch.equal(trainer.weight, engine.weight)


class Wrapper(torch.Tensor):
    """A tensor whose memory is elsewhere, as a DTensor's is."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapper":
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made  # type: ignore[return-value]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: object) -> "Wrapper":
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*(arg.inner if isinstance(arg, Wrapper) else arg for arg in args), **(kwargs or {}))


def test_a_wrapped_tensor_is_refused_and_not_read_at_address_zero() -> None:
    with pytest.raises(RuntimeError, match="a Wrapper is not a plain whole tensor"):
        check_storage(Wrapper(torch.ones(3)))


def test_a_tensor_that_cannot_be_sent_is_found_before_anybody_is_touched() -> None:
    sent = {"a": torch.ones(64), "b": torch.ones(64, device="meta")}
    held = {"a": torch.zeros(64), "b": torch.zeros(64)}
    with pair(MappingSource(sent), MappingLoader(held), slot_bytes=256, verify="off") as ends:
        error = ends.sync(1, timeout_s=0.5).error
        assert isinstance(error, SourceError)
        assert (error.tensor, error.phase) == ("b", "ANNOUNCE")
        assert ends.subscribers[0].state is State.SERVING


def test_autograd_notices_that_weights_were_written() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with pair(MappingSource({"w": torch.full((2, 2), 5.0)}), MappingLoader({"w": weight})) as ends:
        loss = (torch.ones(1, 2, requires_grad=True) @ weight).sum()
        ends.sync(1).raise_any()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_conjugate_view_is_no_alias_and_no_destination() -> None:
    c = torch.tensor([1 + 2j, 3 - 4j])
    held = {"c": torch.zeros(2, dtype=c.dtype), "h": torch.zeros(2, dtype=c.dtype)}
    with pair(MappingSource({"c": c, "h": c.conj()}), MappingLoader(held), verify="full") as ends:
        ends.sync(1).raise_any()
        assert torch.equal(held["h"], c.conj())
    with pair(MappingSource({"c": c}), MappingLoader({"c": torch.zeros(2, dtype=c.dtype).conj()})) as ends:
        assert isinstance(ends.sync(1).error, ManifestError)


def test_engine_tensors_that_share_bytes_are_refused_and_interleaved_ones_are_not() -> None:
    base = torch.zeros(10)
    sent = {"a": torch.ones(6), "b": torch.full((6,), 2.0)}
    with pair(MappingSource(sent), MappingLoader({"a": base[:6], "b": base[4:]}), verify="off") as ends:
        error = ends.sync(1).error
        assert isinstance(error, ManifestError)
        assert "overlapping memory" in error.message
        assert not bool(base.any())
    fused = torch.zeros(3, 4)
    columns = {"a": fused[:, :2], "b": fused[:, 2:]}
    with pair(MappingSource({n: torch.ones(3, 2) for n in columns}), MappingLoader(columns), verify="full") as ends:
        ends.sync(1).raise_any()


def test_two_engine_tensors_of_one_canonical_name_are_refused() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.DataParallel(torch.nn.Linear(2, 2, bias=False))
            self.net.register_parameter("weight", torch.nn.Parameter(torch.zeros(2, 2)))

    loader = ModuleLoader(Odd())
    with pair(MappingSource({"net.weight": torch.ones(2, 2)}), loader) as ends:
        error = ends.sync(1).error
        assert isinstance(error, DuplicateParameter)
        assert error.tensor == "net.weight"


# --- streaming sources ----------------------------------------------------------------------------------------------------------


class Gathering:
    """Gathers for the time of its stream, as summon_full_params does. extra: tensors beyond its manifest."""

    def __init__(self, *, extra: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.tensors_ = {"a": torch.ones(2000, dtype=dtype), "b": torch.ones(2000, dtype=dtype)}
        self.log: list[str] = []
        self.last: weakref.ref[torch.Tensor] | None = None
        self._extra = extra
        self._manifest = Manifest([*(entry_of(n, torch.ones(2000)) for n in self.tensors_), Entry("none", "float32", (0,))])

    def manifest(self) -> Manifest:
        return self._manifest

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[None]:
        self.log.append("gathered")
        try:
            yield
        finally:
            self.log.append("given back")

    def stream(self) -> Iterator[torch.Tensor]:
        with self._gathered():
            for tensor in self.tensors_.values():
                full = tensor.clone()
                self.last = weakref.ref(full)
                yield full
                del full
            yield torch.ones(0)
            for _ in range(self._extra):
                yield torch.full((5,), 9.0)


def held_for_gathering() -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(2000), "b": torch.zeros(2000), "none": torch.zeros(0)}


def test_a_streaming_source_is_finished_and_let_go_in_every_round() -> None:
    source = Gathering()
    with pair(source, MappingLoader(held_for_gathering()), verify="off") as ends:
        for version in (1, 2):
            ends.sync(version).raise_any()
            assert source.log == ["gathered", "given back"] * version
            assert source.last is not None
            assert source.last() is None, "its last tensor is not held between rounds"


def test_a_streaming_source_is_let_go_when_the_engine_failed() -> None:
    source = Gathering()
    loader = FaultyLoader(MappingLoader(held_for_gathering()), [fail_at("install", raising(KeyError("no")), bucket=0)])
    with pair(source, loader, verify="off", slot_bytes=4096, slots=1) as ends:
        assert isinstance(ends.sync(1).error, LoaderError)
        assert source.log == ["gathered", "given back"]


def test_tensors_beyond_the_manifest_are_an_error_and_not_lost() -> None:
    with pair(Gathering(extra=2), MappingLoader(held_for_gathering()), verify="off") as ends:
        error = ends.sync(1).error
        assert isinstance(error, SourceError)
        assert "2 tensors more than its manifest" in error.message


def test_a_streamed_dtype_that_would_wrap_is_refused() -> None:
    with pair(Gathering(dtype=torch.int32), MappingLoader(held_for_gathering()), verify="off") as ends:
        error = ends.sync(1).error
        assert isinstance(error, SourceError)
        assert "a came as torch.int32, its manifest says float32" in error.message


def test_the_same_error_object_raised_twice_does_not_keep_its_old_place() -> None:
    again = SourceError("the same object")

    def raise_again() -> None:
        raise again

    faults = [fail_at("tensor", raise_again, bucket=1, round=1), fail_at("tensor", raise_again, bucket=2)]
    source = FaultySource(MappingSource(tagged(1)), faults)
    with pair(source, MappingLoader(tagged(-1)), slot_bytes=64, verify="off") as ends:
        assert ends.sync(1).error.bucket == 1  # type: ignore[union-attr]
        second = ends.sync(2).error
        assert isinstance(second, SourceError)
        assert (second.bucket, second.version) == (2, 2)


# --- the round ------------------------------------------------------------------------------------------------------------------


def test_a_replica_that_is_half_torn_serves_nothing_in_the_report() -> None:
    address = new_address()
    bad = FaultyLoader(MappingLoader(tagged(-1)), [fail_at("commit", raising(KeyError("no")))])
    with (
        Publisher(MappingSource(tagged(1)), address, deadlines=SHORT) as publisher,
        Subscriber(bad, address, "rank-0", replica="R", rank=0, size=2) as zero,
        Subscriber(MappingLoader(tagged(-1)), address, "rank-1", replica="R", rank=1, size=2) as one,
    ):
        deadline = time.monotonic() + 20
        while len(publisher.peers) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        threads = [threading.Thread(target=_pull, args=(subscriber,)) for subscriber in (zero, one)]
        for thread in threads:
            thread.start()
        with pytest.raises(LoaderError) as failed:
            publisher.publish(1)
        for thread in threads:
            thread.join(20)
        assert failed.value.report.replicas == {"R": None}
        assert pickle.loads(pickle.dumps(failed.value)).report.replicas == {"R": None}


def _pull(subscriber: Subscriber) -> None:
    with contextlib.suppress(Exception):
        subscriber.pull(20)


@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_an_engine_that_was_busy_when_the_source_failed_is_there_in_the_next_round(transport: str) -> None:
    source = FaultySource(MappingSource(tagged(1)), [fail_at("tensor", raising(RuntimeError("oom")), round=2)])
    loaders = {"a": MappingLoader(tagged(-1)), "busy": MappingLoader(tagged(-1))}
    with pair(source, loaders, deadlines=SHORT, min_replicas=1, transport=transport, verify="off") as ends:
        ends.sync(1).raise_any()
        assert ends.sync(2, pulling=ends.subscribers[:1]).error is not None
        report = ends.sync(3).raise_any().report
        assert report is not None
        assert report.replicas == {"a": 3, "busy": 3}


def test_a_round_that_ends_before_the_transfer_leaves_no_connection_waiting() -> None:
    good, bad = MappingLoader({"a": torch.zeros(2)}), MappingLoader({"a": torch.zeros(3)})
    with pair(MappingSource({"a": torch.ones(2)}), {"good": good, "bad": bad}, transport="shm", deadlines=SHORT) as ends:
        ends.sync(1)
        before = len(os.listdir("/proc/self/fd"))
        for version in range(2, 30):
            ends.sync(version, timeout_s=0.5)  # whoever answers late waits for another round: not long, here
        assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_engines_that_come_and_go_leave_no_descriptor_in_the_trainer() -> None:
    address = new_address()
    counts = []
    with Publisher(MappingSource({"a": torch.ones(2)}), address, transport="shm") as publisher:
        for version in range(1, 9):
            with Subscriber(MappingLoader({"a": torch.zeros(2)}), address, f"rollout-{version}") as engine:
                publisher.wait_for_peers(1, timeout_s=20)
                thread = threading.Thread(target=engine.pull, args=(20,))
                thread.start()
                publisher.publish(version)
                thread.join(20)
            deadline = time.monotonic() + 20
            while publisher.peers and time.monotonic() < deadline:
                time.sleep(0.01)
            counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] <= counts[1] + 1, counts


def test_a_deadline_is_judged_by_what_had_arrived_when_it_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher's own digests take longer than release_s; the engine's answer was there in time."""
    from weightlift.verify.audit import Auditor

    settle = Auditor.settle
    monkeypatch.setattr(Auditor, "settle", lambda self: (time.sleep(1.5), settle(self))[1])
    short = Deadlines(announce_s=5, prepare_s=5, transfer_s=5, release_s=0.8, commit_s=5, cause_s=1)
    with pair(MappingSource(tagged(1)), MappingLoader(tagged(-1)), deadlines=short, verify="full") as ends:
        ends.sync(1).raise_any()


def test_more_replicas_than_there_are_is_said_in_words() -> None:
    with pair(MappingSource(tagged(1)), MappingLoader(tagged(-1)), min_replicas=3) as ends:
        error = ends.sync(1, pulling=[]).error
        assert isinstance(error, PeerLost)
        assert "min_replicas is 3, and 1 replicas are connected" in error.message


def test_a_version_that_nobody_serves_is_not_the_publishers() -> None:
    with Publisher(MappingSource(tagged(1)), new_address(), min_replicas=0) as publisher:
        publisher.publish(1)
        assert publisher.version is None


def test_a_source_that_cannot_be_read_again_still_gets_a_digest_mismatch() -> None:
    class Once(Gathering):
        def stream(self) -> Iterator[torch.Tensor]:
            if self.log:
                raise RuntimeError("only once")
            yield from super().stream()

    class Wrong(MappingLoader):
        def finish(self) -> None:
            super().finish()
            self._targets["b"][0][7] = 77.0

    with pair(Once(), Wrong(held_for_gathering()), verify="full") as ends:
        error = ends.sync(1).error
        assert isinstance(error, DigestMismatch)
        assert error.tensor == "b"
        assert "where is not known" in error.message
        assert error.report.replicas == {"engine": None}


def test_an_error_text_that_cannot_be_encoded_still_arrives() -> None:
    loader = FaultyLoader(MappingLoader(tagged(-1)), [fail_at("prepare", raising(OSError("no file \udcff.bin")))])
    with pair(MappingSource(tagged(1)), loader, deadlines=SHORT) as ends:
        error = ends.sync(1).error
        assert isinstance(error, LoaderError)
        assert "no file" in error.message
    assert "\\udcff" in describe(ValueError("\udcff")).cause_message


def test_a_subscriber_whose_name_was_taken_asks_again() -> None:
    address = new_address()
    with Publisher(MappingSource(tagged(1)), address, deadlines=SHORT) as publisher:
        first = Subscriber(MappingLoader(tagged(-1)), address, "engine")
        publisher.wait_for_peers(1, timeout_s=20)
        with Subscriber(MappingLoader(tagged(-1)), address, "engine") as second:
            deadline = time.monotonic() + 20
            refused = False
            while not refused and time.monotonic() < deadline:
                _ = publisher.peers
                try:
                    second.pull(0.1)
                except TransferTimeout:
                    continue
                except ConfigError:
                    refused = True
            assert refused
            first.close()
            deadline = time.monotonic() + 20
            thread = threading.Thread(target=second.pull, args=(20,))
            thread.start()
            while not publisher.peers and time.monotonic() < deadline:
                time.sleep(0.05)
            assert publisher.publish(1).replicas == {"engine": 1}
            thread.join(20)


# --- hostile or odd values ------------------------------------------------------------------------------------------------------


def hello(**changes: object) -> Hello:
    fields = {"round": 0, "version": -1, "protocol": 1, "run_id": "r", "token": "", "peer": "p", "incarnation": "i", "replica": "p"}
    more = {"rank": 0, "size": 1, "pid": os.getpid(), "host": "h", "serves": -1, "torn": False, "transports": ()}
    return Hello(**{**fields, **more, **changes})  # type: ignore[arg-type]


def test_a_hello_of_absurd_size_or_pid_costs_nothing() -> None:
    welcome = Welcome(round=0, version=-1, protocol=1, run_id="r", pid=1, host="h", incarnation="i")
    roster = Roster(welcome, token="", alive=lambda _: True)
    assert roster.hello(b"k", hello(size=2**62)).error is None
    assert roster.complete() == []
    assert roster.members() == []
    assert open_pidfd(2**40, host_identity()) is None
    assert roster.key_of(PeerId("p")) == b"k"


def test_auto_takes_memory_only_for_this_very_process() -> None:
    assert registry.choose("auto", peers=[(host_identity(), os.getpid())]).name == "memory"
    assert registry.choose("auto", peers=[("another host", os.getpid())]).name == "shm"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Subscriber(MappingLoader(tagged(0)), "tcp://*:5555", "e"), "cannot be connected to"),
        (lambda: Subscriber(MappingLoader(tagged(0)), "tcp://127.0.0.1:0", "e"), "between 1 and 65535"),
        (lambda: Subscriber(MappingLoader(tagged(0)), new_address(), "e", token=None), "token must be a string, got NoneType"),
        (lambda: Publisher(MappingSource(tagged(0)), new_address(), token=None), "token must be a string, got NoneType"),
        (lambda: Subscriber(MappingLoader(tagged(0)), new_address(), "e", replica=3), "replica must be a string"),
        (lambda: ShmConfig(slots=512), "slots must be at most 128"),
    ],
)
def test_values_that_were_accepted_and_broke_later(make, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=text.replace("*", r"\*")):
        make()


def test_a_deadline_of_months_is_no_overflow() -> None:
    long = Deadlines(announce_s=1e7, prepare_s=1e7, transfer_s=1e7, release_s=1e7, commit_s=1e7)
    with pair(MappingSource(tagged(1)), MappingLoader(tagged(-1)), deadlines=long, transport="shm") as ends:
        ends.sync(1).raise_any()


def test_an_explicit_auto_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTLIFT_TRANSPORT", "shm")
    with pair(MappingSource(tagged(1)), MappingLoader(tagged(-1)), transport="auto") as ends:
        assert ends.sync(1).raise_any().report.transport == "memory"  # type: ignore[union-attr]
    with pair(MappingSource(tagged(1)), MappingLoader(tagged(-1)), transport=None) as ends:
        assert ends.sync(1).raise_any().report.transport == "shm"  # type: ignore[union-attr]


# --- files and processes --------------------------------------------------------------------------------------------------------


def test_a_directory_with_other_files_is_refused_and_none_is_removed(tmp_path: pathlib.Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    checkpoint = home / "step-1000.pt"
    checkpoint.write_bytes(b"months of work")
    with pytest.raises(ConfigError, match="must be empty or a run directory"):
        Publisher(MappingSource(tagged(1)), f"ipc://{home}")
    assert checkpoint.exists()
    empty = tmp_path / "empty"
    directory = RunDirectory(empty)
    (empty / "mine.txt").write_text("put here later")
    directory.close()
    assert [path.name for path in empty.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("length", range(88, 102))
def test_a_run_directory_of_any_length_has_room_for_every_socket(tmp_path: pathlib.Path, length: int) -> None:
    room = length - len(os.fsencode(tmp_path)) - 1
    if room < 1:
        pytest.skip(f"the temporary directory is longer than {length} bytes already")
    address = f"ipc://{tmp_path}/{'r' * room}"
    assert len(os.fsencode(parse_address(address).directory or "")) <= 93
    with pair(MappingSource(tagged(1)), MappingLoader(tagged(-1)), address=address, transport="shm") as ends:
        ends.sync(1).raise_any()


FORGOTTEN = """
import gc, torch
from weightlift import Publisher, Subscriber, new_address
from weightlift.loaders import MappingLoader
from weightlift.sources import MappingSource
address = new_address()
publisher = Publisher(MappingSource({"a": torch.ones(2)}), address)
subscriber = Subscriber(MappingLoader({"a": torch.ones(2)}), address, "e")
publisher.wait_for_peers(1)
publisher.me, subscriber.me = publisher, subscriber
del publisher, subscriber
gc.collect()
print("collected")
"""


def test_a_publisher_that_nobody_closes_does_not_hang_the_collector(tmp_path: pathlib.Path) -> None:
    # Its run directory stays, as that of a killed process does: the next run removes it.
    environment = {**os.environ, "WEIGHTLIFT_RUN_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", FORGOTTEN], capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout) == (0, "collected\n"), done.stderr


def test_a_loader_whose_abort_raises_at_close_leaks_nothing() -> None:
    address = new_address()
    loader = FaultyLoader(MappingLoader(tagged(-1)), [fail_at("abort", raising(RuntimeError("no")))])
    subscriber = Subscriber(loader, address, "engine")
    with pytest.raises(RuntimeError, match="no"):
        subscriber.close()


def test_of_publishers_that_start_at_once_one_gets_the_address() -> None:
    address = new_address()
    barrier = threading.Barrier(6)
    made: list[Publisher] = []
    refused: list[ConfigError] = []

    def start() -> None:
        barrier.wait(20)
        try:
            made.append(Publisher(MappingSource(tagged(1)), address))
        except ConfigError as error:
            refused.append(error)

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for publisher in made:
        publisher.close()
    assert (len(made), len(refused)) == (1, 5)


def test_a_publisher_that_is_refused_does_not_cut_off_the_one_that_is_there() -> None:
    address = new_address()
    with Publisher(MappingSource(tagged(1)), address) as first:
        with pytest.raises(ConfigError, match="is in use by another publisher"):
            Publisher(MappingSource(tagged(1)), address)
        with Subscriber(MappingLoader(tagged(-1)), address, "engine"):
            first.wait_for_peers(1, timeout_s=20)


def test_a_buffer_called_cache_is_not_the_loaders_to_drop() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("_cache", torch.zeros(3))
            self.weight = torch.nn.Parameter(torch.zeros(3))

    trainer, engine = Odd(), Odd()
    with torch.no_grad():
        trainer.weight.fill_(1.0)
    with pair(ModuleSource(trainer), HuggingFaceLoader(engine)) as ends:
        ends.sync(1).raise_any()
        ends.sync(2).raise_any()
    assert engine._cache is not None


def test_aliases_of_many_tensors_are_not_looked_up_one_by_one() -> None:
    shared = torch.ones(1)
    sent = {f"w{i}": torch.ones(1) for i in range(2000)} | {f"alias{i}": shared for i in range(2000)}
    names: list[str] = []
    with pair(MappingSource(sent), CallbackLoader(lambda name, _: names.append(name), aliases=True), verify="off") as ends:
        ends.sync(1).raise_any()
    assert sorted(names) == sorted(sent)


def test_too_many_tensors_for_one_frame_are_refused_before_any_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightlift.verify.proof.MAX_FRAME_FROM_SUBSCRIBER", 4096 + 16)
    with pair(MappingSource(tagged(1)), MappingLoader(tagged(-1))) as ends:
        error = ends.sync(1).error
        assert isinstance(error, ManifestError)
        assert (error.phase, ends.subscribers[0].state) == ("PREPARE", State.SERVING)


def test_a_garbled_data_frame_with_a_descriptor_leaves_none() -> None:
    import socket

    import msgspec

    from weightlift.transports.doorbell import Doorbell

    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bell = Doorbell(one, msgspec.msgpack.Decoder(int), peer="stranger")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        socket.send_fds(other, [b"\xc1"], [0])
        with pytest.raises(RemoteProtocolError):
            bell.try_receive()
    assert len(os.listdir("/proc/self/fd")) == before
    bell.close()
    other.close()
    gc.collect()


def test_a_lock_that_somebody_keeps_is_an_error_and_not_a_hang(tmp_path: pathlib.Path) -> None:
    held, wanted = (os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="was locked by another process"):
        lock_within(wanted, fcntl.LOCK_SH, tmp_path, limit_s=0.2)
    os.close(held)
    lock_within(wanted, fcntl.LOCK_SH, tmp_path, limit_s=0.2)
    os.close(wanted)
