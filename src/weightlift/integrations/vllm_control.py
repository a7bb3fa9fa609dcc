"""A vLLM engine from outside: pause, take a version, reset caches, stamp, resume; and what it serves when that fails.

Owns: the order of a sync around the scheduler, `VLLMEngine`'s state, the two ways to reach an engine (an `LLM` in this process, a
server over HTTP). Must not know: what a worker does with weights. Called by whoever owns the engine: rl/, or a user's loop. The engine
must have been started with `worker_extension_cls="weightlift.integrations.vllm_extension.WeightliftExtension"`.

    SERVING --pause--> workers pull --all committed--> caches reset --> version stamped --resume--> SERVING
                            |                               |
                            | refused, nothing touched      | the engine says that they were not reset
                            v                               v
                  resumed, SERVING the old one         paused, STALE: the next update goes on from there
                            |
                            | any worker touched, or nobody knows
                            v
                       paused, TORN until a full sync

Nothing here resumes in a `finally`. A paused engine schedules nothing; `ensure_serving` says why.
"""

from __future__ import annotations

import contextlib
import enum
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias

from weightlift.config import check_seconds
from weightlift.errors import (
    ConfigError,
    EngineBusy,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    TornWeights,
    WeightliftError,
)
from weightlift.handoff import SleepLevel
from weightlift.integrations.background import bounded
from weightlift.integrations.vllm_worker import rebuild_error

__all__ = ["Control", "EngineState", "HttpControl", "OfflineControl", "PauseMode", "VLLMEngine", "VLLMMemory"]

PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
"""What becomes of requests that are under way: ended at once, waited for, or frozen and gone on with the new weights (what they have
in the KV cache is computed again)."""

_GRACE_S: Final = 15.0
_RESET_PAUSE_S: Final = 0.05


class EngineState(enum.StrEnum):
    """EMPTY: no version yet. STALE: new weights, caches of older ones. Only SERVING may generate."""

    EMPTY = "EMPTY"
    SERVING = "SERVING"
    UPDATING = "UPDATING"
    STALE = "STALE"
    TORN = "TORN"


class Control(Protocol):
    """How an engine is reached. Every call ends in bounded time, by a result or by an error."""

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Schedule nothing from now on. Returns when nothing runs."""

    def resume(self) -> None:
        """Schedule again."""

    def rpc(self, method: str, args: Sequence[Any], timeout_s: float) -> list[Any]:
        """A method on every worker."""

    def reset_caches(self, *, running: bool) -> bool:
        """Drop prefix, multimodal and encoder caches; what the engine says of it. running: also those of requests that are frozen."""

    def set_version(self, version: str) -> None:
        """What the engine stamps on its outputs from now on."""

    def sleep(self, level: int, timeout_s: float) -> None:
        """vLLM's sleep."""

    def wake(self, tag: Literal["weights", "kv_cache"], timeout_s: float) -> None:
        """vLLM's wake-up of one kind of memory."""

    def close(self) -> None:
        """Give back what the control itself holds; the engine goes on."""


