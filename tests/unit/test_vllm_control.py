"""integrations/vllm_control.py without vLLM: the order of calls around a sync, and which state every kind of failure leaves."""

from collections.abc import Sequence
from typing import Any, Literal

import pytest

from weightlift.errors import ConfigError, EngineBusy, LocalProtocolError, PeerLost, RemoteProtocolError, ShapeMismatch, TornWeights
from weightlift.integrations.vllm_control import EngineState, OfflineControl, PauseMode, VLLMEngine, VLLMMemory
from weightlift.integrations.vllm_worker import describe_error

Answer = dict[str, Any]


def answer(version: int, state: str = "SERVING", error: Exception | None = None, rank: int = 0) -> Answer:
    said = None if error is None else describe_error(error)  # type: ignore[arg-type]
    return {"rank": rank, "version": version, "state": state, "device": "cpu", "load": {"rank": rank}, "error": said}


class Scripted:
    """A Control that notes what is called. pulls: what the workers answer, round by round. resets: what the caches say."""

    def __init__(self, *pulls: Sequence[Answer] | Exception, resets: Sequence[bool] = ()) -> None:
        self.pulls, self.resets = list(pulls), list(resets)
        self.calls: list[str] = []
        self.asked: list[tuple[str, tuple[Any, ...], float]] = []
        self.fails: dict[str, Exception] = {}
        self.device = "cpu"

    def _note(self, call: str) -> None:
        self.calls.append(call)
        error = self.fails.get(call.partition(" ")[0])
        if error is not None:
            raise error

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        self._note(f"pause {mode}")

    def resume(self) -> None:
        self._note("resume")

    def rpc(self, method: str, args: Sequence[Any], timeout_s: float) -> list[Any]:
        self.asked.append((method, tuple(args), timeout_s))
        self._note(method)
        if method != "weightlift_pull":
            return [{**answer(-1), "device": self.device}]
        said = self.pulls.pop(0)
        if isinstance(said, Exception):
            raise said
        return list(said)

    def reset_caches(self, *, running: bool) -> bool:
        self._note(f"reset running={running}")
        return self.resets.pop(0) if self.resets else True

    def set_version(self, version: str) -> None:
        self._note(f"version {version}")

    def sleep(self, level: int, timeout_s: float) -> None:
        self._note(f"sleep {level}")

    def wake(self, tag: Literal["weights", "kv_cache"], timeout_s: float) -> None:
        self._note(f"wake {tag}")

    def close(self) -> None:
        self._note("close")


def engine_on(control: Scripted, **options: Any) -> VLLMEngine:
    engine = VLLMEngine(control, **{"reset_s": 0.0, **options})
    engine.connect("here")
    control.calls.clear()
    return engine


@pytest.mark.parametrize(("pause", "running"), [("abort", False), ("wait", False), ("keep", True)])
def test_a_sync_pauses_first_and_resumes_last(pause: PauseMode, running: bool) -> None:
    control = Scripted([answer(3), answer(3, rank=1)])
    engine = engine_on(control, pause=pause)
    assert engine.update(5.0) == 3
    assert control.calls == [f"pause {pause}", "weightlift_pull", f"reset running={running}", "version 3", "resume"]
    assert (engine.state, engine.version, engine.ensure_serving(), engine.load) == (EngineState.SERVING, 3, 3, {"rank": 0})


def test_every_call_to_the_workers_has_an_end() -> None:
    control = Scripted([answer(0)])
    engine = engine_on(control)
    engine.update(5.0)
    engine.close()
    assert [method for method, _, _ in control.asked] == ["weightlift_connect", "weightlift_pull", "weightlift_close"]
    assert control.asked[1][1] == (5.0,)
    assert control.asked[1][2] > 5.0, "the workers give up first, and say why"
    assert all(0 < timeout_s <= 60.0 for _, _, timeout_s in control.asked)


def test_an_engine_without_a_version_serves_nothing() -> None:
    engine = engine_on(Scripted())
    assert (engine.state, engine.version) == (EngineState.EMPTY, None)
    with pytest.raises(LocalProtocolError, match="EMPTY"):
        engine.ensure_serving()


REFUSED = ShapeMismatch("the engine holds another shape", tensor="w")


@pytest.mark.parametrize("synced", [False, True])
def test_what_is_refused_before_any_byte_leaves_the_old_version_and_resumes(synced: bool) -> None:
    before = 1 if synced else -1
    control = Scripted(*([[answer(1), answer(1)]] if synced else []), [answer(before, error=REFUSED), answer(before)])
    engine = engine_on(control)
    if synced:
        engine.update()
    control.calls.clear()
    with pytest.raises(ShapeMismatch) as caught:
        engine.update()
    assert caught.value.tensor == "w"
    assert control.calls == ["pause abort", "weightlift_pull", "resume"]
    assert (engine.state, engine.version) == ((EngineState.SERVING, 1) if synced else (EngineState.EMPTY, None))


LOST = PeerLost("the trainer is gone", peer="trainer")
TORN = {
    "a torn worker": [answer(1, "TORN", LOST), answer(1)],
    "a worker that is further": [answer(1, error=LOST), answer(2)],
    "workers of two versions, no error": [answer(2), answer(1)],
    "no answer": PeerLost("vLLM's process is gone", peer="vllm"),
    "an answer that is none": [None],
    "no worker": [],
}


@pytest.mark.parametrize("what", TORN)
def test_what_is_not_whole_is_torn_and_never_resumed(what: str) -> None:
    control = Scripted([answer(1), answer(1)], TORN[what], [answer(3), answer(3)])  # type: ignore[arg-type]
    engine = engine_on(control)
    engine.update()
    control.calls.clear()
    with pytest.raises(RemoteProtocolError if "version" in what or what in ("an answer that is none", "no worker") else PeerLost):
        engine.update()
    assert "resume" not in control.calls
    assert (engine.state, engine.version) == (EngineState.TORN, None)
    with pytest.raises(TornWeights):
        engine.ensure_serving()
    assert engine.update() == 3, "a full sync heals it"
    assert control.calls[-1] == "resume"


