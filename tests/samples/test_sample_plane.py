"""The plane between a trainer and an engine in threads of one process: bounds, deadlines, versions, errors, clean-up."""

from __future__ import annotations

import contextlib
import pathlib
import stat
import threading
import time

import pytest

from weightlift.errors import LocalProtocolError, PeerLost, RemoteProtocolError, TornWeights, TransferTimeout
from weightlift.samples import (
    FailureReply,
    GenerateReply,
    GenerateRequest,
    Prompt,
    Sample,
    SampleEndpoint,
    SamplePlane,
    SamplingParams,
    ShutdownRequest,
    SyncReply,
    SyncRequest,
    remove_address,
)

SAMPLING = SamplingParams(samples=1, max_new_tokens=4, temperature=1.0, greedy=False, seed=0)
PROMPTS = [Prompt(id=0, tokens=[1, 2])]


def directory_of(plane):
    return pathlib.Path(plane.address.removeprefix("ipc://")).parent


@contextlib.contextmanager
def engine(plane, answer, name="rollout-0"):
    """An engine in a thread: answer(request) -> reply, or None for silence; it ends with ShutdownRequest."""

    def work():
        with SampleEndpoint(address=plane.address, name=name) as endpoint:
            endpoint.hello()
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                request = endpoint.receive(timeout_s=0.5)
                if isinstance(request, ShutdownRequest):
                    return
                reply = None if request is None else answer(request)
                if reply is not None:
                    endpoint.reply(reply)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        plane.wait_for_engines([name], timeout_s=10)
        yield
    finally:
        plane.shutdown(name)
        thread.join(10)
        assert not thread.is_alive()


class Versioned:
    """An engine that is told versions and stamps its samples with the last one."""

    def __init__(self):
        self.version = -1

    def __call__(self, request):
        if isinstance(request, SyncRequest):
            self.version = request.version
            return SyncReply(id=request.id, version=self.version, seconds=0.0)
        assert isinstance(request, GenerateRequest)
        samples = [
            Sample(prompt_id=prompt.id, version=self.version, tokens=prompt.tokens[::-1], logprobs=[-0.5, -0.25], finished=True)
            for prompt in request.prompts
        ]
        return GenerateReply(id=request.id, samples=samples, seconds=0.0)


def test_a_sample_says_which_version_made_it_even_when_collected_after_the_next_sync():
    with SamplePlane(max_in_flight=3) as plane, engine(plane, Versioned()):
        plane.collect(plane.sync("rollout-0", version=4, timeout_s=1), timeout_s=5)
        early = plane.generate("rollout-0", PROMPTS, SAMPLING)
        later = plane.sync("rollout-0", version=5, timeout_s=1)
        assert plane.collect(later, timeout_s=5).version == 5
        assert [sample.version for sample in plane.collect(early, timeout_s=5).samples] == [4]
        again = plane.collect(plane.generate("rollout-0", PROMPTS, SAMPLING), timeout_s=5)
        assert again.samples == [Sample(prompt_id=0, version=5, tokens=[2, 1], logprobs=[-0.5, -0.25], finished=True)]


def test_at_most_max_in_flight_requests():
    with SamplePlane(max_in_flight=2) as plane, engine(plane, Versioned()):
        first = plane.generate("rollout-0", PROMPTS, SAMPLING)
        plane.generate("rollout-0", PROMPTS, SAMPLING)
        with pytest.raises(LocalProtocolError, match="max_in_flight is 2"):
            plane.generate("rollout-0", PROMPTS, SAMPLING)
        assert plane.in_flight == 2
        plane.collect(first, timeout_s=5)
        plane.generate("rollout-0", PROMPTS, SAMPLING)


def test_a_silent_engine_ends_in_a_timeout_that_names_it_and_stays_in_flight():
    with SamplePlane() as plane, engine(plane, lambda request: None):
        ticket = plane.generate("rollout-0", PROMPTS, SAMPLING)
        with pytest.raises(TransferTimeout, match=r"engine rollout-0 did not answer request 1 within 0\.1 s") as caught:
            plane.collect(ticket, timeout_s=0.1)
        assert caught.value.peer == "rollout-0"
        assert plane.in_flight == 1


def test_an_engine_that_never_reports_is_named():
    with SamplePlane() as plane, pytest.raises(TransferTimeout, match="engine rollout-1 did not report"):
        plane.wait_for_engines(["rollout-1"], timeout_s=0.1)


def test_a_dead_process_ends_every_wait_before_its_deadline():
    def gone():
        raise PeerLost("the rollout process ended", peer="rollout-0")

    with SamplePlane(watch=gone) as plane:
        start = time.monotonic()
        with pytest.raises(PeerLost):
            plane.wait_for_engines(["rollout-0"], timeout_s=60)
        assert time.monotonic() - start < 5


def test_the_engines_own_error_is_raised_with_its_class_and_cause():
    def torn(request):
        error = TornWeights("touched and not finished", peer="rollout-0")
        error.__cause__ = ValueError("bad bytes")
        return FailureReply.of(error, id=request.id, version=None)

    with SamplePlane() as plane, engine(plane, torn):
        ticket = plane.generate("rollout-0", PROMPTS, SAMPLING)
        with pytest.raises(TornWeights, match="touched and not finished") as caught:
            plane.collect(ticket, timeout_s=5)
        assert "bad bytes" in str(caught.value.__cause__)
        assert plane.in_flight == 0


def test_an_answer_to_what_was_not_asked_is_refused():
    with SamplePlane() as plane, engine(plane, lambda request: SyncReply(id=99, version=0, seconds=0.0)):
        ticket = plane.generate("rollout-0", PROMPTS, SAMPLING)
        with pytest.raises(RemoteProtocolError, match="request 99"):
            plane.collect(ticket, timeout_s=5)


def test_unknown_tickets_and_engines_are_the_callers_fault():
    with SamplePlane() as plane:
        with pytest.raises(LocalProtocolError, match="request 5 is not in flight"):
            plane.collect(5, timeout_s=1)
        with pytest.raises(LocalProtocolError, match="did not say hello"):
            plane.generate("rollout-9", PROMPTS, SAMPLING)


def test_the_directory_is_private_and_goes_with_the_plane():
    plane = SamplePlane()
    directory = directory_of(plane)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    plane.close()
    plane.close()
    assert not directory.exists()


def test_only_a_planes_own_directory_can_be_removed(tmp_path):
    (tmp_path / "kept").mkdir()
    remove_address(f"ipc://{tmp_path}/kept/s")
    assert (tmp_path / "kept").exists()


def test_an_idle_endpoint_returns_none():
    with SamplePlane() as plane, SampleEndpoint(address=plane.address, name="rollout-0") as endpoint:
        assert endpoint.receive(timeout_s=0.01) is None