class VLLMEngine:
    """One engine with all its workers.

    Args:
        control: how it is reached. replica: its name at the trainer.
        pause: what becomes of running requests at a sync. reset_s: how long the caches may refuse to be reset.
    """

    def __init__(self, control: Control, *, replica: str = "vllm", pause: PauseMode = "abort", reset_s: float = 10.0) -> None:
        if pause not in ("abort", "wait", "keep"):
            raise ConfigError(f"pause must be abort, wait or keep, got {pause!r}")
        check_seconds("reset_s", reset_s, zero=True)
        self._control = control
        self._replica = replica
        self._pause: PauseMode = pause
        self._reset_s = reset_s
        self._version: int | None = None
        self._state = EngineState.EMPTY
        self._fresh = True  # connected, and no version of this publisher yet
        self.load: dict[str, Any] = {}
        """How the last version's tensors got in (loaders.vllm.LoadReport), of worker 0."""

    @property
    def state(self) -> EngineState:
        """What the engine may do."""
        return self._state

    @property
    def version(self) -> int | None:
        """The version that is served; None if there is none."""
        return self._version if self._state is EngineState.SERVING else None

    def connect(self, address: str, *, timeout_s: float = 60.0, **settings: Any) -> None:
        """Have every worker subscribe to a publisher; a new one replaces the old one. settings: further ones of WorkerSettings."""
        given = {"address": address, "replica": self._replica, **settings}
        answers = self._call("weightlift_connect", (given,), timeout_s)
        self._raise_first(answers)
        self._fresh = True

    def update(self, timeout_s: float = 300.0) -> int:
        """Take part in the publisher's next round; returns the version that is served from now on.

        Raises: the first cause, as the workers give it. `state` then says whether the old version is served, or none.
        """
        check_seconds("timeout_s", timeout_s)
        before = self._state
        self._state = EngineState.UPDATING
        try:
            self._control.pause(self._pause, timeout_s)
            answers = self._call("weightlift_pull", (timeout_s,), timeout_s + _GRACE_S)
        except BaseException:
            self._state = EngineState.TORN  # nobody knows how far the workers came
            raise
        if any(answer["error"] for answer in answers):
            self._after_failure(answers, before)
            self._raise_first(answers)
        version = self._same_version(answers)
        self.load = dict(answers[0].get("load") or {})
        self._version, self._state, self._fresh = version, EngineState.STALE, False
        self._reset()
        self._control.set_version(str(version))
        self._control.resume()
        self._state = EngineState.SERVING
        return version

    def _after_failure(self, answers: Sequence[Mapping[str, Any]], before: EngineState) -> None:
        """Resume with the old version only if every worker says that it still has it, whole."""
        untouched = -1 if self._fresh else self._version
        whole = all(answer["state"] == "SERVING" and answer["version"] == untouched for answer in answers)
        if not whole or before not in (EngineState.SERVING, EngineState.EMPTY, EngineState.STALE):
            self._state = EngineState.TORN
            return
        if before is not EngineState.STALE:
            self._control.resume()
        self._state = before

    def _same_version(self, answers: Sequence[Mapping[str, Any]]) -> int:
        versions = {int(answer["version"]) for answer in answers}
        if len(versions) != 1:
            self._state = EngineState.TORN
            raise RemoteProtocolError(f"the workers of {self._replica} hold versions {sorted(versions)}", peer=self._replica)
        return versions.pop()

    def _reset(self) -> None:
        """Until the engine says that its caches are empty."""
        deadline = time.monotonic() + self._reset_s
        while not self._control.reset_caches(running=self._pause == "keep"):
            if time.monotonic() >= deadline:
                raise EngineBusy(
                    f"{self._replica} did not reset its prefix cache within {self._reset_s:g} s: requests still hold blocks",
                    peer=self._replica,
                    still_works="It holds the new weights and stays paused: it would answer from what older ones computed.",
                    remedy='pause="abort" ends such requests; the next update tries again.',
                )
            time.sleep(_RESET_PAUSE_S)

    def ensure_serving(self) -> int:
        """The version to generate with. TornWeights, EngineBusy or LocalProtocolError if there is none."""
        if self._state is EngineState.SERVING and self._version is not None:
            return self._version
        if self._state is EngineState.TORN:
            raise TornWeights("this engine was touched by a sync that did not finish; it is paused", peer=self._replica)
        if self._state is EngineState.STALE:
            raise EngineBusy("this engine's caches are older than its weights; it is paused", peer=self._replica)
        raise LocalProtocolError(
            f"this engine cannot serve: it is {self._state}", peer=self._replica, remedy="call update() first."
        )

    def discarded(self) -> None:
        """The weights were given away (sleep level 2): nothing is served until a full sync."""
        self._call("weightlift_discard", (), _GRACE_S)
        self._state = EngineState.TORN

    def device(self) -> str:
        """What the workers run on: cpu, cuda, ..."""
        return str(self._call("weightlift_state", (), _GRACE_S)[0]["device"])

    def close(self, timeout_s: float = 10.0) -> None:
        """Have the workers leave the publisher. Never raises for an engine that is gone."""
        with contextlib.suppress(WeightliftError):
            self._call("weightlift_close", (), timeout_s)
        self._control.close()

    def _call(self, method: str, args: Sequence[Any], timeout_s: float) -> list[dict[str, Any]]:
        answers = self._control.rpc(method, args, timeout_s)
        if not answers or not all(isinstance(answer, Mapping) and "state" in answer for answer in answers):
            raise RemoteProtocolError(
                f"{method} was answered with {answers!r}",
                peer=self._replica,
                remedy='start vLLM with worker_extension_cls="weightlift.integrations.vllm_extension.WeightliftExtension".',
            )
        return [dict(answer) for answer in answers]

    def _raise_first(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """The cause: what a worker says of itself before what it says of another one."""
        errors = [rebuild_error(answer["error"]) for answer in answers if answer["error"]]
        if errors:
            first = next((e for e in errors if not isinstance(e, PeerLost)), errors[0])
            raise first


class OfflineControl:
    """An `LLM` in this process."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """See Control. An LLM runs requests inside `generate` only; what was enqueued stays so, or is ended."""
        self._guarded(self._llm.sleep, level=0, mode="keep" if mode == "wait" else mode)

    def resume(self) -> None:
        """See Control."""
        self._guarded(self._llm.wake_up, tags=["scheduling"])

    def rpc(self, method: str, args: Sequence[Any], timeout_s: float) -> list[Any]:
        """See Control."""
        answers = self._guarded(
            bounded, timeout_s + _GRACE_S, method, self._llm.collective_rpc, method, timeout=timeout_s, args=tuple(args)
        )
        return list(answers)

    def reset_caches(self, *, running: bool) -> bool:
        """See Control."""
        engine = self._llm.llm_engine
        done = self._guarded(self._llm.reset_prefix_cache, reset_running_requests=running)
        self._guarded(engine.reset_mm_cache)
        self._guarded(engine.reset_encoder_cache)
        return bool(done)

    def set_version(self, version: str) -> None:
        """See Control. vLLM before 0.25 stamps nothing."""
        update = getattr(self._llm, "update_weight_version", None)
        if update is not None:
            self._guarded(update, version)

    def sleep(self, level: int, timeout_s: float) -> None:
        """See Control."""
        self._guarded(self._llm.sleep, level=level)

    def wake(self, tag: Literal["weights", "kv_cache"], timeout_s: float) -> None:
        """See Control."""
        self._guarded(self._llm.wake_up, tags=[tag])

    def close(self) -> None:
        """See Control."""

    def _guarded(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own exceptions, as PeerLost: it says that its engine process is gone, or could not do what it was told."""
        try:
            return call(*args, **kwargs)
        except WeightliftError:
            raise
        except Exception as error:
            raise PeerLost(f"vLLM raised {type(error).__name__}: {error}", peer="vllm", remedy="read vLLM's log.") from error


class HttpControl:
    """A server started by `vllm serve` with VLLM_SERVER_DEV_MODE=1 and the worker extension.

    Args:
        url: "http://127.0.0.1:8000". socket: path of the server's Unix socket, if it has one (`--uds`).
        timeout_s: of every call that has no time of its own.
    """

    def __init__(self, url: str, *, socket: pathlib.Path | None = None, timeout_s: float = 60.0) -> None:
        import httpx

        check_seconds("timeout_s", timeout_s)
        self._timeout_s = timeout_s
        self._errors = httpx.HTTPError
        transport = None if socket is None else httpx.HTTPTransport(uds=str(socket))
        self._client = httpx.Client(base_url=url.rstrip("/"), timeout=timeout_s, trust_env=False, transport=transport)

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """See Control."""
        clear = "false" if mode == "keep" else "true"
        self._post("/pause", timeout_s, params={"mode": mode, "clear_cache": clear})

    def resume(self) -> None:
        """See Control."""
        self._post("/resume", self._timeout_s)

    def rpc(self, method: str, args: Sequence[Any], timeout_s: float) -> list[Any]:
        """See Control."""
        body = {"method": method, "args": list(args), "timeout": timeout_s}
        return list(self._post("/collective_rpc", timeout_s + _GRACE_S, json=body).get("results") or [])

    def reset_caches(self, *, running: bool) -> bool:
        """See Control."""
        done = self._post("/reset_prefix_cache", self._timeout_s, params={"reset_running_requests": str(running).lower()})
        self._post("/reset_mm_cache", self._timeout_s)
        self._post("/reset_encoder_cache", self._timeout_s)
        return bool(done.get("success"))

    def set_version(self, version: str) -> None:
        """See Control."""
        self._post("/update_weight_version", self._timeout_s, json={"new_version": version})

    def sleep(self, level: int, timeout_s: float) -> None:
        """See Control."""
        self._post("/sleep", timeout_s, params={"level": str(level)})

    def wake(self, tag: Literal["weights", "kv_cache"], timeout_s: float) -> None:
        """See Control."""
        self._post("/wake_up", timeout_s, params={"tags": tag})

    def close(self) -> None:
        """See Control."""
        self._client.close()

    def _post(self, path: str, timeout_s: float, **what: Any) -> dict[str, Any]:
        try:
            response = self._client.post(path, timeout=timeout_s, **what)
        except self._errors as error:
            raise PeerLost(
                f"POST {path} failed: {type(error).__name__}: {error}", peer="vllm", remedy="read vLLM's log."
            ) from error
        if response.status_code >= 400:
            hint = "start the server with VLLM_SERVER_DEV_MODE=1." if response.status_code == 404 else "read vLLM's log."
            raise RemoteProtocolError(
                f"POST {path} was answered with {response.status_code}: {response.text[:300]}", peer="vllm", remedy=hint
            )
        if not response.content:
            return {}
        data = response.json()
        return data if isinstance(data, dict) else {}


class VLLMMemory:
    """vLLM's sleep levels and tags, as handoff.EngineMemory: for a `handoff.Sleeper`.

    ConfigError on a platform where vLLM ignores its sleep mode (the CPU): it would say yes and keep everything.
    """

    def __init__(self, engine: VLLMEngine, control: Control, *, timeout_s: float = 60.0) -> None:
        device = engine.device()
        if device == "cpu":
            raise ConfigError("the engine must run on a device that vLLM can put to sleep, got cpu: vLLM ignores sleep mode there")
        self._engine = engine
        self._control = control
        self._timeout_s = timeout_s

    def release_kv_cache(self) -> None:
        """vLLM gives the KV cache back together with the weights, in one call: see the next two."""

    def allocate_kv_cache(self) -> None:
        """See EngineMemory."""
        self._control.wake("kv_cache", self._timeout_s)

    def offload_weights(self) -> None:
        """See EngineMemory."""
        self._control.sleep(int(SleepLevel.OFFLOAD), self._timeout_s)

    def discard_weights(self) -> None:
        """See EngineMemory."""
        self._engine.discarded()
        self._control.sleep(int(SleepLevel.DISCARD), self._timeout_s)

    def allocate_weights(self) -> None:
        """See EngineMemory."""
        self._control.wake("weights", self._timeout_s)
