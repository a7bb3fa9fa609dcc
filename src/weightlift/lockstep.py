"""A publish of several trainer ranks: all begin together, gather together, and raise together.

Owns: what each kind of rank does, in which order. Must not know: how ranks talk (sources/group.py), how engines are reached
(publishing.py). Used by `api.Publisher` for sources that are spread over a group.
"""

from __future__ import annotations

import collections
import contextlib

from weightlift.config import Deadlines
from weightlift.errors import SourceError, WeightliftError
from weightlift.observe.report import SyncReport
from weightlift.publishing import Sending
from weightlift.sources.base import GroupSource
from weightlift.sources.group import GroupPlan, GroupRound

__all__ = ["Lockstep"]


class Lockstep:
    """One rank's seat in the publishes of a trainer group."""

    def __init__(self, source: GroupSource, deadlines: Deadlines) -> None:
        self._source = source
        self._group = source.group
        self._deadlines = deadlines

    @property
    def sends(self) -> bool:
        """Whether this rank talks to engines."""
        return self._group.sends

    @property
    def version(self) -> int | None:
        """The last version that this rank saw published."""
        return None if self._group.committed < 0 else self._group.committed

    def alive(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the other ranks see that this one lives."""
        return self._group.fabric.alive()

    def publish(self, version: int, sending: Sending | None) -> SyncReport:
        """One publish, on every rank."""
        with self.alive():
            plan, failure = self._look(version)
            try:
                current = self._group.begin(plan, failure, self._deadlines)
                try:
                    if sending is None:
                        return current.follow(self._assist)
                    return self._send(current, version, sending)
                finally:
                    self._group.finish()
            except WeightliftError as error:
                error.fill(version=version)
                raise

    def _look(self, version: int) -> tuple[GroupPlan, WeightliftError | None]:
        """What this rank is about to publish, or why it cannot."""
        source = self._source
        try:
            digest = source.manifest().digest
            return GroupPlan(version=version, digest=digest, sends=source.sends(), expects=source.expects()), None
        except WeightliftError as error:
            return GroupPlan(version=version), error
        except Exception as error:
            failure = SourceError(f"the source raised {type(error).__name__}: {error}", phase="ANNOUNCE")
            failure.__cause__ = error
            return GroupPlan(version=version), failure

    def _assist(self) -> None:
        collections.deque(self._source.stream(), maxlen=0)

    def _send(self, current: GroupRound, version: int, sending: Sending) -> SyncReport:
        """The round of a rank that sends; the others learn its outcome, whatever it is."""
        each = self._group.senders == "each"
        try:
            ready, consent = (lambda: current.vote("ready", None)), (lambda: current.vote("commit", None))
            report = sending.publish(version, ready=ready if each else None, consent=consent if each else None)
        except BaseException as error:
            current.end(getattr(error, "report", None), _as_ours(error))
            raise
        finally:
            if sending.version is not None:  # also after a round in which too few replicas committed
                self._group.committed = max(self._group.committed, sending.version)
        current.end(report, None)
        return report


def _as_ours(error: BaseException) -> WeightliftError:
    if isinstance(error, WeightliftError):
        return error
    ours = WeightliftError(f"the sending rank was interrupted by {type(error).__name__}: {error}")
    ours.__cause__ = error
    return ours
