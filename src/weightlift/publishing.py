"""The publisher's side towards engines: one round after the other to whoever is connected.

Owns: `Sending`: the reception, the senders, the packer and the auditor of one address; which version comes next. Must not know:
other ranks of the trainer (lockstep.py). `api.Publisher` is its public face.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import get_args

import torch

from weightlift.config import Deadlines, ShmConfig, check_int, check_seconds, check_text, env
from weightlift.errors import ConfigError, LocalProtocolError, PeerLost, SourceError, WeightliftError
from weightlift.observe.events import PeerFenced, RoundEnded, Sink, emit
from weightlift.observe.report import StopWatch, SyncReport
from weightlift.protocol.messages import Limits
from weightlift.protocol.plan import Plan
from weightlift.protocol.round import Round
from weightlift.sources.base import Source
from weightlift.sources.packing import Packer
from weightlift.transports import registry, summary
from weightlift.transports.base import Sender
from weightlift.transports.curve import CurveKeys
from weightlift.transports.driver import Delivery, Driver
from weightlift.transports.endpoint import Endpoint, RunDirectory
from weightlift.transports.reception import Reception
from weightlift.verify.audit import Auditor
from weightlift.verify.digests import Scope
from weightlift.verify.finite import check_finite, check_finite_tensor

__all__ = ["Sending", "Settings"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a Publisher was given, checked; see there."""

    transport: str | None
    deadlines: Deadlines
    min_replicas: int | None
    verify: Scope
    check_finite: bool
    token: str
    curve: CurveKeys | None
    shm: ShmConfig
    sink: Sink | None

    def __post_init__(self) -> None:
        if self.min_replicas is not None:
            check_int("min_replicas", self.min_replicas, at_least=0)
        if self.verify not in get_args(Scope):
            raise ConfigError(f"verify must be off, sample or full, got {self.verify!r}")
        check_text("token", self.token)

    def limits(self) -> Limits:
        """The deadlines that travel."""
        return Limits(**{name: getattr(self.deadlines, name) for name in Limits.__struct_fields__})


