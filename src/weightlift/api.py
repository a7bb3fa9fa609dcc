"""The public seam: `Publisher` in the trainer, `Subscriber` in the engine's worker.

Owns: lifetimes, versions, the report, the choice of transport. Must not know: how bytes move, what frames there are.
Main path of a sync, in three hops: `Publisher.publish` -> `transports.driver.Driver.run` -> `protocol.round.Round`;
on the other side `Subscriber.pull` -> `transports.follower.Follower.pull` -> `protocol.session.SubscriberSession`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import secrets
from types import TracebackType
from typing import Self, get_args

import torch

from weightlift.config import Deadlines, ShmConfig, check_int, check_seconds, check_text, env
from weightlift.errors import ConfigError, LocalProtocolError, PeerLost, SourceError, TornWeights, WeightliftError
from weightlift.loaders.base import Loader
from weightlift.observe.events import PeerFenced, RoundEnded, Sink, emit
from weightlift.observe.report import StopWatch, SyncReport
from weightlift.protocol.messages import PROTOCOL_VERSION, Goodbye, Hello, Limits
from weightlift.protocol.plan import Plan
from weightlift.protocol.round import Round
from weightlift.protocol.session import Stage, SubscriberSession
from weightlift.sources.base import Source
from weightlift.sources.packing import Packer
from weightlift.transports import registry, summary
from weightlift.transports.base import Sender
from weightlift.transports.curve import CurveKeys, check_public_key
from weightlift.transports.driver import Delivery, Driver
from weightlift.transports.endpoint import Endpoint, RunDirectory, parse_address
from weightlift.transports.follower import Follower
from weightlift.transports.liveness import host_identity
from weightlift.transports.mailbox import Mailbox
from weightlift.transports.reception import Reception
from weightlift.verify.audit import Auditor
from weightlift.verify.digests import Scope
from weightlift.verify.finite import check_finite, check_finite_tensor

__all__ = ["Publisher", "State", "Subscriber"]


class State(enum.StrEnum):
    """What an engine may do. TORN and a subscriber without a version must not generate."""

    SERVING = "SERVING"
    UPDATING = "UPDATING"
    TORN = "TORN"


class Publisher:
    """The trainer's end: publishes versions of one source to all live subscribers of one address.

    Args:
        source: where the tensors come from.
        address: from `new_address()`; handed to the subscribers as a string.
        transport: "auto", or the name of a registered transport; None takes WEIGHTLIFT_TRANSPORT, or else "auto".
        deadlines: how long each phase may take; they rule both sides.
        min_replicas: how many replicas must commit for `publish` to return; None: all that are live when it is called.
        verify: how much of what the engines hold after the transfer is compared with the source before anybody commits. "sample": one
            run of 256 elements of every tensor, another one each version; "full": every byte; "off": nothing. A difference is a
            DigestMismatch.
        check_finite: whether a NaN or an infinity in the source is a NonFiniteTensor instead of a version.
        token: shared secret of the run, for `tcp://` addresses.
        curve: encrypts the control channel; the subscribers are given `curve.public`.
        shm: the ring of the shared-memory transport.
        sink: receives typed events (weightlift.observe).

    One thread at a time. Raises ConfigError for wrong values or an address in use.
    """

    def __init__(
        self,
        source: Source,
        address: str,
        *,
        transport: str | None = None,
        deadlines: Deadlines | None = None,
        min_replicas: int | None = None,
        verify: Scope = "sample",
        check_finite: bool = False,
        token: str = "",
        curve: CurveKeys | None = None,
        shm: ShmConfig | None = None,
        sink: Sink | None = None,
    ) -> None:
        if min_replicas is not None:
            check_int("min_replicas", min_replicas, at_least=0)
        if verify not in get_args(Scope):
            raise ConfigError(f"verify must be off, sample or full, got {verify!r}")
        self._verify, self._check_finite = verify, bool(check_finite)
        check_text("token", token)
        self._source = source
        self._endpoint = parse_address(address)
        self._transport = env("TRANSPORT", "auto") if transport is None else transport
        if self._transport != "auto":
            registry.resolve(self._transport)
        self._limits = Limits(**dataclasses.asdict(deadlines or Deadlines()))
        self._min_replicas = min_replicas
        self._shm = shm or ShmConfig()
        self._sink = sink
        self._directory = _hold(self._endpoint)
        try:
            self._reception = Reception(self._endpoint, token=token, curve=curve, sink=sink)
        except BaseException:
            if self._directory is not None:
                self._directory.close()
            raise
        self._driver = Driver(self._reception, sink=sink)
        self._senders: dict[str, Sender] = {}
        self._packer: Packer | None = None
        self._auditor: Auditor | None = None
        self._version: int | None = None
        self._retry: int | None = None
        self._open = True

    @property
    def version(self) -> int | None:
        """The last version that any replica committed; None before the first."""
        return self._version

    @property
    def peers(self) -> list[str]:
        """Names of the subscribers that are connected now."""
        self._check_open()
        self._driver.wait_until(lambda: True, 0.0, lambda: "")
        return [connected.hello.peer for connected in self._reception.roster.connected()]

    def wait_for_peers(self, count: int, timeout_s: float = 60.0) -> None:
        """Wait until `count` subscribers are connected, with all ranks of their replicas; TransferTimeout otherwise."""
        self._check_open()
        check_int("count", count, at_least=0)
        check_seconds("timeout_s", timeout_s, zero=True)
        roster = self._reception.roster
        self._driver.wait_until(
            lambda: len(roster.complete()) >= count,
            timeout_s,
            lambda: f"{len(roster.complete())} of {count} subscribers connected",
        )

    def publish(self, version: int) -> SyncReport:
        """Publish the source's tensors as `version`; blocks until enough replicas serve it.

        Raises: a WeightliftError, in bounded time, when fewer than `min_replicas` committed: the first cause, with `.report`, which
        says what every replica serves now. LocalProtocolError if the version does not increase (the version of a failed round may be
        repeated). PeerLost if nobody is connected.
        """
        self._check_open()
        self._check_version(version)
        self._retry = version
        watch = StopWatch()
        self._driver.wait_until(lambda: True, 0.0, lambda: "")
        self._check_members(version)
        choice = registry.choose(self._transport, peers=[(c.hello.host, c.hello.pid) for c in self._reception.roster.connected()])
        delivery = self._delivery(version, choice.name, watch)
        try:
            outcome = self._driver.run(delivery)
        finally:
            if self._driver.committed:  # also when the round was interrupted in the middle of its commits
                self._version = version
            delivery.sender.settle()
            if self._packer is not None:
                self._packer.end()
        return self._conclude(outcome, delivery, choice.reason)

    def _delivery(self, version: int, transport: str, watch: StopWatch) -> Delivery:
        """Everything a round needs: plan and packer are kept as long as the manifest and the bucket are the same."""
        sender = self._senders.get(transport)
        if sender is None:
            sender = self._senders[transport] = registry.make_sender(transport, self._endpoint, self._shm)
        with watch.measure("gather"):
            packer = self._begin(version, sender.capacity)

        def fill(bucket: int, memory: object) -> None:
            with watch.measure("pack"):
                packer.fill(bucket, memory)  # type: ignore[arg-type]

        return Delivery(
            version=version,
            need=self._min_replicas,
            plan=packer.plan,
            fill=fill,
            sender=sender,
            transport=transport,
            limits=self._limits,
            watch=watch,
            audit=self._auditor,
        )

    def _begin(self, version: int, capacity: int) -> Packer:
        """A packer that is ready for the round. What the source raises is a SourceError, before anybody is told of a round."""
        try:
            manifest, packer = self._source.manifest(), self._packer
            if packer is None or packer.plan.manifest is not manifest or packer.plan.capacity != capacity:
                packer = self._packer = Packer(self._source, Plan(manifest, capacity=capacity))
                self._auditor = None if self._verify == "off" else Auditor(packer.plan, self._verify, packer.recall)
            packer.begin(self._look)
            if self._auditor is not None:
                self._auditor.begin(version, packer.tensors)
            if self._check_finite and packer.tensors is not None:
                check_finite(packer.plan.manifest, packer.tensors)
        except WeightliftError as error:
            error.fill(version=version, phase="ANNOUNCE")
            raise
        except Exception as error:
            message = f"the source raised {type(error).__name__}: {error}"
            raise SourceError(message, version=version, phase="ANNOUNCE") from error
        return packer

    def _look(self, entry: int, tensor: torch.Tensor) -> None:
        """A streaming source yields a tensor: it is looked at before a byte of it is packed."""
        assert self._packer is not None, "it is the packer that asks"
        if self._check_finite:
            check_finite_tensor(self._packer.plan.manifest.entries[entry].name, tensor)
        if self._auditor is not None:
            self._auditor.look(entry, tensor)

    def _conclude(self, outcome: Round, delivery: Delivery, reason: str) -> SyncReport:
        """Return the report, or raise the first cause with it."""
        report = summary.of_round(outcome, delivery, reason)
        for replica, error in outcome.fenced_replicas().items():
            emit(self._sink, "round", PeerFenced(replica=replica, version=outcome.version, error=str(error)))
        failure = None if report.committed else outcome.first_error
        event = RoundEnded(
            round=outcome.round,
            version=outcome.version,
            error="" if failure is None else str(failure),
            report=report.to_dict(),
        )
        emit(self._sink, "round", event)
        if failure is not None:
            failure.fill(still_works=summary.still_of_replicas(report))
            failure.report = report
            raise failure
        self._retry = None
        return report

    def _check_members(self, version: int) -> None:
        """Whether there are enough replicas to begin with."""
        replicas = len({member.replica for member in self._reception.roster.members()})
        if self._min_replicas is None and not replicas:
            gone = self._reception.absent()
            message = f"no subscriber is connected{' any more: ' + gone if gone else ''}"
        elif self._min_replicas is not None and self._min_replicas > replicas:
            message = f"min_replicas is {self._min_replicas}, and {replicas} replicas are connected with all their ranks"
        else:
            return
        raise PeerLost(message, version=version, phase="ANNOUNCE", remedy="call wait_for_peers() first.")

    def _check_version(self, version: int) -> None:
        check_int("version", version, at_least=0)
        if self._version is not None and version <= self._version and version != self._retry:
            raise LocalProtocolError(
                f"version {version} was asked for, version {self._version} is published already",
                version=version,
                remedy="versions strictly increase; only the version of a failed round may be published again.",
            )

    def _check_open(self) -> None:
        if not self._open:
            raise LocalProtocolError("this publisher is closed")

    def close(self) -> None:
        """Tell the subscribers, give back everything. Idempotent."""
        if not self._open:
            return
        self._open = False
        parts = (self._directory, *self._senders.values(), self._auditor, self._packer)
        with contextlib.ExitStack() as stack:  # every part is closed, whatever one of them raises
            for part in parts:
                if part is not None:
                    stack.callback(part.close)
            stack.callback(self._reception.close, "the publisher was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Subscriber:
    """The engine's end: takes part in rounds, and knows what may be served.

    Args:
        loader: installs versions into the engine.
        address: the publisher's.
        name: unique among the subscribers of this address; appears in errors and reports.
        replica: the engine that this worker is a rank of; default: a replica of its own. rank, size: within the replica.
        token: shared secret of the run, for `tcp://` addresses.
        curve: the publisher's public key, where it has CurveKeys.
        sink: receives typed events.

    One thread at a time. The constructor does not wait: the publisher may start later.
    """

    def __init__(
        self,
        loader: Loader,
        address: str,
        name: str,
        *,
        replica: str = "",
        rank: int = 0,
        size: int = 1,
        token: str = "",
        curve: str | None = None,
        sink: Sink | None = None,
    ) -> None:
        if curve is not None:
            check_public_key("curve", curve)
        check_text("name", name, empty=False)
        check_text("token", token)
        check_text("replica", replica)
        check_int("size", size, at_least=1)
        check_int("rank", rank, at_least=0)
        if rank >= size:
            raise ConfigError(f"rank must be below size {size}, got {rank}")
        self._endpoint = parse_address(address)
        self._identity = (name, replica or name, rank, size, token)
        self._incarnation = secrets.token_hex(8)
        self._session = SubscriberSession()
        self._directory = _hold(self._endpoint)
        try:
            self._mailbox = Mailbox(self._endpoint, self._hello, curve=curve, sink=sink)
        except BaseException:
            if self._directory is not None:
                self._directory.close()
            raise
        self._follower = Follower(self._mailbox, self._session, loader, peer=name)
        self._open = True

    @property
    def name(self) -> str:
        """This subscriber's name."""
        return self._identity[0]

    @property
    def version(self) -> int | None:
        """The version that the engine holds completely; None before the first sync and when TORN. While a round is under way
        (`state` UPDATING) it is the one before: what may be generated with, `ensure_serving` says."""
        return self._session.serves

    @property
    def state(self) -> State:
        """SERVING, UPDATING (a round is under way) or TORN. SERVING with version None: never synced."""
        if self._session.stage is not Stage.IDLE:
            return State.UPDATING
        return State.TORN if self._session.torn else State.SERVING

    def ensure_serving(self) -> int:
        """The version to stamp on what is generated now. TornWeights if the engine holds a mixture, LocalProtocolError if it holds
        no version yet or an update is under way."""
        if self._session.torn:
            raise TornWeights("this engine was touched by a sync that did not finish", peer=self.name)
        if self._session.stage is not Stage.IDLE or self._session.serves is None:
            why = "an update is under way" if self._session.stage is not Stage.IDLE else "no version was pulled yet"
            raise LocalProtocolError(f"this engine cannot serve: {why}", peer=self.name, remedy="call pull() first.")
        return self._session.serves

    def pull(self, timeout_s: float = 60.0) -> SyncReport:
        """Take part in the next round; blocks until it is over. `report.version` is what the engine now serves.

        Raises: TransferTimeout if no round is announced in time; otherwise the first cause why the round ended early for this engine.
        `version` and `state` then say what is served.
        """
        if not self._open:
            raise LocalProtocolError("this subscriber is closed")
        check_seconds("timeout_s", timeout_s, zero=True)
        report = self._follower.pull(timeout_s)
        return dataclasses.replace(report, replicas={self._identity[1]: report.version})

    def _hello(self) -> Hello:
        name, replica, rank, size, token = self._identity
        return Hello(
            round=0,
            version=-1,
            protocol=PROTOCOL_VERSION,
            run_id=self._endpoint.run_id,
            token=token,
            peer=name,
            incarnation=self._incarnation,
            replica=replica,
            rank=rank,
            size=size,
            pid=os.getpid(),
            host=host_identity(),
            serves=-1 if self._session.serves is None else self._session.serves,
            torn=self._session.torn,
            transports=tuple(registry.names()),
        )

    def close(self) -> None:
        """Leave the publisher's roster, give back everything; the weights stay as they are. Idempotent."""
        if not self._open:
            return
        self._open = False
        with contextlib.ExitStack() as stack:  # every part is closed, whatever one of them raises
            if self._directory is not None:
                stack.callback(self._directory.close)
            stack.callback(self._follower.close)
            stack.callback(self._mailbox.close, Goodbye(round=0, version=-1, reason="the subscriber was closed"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _hold(endpoint: Endpoint) -> RunDirectory | None:
    return None if endpoint.directory is None else RunDirectory(endpoint.directory)
