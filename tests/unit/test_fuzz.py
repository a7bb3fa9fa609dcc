"""Random and mutated frames into the codec and the round: only typed errors, no illegal state, the others' round goes on."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from test_round import LIMITS, A, B, frames

from weightlift.errors import RemoteProtocolError, WeightliftError
from weightlift.protocol import codec
from weightlift.protocol.messages import Frame, PeerId
from weightlift.protocol.round import Member, Round
from weightlift.protocol.session import PEER_LAW, PeerStage

changed_bytes = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6)
SAMPLES = [codec.encode(frame) for frame in frames().values()]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(SAMPLES),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6),
    st.integers(0, 400),
)
def test_mutated_frames_are_read_or_refused(sample: bytes, changes: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(sample)
    for position, value in changes:
        data[position % len(data)] = value
    for mutated in (bytes(data), bytes(data[: cut % (len(data) + 1)])):
        try:
            frame = codec.decode_from_subscriber(mutated)
        except RemoteProtocolError:
            continue
        assert isinstance(frame, Frame)
        assert codec.decode_from_subscriber(codec.encode(frame)) == frame


@st.composite
def any_frame(draw: st.DrawFn) -> Frame:
    frame = draw(st.sampled_from(list(frames().values())))
    number = draw(st.sampled_from([3, 3, 3, 3, 0, 1, 2, 4, -1, 2**40]))
    return msgspec.structs.replace(frame, round=number, version=draw(st.integers(-1, 9)))


steps = st.lists(
    st.one_of(
        st.tuples(st.just("frame"), st.sampled_from(["a", "b", "stranger"]), any_frame()),
        st.tuples(st.just("tick"), st.floats(0, 400), st.none()),
        st.tuples(st.just("end"), st.sampled_from(["a", "b"]), st.sampled_from([None, "broken"])),
    ),
    max_size=25,
)


@settings(max_examples=400, deadline=None)
@given(steps, st.sampled_from([1, 2]))
def test_a_round_survives_any_frames_in_any_order(happenings: list[tuple[str, object, object]], need: int) -> None:
    current = Round(round=3, version=5, members=[Member(A, "x", 4), Member(B, "y", 4)], need=need, limits=LIMITS, now=0.0)
    current.start()
    now = 1.0
    for kind, who, what in happenings:
        now += 1.0
        before = {peer: view.stage for peer, view in current.peers.items()}
        if kind == "frame":
            current.receive(PeerId(str(who)), what, now)  # type: ignore[arg-type]
        elif kind == "tick":
            current.tick(float(who))  # type: ignore[arg-type]
        elif current.peers[PeerId(str(who))].stage is PeerStage.TRANSFER:
            current.transferred(PeerId(str(who)), None, now)
        for peer, view in current.peers.items():
            assert view.stage in reachable(before[peer])
            assert view.error is None or isinstance(view.error, WeightliftError)
        waiting = [
            view for view in current.peers.values() if view.stage not in (PeerStage.TRANSFER, PeerStage.READY, PeerStage.VERIFIED)
        ]
        assert all(view.out or view.deadline is not None for view in waiting)
    assert set(current.committed_replicas()) <= {"x", "y"}


def reachable(stage: PeerStage) -> set[PeerStage]:
    """Every stage that the table reaches from one."""
    found, queue = {stage}, [stage]
    while queue:
        for target in PEER_LAW[queue.pop()].values():
            if target not in found:
                found.add(target)
                queue.append(target)
    return found
