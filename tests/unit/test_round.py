"""protocol/round.py: who is sent what, who is given up, when a replica commits. Every cell, and the rules across peers."""

import itertools

import pytest

from weightlift.errors import (
    DigestMismatch,
    LoaderError,
    PeerLost,
    RemoteProtocolError,
    ShapeMismatch,
    SourceError,
    TransferTimeout,
)
from weightlift.protocol.failure import describe
from weightlift.protocol.messages import (
    Abort,
    Begin,
    Commit,
    Committed,
    Evidence,
    Failed,
    Fenced,
    Frame,
    Goodbye,
    Limits,
    NeedManifest,
    PeerId,
    Ready,
    Refused,
    Released,
)
from weightlift.protocol.round import Action, Member, Round, Send, SendAnnounce, SendManifest, Transfer
from weightlift.protocol.session import PEER_LAW, PeerEvent, PeerStage
from weightlift.testing.world import ModelAudit

LIMITS = Limits(announce_s=10, prepare_s=20, transfer_s=30, release_s=40, commit_s=50, cause_s=2)
A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def make(*replicas: str, need: int | None = None) -> Round:
    members = [Member(peer, replica, serves=4) for peer, replica in zip((A, B, C), replicas, strict=False)]
    count = len(set(replicas)) if need is None else need
    return Round(round=3, version=5, members=members, need=count, limits=LIMITS, now=100.0, audit=ModelAudit())


def frames() -> dict[PeerEvent, Frame]:
    error = describe(LoaderError("broken"))
    return {
        PeerEvent.NEED: NeedManifest(round=3, version=5),
        PeerEvent.READY: Ready(round=3, version=5),
        PeerEvent.REFUSED: Refused(round=3, version=5, error=error),
        PeerEvent.RELEASED: Released(round=3, version=5, digests=b"", tensors=1, total_bytes=1, load_s=0.1, release_s=0.1),
        PeerEvent.EVIDENCE: Evidence(round=3, version=5, start=0, data=b""),
        PeerEvent.COMMITTED: Committed(round=3, version=5, commit_s=0.1),
        PeerEvent.FAILED: Failed(round=3, version=5, error=error, torn=True, serves=-1),
        PeerEvent.LOST: Goodbye(round=0, version=-1, reason="tired"),
    }


READY, RELEASED, COMMITTED = frames()[PeerEvent.READY], frames()[PeerEvent.RELEASED], frames()[PeerEvent.COMMITTED]


def kinds(actions: list[Action]) -> list[str]:
    return [f"{type(a.frame).__name__} {a.peer}" if isinstance(a, Send) else type(a).__name__ for a in actions]


def to_transfer(current: Round) -> None:
    for peer in current.peers:
        current.receive(peer, READY, 101.0)


@pytest.mark.parametrize(("stage", "event"), list(itertools.product(PeerStage, frames())), ids=lambda x: x.name)
def test_cell_of_a_frame(stage: PeerStage, event: PeerEvent) -> None:
    """Each frame in each stage: as the table says, or its sender is put out and the reason is a RemoteProtocolError."""
    current = make("a", "b", need=1)
    view = current.peers[A]
    view.stage = stage
    current.begun = stage not in (PeerStage.ANNOUNCED, PeerStage.PREPARING, PeerStage.READY)
    current.receive(A, frames()[event], 101.0)
    if event in PEER_LAW[stage]:
        reached = {PEER_LAW[stage][event]}
        # A replica of one rank goes on at once.
        reached |= {PeerStage.COMMIT} if reached == {PeerStage.VERIFIED} else set()
        assert view.stage in reached
    elif stage in (PeerStage.DONE, PeerStage.SPARED, PeerStage.FENCED):
        assert view.stage is stage
    else:
        assert view.stage in (PeerStage.SPARED, PeerStage.FENCED)
        assert isinstance(view.error, RemoteProtocolError)
    assert current.peers[B].stage is PeerStage.ANNOUNCED, "the other peer's round goes on"


def test_the_path_without_faults() -> None:
    current = make("a", "b")
    assert kinds(current.start()) == ["SendAnnounce", "SendAnnounce"]
    assert current.next_deadline() == 110.0
    assert kinds(current.receive(A, frames()[PeerEvent.NEED], 101.0)) == ["SendManifest"]
    assert current.receive(A, READY, 102.0) == []
    actions = current.receive(B, READY, 103.0)
    assert kinds(actions) == ["Begin a", "Begin b", "Transfer"]
    assert actions[-1] == Transfer((A, B))
    assert current.transferred(A, None, 104.0) == []
    assert current.transferred(B, None, 104.0) == []
    assert current.next_deadline() == 144.0
    assert kinds(current.receive(B, RELEASED, 105.0)) == ["Commit b"]
    assert kinds(current.receive(A, RELEASED, 105.0)) == ["Commit a"]
    current.receive(A, COMMITTED, 106.0)
    assert not current.done
    current.receive(B, COMMITTED, 106.0)
    assert current.done
    assert current.committed_replicas() == ["a", "b"]
    assert current.fenced_replicas() == {}
    assert current.first_error is None


