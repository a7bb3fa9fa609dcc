"""The ranks of a trainer that publish together: they begin, gather and end in step, each in bounded time.

Owns: `TrainerGroup` and what its ranks say to each other about a publish. Must not know: how a gather works, subscribers, buckets.
Every rank calls `Publisher.publish`; the sending ranks talk to engines, the others take part in the gathers.

    senders="first": one rank sends                         senders="each": every rank sends to the engine rank on its own device
      begin     all: version, manifest, the same?             begin     the same
      word      first -> others: gather now | it is over      ready     all: my engine is ready for the first byte | I failed
      ...       as often as the first needs the tensors       commit    all: my engine has verified everything | I failed
      end       first -> others: the report, or the cause     end       each its own

A rank that fails says why before it stops: everybody else raises that cause, with the rank's name.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import msgspec
import torch.distributed as dist

from weightlift.config import Deadlines
from weightlift.errors import ConfigError, LocalProtocolError, SourceError, WeightliftError
from weightlift.fabric import Fabric, default_store
from weightlift.observe.report import SyncReport
from weightlift.protocol.failure import describe, revive
from weightlift.protocol.messages import ErrorInfo

__all__ = ["GroupPlan", "GroupRound", "Senders", "TrainerGroup"]

Senders: TypeAlias = Literal["first", "each"]

_made: collections.Counter[str] = collections.Counter()
"""How many groups of the same ranks this process has made: their names in the store differ."""


class _Begin(msgspec.Struct, frozen=True):
    """What every rank says first. version: that it was asked to publish. committed: that it published last, -1 for none."""

    version: int
    committed: int
    digest: bytes
    sends: dict[int, bytes]
    generation: int
    broken: bool
    error: ErrorInfo | None = None


class _Word(msgspec.Struct, frozen=True):
    """What the first rank says next: gather (again), or how it ended."""

    gather: bool
    report: SyncReport | None = None
    error: ErrorInfo | None = None


class _Vote(msgspec.Struct, frozen=True):
    """Whether a rank is ready to go on; its reason if not."""

    error: ErrorInfo | None = None


_begin: Final = msgspec.msgpack.Decoder(_Begin)
_word: Final = msgspec.msgpack.Decoder(_Word)
_vote: Final = msgspec.msgpack.Decoder(_Vote)
_info: Final = msgspec.msgpack.Decoder(ErrorInfo)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """What one rank is about to do: version, digest of its manifest, digests of what it sends to whom and expects of whom."""

    version: int
    digest: bytes = b""
    sends: Mapping[int, bytes] = dataclasses.field(default_factory=dict)
    expects: Mapping[int, bytes] = dataclasses.field(default_factory=dict)


class TrainerGroup:
    """The ranks that publish together. Every one of them makes it, in the same order as other groups of the same ranks.

    Args:
        ranks: of the default process group; None: all. The first one is the sender, where one sends.
        senders: "first": one rank sends to all engines. "each": every rank has an address, and engines, of its own, and none of
            them commits before all have verified.

    Raises ConfigError without a default process group, or if this process is not one of the ranks.
    """

    def __init__(self, ranks: Sequence[int] | None = None, *, senders: Senders = "first") -> None:
        if senders not in ("first", "each"):
            raise ConfigError(f"senders must be first or each, got {senders!r}")
        store = default_store()
        self.ranks: Final = tuple(range(dist.get_world_size()) if ranks is None else ranks)
        if dist.get_rank() not in self.ranks or len(set(self.ranks)) != len(self.ranks):
            raise ConfigError(
                f"ranks must be different and contain this process, which is rank {dist.get_rank()}, got {self.ranks}"
            )
        self.senders: Final[Senders] = senders
        self.index: Final = self.ranks.index(dist.get_rank())
        digest = hashlib.sha256(repr((self.ranks, senders)).encode()).hexdigest()[:16]
        _made[digest] += 1
        self.fabric: Final = Fabric(f"{digest}/{_made[digest]}", self.index, len(self.ranks), silence_s=_SILENCE_S, store=store)
        self.committed = -1
        """The last version that this rank saw published; -1 for none."""
        self._rounds = 0
        self._current: GroupRound | None = None
        self._streams: dict[int, list[tuple[str, int]]] = {}

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.ranks)

    @property
    def sends(self) -> bool:
        """Whether this rank talks to engines."""
        return self.senders == "each" or self.index == 0

    @property
    def receivers(self) -> tuple[int, ...]:
        """Indices of the ranks that need full tensors."""
        return tuple(range(self.size)) if self.senders == "each" else (0,)

    @property
    def current(self) -> GroupRound:
        """The publish that is under way; LocalProtocolError outside of one: the other ranks would not take part."""
        if self._current is None:
            raise LocalProtocolError(
                "a sharded source can only be read inside Publisher.publish, which all ranks of the trainer call together"
            )
        return self._current

    def begin(self, plan: GroupPlan, failure: WeightliftError | None, deadlines: Deadlines) -> GroupRound:
        """Meet the other ranks. Raises on all of them if one did not come, failed, or has something else to publish."""
        self._rounds = self._next_round()
        self._forget(self._rounds - 2)
        current = GroupRound(self, self._rounds, plan.version, deadlines)
        try:
            said = current.meet(plan, failure)
        except WeightliftError as error:
            current.give_up(error)
            raise
        self.fabric.rebuild(max(b.generation for b in said) + any(b.broken for b in said))
        self._current = current
        return current

    def _next_round(self) -> int:
        """The number of the publish that begins. A rank that missed some, which the others gave up, joins them where they are."""
        number = self._rounds + 1
        if self.index == 0:
            self.fabric.put(_LATEST, str(number).encode())
            return number
        number = max(number, self.latest())
        while self.fabric.has(f"{number}/word/over"):
            number += 1
        return number

    def latest(self) -> int:
        """The publish that the first rank began last; 0 for none."""
        return int(self.fabric.get(_LATEST, of=0, doing="begin a publish")) if self.fabric.has(_LATEST) else 0

    def finish(self) -> None:
        """The publish is over on this rank."""
        self._current = None

    def _forget(self, number: int) -> None:
        """Remove from the store what this rank said in an earlier publish."""
        keys = [f"{number}/{what}/{self.index}" for what in ("begin", "ready", "commit", "cause")]
        if self.index == 0:
            keys += [f"{number}/word/over", *(f"{number}/word/{i}" for i in range(_MOST_WORDS))]
        if number > 0:
            self.fabric.drop(keys)
        for stream, steps in self._streams.pop(number, []):
            self.fabric.forget(stream, steps)

    def close(self) -> None:
        """Give back everything. Idempotent."""
        self.fabric.close()


_SILENCE_S: Final = 20.0
_LATEST: Final = "latest"
_MOST_WORDS: Final = 8


class GroupRound:
    """One publish, as one rank sees it."""

    def __init__(self, group: TrainerGroup, number: int, version: int, deadlines: Deadlines) -> None:
        self._group = group
        self._fabric = group.fabric
        self._number = number
        self._version = version
        self._deadlines = deadlines
        self._words = 0
        self._voted: set[str] = set()

    # --- everybody --------------------------------------------------------------------------------------------------------------

    def meet(self, plan: GroupPlan, failure: WeightliftError | None) -> list[_Begin]:
        """Say what this rank is about to do, and hear the others."""
        group, fabric = self._group, self._fabric
        mine = _Begin(
            version=self._version,
            committed=group.committed,
            digest=plan.digest,
            sends=dict(plan.sends),
            generation=fabric.generation,
            broken=fabric.broken,
            error=None if failure is None else describe(failure),
        )
        fabric.put(f"{self._number}/begin/{group.index}", msgspec.msgpack.encode(mine))
        if failure is not None:
            raise failure
        said = []
        for rank in range(group.size):
            doing = f"call publish({self._version})"
            data = fabric.get(
                f"{self._number}/begin/{rank}",
                of=rank,
                doing=doing,
                timeout_s=self._deadlines.announce_s,
                unless=lambda: group.latest() > self._number,
            )
            said.append(_begin.decode(data))
            if (info := said[-1].error) is not None:
                raise self._of_rank(rank, info)
        for rank, other in enumerate(said):
            if (other.version, other.digest) != (said[0].version, said[0].digest):
                what = (
                    f"version {other.version}" if other.version != said[0].version else "another manifest (names, shapes, dtypes)"
                )
                raise SourceError(
                    f"rank {rank} of the trainer is about to publish {what}, rank 0 version {said[0].version}",
                    version=self._version,
                    peer=f"trainer rank {rank}",
                    remedy="all ranks publish the same version of the same model; see that they took the same number of steps.",
                )
            if other.sends.get(group.index) != plan.expects.get(rank):
                raise SourceError(
                    f"rank {rank} of the trainer is about to send other parts than rank {group.index} expects",
                    version=self._version,
                    peer=f"trainer rank {rank}",
                    remedy="all ranks must wrap the same model in the same way, over the same mesh.",
                )
        # A rank that was late for the end of a round may not know that it went well.
        group.committed = max(other.committed for other in said)
        return said

    def gather(self, steps: int) -> tuple[str, float]:
        """Called where the tensors are needed: all others begin to gather as well. steps: how many the stream has.

        Returns the name of the stream, and gather_s.
        """
        group = self._group
        step = f"{self._number}.{self._words if group.sends else self._words - 1}"
        if not group.sends:
            pass  # the word was heard: this is its answer
        elif group.senders == "each":
            if self._words:
                raise SourceError("the source cannot be read again: the other ranks have moved on")
            self._words += 1
        else:
            self.say(_Word(gather=True))
        group._streams.setdefault(self._number, []).append((step, steps))
        return step, self._deadlines.gather_s

    def vote(self, what: str, error: WeightliftError | None) -> None:
        """Say whether this rank goes on; wait for all others. Raises the cause of the first one that does not."""
        group = self._group
        if what not in self._voted:
            self._voted.add(what)
            vote = _Vote(None if error is None else describe(error))
            self._fabric.put(f"{self._number}/{what}/{group.index}", msgspec.msgpack.encode(vote))
        if error is not None:
            return
        for rank in range(group.size):
            doing = "say that its engine is ready" if what == "ready" else "say that its engine has verified the version"
            vote = _vote.decode(self._fabric.get(f"{self._number}/{what}/{rank}", of=rank, doing=doing, timeout_s=None))
            if vote.error is not None:
                raise self._of_rank(rank, vote.error)

    def cause(self, error: WeightliftError) -> None:
        """Leave word of what this rank failed with, for those who find its parts marked."""
        self._fabric.put(f"{self._number}/cause/{self._group.index}", msgspec.msgpack.encode(describe(error)))

    def why(self, rank: int) -> WeightliftError:
        """What another rank failed with."""
        data = self._fabric.get(
            f"{self._number}/cause/{rank}", of=rank, doing="say why it failed", timeout_s=self._deadlines.cause_s
        )
        return self._of_rank(rank, _info.decode(data))

    def _of_rank(self, rank: int, info: ErrorInfo) -> WeightliftError:
        error = revive(info, version=self._version, round=0, peer=f"trainer rank {rank}")
        named = f"rank {rank} of the trainer: "
        # The cause may have come round through several ranks: it is named once, after the first.
        error.message = error.message if error.message.startswith("rank ") else named + error.message
        error.args = (error.message,)
        # A bucket of that rank's engine says nothing about this one's.
        error.bucket = error.buckets = None
        return error

    # --- one sends --------------------------------------------------------------------------------------------------------------

    def say(self, word: _Word, *, over: bool = False) -> None:
        """The first rank tells the others what comes next."""
        data = msgspec.msgpack.encode(word)
        if over:
            self._fabric.put(f"{self._number}/word/over", b"1")
        self._fabric.put(f"{self._number}/word/{self._words}", data)
        self._words += 1

    def give_up(self, error: WeightliftError) -> None:
        """This rank does not take part: whoever found nothing wrong must not wait for it."""
        if self._group.senders == "each":
            self.vote("ready", error)
            self.vote("commit", error)
        elif self._group.index == 0:
            self.say(_Word(gather=False, error=describe(error)), over=True)

    def end(self, report: SyncReport | None, error: WeightliftError | None) -> None:
        """This rank's engines are through: tell the others how it went."""
        if error is not None and self._group.senders == "each":
            self.vote("ready", error)
            self.vote("commit", error)
        if self._group.senders == "first":
            self.say(_Word(gather=False, report=report, error=None if error is None else describe(error)))
        if report is not None and report.committed:
            self._group.committed = self._version

    def follow(self, assist: Callable[[], None]) -> SyncReport:
        """Of a rank that does not send: gather as often as the first rank needs it, then return its report or raise its error."""
        own: WeightliftError | None = None
        while True:
            doing = "end the round"
            word = _word.decode(self._fabric.get(f"{self._number}/word/{self._words}", of=0, doing=doing, timeout_s=None))
            self._words += 1
            if not word.gather:
                break
            try:
                assist()
            except WeightliftError as error:
                own = own or error
        if isinstance(own, SourceError) and own.peer is None:
            raise own  # the fault began here: this rank has the whole of it
        if word.report is not None and word.error is None:
            self._group.committed = self._version
            return word.report
        assert word.error is not None, "a round ends with a report or an error"
        failure = revive(word.error, version=self._version, round=0, peer="trainer rank 0")
        failure.report = word.report
        raise failure
