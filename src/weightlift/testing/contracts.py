"""Contract suites: a transport, source or loader is done when it passes its suite.

Owns: the suites, as plain classes with `test_` methods. Must not know: pytest; whoever subclasses them brings the runner.

    class TestMyTransport(TransportContract):
        def ends(self, capacity, slots):   # -> a Sender and a function that makes a Receiver by name
            ...
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy
import torch

from weightlift.errors import (
    DtypeMismatch,
    LoaderError,
    MissingParameter,
    PeerLost,
    ShapeMismatch,
    SourceError,
    TransferTimeout,
    UnexpectedParameter,
    WeightliftError,
    drop_frames,
)
from weightlift.loaders.base import Loader
from weightlift.protocol.manifest import Entry, Manifest
from weightlift.protocol.messages import PeerId
from weightlift.protocol.plan import Plan
from weightlift.sources.base import Source
from weightlift.sources.module import MappingSource
from weightlift.sources.packing import Packer
from weightlift.tensors import torch_dtype
from weightlift.transports.base import ReceiveJob, Receiver, Sender, SendJob

__all__ = ["LoaderContract", "SourceContract", "TransportContract", "odd_tensors"]


def odd_tensors() -> dict[str, torch.Tensor]:
    """Every shape, stride and dtype that has broken a packer: odd bytes before wide dtypes, 0-dim, empty, strided, oversized."""
    generator = torch.Generator().manual_seed(0)
    fused = torch.arange(18.0).view(6, 3)
    return {
        "bf16_3": torch.tensor([1.5, -2.0, 3.25], dtype=torch.bfloat16),
        "fp32_2": torch.tensor([0.1, float("nan")]),
        "u8_1": torch.tensor([255], dtype=torch.uint8),
        "i64_1": torch.tensor([-(2**62)]),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "empty_0_7": torch.empty(0, 7),
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "counter": torch.tensor(7),
        "bool": torch.tensor([True, False, True]),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "every_second": torch.rand(4, 6, generator=generator)[:, ::2],
        "expanded": torch.ones(1, 4).expand(3, 4),
        "offset": torch.rand(8, generator=generator)[1::3],
        "slice_of_fused": fused[2:4],
        "complex": torch.tensor([1 + 2j, -3j]),
        "fp8": torch.tensor([0.5, 2.0, -1.0]).to(torch.float8_e4m3fn),
        "oversized": torch.rand(50, 33, generator=generator),
        "wide_row": torch.rand(2, 3000, generator=generator),
        "after": torch.tensor([4], dtype=torch.int16),
    }


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the logical tensor: equal exactly when shape-independent content is bit-equal."""
    # A clone, not contiguous(): that keeps the stride of a dimension of size 1, and such a tensor cannot be seen as bytes.
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and bits."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def caught(kind: type[Exception], call: Callable[[], object]) -> Exception | None:
    """What a call raised, if it is of that kind; None if it raised nothing."""
    try:
        call()
    except kind as error:
        return error
    return None


