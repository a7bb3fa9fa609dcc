"""Every cell of the two tables of protocol/session.py, the illegal ones too."""

import itertools

import pytest

from weightlift.errors import LocalProtocolError, RemoteProtocolError
from weightlift.protocol.session import (
    PEER_LAW,
    PHASE_OF_PEER_STAGE,
    PHASE_OF_STAGE,
    SUBSCRIBER_LAW,
    Effect,
    Event,
    PeerEvent,
    PeerStage,
    Stage,
    SubscriberSession,
)

CELLS = list(itertools.product(Stage, Event))
TOUCHED = {Stage.LOADING, Stage.RELEASE, Stage.VERIFIED, Stage.COMMIT}
FROM_THE_WIRE = {Event.OFFER, Event.MANIFEST, Event.BEGIN, Event.DISPUTE, Event.COMMIT, Event.ABORT}


def session_in(stage: Stage) -> SubscriberSession:
    session = SubscriberSession()
    session.serves, session.stage, session.version, session.round = 7, stage, 8, 3
    return session


def test_tables_have_a_row_for_every_stage() -> None:
    assert set(SUBSCRIBER_LAW) == set(Stage) == set(PHASE_OF_STAGE)
    assert set(PEER_LAW) == set(PeerStage) == set(PHASE_OF_PEER_STAGE)


@pytest.mark.parametrize(("stage", "event"), CELLS, ids=lambda x: x.name)
def test_cell(stage: Stage, event: Event) -> None:
    session = session_in(stage)
    if event not in SUBSCRIBER_LAW[stage]:
        blame = RemoteProtocolError if event in FROM_THE_WIRE else LocalProtocolError
        with pytest.raises(blame, match=rf"{event.name} is not possible in stage {stage.name}"):
            session.on(event)
        assert (session.stage, session.serves, session.torn) == (stage, 7, False)
        return
    session.on(event)
    target, effect = SUBSCRIBER_LAW[stage][event]
    assert session.stage is target
    assert (session.serves, session.torn) == {Effect.KEEP: (7, False), Effect.TEAR: (None, True), Effect.ADVANCE: (8, False)}[
        effect
    ]


@pytest.mark.parametrize("stage", [s for s in Stage if s is not Stage.IDLE], ids=lambda s: s.name)
@pytest.mark.parametrize("event", [Event.ABORT, Event.FAIL, Event.LOST, Event.EXPIRED], ids=lambda e: e.name)
def test_leaving_tears_exactly_after_the_first_byte(stage: Stage, event: Event) -> None:
    session = session_in(stage)
    assert session.touched == (stage in TOUCHED)
    session.on(event)
    assert session.stage is Stage.IDLE
    assert session.torn == (stage in TOUCHED)


def test_only_commit_advances() -> None:
    advancing = [(s, e) for s, row in SUBSCRIBER_LAW.items() for e, (_, effect) in row.items() if effect is Effect.ADVANCE]
    assert advancing == [(Stage.COMMIT, Event.DONE)]


def test_a_torn_session_is_healed_by_a_full_round() -> None:
    session = session_in(Stage.LOADING)
    session.on(Event.FAIL)
    assert session.torn
    session.offer(4, 8)
    for event in (Event.ACCEPT, Event.BEGIN, Event.WRITE, Event.LOADED, Event.CLEAN, Event.COMMIT, Event.DONE):
        assert session.torn
        session.on(event)
    assert (session.serves, session.torn) == (8, False)


def test_a_version_that_goes_back_is_refused_and_changes_nothing() -> None:
    session = session_in(Stage.IDLE)
    with pytest.raises(RemoteProtocolError, match="version 6, but version 7 is served"):
        session.offer(9, 6)
    assert (session.stage, session.serves, session.round) == (Stage.IDLE, 7, 3)
    session.offer(9, 7)
    assert session.stage is Stage.PREPARE


@pytest.mark.parametrize("stage", list(PeerStage), ids=lambda s: s.name)
def test_peer_law_every_way_out_is_spared_before_bytes_and_fenced_after(stage: PeerStage) -> None:
    row = PEER_LAW[stage]
    before = {PeerStage.ANNOUNCED, PeerStage.PREPARING, PeerStage.READY}
    out = {PeerStage.DONE, PeerStage.SPARED, PeerStage.FENCED}
    if stage in out:
        assert row == {}
        return
    for event in (PeerEvent.FAILED, PeerEvent.GIVE_UP, PeerEvent.LOST, PeerEvent.EXPIRED):
        assert row[event] is (PeerStage.SPARED if stage in before else PeerStage.FENCED)
