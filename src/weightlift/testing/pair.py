"""A publisher and its subscribers in one process, for tests that need the real path but no real processes.

Owns: `Pair`. Must not know: pytest. The subscribers pull in threads; transport "shm" works between threads as between processes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weightlift.api import Publisher, Subscriber
from weightlift.config import Deadlines, ShmConfig
from weightlift.loaders.base import Loader
from weightlift.observe.report import SyncReport
from weightlift.sources.base import Source
from weightlift.transports.endpoint import new_address

__all__ = ["FAST", "Outcome", "Pair", "pair"]

FAST = Deadlines(announce_s=5.0, prepare_s=5.0, transfer_s=2.0, release_s=2.0, commit_s=2.0, cause_s=1.0)
"""Deadlines for tests: short enough to wait for, long enough for a busy machine."""


class Outcome:
    """What both sides of one sync ended with: a report or an error, per side."""

    def __init__(self) -> None:
        self.report: SyncReport | None = None
        self.error: BaseException | None = None
        self.pulled: dict[str, SyncReport] = {}
        self.failed: dict[str, BaseException] = {}

    def raise_any(self) -> Outcome:
        """Raise the publisher's error, then the first subscriber's, if there is one."""
        for error in (self.error, *self.failed.values()):
            if error is not None:
                raise error
        return self


class Pair:
    """One publisher, some subscribers. `sync(v)` runs publish and every pull at the same time and never raises."""

    def __init__(self, publisher: Publisher, subscribers: Sequence[Subscriber]) -> None:
        self.publisher = publisher
        self.subscribers = list(subscribers)

    def sync(self, version: int, *, pulling: Sequence[Subscriber] | None = None, timeout_s: float = 10.0) -> Outcome:
        """One round; `pulling` are the subscribers that take part (default: all)."""
        outcome = Outcome()

        def pull(subscriber: Subscriber) -> None:
            try:
                outcome.pulled[subscriber.name] = subscriber.pull(timeout_s)
            except BaseException as error:
                outcome.failed[subscriber.name] = error

        active = self.subscribers if pulling is None else pulling
        threads = [threading.Thread(target=pull, args=(s,), name=f"pull-{s.name}") for s in active]
        for thread in threads:
            thread.start()
        try:
            outcome.report = self.publisher.publish(version)
        except BaseException as error:
            outcome.error = error
        for thread in threads:
            thread.join(timeout_s + 60.0)
            assert not thread.is_alive(), f"{thread.name} is still inside pull()"
        return outcome


@contextlib.contextmanager
def pair(
    source: Source,
    loaders: Mapping[str, Loader] | Loader,
    *,
    transport: str | None = "shm",
    slot_bytes: int = 4096,
    slots: int = 2,
    deadlines: Deadlines = FAST,
    address: str | None = None,
    subscriber: Mapping[str, Any] | None = None,
    **publisher: Any,
) -> Iterator[Pair]:
    """A connected pair over a private address.

    loaders: name -> loader, one subscriber each; a single loader is called "engine". subscriber, publisher: further arguments.
    """
    named = loaders if isinstance(loaders, Mapping) else {"engine": loaders}
    where = address or new_address()
    with contextlib.ExitStack() as stack:
        sender = Publisher(
            source, where, transport=transport, deadlines=deadlines, shm=ShmConfig(slot_bytes=slot_bytes, slots=slots), **publisher
        )
        stack.enter_context(sender)
        receivers = [stack.enter_context(Subscriber(loader, where, name, **(subscriber or {}))) for name, loader in named.items()]
        size = int((subscriber or {}).get("size", 1))
        sender.wait_for_peers(len(receivers) if size == 1 else 0, timeout_s=30.0)
        yield Pair(sender, receivers)