class Sending:
    """Rounds of one source to all subscribers of one address. Raises ConfigError for an address in use."""

    def __init__(self, source: Source, endpoint: Endpoint, settings: Settings) -> None:
        self._source = source
        self._endpoint = endpoint
        self._settings = settings
        self._transport = env("TRANSPORT", "auto") if settings.transport is None else settings.transport
        if self._transport != "auto":
            registry.resolve(self._transport)
        self._limits = settings.limits()
        self._directory = None if endpoint.directory is None else RunDirectory(endpoint.directory)
        try:
            self._reception = Reception(endpoint, token=settings.token, curve=settings.curve, sink=settings.sink)
        except BaseException:
            if self._directory is not None:
                self._directory.close()
            raise
        self._driver = Driver(self._reception, sink=settings.sink)
        self._senders: dict[str, Sender] = {}
        self._packer: Packer | None = None
        self._auditor: Auditor | None = None
        self.version: int | None = None
        self._retry: int | None = None

    @property
    def peers(self) -> list[str]:
        """Names of the subscribers that are connected now."""
        self._driver.wait_until(lambda: True, 0.0, lambda: "")
        return [connected.hello.peer for connected in self._reception.roster.connected()]

    def wait_for_peers(self, count: int, timeout_s: float) -> None:
        """Wait until `count` subscribers are connected, with all ranks of their replicas; TransferTimeout otherwise."""
        check_int("count", count, at_least=0)
        check_seconds("timeout_s", timeout_s, zero=True)
        roster = self._reception.roster
        self._driver.wait_until(
            lambda: len(roster.complete()) >= count,
            timeout_s,
            lambda: f"{len(roster.complete())} of {count} subscribers connected",
        )

    def publish(
        self, version: int, *, ready: Callable[[], None] | None = None, consent: Callable[[], None] | None = None
    ) -> SyncReport:
        """One round; see Publisher.publish.

        ready: called when all engines are ready for the first byte, consent: when the first replica may commit; raising gives the
            round up.
        """
        self._check_version(version)
        self._retry = version
        watch = StopWatch()
        self._driver.wait_until(lambda: True, 0.0, lambda: "")
        self._check_members(version)
        choice = registry.choose(self._transport, peers=[(c.hello.host, c.hello.pid) for c in self._reception.roster.connected()])
        delivery = self._delivery(version, choice.name, watch, ready, consent)
        try:
            outcome = self._driver.run(delivery)
        finally:
            if self._driver.committed:  # also when the round was interrupted in the middle of its commits
                self.version = version
            delivery.sender.settle()
            if self._packer is not None:
                self._packer.end()
        return self._conclude(outcome, delivery, choice.reason)

    def _delivery(
        self,
        version: int,
        transport: str,
        watch: StopWatch,
        ready: Callable[[], None] | None,
        consent: Callable[[], None] | None,
    ) -> Delivery:
        """Everything a round needs: plan and packer are kept as long as the manifest and the bucket are the same."""
        sender = self._senders.get(transport)
        if sender is None:
            sender = self._senders[transport] = registry.make_sender(transport, self._endpoint, self._settings.shm)
        with watch.measure("gather"):
            packer = self._begin(version, sender.capacity)

        def fill(bucket: int, memory: object) -> None:
            with watch.measure("pack"):
                packer.fill(bucket, memory)  # type: ignore[arg-type]

        return Delivery(
            version=version,
            need=self._settings.min_replicas,
            plan=packer.plan,
            fill=fill,
            sender=sender,
            transport=transport,
            limits=self._limits,
            watch=watch,
            audit=self._auditor,
            ready=ready,
            consent=consent,
        )

    def _begin(self, version: int, capacity: int) -> Packer:
        """A packer that is ready for the round. What the source raises is a SourceError, before anybody is told of a round."""
        try:
            manifest, packer = self._source.manifest(), self._packer
            if packer is None or packer.plan.manifest is not manifest or packer.plan.capacity != capacity:
                packer = self._packer = Packer(self._source, Plan(manifest, capacity=capacity))
                self._auditor = (
                    None if self._settings.verify == "off" else Auditor(packer.plan, self._settings.verify, packer.recall)
                )
            packer.begin(self._look)
            if self._auditor is not None:
                self._auditor.begin(version, packer.tensors)
            if self._settings.check_finite and packer.tensors is not None:
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
        if self._settings.check_finite:
            check_finite_tensor(self._packer.plan.manifest.entries[entry].name, tensor)
        if self._auditor is not None:
            self._auditor.look(entry, tensor)

    def _conclude(self, outcome: Round, delivery: Delivery, reason: str) -> SyncReport:
        """Return the report, or raise the first cause with it."""
        report = summary.of_round(outcome, delivery, reason)
        for replica, error in outcome.fenced_replicas().items():
            emit(self._settings.sink, "round", PeerFenced(replica=replica, version=outcome.version, error=str(error)))
        failure = None if report.committed else outcome.first_error
        event = RoundEnded(
            round=outcome.round,
            version=outcome.version,
            error="" if failure is None else str(failure),
            report=report.to_dict(),
        )
        emit(self._settings.sink, "round", event)
        if failure is not None:
            failure.fill(still_works=summary.still_of_replicas(report))
            failure.report = report
            raise failure
        self._retry = None
        return report

    def _check_members(self, version: int) -> None:
        """Whether there are enough replicas to begin with."""
        replicas = len({member.replica for member in self._reception.roster.members()})
        if self._settings.min_replicas is None and not replicas:
            gone = self._reception.absent()
            message = f"no subscriber is connected{' any more: ' + gone if gone else ''}"
        elif self._settings.min_replicas is not None and self._settings.min_replicas > replicas:
            message = f"min_replicas is {self._settings.min_replicas}, and {replicas} replicas are connected with all their ranks"
        else:
            return
        raise PeerLost(message, version=version, phase="ANNOUNCE", remedy="call wait_for_peers() first.")

    def _check_version(self, version: int) -> None:
        check_int("version", version, at_least=0)
        if self.version is not None and version <= self.version and version != self._retry:
            raise LocalProtocolError(
                f"version {version} was asked for, version {self.version} is published already",
                version=version,
                remedy="versions strictly increase; only the version of a failed round may be published again.",
            )

    def close(self) -> None:
        """Tell the subscribers, give back everything. Idempotent."""
        parts = (self._directory, *self._senders.values(), self._auditor, self._packer)
        with contextlib.ExitStack() as stack:  # every part is closed, whatever one of them raises
            for part in parts:
                if part is not None:
                    stack.callback(part.close)
            stack.callback(self._reception.close, "the publisher was closed")
