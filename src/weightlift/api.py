"""The public seam: `Publisher` in the trainer, `Subscriber` in the engine's worker.

Owns: lifetimes, versions, the report, the choice of transport. Must not know: how bytes move, what frames there are.
Main path of a sync, in three hops: `Publisher.publish` -> `publishing.Sending.publish` -> `transports.driver.Driver.run`, which
does what `protocol.round.Round` says; where several trainer ranks gather together, lockstep.py is around it. On the other side
`Subscriber.pull` -> `transports.follower.Follower.pull` -> `protocol.session.SubscriberSession`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import secrets
from types import TracebackType
from typing import Self

from weightlift.config import Deadlines, ShmConfig, check_int, check_seconds, check_text
from weightlift.errors import ConfigError, LocalProtocolError, TornWeights
from weightlift.liveness import host_identity
from weightlift.loaders.base import Loader
from weightlift.lockstep import Lockstep
from weightlift.observe.events import Sink
from weightlift.observe.report import SyncReport
from weightlift.protocol.messages import PROTOCOL_VERSION, Goodbye, Hello
from weightlift.protocol.session import Event, Stage, SubscriberSession
from weightlift.publishing import Sending, Settings
from weightlift.sources.base import GroupSource, Source
from weightlift.transports import registry
from weightlift.transports.curve import CurveKeys, check_public_key
from weightlift.transports.endpoint import Endpoint, RunDirectory, parse_address
from weightlift.transports.follower import Follower
from weightlift.transports.mailbox import Mailbox
from weightlift.verify.digests import Scope

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
        verify: how much of what the engines hold after the transfer is compared with the source before anybody commits. "sample":
        one
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
        settings = Settings(
            transport=transport,
            deadlines=deadlines or Deadlines(),
            min_replicas=min_replicas,
            verify=verify,
            check_finite=bool(check_finite),
            token=token,
            curve=curve,
            shm=shm or ShmConfig(),
            sink=sink,
        )
        endpoint = parse_address(address)
        self._lockstep = Lockstep(source, settings.deadlines) if isinstance(source, GroupSource) else None
        sends = self._lockstep is None or self._lockstep.sends
        self._sending = Sending(source, endpoint, settings) if sends else None
        self._open = True

    @property
    def version(self) -> int | None:
        """The last version that any replica committed; None before the first."""
        if self._lockstep is not None:
            return self._lockstep.version
        assert self._sending is not None, "a publisher without a group sends"
        return self._sending.version

    @property
    def peers(self) -> list[str]:
        """Names of the subscribers that are connected now; none on a rank that does not send."""
        self._check_open()
        return [] if self._sending is None else self._sending.peers

    def wait_for_peers(self, count: int, timeout_s: float = 60.0) -> None:
        """Wait until `count` subscribers are connected, with all ranks of their replicas; TransferTimeout otherwise.

        Returns at once on a rank of a trainer group that does not send: its `publish` waits for the ranks that do.
        """
        self._check_open()
        if self._sending is not None:
            with contextlib.nullcontext() if self._lockstep is None else self._lockstep.alive():
                self._sending.wait_for_peers(count, timeout_s)

    def publish(self, version: int) -> SyncReport:
        """Publish the source's tensors as `version`; blocks until enough replicas serve it.

        Of a source that is spread over a trainer group, every rank calls this with the same version; all return the same report
        (or, where each rank sends, its own), or all raise.

        Raises: a WeightliftError, in bounded time, when fewer than `min_replicas` committed: the first cause, with `.report`, which
        says what every replica serves now. LocalProtocolError if the version does not increase (the version of a failed round may
        be repeated). PeerLost if nobody is connected.
        """
        self._check_open()
        check_int("version", version, at_least=0)
        if self._lockstep is not None:
            return self._lockstep.publish(version, self._sending)
        assert self._sending is not None, "a publisher without a group sends"
        return self._sending.publish(version)

    def _check_open(self) -> None:
        if not self._open:
            raise LocalProtocolError("this publisher is closed")

    def close(self) -> None:
        """Tell the subscribers, give back everything. Idempotent. Waits for no other rank."""
        if not self._open:
            return
        self._open = False
        if self._sending is not None:
            self._sending.close()

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
        self._discarded = False
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
            why = (
                "this engine's weights were discarded"
                if self._discarded
                else "this engine was touched by a sync that did not finish"
            )
            raise TornWeights(why, peer=self.name)
        if self._session.stage is not Stage.IDLE or self._session.serves is None:
            why = "an update is under way" if self._session.stage is not Stage.IDLE else "no version was pulled yet"
            raise LocalProtocolError(f"this engine cannot serve: {why}", peer=self.name, remedy="call pull() first.")
        return self._session.serves

    def pull(self, timeout_s: float = 60.0) -> SyncReport:
        """Take part in the next round; blocks until it is over. `report.version` is what the engine now serves.

        Raises: TransferTimeout if no round is announced in time; otherwise the first cause why the round ended early for this
        engine. `version` and `state` then say what is served.
        """
        if not self._open:
            raise LocalProtocolError("this subscriber is closed")
        check_seconds("timeout_s", timeout_s, zero=True)
        report = self._follower.pull(timeout_s)
        self._discarded = False
        return dataclasses.replace(report, replicas={self._identity[1]: report.version})

    def discard(self) -> None:
        """The engine's weights are about to be given away (sleep level 2): nothing is served until the next full sync.

        LocalProtocolError in the middle of a round.
        """
        self._session.on(Event.DISCARD)
        self._discarded = True

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
