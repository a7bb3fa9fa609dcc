"""Everything that can happen to one publisher and two subscribers, and a proof that the search would see a broken law."""

import pytest

from weightlift.protocol import session
from weightlift.protocol.session import Effect, Event, PeerEvent, PeerStage, Stage
from weightlift.testing import search as search_module
from weightlift.testing.search import Scenario, Violation, search

SCENARIOS = {
    "two rounds, two replicas, one fault": (Scenario(faults=1, rounds=2), 5_000),
    "two rounds, one of two is enough": (Scenario(faults=1, rounds=2, need=1), 5_000),
    "two rounds, one replica with two ranks": (Scenario(faults=1, rounds=2, replicas=("a", "a")), 5_000),
    "two faults, two replicas": (Scenario(faults=2, rounds=1), 5_000),
    "two faults, one of two is enough": (Scenario(faults=2, rounds=1, need=1), 5_000),
    "two faults, one replica with two ranks": (Scenario(faults=2, rounds=1, replicas=("a", "a")), 4_000),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_reachable_state_breaks_a_property(name: str) -> None:
    scenario, at_least = SCENARIOS[name]
    found = search(scenario)
    assert found.states > at_least, "the search must not become trivial"
    assert found.endings > 10


def test_without_faults_there_is_one_ending() -> None:
    assert search(Scenario(faults=0, rounds=2)).endings == 1


def _with(monkeypatch: pytest.MonkeyPatch, law: str, stage: object, event: object, outcome: object) -> None:
    table = dict(getattr(session, law))
    table[stage] = {**table[stage], event: outcome}
    monkeypatch.setattr(session, law, table)
    monkeypatch.setattr(search_module, "SUBSCRIBER_LAW", session.SUBSCRIBER_LAW)
    monkeypatch.setattr("weightlift.protocol.round.PEER_LAW", session.PEER_LAW)


def test_an_engine_that_keeps_serving_after_a_failed_load_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, "SUBSCRIBER_LAW", Stage.LOADING, Event.FAIL, (Stage.IDLE, Effect.KEEP))
    with pytest.raises(Violation, match=r"P1: s\d says version 0 and holds") as caught:
        search(Scenario(faults=1, rounds=1))
    steps = str(caught.value).splitlines()
    assert "start" in steps[2]
    assert "raises in LOADING" in steps[-1]


def test_a_commit_before_the_other_rank_is_verified_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, "SUBSCRIBER_LAW", Stage.VERIFIED, Event.LOST, (Stage.IDLE, Effect.ADVANCE))
    _with(monkeypatch, "SUBSCRIBER_LAW", Stage.READY, Event.BEGIN, (Stage.VERIFIED, Effect.KEEP))
    with pytest.raises(Violation, match=r"P\d"):
        search(Scenario(faults=1, rounds=1, replicas=("a", "a")))


def test_a_publisher_that_calls_a_touched_peer_untouched_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, "PEER_LAW", PeerStage.TRANSFER, PeerEvent.GIVE_UP, PeerStage.SPARED)
    with pytest.raises(Violation, match="P4"):
        search(Scenario(faults=1, rounds=1))


def test_a_wait_without_a_deadline_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    table = dict(session.SUBSCRIBER_LAW)
    table[Stage.VERIFIED] = {e: o for e, o in table[Stage.VERIFIED].items() if e is not Event.EXPIRED}
    monkeypatch.setattr(session, "SUBSCRIBER_LAW", table)
    monkeypatch.setattr(search_module, "SUBSCRIBER_LAW", table)
    with pytest.raises(Violation, match="P2: s0 waits in VERIFIED without a deadline"):
        search(Scenario(faults=0, rounds=1))


def test_a_publisher_that_commits_another_digest_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, "PEER_LAW", PeerStage.RELEASE, PeerEvent.DIFFERS, PeerStage.VERIFIED)
    with pytest.raises(Violation, match=r"P\d"):
        search(Scenario(faults=1, rounds=1))


def test_an_audit_that_sees_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightlift.testing.world.ModelAudit.examine", lambda *_: None)
    with pytest.raises(Violation, match=r"P1: s\d says version 1 and holds \(1, -1\)"):
        search(Scenario(faults=1, rounds=1))