def test_a_torn_engine_that_refuses_the_next_version_stays_torn() -> None:
    control = Scripted([answer(1)], [answer(1, "TORN", LOST)], [answer(1, "TORN", REFUSED)])
    engine = engine_on(control)
    engine.update()
    for _ in range(2):
        with pytest.raises((PeerLost, ShapeMismatch)):
            engine.update()
    assert engine.state is EngineState.TORN
    assert control.calls.count("resume") == 1


def test_the_cause_is_what_a_worker_says_of_itself() -> None:
    """The others only saw that one of them was gone."""
    control = Scripted([answer(-1, error=LOST), answer(-1, error=REFUSED, rank=1)])
    with pytest.raises(ShapeMismatch):
        engine_on(control).update()


def test_caches_that_stay_keep_the_engine_paused_until_they_are_reset() -> None:
    control = Scripted([answer(1)], [answer(2)], [answer(2, error=REFUSED)], [answer(3)], resets=[True, False])
    engine = engine_on(control)
    engine.update()
    control.calls.clear()
    with pytest.raises(EngineBusy, match="prefix cache"):
        engine.update()
    assert control.calls == ["pause abort", "weightlift_pull", "reset running=False"], "no version is stamped, nothing resumes"
    assert (engine.state, engine.version) == (EngineState.STALE, None)
    with pytest.raises(EngineBusy):
        engine.ensure_serving()
    control.calls.clear()
    with pytest.raises(ShapeMismatch):
        engine.update()
    assert engine.state is EngineState.STALE, "the workers still hold version 2, whole; the caches are still older"
    assert "resume" not in control.calls
    assert engine.update() == 3


def test_caches_that_are_busy_for_a_while_are_asked_again() -> None:
    control = Scripted([answer(1)], resets=[False, False, True])
    assert engine_on(control, reset_s=30.0).update() == 1
    assert control.calls.count("reset running=False") == 3


@pytest.mark.parametrize("step", ["pause", "reset", "version", "resume"])
def test_a_control_call_that_fails_leaves_the_engine_unserved(step: str) -> None:
    control = Scripted([answer(1)])
    engine = engine_on(control)
    control.fails[step] = PeerLost("no answer", peer="vllm")
    with pytest.raises(PeerLost):
        engine.update()
    assert engine.version is None
    assert engine.state is (EngineState.TORN if step == "pause" else EngineState.STALE)


def test_a_new_publisher_may_have_any_version() -> None:
    """A worker that subscribed anew has no version of this publisher yet; its weights are those of before."""
    control = Scripted([answer(7)], [answer(-1, error=REFUSED)], [answer(1)])
    engine = engine_on(control)
    engine.update()
    engine.connect("there")
    with pytest.raises(ShapeMismatch):
        engine.update()
    assert (engine.state, engine.version) == (EngineState.SERVING, 7)
    assert engine.update() == 1


def test_discarded_weights_serve_nothing() -> None:
    control = Scripted([answer(1)])
    control.device = "cuda"
    engine = engine_on(control)
    engine.update()
    memory = VLLMMemory(engine, control)
    control.calls.clear()
    memory.offload_weights()
    assert engine.version == 1
    memory.discard_weights()
    assert control.calls == ["sleep 1", "weightlift_discard", "sleep 2"], "said before it is done"
    with pytest.raises(TornWeights):
        engine.ensure_serving()
    memory.allocate_weights()
    memory.allocate_kv_cache()
    assert control.calls[-2:] == ["wake weights", "wake kv_cache"]


def test_sleep_on_a_cpu_is_refused() -> None:
    control = Scripted()
    with pytest.raises(ConfigError, match="got cpu"):
        VLLMMemory(engine_on(control), control)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="pause"):
        VLLMEngine(Scripted(), pause="stop")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="timeout_s"):
        engine_on(Scripted()).update(0.0)


class FakeLLM:
    """`LLM` as far as a control looks at it. reset: what reset_prefix_cache answers."""

    def __init__(self, reset: bool = True) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.reset = reset
        self.llm_engine = self

    def __getattr__(self, name: str) -> Any:
        if name == "update_weight_version":
            raise AttributeError(name)  # vLLM 0.24 has none

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, kwargs))
            if name == "collective_rpc" and args[0] == "boom":
                raise RuntimeError("EngineCore died")
            return self.reset if name == "reset_prefix_cache" else [args]

        return call


def test_an_offline_engine_is_paused_by_level_0_and_its_boolean_is_not_dropped() -> None:
    llm = FakeLLM(reset=False)
    control = OfflineControl(llm)
    control.pause("wait", 5.0)
    assert control.reset_caches(running=True) is False
    control.set_version("3")
    control.resume()
    assert control.rpc("weightlift_state", (), 5.0) == [("weightlift_state",)]
    assert llm.calls == [
        ("sleep", {"level": 0, "mode": "keep"}),
        ("reset_prefix_cache", {"reset_running_requests": True}),
        ("reset_mm_cache", {}),
        ("reset_encoder_cache", {}),
        ("wake_up", {"tags": ["scheduling"]}),
        ("collective_rpc", {"timeout": 5.0, "args": ()}),
    ]


def test_what_vllm_raises_becomes_one_of_ours() -> None:
    with pytest.raises(PeerLost, match="EngineCore died"):
        OfflineControl(FakeLLM()).rpc("boom", (), 5.0)