def test_a_refusal_before_any_byte_ends_the_round_for_all_when_all_are_needed() -> None:
    current = make("a", "b")
    current.receive(A, READY, 101.0)
    refused = Refused(round=3, version=5, error=describe(ShapeMismatch("w is [2]", tensor="w")))
    actions = current.receive(B, refused, 102.0)
    assert kinds(actions) == ["Abort a"]
    assert current.done
    assert type(current.first_error) is ShapeMismatch
    assert (current.first_error.tensor, current.first_error.peer) == ("w", "b")
    assert all((view.serves, view.torn) == (4, False) for view in current.peers.values())


def test_a_refusal_leaves_the_others_to_go_on_when_they_are_enough() -> None:
    current = make("a", "b", need=1)
    current.receive(B, frames()[PeerEvent.REFUSED], 101.0)
    assert kinds(current.receive(A, READY, 102.0)) == ["Begin a", "Transfer"]


def test_a_peer_that_does_not_answer_is_named_with_phase_and_remedy() -> None:
    current = make("a", "b", need=1)
    current.receive(A, READY, 101.0)
    actions = current.tick(110.0)
    assert kinds(actions) == ["Abort b", "Begin a", "Transfer"]
    error = current.peers[B].error
    assert type(error) is TransferTimeout
    assert (error.peer, error.phase, error.version) == ("b", "ANNOUNCE", 5)
    assert "announce_s" in error.remedy


def test_one_rank_out_takes_its_whole_replica_out() -> None:
    current = make("x", "x", "y", need=1)
    to_transfer(current)
    current.transferred(A, None, 110.0)
    actions = current.transferred(B, TransferTimeout("stalled", bucket=2), 110.0)
    assert kinds(actions) == ["Abort b", "Abort a"]
    current.transferred(C, None, 110.0)
    assert kinds(current.receive(C, RELEASED, 111.0)) == ["Commit c"]
    current.receive(C, COMMITTED, 112.0)
    assert current.done
    assert current.committed_replicas() == ["y"]
    assert type(current.fenced_replicas()["x"]) is TransferTimeout


def test_a_mate_inside_the_transfer_is_given_up_when_its_transfer_ends() -> None:
    current = make("x", "x", "y", need=1)
    to_transfer(current)
    current.transferred(A, TransferTimeout("stalled"), 110.0)
    assert current.peers[B].stage is PeerStage.TRANSFER
    assert kinds(current.transferred(B, None, 110.0)) == ["Abort b"]


def test_a_replica_commits_only_when_all_its_ranks_are_verified() -> None:
    current = make("x", "x")
    to_transfer(current)
    for peer in (A, B):
        current.transferred(peer, None, 110.0)
    assert current.receive(A, RELEASED, 111.0) == []
    assert kinds(current.receive(B, RELEASED, 112.0)) == ["Commit a", "Commit b"]


def test_a_closed_data_plane_waits_for_its_reason_and_prefers_it() -> None:
    current = make("a", "b")
    to_transfer(current)
    current.transferred(A, None, 110.0)
    assert current.transferred(B, PeerLost("closed", bucket=4), 110.0) == []
    assert current.next_deadline() == 112.0
    error = describe(LoaderError("ValueError: bad shape for w7", tensor="w7", bucket=4))
    current.receive(B, Failed(round=3, version=5, error=error, torn=True, serves=-1), 111.0)
    assert type(current.first_error) is LoaderError
    assert current.first_error.tensor == "w7"
    assert (current.peers[B].serves, current.peers[B].torn) == (-1, True)


def test_a_closed_data_plane_without_a_reason_is_a_lost_peer_at_that_bucket() -> None:
    current = make("a")
    to_transfer(current)
    current.transferred(A, PeerLost("closed", bucket=4), 110.0)
    current.tick(112.0)
    assert type(current.first_error) is PeerLost
    assert current.first_error.bucket == 4
    assert current.done


def test_a_death_in_the_transfer_keeps_the_bucket() -> None:
    current = make("a")
    to_transfer(current)
    current.transferred(A, PeerLost("closed", bucket=4), 110.0)
    current.lost(A, PeerLost("its process has ended"), 110.5)
    assert str(current.first_error).startswith("its process has ended")
    assert current.first_error is not None
    assert current.first_error.bucket == 4