class TransportContract:
    """What transports/base.py promises. Every wait of these tests is far below the suite's own limit."""

    peers: ClassVar[tuple[str, ...]] = ("p0", "p1", "p2")

    def ends(self, capacity: int, slots: int) -> tuple[Sender, Callable[[str], Receiver]]:
        """A sender with buckets of `capacity` bytes, and a maker of receivers."""
        raise NotImplementedError("a subclass brings what is under test")

    # --- the machinery of the tests --------------------------------------------------------------------------------------------

    def _plan(self, capacity: int, count: int = 9) -> Plan:
        return Plan(Manifest([Entry(f"t{i}", "uint8", (capacity,)) for i in range(count)]), capacity=capacity)

    def _round(
        self,
        sender: Sender,
        receivers: dict[str, Receiver],
        plan: Plan,
        *,
        number: int = 1,
        fill: Callable[[int, torch.Tensor], None] | None = None,
        install: Callable[[str, int, torch.Tensor], None] | None = None,
        stall_s: float = 5.0,
        release: bool = True,
    ) -> tuple[dict[PeerId, WeightliftError] | BaseException, dict[str, BaseException | None], dict[str, list[tuple[int, bytes]]]]:
        """One transfer: (what send returned or raised, what each receive raised, what each installed)."""
        peers = [PeerId(peer) for peer in receivers]
        offer = sender.offer(plan, peers)
        seen: dict[str, list[tuple[int, bytes]]] = {peer: [] for peer in receivers}
        errors: dict[str, BaseException | None] = dict.fromkeys(receivers)

        def default_fill(bucket: int, memory: torch.Tensor) -> None:
            memory[: plan.buckets[bucket].nbytes] = (bucket * 7 + number) % 251

        def receive(peer: str, receiver: Receiver) -> None:
            def on_bucket(bucket: int, memory: torch.Tensor) -> None:
                if install is not None:
                    install(peer, bucket, memory)
                seen[peer].append((bucket, bytes(memory[: plan.buckets[bucket].nbytes].tolist())))

            try:
                receiver.receive(ReceiveJob(round=number, version=number, plan=plan, install=on_bucket, stall_s=2 * stall_s))
                if release:
                    receiver.release()
            except BaseException as error:
                errors[peer] = error
                drop_frames(error)
                receiver.abort()

        for receiver in receivers.values():
            receiver.attach(offer, plan)
        threads = [threading.Thread(target=receive, args=item) for item in receivers.items()]
        for thread in threads:
            thread.start()
        result: Any
        try:
            job = SendJob(round=number, version=number, plan=plan, peers=peers, fill=fill or default_fill, stall_s=stall_s)
            result = dict(sender.send(job))
        except BaseException as error:
            result = error
            drop_frames(error)
        sender.settle()
        for thread in threads:
            thread.join(60.0)
            assert not thread.is_alive(), "a receiver is still waiting"
        return result, errors, seen

    def _made(self, capacity: int = 64, slots: int = 2, count: int = 1) -> tuple[Sender, dict[str, Receiver]]:
        sender, receiver = self.ends(capacity, slots)
        return sender, {peer: receiver(peer) for peer in self.peers[:count]}

    def _close(self, sender: Sender, receivers: dict[str, Receiver]) -> None:
        for receiver in receivers.values():
            receiver.close()
            receiver.close()
        sender.close()
        sender.close()

    # --- the contract ----------------------------------------------------------------------------------------------------------

    def test_every_bucket_arrives_once_in_order_at_every_peer(self) -> None:
        sender, receivers = self._made(count=3)
        plan = self._plan(64)
        for number in (1, 2, 3):
            failed, errors, seen = self._round(sender, receivers, plan, number=number)
            assert failed == {}
            assert set(errors.values()) == {None}
            expected = [(b, bytes([(b * 7 + number) % 251] * 64)) for b in range(len(plan))]
            assert all(got == expected for got in seen.values())
        self._close(sender, receivers)

    def test_a_plan_without_buckets_is_a_transfer_too(self) -> None:
        sender, receivers = self._made()
        plan = Plan(Manifest([Entry("nothing", "float32", (0, 4))]), capacity=64)
        failed, errors, seen = self._round(sender, receivers, plan)
        assert (failed, errors, seen) == ({}, {"p0": None}, {"p0": []})
        self._close(sender, receivers)

    def test_an_install_that_raises_fails_its_peer_and_no_other(self) -> None:
        sender, receivers = self._made(count=3)
        plan = self._plan(64)

        def install(peer: str, bucket: int, memory: torch.Tensor) -> None:
            if peer == "p1" and bucket == 4:
                raise ValueError("no")

        failed, errors, seen = self._round(sender, receivers, plan, install=install)
        assert isinstance(failed, dict)
        assert list(failed) == ["p1"]
        assert type(failed[PeerId("p1")]) is PeerLost
        assert failed[PeerId("p1")].bucket == 4
        assert isinstance(errors["p1"], ValueError)
        assert len(seen["p0"]) == len(seen["p2"]) == len(plan)
        self._again(sender, receivers, plan)

    def test_a_fill_that_raises_closes_everybody_and_is_raised(self) -> None:
        sender, receivers = self._made(count=3)
        plan = self._plan(64)

        def fill(bucket: int, memory: torch.Tensor) -> None:
            if bucket == 5:
                raise SourceError("no")

        raised, errors, _ = self._round(sender, receivers, plan, fill=fill)
        assert isinstance(raised, SourceError)
        assert {type(error) for error in errors.values()} == {PeerLost}
        self._again(sender, receivers, plan)

    def test_a_peer_that_stalls_is_named_and_the_others_go_on(self) -> None:
        sender, receivers = self._made(count=3)
        plan = self._plan(64)
        wake = threading.Event()

        def install(peer: str, bucket: int, memory: torch.Tensor) -> None:
            if peer == "p2" and bucket == 3:
                wake.wait(20.0)

        start = time.monotonic()
        threading.Timer(2.0, wake.set).start()
        failed, errors, seen = self._round(sender, receivers, plan, install=install, stall_s=0.5)
        assert time.monotonic() - start < 15.0
        assert isinstance(failed, dict)
        assert type(failed[PeerId("p2")]) is TransferTimeout
        assert failed[PeerId("p2")].bucket == 3
        assert list(failed) == ["p2"]
        assert len(seen["p0"]) == len(plan)
        assert errors["p2"] is not None
        self._again(sender, receivers, plan)

    def test_a_sender_that_stalls_is_a_timeout_at_the_receiver(self) -> None:
        sender, receivers = self._made()
        plan = self._plan(64)

        def fill(bucket: int, memory: torch.Tensor) -> None:
            if bucket == 2:
                time.sleep(3.0)

        failed, errors, _ = self._round(sender, receivers, plan, fill=fill, stall_s=0.5)
        assert type(errors["p0"]) is TransferTimeout
        assert errors["p0"].bucket == 2
        assert isinstance(failed, dict)
        assert list(failed) == ["p0"]
        self._again(sender, receivers, plan)

    def test_more_buckets_than_slots_never_overwrite_one_that_is_being_read(self) -> None:
        sender, receivers = self._made(slots=2, count=2)
        plan = self._plan(64, count=40)

        def install(peer: str, bucket: int, memory: torch.Tensor) -> None:
            before = memory.clone()
            if peer == "p1":
                time.sleep(0.005)
            assert torch.equal(before, memory), "the bucket changed while it was read"

        failed, errors, _ = self._round(sender, receivers, plan, install=install)
        assert (failed, errors) == ({}, {"p0": None, "p1": None})
        self._close(sender, receivers)

    def test_usage_is_zero_after_close(self) -> None:
        sender, receivers = self._made()
        self._round(sender, receivers, self._plan(64))
        assert sender.usage().host_bytes + sender.usage().device_bytes > 0
        self._close(sender, receivers)
        assert sender.usage().host_bytes == sender.usage().device_bytes == 0
        assert all(r.usage().host_bytes == 0 for r in receivers.values())

    def _again(self, sender: Sender, receivers: dict[str, Receiver], plan: Plan) -> None:
        """After any failure the next round works on the same objects."""
        failed, errors, seen = self._round(sender, receivers, plan, number=99)
        assert failed == {}
        assert set(errors.values()) == {None}
        assert all(len(got) == len(plan) for got in seen.values())
        self._close(sender, receivers)


