"""Exhaustive search over everything that can happen to one publisher and two subscribers.

Owns: the steps of the model (world.py), all faults among them, and the properties that must hold in every reachable state.
Must not know: sockets, time, tensors.

`search` walks breadth first, so a counterexample is the shortest there is; `Violation` prints it step by step. What is checked:

    P1  an engine that may serve holds one version completely, and it is the version it says
    P2  whoever waits has a deadline, or waits for an action that has one
    P3  between rounds an engine is either whole or TORN
    P4  the publisher is never wrong about a peer: DONE serves the new version, SPARED was not touched
    P5  the version that an engine serves never goes back
    P6  nothing stops: a state in which nothing can happen any more is one in which the round is over
    P7  the ranks of one replica never serve different versions at the same time

Time is left out: a deadline may pass at any moment at which it is set.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from weightlift.errors import PeerLost, SourceError, TransferTimeout
from weightlift.protocol.messages import (
    Abort,
    Announce,
    Begin,
    Commit,
    Committed,
    Dispute,
    Evidence,
    Failed,
    Fenced,
    ManifestBody,
    NeedManifest,
    PeerId,
    Ready,
    Refused,
    Released,
)
from weightlift.protocol.round import Member, Round
from weightlift.protocol.session import SUBSCRIBER_LAW, Event, PeerStage, Stage
from weightlift.testing.world import ACKED, BROKEN, CORRUPT, ERROR, LIMITS, MOVING, STALLED, ModelAudit, Scenario, World

__all__ = ["Scenario", "Search", "Violation", "World", "search"]


class Violation(AssertionError):
    """A property does not hold; the message is the shortest way there."""


class Step(NamedTuple):
    """One thing that happened, in words, and the state after it."""

    text: str
    world: World


class Search(NamedTuple):
    """What a search saw."""

    states: int
    steps: int
    endings: int


def search(scenario: Scenario, *, most_states: int = 2_000_000) -> Search:
    """Visit every reachable state; raises Violation with the shortest path to a state that breaks a property."""
    start = World(scenario)
    seen: dict[object, tuple[object, str]] = {start.key(): (None, "start")}
    queue = collections.deque([start])
    steps = endings = 0
    while queue:
        world = queue.popleft()
        moved = False
        for step in itertools.chain(_steps(world), _quiet(world)):
            moved = True
            steps += 1
            key = step.world.key()
            if key in seen:
                continue
            seen[key] = (world.key(), step.text)
            for problem in _broken(world, step.world):
                raise Violation(_path(seen, key, problem))
            queue.append(step.world)
        if not moved:
            endings += 1
            if world.publisher_alive and world.round is not None and not world.round.done:
                raise Violation(_path(seen, world.key(), "P6: nothing can happen any more, but the round is not over"))
        if len(seen) > most_states:
            raise Violation(f"more than {most_states} states: narrow the scenario")
    return Search(len(seen), steps, endings)


def _path(seen: dict[object, tuple[object, str]], key: object, problem: str) -> str:
    lines: list[str] = []
    at: object = key
    while at is not None:
        at, text = seen[at]
        lines.append(text)
    steps = "\n".join(f"  {i:2}  {text}" for i, text in enumerate(reversed(lines)))
    return f"{problem}\nshortest way there:\n{steps}"


# --- what can happen ------------------------------------------------------------------------------------------------------------


def _steps(world: World) -> Iterator[Step]:
    """Every step from a state."""
    if world.publisher_alive:
        yield from _publisher_steps(world)
        if world.faults < world.scenario.faults:
            yield _publisher_dies(world)
    for peer, engine in world.engines.items():
        if engine.alive:
            yield from _engine_steps(world, peer)
            if world.faults < world.scenario.faults:
                yield _engine_dies(world, peer)


def _quiet(world: World) -> Iterator[Step]:
    """Where faults are used up and nothing else can happen, time still passes: deadlines end every wait."""
    if world.faults < world.scenario.faults or any(True for _ in _steps(world)):
        return
    more = world.clone()
    more.scenario = dataclasses.replace(world.scenario, faults=world.faults + 1)
    for step in _steps(more):
        if "deadline" in step.text or "stalls" in step.text:
            step.world.scenario, step.world.faults = world.scenario, world.faults
            yield step


def _publisher_steps(world: World) -> Iterator[Step]:
    current = world.round
    if current is None or current.done:
        if world.rounds < world.scenario.rounds:
            yield _new_round(world)
        return
    if world.transfer is not None:
        yield from _transfer_steps(world)
        return  # the publisher's thread is inside the transfer: it reads no frame, and no deadline of its own passes
    for peer, engine in world.engines.items():
        if engine.outbox:
            new = world.clone()
            frame, new.engines[peer].outbox = engine.outbox[0], engine.outbox[1:]
            assert new.round is not None
            new.perform(new.round.receive(peer, frame, 0.0))
            yield Step(f"publisher reads {type(frame).__name__} of {peer}", new)
        view = current.peers.get(peer)
        if view is None or view.out:
            continue
        if not engine.alive and not engine.outbox:
            new = world.clone()
            assert new.round is not None
            new.perform(new.round.lost(peer, PeerLost("gone"), 0.0))
            yield Step(f"publisher notices that {peer} is gone", new)
        if view.deadline is not None and world.faults < world.scenario.faults:
            new = world.clone()
            new.faults += 1
            assert new.round is not None
            new.perform(new.round.expire(peer, 0.0))
            yield Step(f"publisher's deadline for {peer} passes in {view.stage.name}", new)


def _new_round(world: World) -> Step:
    new = world.clone()
    new.rounds += 1
    members = []
    for i, (peer, engine) in enumerate(new.engines.items()):
        mates = [e for e, r in zip(new.engines.values(), new.scenario.replicas, strict=True) if r == new.scenario.replicas[i]]
        if all(mate.alive for mate in mates):
            serves = -1 if engine.session.serves is None else engine.session.serves
            members.append(Member(peer, new.scenario.replicas[i], serves))
    replicas = len({m.replica for m in members})
    need = replicas if new.scenario.need is None else min(new.scenario.need, replicas)
    new.round = Round(round=new.rounds, version=new.rounds, members=members, need=need, limits=LIMITS, now=0.0, audit=ModelAudit())
    new.perform(new.round.start())
    return Step(f"publisher announces version {new.rounds}", new)


def _transfer_steps(world: World) -> Iterator[Step]:
    assert world.transfer is not None
    for peer, status in world.transfer.items():
        if status == MOVING and not world.engines[peer].alive:
            new = world.clone()
            assert new.transfer is not None
            new.transfer[peer] = BROKEN
            yield Step(f"the data plane of {peer} closes with its process", new)
        elif status == MOVING and world.faults < world.scenario.faults:
            new = world.clone()
            new.faults += 1
            assert new.transfer is not None
            new.transfer[peer] = STALLED
            new.engines[peer].plane = False
            yield Step(f"{peer} stalls in the transfer and is dropped", new)
    if MOVING not in world.transfer.values():
        new = world.clone()
        assert new.round is not None
        assert new.transfer is not None
        outcome, new.transfer = new.transfer, None
        for peer, status in outcome.items():
            error = {ACKED: None, BROKEN: PeerLost("closed"), STALLED: TransferTimeout("stalled")}[status]
            new.perform(new.round.transferred(peer, error, 0.0))
        yield Step("the transfer ends", new)
    if world.faults < world.scenario.faults:
        new = world.clone()
        new.faults += 1
        assert new.round is not None
        assert new.transfer is not None
        for peer in new.transfer:
            new.engines[peer].plane = False
        new.transfer = None
        new.perform(new.round.source_failed(SourceError("source"), 0.0))
        yield Step("the publisher's source raises", new)


def _publisher_dies(world: World) -> Step:
    new = world.clone()
    new.faults += 1
    new.publisher_alive, new.round, new.transfer = False, None, None
    for engine in new.engines.values():
        engine.plane = False
    return Step("the publisher is killed", new)


def _engine_dies(world: World, peer: PeerId) -> Step:
    new = world.clone()
    new.faults += 1
    engine = new.engines[peer]
    engine.alive, engine.inbox, engine.plane = False, (), False
    return Step(f"{peer} is killed", new)


def _engine_steps(world: World, peer: PeerId) -> Iterator[Step]:
    """One engine: it reads a frame, does its own work, or stops waiting."""
    engine = world.engines[peer]
    stage = engine.session.stage
    moving = stage in (Stage.TRANSFER, Stage.LOADING) and engine.plane
    if engine.inbox and not moving and stage not in (Stage.RELEASE, Stage.COMMIT):
        yield _read(world, peer)
    yield from _work(world, peer, stage, moving)
    if stage is Stage.IDLE:
        return
    if not world.publisher_alive:
        yield _leave(world, peer, Event.LOST, "notices that the publisher is gone", tell=False)
    if world.faults < world.scenario.faults:
        yield _leave(world, peer, Event.EXPIRED, "'s own deadline passes", tell=True, fault=True)
        yield _leave(world, peer, Event.FAIL, " raises", tell=True, fault=True)


def _read(world: World, peer: PeerId) -> Step:
    """The next frame, as mailbox.py sorts it."""
    new = world.clone()
    engine = new.engines[peer]
    frame, engine.inbox = engine.inbox[0], engine.inbox[1:]
    session = engine.session
    text = f"{peer} reads {type(frame).__name__}"
    if session.stage is Stage.IDLE:
        if isinstance(frame, Announce):
            # The real mailbox passes over an announcement whose end is queued behind it; taking it is the harder case.
            session.offer(frame.round, frame.version)
            if not engine.knows_manifest:
                engine.outbox += (NeedManifest(round=frame.round, version=frame.version),)
        return Step(text, new)
    if frame.round != session.round:
        return Step(text + " of another round, and passes over it", new)
    match frame:
        case Abort() | Fenced():
            return _leave(new, peer, Event.ABORT, f" reads {type(frame).__name__}", tell=False)
        case ManifestBody():
            session.on(Event.MANIFEST)
            engine.knows_manifest = True
        case Begin():
            session.on(Event.BEGIN)
        case Dispute():
            session.on(Event.DISPUTE)
            engine.outbox += (Evidence(round=frame.round, version=frame.version, start=0, data=b""),)
        case Commit():
            session.on(Event.COMMIT)
        case _:
            raise Violation(f"{peer} reads {type(frame).__name__} in {session.stage.name}")
    return Step(text, new)


def _work(world: World, peer: PeerId, stage: Stage, moving: bool) -> Iterator[Step]:
    """What an engine does by itself."""
    session = world.engines[peer].session
    n, v = session.round, session.version
    if stage is Stage.PREPARE and world.engines[peer].knows_manifest:
        new = world.clone()
        new.engines[peer].session.on(Event.ACCEPT)
        new.engines[peer].plane = True
        new.engines[peer].outbox += (Ready(round=n, version=v),)
        yield Step(f"{peer} is ready", new)
        if world.faults < world.scenario.faults:
            new = world.clone()
            new.faults += 1
            new.engines[peer].session.on(Event.REFUSE)
            new.engines[peer].outbox += (Refused(round=n, version=v, error=ERROR),)
            yield Step(f"{peer} refuses the manifest", new)
    elif stage is Stage.TRANSFER and moving:
        new = world.clone()
        new.engines[peer].session.on(Event.WRITE)
        new.engines[peer].weights = (v, new.engines[peer].weights[1])
        yield Step(f"{peer} writes the first bucket", new)
    elif stage is Stage.LOADING and moving:
        new = world.clone()
        new.engines[peer].session.on(Event.LOADED)
        new.engines[peer].weights = (v, v)
        if new.transfer is not None and new.transfer.get(peer) == MOVING:
            new.transfer[peer] = ACKED
        yield Step(f"{peer} writes the last bucket", new)
    elif stage is Stage.RELEASE:
        yield _release(world, peer, n, v, b"")
        if world.faults < world.scenario.faults:
            new = world.clone()
            new.faults += 1
            new.engines[peer].weights = (v, CORRUPT)
            yield _release(new, peer, n, v, b"other")
    elif stage is Stage.COMMIT:
        new = world.clone()
        new.engines[peer].session.on(Event.DONE)
        new.engines[peer].outbox += (Committed(round=n, version=v, commit_s=0.0),)
        yield Step(f"{peer} commits", new)


def _release(world: World, peer: PeerId, n: int, v: int, digests: bytes) -> Step:
    """Everything is installed; the digests tell whether it is what was sent."""
    new = world.clone()
    new.engines[peer].session.on(Event.CLEAN)
    new.engines[peer].outbox += (
        Released(round=n, version=v, digests=digests, tensors=0, total_bytes=0, load_s=0.0, release_s=0.0),
    )
    return Step(f"{peer} releases" + (" and holds other bytes" if digests else ""), new)


def _leave(world: World, peer: PeerId, event: Event, text: str, *, tell: bool, fault: bool = False) -> Step:
    """An engine ends its round early, as follower.py does: settle, tell, drop the data plane."""
    new = world.clone()
    engine = new.engines[peer]
    session = engine.session
    stage = session.stage.name
    session.on(event)
    if fault:
        new.faults += 1
    if tell:
        serves = -1 if session.serves is None else session.serves
        failed = Failed(round=session.round, version=session.version, error=ERROR, torn=session.torn, serves=serves)
        engine.outbox += (failed,)
    new.close_plane(peer)
    return Step(f"{peer}{text if text.startswith(chr(39)) else ' ' + text.strip()} in {stage}", new)


# --- what must hold -------------------------------------------------------------------------------------------------------------


def _broken(before: World, after: World) -> Iterator[str]:
    """The properties that a step breaks."""
    for peer, engine in after.engines.items():
        serves, was = engine.serves, before.engines[peer].serves
        if serves is not None and engine.weights != (serves, serves):
            yield f"P1: {peer} says version {serves} and holds {engine.weights}"
        idle = engine.session.stage is Stage.IDLE
        if engine.alive and idle and not engine.session.torn and len(set(engine.weights)) > 1:
            yield f"P3: {peer} is between rounds with {engine.weights} and is not TORN"
        if serves is not None and was is not None and serves < was:
            yield f"P5: {peer} went back from version {was} to {serves}"
        if not idle and Event.EXPIRED not in SUBSCRIBER_LAW[engine.session.stage]:
            yield f"P2: {peer} waits in {engine.session.stage.name} without a deadline"
    current = after.round
    if current is not None:
        if not current.done and after.transfer is None and current.next_deadline() is None:
            yield "P2: the publisher waits without a deadline"
        yield from _wrong_about(after, current)
    by_replica: dict[str, set[int]] = {}
    for engine, replica in zip(after.engines.values(), after.scenario.replicas, strict=True):
        if engine.serves is not None:
            by_replica.setdefault(replica, set()).add(engine.serves)
    for replica, versions in by_replica.items():
        ranks = after.scenario.replicas.count(replica)
        serving = [
            e for e, r in zip(after.engines.values(), after.scenario.replicas, strict=True) if r == replica and e.serves is not None
        ]
        if len(versions) > 1 and len(serving) == ranks:
            yield f"P7: the ranks of replica {replica} serve {sorted(versions)}"


def _wrong_about(world: World, current: Round) -> Iterator[str]:
    for peer, view in current.peers.items():
        engine = world.engines[peer]
        if not engine.alive:
            continue
        if view.stage is PeerStage.DONE and engine.session.round == current.round and engine.serves != current.version:
            yield f"P4: the publisher holds {peer} for DONE, but it serves {engine.serves}"
        touched = current.version in engine.weights
        if view.stage is PeerStage.SPARED and touched:
            yield f"P4: the publisher holds {peer} for untouched, but it holds {engine.weights}"