def test_a_failing_source_gives_everybody_up() -> None:
    current = make("a", "b")
    to_transfer(current)
    actions = current.source_failed(SourceError("no", tensor="w"), 110.0)
    assert kinds(actions) == ["Abort a", "Abort b"]
    assert current.done
    assert all(view.torn for view in current.peers.values())


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_frame_of_another_round_is_answered_with_fenced(number: int) -> None:
    current = make("a")
    actions = current.receive(A, Ready(round=number, version=2), 101.0)
    assert kinds(actions) == ["Fenced a"]
    assert isinstance(actions[0], Send)
    assert isinstance(actions[0].frame, Fenced)
    assert actions[0].frame.round == number
    assert current.peers[A].stage is PeerStage.ANNOUNCED


def test_a_repeated_frame_puts_its_sender_out_and_no_other() -> None:
    current = make("a", "b", need=1)
    current.receive(A, READY, 101.0)
    assert kinds(current.receive(A, READY, 101.0)) == ["Abort a"]
    assert kinds(current.receive(B, READY, 102.0)) == ["Begin b", "Transfer"]


def test_a_late_confirmation_after_the_end_is_told_so() -> None:
    current = make("a", "b", need=1)
    to_transfer(current)
    for peer in (A, B):
        current.transferred(peer, None, 110.0)
        current.receive(peer, RELEASED, 111.0)
    current.tick(161.0)
    assert type(current.peers[A].error) is TransferTimeout
    assert current.peers[A].error.phase == "COMMIT"
    assert kinds(current.receive(A, COMMITTED, 162.0)) == ["Fenced a"]


def test_start_announces_to_each() -> None:
    assert make("a", "b").start() == [SendAnnounce(A), SendAnnounce(B)]


def test_manifest_is_sent_to_who_asks() -> None:
    assert make("a").receive(A, frames()[PeerEvent.NEED], 101.0) == [SendManifest(A)]


def test_abort_carries_the_first_cause() -> None:
    current = make("a", "b")
    actions = current.receive(B, frames()[PeerEvent.REFUSED], 101.0)
    assert isinstance(actions[0], Send)
    assert isinstance(actions[0].frame, Abort)
    assert (actions[0].frame.error.error, actions[0].frame.error.peer) == ("LoaderError", "b")


def test_begin_and_commit_name_the_round() -> None:
    current = make("a")
    begin = current.receive(A, READY, 101.0)[0]
    assert begin == Send(A, Begin(round=3, version=5))
    current.transferred(A, None, 102.0)
    assert current.receive(A, RELEASED, 103.0) == [Send(A, Commit(round=3, version=5))]


OTHER = Released(round=3, version=5, digests=b"other", tensors=1, total_bytes=1, load_s=0.1, release_s=0.1)


def disputed() -> Round:
    """Two replicas; `a` reported a digest that is not the trainer's."""
    current = make("a", "b")
    to_transfer(current)
    current.transferred(A, None, 104.0)
    current.transferred(B, None, 104.0)
    assert kinds(current.receive(A, OTHER, 105.0)) == ["Dispute a"]
    assert current.peers[A].stage is PeerStage.DISPUTE
    assert kinds(current.receive(B, RELEASED, 105.0)) == ["Commit b"], "the other replica goes on"
    return current


def test_another_digest_is_disputed_and_never_committed() -> None:
    current = disputed()
    actions = current.receive(A, Evidence(round=3, version=5, start=0, data=b"x"), 106.0)
    assert kinds(actions) == ["Abort a"]
    current.receive(B, COMMITTED, 106.0)
    assert (current.done, current.committed_replicas()) == (True, ["b"])
    assert isinstance(current.fenced_replicas()["a"], DigestMismatch)
    assert (current.peers[A].serves, current.peers[A].torn) == (-1, True)


@pytest.mark.parametrize("end", ["expires", "fails", "is lost"])
def test_a_disputed_peer_that_gives_no_evidence_is_a_digest_mismatch_all_the_same(end: str) -> None:
    current = disputed()
    if end == "expires":
        current.tick(105.0 + LIMITS.release_s)
    elif end == "fails":
        current.receive(A, frames()[PeerEvent.FAILED], 106.0)
    else:
        current.lost(A, PeerLost("gone"), 106.0)
    assert isinstance(current.peers[A].error, DigestMismatch)
    assert current.peers[A].stage is PeerStage.FENCED


class _Confused(ModelAudit):
    def expect(self, peer: PeerId, frame: Ready) -> None:
        raise RemoteProtocolError("Ready speaks of entry 9")


def test_a_peer_whose_frame_the_audit_refuses_is_put_out_alone() -> None:
    current = make("a", "b", need=1)
    current.audit = _Confused()
    assert kinds(current.receive(A, READY, 101.0)) == ["Abort a"]
    assert isinstance(current.peers[A].error, RemoteProtocolError)
    assert current.peers[B].stage is PeerStage.ANNOUNCED