class SourceContract:
    """What sources/base.py promises."""

    def source(self) -> tuple[Source, dict[str, torch.Tensor]]:
        """A source and the tensors that it must send, aliases included, by wire name."""
        raise NotImplementedError("a subclass brings what is under test")

    def test_manifest_is_stable_and_complete(self) -> None:
        source, expected = self.source()
        manifest = source.manifest()
        assert source.manifest() is manifest
        assert list(manifest.by_name) == list(expected)

    def test_stream_yields_the_values_and_changes_nothing(self) -> None:
        source, expected = self.source()
        before = {name: tensor.detach().clone() for name, tensor in expected.items()}
        owners = [entry for entry in source.manifest().entries if not entry.alias_of]
        streamed = list(source.stream())
        assert len(streamed) == len(owners)
        for entry, tensor in zip(owners, streamed, strict=True):
            assert tuple(tensor.shape) == entry.shape
            assert not tensor.requires_grad
            assert same_bits(tensor.to(expected[entry.name].dtype), before[entry.name])
        assert all(same_bits(expected[name], before[name]) for name in expected)

    def test_packs_to_the_same_bits_at_any_capacity(self) -> None:
        source, expected = self.source()
        for capacity in (16, 100, 1 << 20):
            plan = Plan(source.manifest(), capacity=capacity)
            packer = Packer(source, plan)
            for _ in range(2):
                packer.begin()
                assert _unpacked(packer, plan, capacity) == {
                    entry.name: bits(expected[entry.name].to(torch_dtype(entry.dtype))).tolist()
                    for entry in plan.manifest.entries
                    if not entry.alias_of and entry.elements
                }
            packer.close()


