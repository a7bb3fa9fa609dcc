"""The rollout process's serving loop, in a thread: what it serves, and what it refuses to serve."""

from __future__ import annotations

import contextlib
import threading
import types

import pytest

from weightlift.errors import LocalProtocolError, TornWeights, TransferTimeout, WeightliftError
from weightlift.rl.config import TinyModelConfig
from weightlift.rl.models import build_tiny
from weightlift.rl.rollout import Parts, serve
from weightlift.samples import Prompt, SampleEndpoint, SamplePlane, SamplingParams

SAMPLING = SamplingParams(samples=2, max_new_tokens=3, temperature=1.0, greedy=False, seed=0)


class ScriptedSubscriber:
    """A subscriber without weights: `pull` does what the script says next, a version to serve or an error to raise."""

    def __init__(self, *script):
        self.script, self.version, self.torn = list(script), None, False

    def pull(self, timeout_s):
        outcome = self.script.pop(0)
        if isinstance(outcome, Exception):
            self.torn = isinstance(outcome, TornWeights)
            self.version = None if self.torn else self.version
            raise outcome
        self.version, self.torn = outcome, False
        return types.SimpleNamespace(version=outcome)

    def ensure_serving(self):
        if self.torn:
            raise TornWeights("this engine was touched by a sync that did not finish")
        if self.version is None:
            raise LocalProtocolError("no version was pulled yet")
        return self.version


@contextlib.contextmanager
def serving(*script):
    """A plane with one engine behind it; at the end the engine has to obey the shutdown request."""
    text_model = build_tiny(TinyModelConfig(hidden_size=32, layers=1, heads=2, max_tokens=32), seed=0)
    with SamplePlane() as plane:

        def work():
            with SampleEndpoint(address=plane.address, name="rollout-0") as endpoint:
                serve(endpoint, Parts(ScriptedSubscriber(*script), text_model))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        plane.wait_for_engines(["rollout-0"], timeout_s=10)
        try:
            yield plane, [Prompt(id=0, tokens=text_model.encode_prompt("ab="))]
        finally:
            plane.shutdown("rollout-0")
            thread.join(10)
            assert not thread.is_alive()


def sync(plane, version):
    return plane.collect(plane.sync("rollout-0", version=version, timeout_s=1), timeout_s=10)


def generate(plane, prompts):
    return plane.collect(plane.generate("rollout-0", prompts, SAMPLING), timeout_s=10)


def test_samples_carry_the_version_of_the_last_sync():
    with serving(0, 1) as (plane, prompts):
        for version in (0, 1):
            assert sync(plane, version).version == version
            assert {sample.version for sample in generate(plane, prompts).samples} == {version}


def test_an_engine_without_weights_makes_no_sample():
    with serving() as (plane, prompts), pytest.raises(LocalProtocolError, match="no version was pulled yet"):
        generate(plane, prompts)


def test_a_torn_engine_makes_no_sample_until_a_sync_heals_it():
    with serving(0, TornWeights("half way"), 2) as (plane, prompts):
        sync(plane, 0)
        with pytest.raises(TornWeights, match="half way"):
            sync(plane, 1)
        with pytest.raises(TornWeights, match="did not finish"):
            generate(plane, prompts)
        sync(plane, 2)
        assert {sample.version for sample in generate(plane, prompts).samples} == {2}


def test_a_failed_sync_that_touched_nothing_leaves_the_old_version_in_force():
    with serving(0, TransferTimeout("no round was announced")) as (plane, prompts):
        sync(plane, 0)
        with pytest.raises(TransferTimeout, match="no round was announced"):
            sync(plane, 1)
        assert {sample.version for sample in generate(plane, prompts).samples} == {0}


def test_a_foreign_exception_arrives_as_an_error_with_its_cause():
    with serving(0, ValueError("bad shape")) as (plane, _):
        sync(plane, 0)
        with pytest.raises(WeightliftError, match="ValueError: bad shape") as caught:
            sync(plane, 1)
        assert "bad shape" in str(caught.value.__cause__)
