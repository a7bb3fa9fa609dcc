"""What both drivers say about a round when it is over: reports and sentences.

Owns: filling SyncReport from what the drivers hold. Must not know: what happens next.
"""

from __future__ import annotations

from weightlift.observe.report import PhaseSeconds, StopWatch, SyncReport
from weightlift.protocol.messages import Announce, Released
from weightlift.protocol.plan import Plan
from weightlift.protocol.round import Round
from weightlift.protocol.session import SubscriberSession
from weightlift.transports.base import Receiver
from weightlift.transports.driver import Delivery

__all__ = ["of_round", "of_subscriber", "released", "still_of_engine", "still_of_replicas"]


def released(offer: Announce, plan: Plan, seconds: PhaseSeconds, digests: bytes) -> Released:
    """What a subscriber says when everything is installed and dropped."""
    manifest = plan.manifest
    return Released(
        round=offer.round,
        version=offer.version,
        tensors=manifest.tensors,
        total_bytes=manifest.total_bytes,
        load_s=seconds.load,
        release_s=seconds.release,
        digests=digests,
    )


def still_of_engine(session: SubscriberSession) -> str:
    """One sentence on what an engine serves after a round that ended early."""
    if session.torn:
        return "This engine was touched: it is TORN and serves nothing until a full sync."
    return "This engine never held a version." if session.serves is None else f"It still serves version {session.serves}."


def of_subscriber(offer: Announce, plan: Plan, receiver: Receiver, watch: StopWatch, load_s: float) -> SyncReport:
    """The report of one subscriber's round."""
    usage = receiver.usage()
    return SyncReport(
        version=offer.version,
        round=offer.round,
        committed=True,
        bytes=plan.manifest.total_bytes,
        tensors=plan.manifest.tensors,
        buckets=len(plan),
        seconds=watch.seconds(load=load_s),
        host_bytes_peak=usage.host_bytes,
        host_bytes_retained=usage.host_bytes,
        device_bytes_peak=usage.device_bytes,
        device_bytes_retained=usage.device_bytes,
        verify=offer.verify,
        transport=offer.transport,
        transport_reason="chosen by the publisher",
    )


def of_round(outcome: Round, delivery: Delivery, reason: str) -> SyncReport:
    """The report of one round, as the publisher saw it."""
    committed = outcome.committed_replicas()
    views = outcome.peers.values()
    usage = delivery.sender.usage()
    manifest = delivery.plan.manifest
    return SyncReport(
        version=outcome.version,
        round=outcome.round,
        committed=len(committed) >= outcome.need,
        bytes=manifest.total_bytes,
        tensors=manifest.tensors,
        buckets=len(delivery.plan),
        seconds=delivery.watch.seconds(load=max((v.released.load_s for v in views if v.released), default=0.0)),
        replicas=outcome.serving(),
        fenced={name: str(error) for name, error in outcome.fenced_replicas().items()},
        host_bytes_peak=usage.host_bytes,
        host_bytes_retained=usage.host_bytes,
        device_bytes_peak=usage.device_bytes,
        device_bytes_retained=usage.device_bytes,
        verify="off" if delivery.audit is None else delivery.audit.scope,
        transport=delivery.transport,
        transport_reason=reason,
    )


def still_of_replicas(report: SyncReport) -> str:
    """One sentence on what every replica serves after a failed round."""
    serving: dict[str, list[str]] = {}
    for replica, version in report.replicas.items():
        serving.setdefault("nothing until a full sync" if version is None else f"version {version}", []).append(replica)
    parts = [f"{', '.join(names)} {'serves' if len(names) == 1 else 'serve'} {what}" for what, names in serving.items()]
    return "; ".join(parts) + "."