def _unpacked(packer: Packer, plan: Plan, capacity: int) -> dict[str, list[int]]:
    """name -> the bytes that were packed for it, in order."""
    found: dict[str, list[int]] = {}
    for bucket in plan.buckets:
        memory = torch.full((capacity,), 170, dtype=torch.uint8)
        packer.fill(bucket.number, memory)
        for piece in bucket.pieces:
            name = plan.manifest.entries[piece.entry].name
            found.setdefault(name, []).extend(memory[piece.offset : piece.offset + piece.nbytes].tolist())
    return found


class LoaderContract:
    """What loaders/base.py promises, for a loader into named tensors."""

    def loader(self, tensors: dict[str, torch.Tensor]) -> Loader:
        """A loader whose engine holds exactly these tensors."""
        raise NotImplementedError("a subclass brings the loader under test")

    def _held(self, sent: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in sent.items()}

    def _plan(self, sent: dict[str, torch.Tensor], capacity: int = 128) -> tuple[Plan, Packer]:
        source = MappingSource(sent)
        plan = Plan(source.manifest(), capacity=capacity)
        packer = Packer(source, plan)
        packer.begin()
        return plan, packer

    def _install(self, loader: Loader, plan: Plan, packer: Packer, *, skip: int = -1) -> torch.Tensor:
        memory = torch.zeros(plan.capacity, dtype=torch.uint8)
        for bucket in plan.buckets:
            packer.fill(bucket.number, memory)
            if bucket.number != skip:
                loader.install(bucket, memory)
        return memory

    def test_installs_every_bit_round_after_round(self) -> None:
        sent = odd_tensors()
        held = self._held(sent)
        loader = self.loader(held)
        plan, packer = self._plan(sent)
        for version in (1, 2):
            for tensor in held.values():
                tensor.zero_()
            loader.prepare(plan)
            self._install(loader, plan, packer)
            loader.finish()
            loader.commit(version)
            assert [name for name in sent if not same_bits(sent[name], held[name])] == []

    def test_prepare_changes_nothing_and_refuses_what_does_not_fit(self) -> None:
        sent = {"a": torch.ones(3), "b": torch.ones(2, 2)}
        wrong: list[tuple[dict[str, torch.Tensor], type[Exception]]] = [
            ({"a": torch.ones(3)}, MissingParameter),
            ({**sent, "c": torch.ones(1)}, UnexpectedParameter),
            ({**sent, "a": torch.ones(1)}, ShapeMismatch),
            ({**sent, "a": torch.ones(3, dtype=torch.int32)}, DtypeMismatch),
        ]
        for other, error in wrong:
            held = self._held(sent)
            loader = self.loader(held)
            refusal = caught(error, lambda loader=loader, other=other: loader.prepare(self._plan(other)[0]))  # type: ignore[misc]
            assert type(refusal) is error, f"{sorted(other)} was not refused with {error.__name__}"
            assert not any(tensor.any() for tensor in held.values())
            plan, packer = self._plan(sent)
            loader.prepare(plan)
            self._install(loader, plan, packer)
            loader.finish()
            assert all(same_bits(sent[name], held[name]) for name in sent), "a refusal does not spoil the next round"

    def test_a_bucket_that_did_not_come_is_seen_by_finish(self) -> None:
        sent = odd_tensors()
        loader = self.loader(self._held(sent))
        plan, packer = self._plan(sent)
        for skip in (0, len(plan) // 2, len(plan) - 1):
            loader.prepare(plan)
            self._install(loader, plan, packer, skip=skip)
            error = caught(LoaderError, loader.finish)
            assert isinstance(error, LoaderError), f"bucket {skip} of {len(plan)} was not installed, and finish() was content"
            assert error.bucket == skip
            loader.abort()

    def test_abort_drops_every_view_of_a_bucket(self) -> None:
        sent = odd_tensors()
        loader = self.loader(self._held(sent))
        plan, packer = self._plan(sent)
        loader.prepare(plan)
        array = numpy.zeros(plan.capacity, dtype=numpy.uint8)
        memory, alive = torch.from_numpy(array), weakref.ref(array)
        packer.fill(0, memory)
        loader.install(plan.buckets[0], memory)
        packer.close()
        del memory, array
        loader.abort()
        assert alive() is None, "the loader still holds a view of a bucket"
