"""The engine as the loop sees it: give it prompts, get samples; tell it that weights are coming.

Owns: the `Engine` seam and `RolloutEngine`, the seam's form over a rollout process and a sample plane. Must not know:
tasks, rewards, how weights travel. Called by rl/loop.py. `vllm serve` is another class with these methods (rl/served.py).
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Final, Literal, Protocol

from weightlift.errors import RemoteProtocolError
from weightlift.handoff import SleepLevel
from weightlift.integrations.vllm_server import CPU_ENVIRONMENT
from weightlift.rl.config import TimeoutConfig, TrainConfig
from weightlift.rl.models import TextModel
from weightlift.rl.processes import ChildProcess
from weightlift.rl.rollout import Colocated, RolloutSettings
from weightlift.rl.rollout_vllm import VLLMRolloutSettings
from weightlift.rl.vllm_model import engine_options, longest_sequence, write_shell
from weightlift.samples import GenerateReply, Prompt, Sample, SamplePlane, SamplingParams, ScoreReply, SyncReply

__all__ = ["Engine", "RolloutEngine", "engine_for"]


class Engine(Protocol):
    """What the loop needs of an engine. Every method ends in bounded time, by a result or by a WeightliftError."""

    def wait_ready(self) -> None:
        """Wait until the engine has built its model."""
        ...

    def begin_sync(self, version: int) -> int:
        """Tell the engine that `version` is about to be published; returns a ticket for `finish_sync`."""
        ...

    def finish_sync(self, ticket: int) -> int:
        """Wait until the engine is through with the round; returns the version that it serves now."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[list[Sample]]:
        """Samples for each prompt, in the order of the prompts, each with the version of the weights that made it."""
        ...

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities of every sequence's tokens but the first, without temperature, under the weights that it serves."""
        ...

    def save(self, directory: pathlib.Path) -> None:
        """Write the tensors that it holds to `<name>.safetensors` in a directory."""
        ...

    def sleep(self, level: SleepLevel) -> None:
        """Give the KV cache's memory back, offload or discard the weights."""
        ...

    def wake_weights(self) -> None:
        """Memory for the weights."""
        ...

    def wake_kv_cache(self) -> None:
        """Memory for the KV cache."""
        ...

    def close(self) -> None:
        """End the engine and everything it started. Safe to call again."""
        ...


def engine_for(
    config: TrainConfig, *, weights_address: str, directory: pathlib.Path, text_model: TextModel, colocated: Colocated | None
) -> Engine:
    """The engine that a run asks for, starting."""
    if config.engine != "vllm-serve":
        return RolloutEngine(
            config, weights_address=weights_address, directory=directory, text_model=text_model, colocated=colocated
        )
    from weightlift.rl.served import ServedEngine

    return ServedEngine(
        config,
        weights_address=weights_address,
        directory=directory,
        folder=write_shell(text_model.model, directory / "engine-model", dtype=config.engine_options.dtype),
        options=engine_options(config, longest_sequence(text_model)),
        eos_ids=text_model.eos_ids,
    )


class RolloutEngine:
    """One rollout process on this host.

    Args:
        config: resolved. weights_address: `weightlift.new_address()`. directory: gets `<name>.log`. colocated: it shares the
            trainer's devices. text_model: the trainer's, for vLLM, which is told its configuration and nothing else.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        weights_address: str,
        directory: pathlib.Path,
        text_model: TextModel,
        name: str = "rollout-0",
        colocated: Colocated | None = None,
    ) -> None:
        self._name: Final = name
        self._timeouts: Final[TimeoutConfig] = config.timeouts
        self._plane = SamplePlane(max_in_flight=2, watch=self._check)
        log_path = directory / f"{name}.log"
        try:
            if config.engine == "vllm":
                self._process = self._vllm(config, weights_address, text_model, log_path)
            else:
                self._process = self._huggingface(config, weights_address, colocated, log_path)
        except BaseException:
            self._plane.close()
            raise

    def _huggingface(self, config: TrainConfig, address: str, colocated: Colocated | None, log_path: pathlib.Path) -> ChildProcess:
        settings = RolloutSettings(
            name=self._name,
            trainer_pid=os.getpid(),
            weights_address=address,
            samples_address=self._plane.address,
            model=None if config.model is None else str(config.model),
            tiny=config.tiny,
            seed=config.seed + 1,
            threads=config.threads or 1,
            colocated=colocated,
        )
        what = f"rollout process {self._name}"
        return ChildProcess(what, self._name, "weightlift.rl.rollout", settings, log_path=log_path)

    def _vllm(self, config: TrainConfig, address: str, text_model: TextModel, log_path: pathlib.Path) -> ChildProcess:
        folder = log_path.parent / "engine-model"
        settings = VLLMRolloutSettings(
            name=self._name,
            trainer_pid=os.getpid(),
            weights_address=address,
            samples_address=self._plane.address,
            folder=str(write_shell(text_model.model, folder, dtype=config.engine_options.dtype).absolute()),
            options=engine_options(config, longest_sequence(text_model)),
            eos_ids=list(text_model.eos_ids),
        )
        environment = {**CPU_ENVIRONMENT, "OMP_NUM_THREADS": str(config.threads)}
        what = f"rollout process {self._name}"
        module = "weightlift.rl.rollout_vllm"
        return ChildProcess(what, self._name, module, settings, log_path=log_path, environment=environment)

    @property
    def pid(self) -> int:
        """Process id of the rollout process."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait for the process's hello; TransferTimeout or PeerLost."""
        self._plane.wait_for_engines([self._name], timeout_s=self._timeouts.start_s)

    def begin_sync(self, version: int) -> int:
        """Send the sync request; the process then waits for the publisher."""
        return self._plane.sync(self._name, version=version, timeout_s=self._timeouts.sync_s)

    def finish_sync(self, ticket: int) -> int:
        """Collect the reply; the engine's own error where its side of the round failed."""
        reply = self._plane.collect(ticket, timeout_s=self._timeouts.sync_s)
        if not isinstance(reply, SyncReply):
            raise RemoteProtocolError(f"a sync was answered with {type(reply).__name__}", peer=self._name)
        return reply.version

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[list[Sample]]:
        """Send the prompts, wait for all samples, hand them back grouped by prompt."""
        request = [Prompt(id=index, tokens=list(tokens)) for index, tokens in enumerate(prompts)]
        ticket = self._plane.generate(self._name, request, sampling)
        reply = self._plane.collect(ticket, timeout_s=self._timeouts.generate_s)
        if not isinstance(reply, GenerateReply):
            raise RemoteProtocolError(f"a generation was answered with {type(reply).__name__}", peer=self._name)
        expected = [index for index in range(len(prompts)) for _ in range(sampling.samples)]
        if [sample.prompt_id for sample in reply.samples] != expected:
            raise RemoteProtocolError(
                f"{len(expected)} samples were asked for, and {len(reply.samples)} came, or in another order",
                peer=self._name,
            )
        width = sampling.samples
        return [reply.samples[start : start + width] for start in range(0, len(expected), width)]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See Engine."""
        reply = self._plane.collect(self._plane.score(self._name, sequences), timeout_s=self._timeouts.generate_s)
        if not isinstance(reply, ScoreReply):
            raise RemoteProtocolError(f"scoring was answered with {type(reply).__name__}", peer=self._name)
        return reply.logprobs

    def save(self, directory: pathlib.Path) -> None:
        """The process writes the file itself; returns when it is there."""
        ticket = self._plane.save(self._name, str((directory / f"{self._name}.safetensors").absolute()))
        self._plane.collect(ticket, timeout_s=self._timeouts.sync_s)

    def sleep(self, level: SleepLevel) -> None:
        """See Engine."""
        self._move("sleep", int(level))

    def wake_weights(self) -> None:
        """See Engine."""
        self._move("wake_weights")

    def wake_kv_cache(self) -> None:
        """See Engine."""
        self._move("wake_kv_cache")

    def _move(self, action: Literal["sleep", "wake_weights", "wake_kv_cache"], level: int = 0) -> None:
        ticket = self._plane.move_memory(self._name, action, level=level)
        self._plane.collect(ticket, timeout_s=self._timeouts.sync_s)

    def close(self) -> None:
        """Ask the process to end, make sure that it does, remove the plane."""
        self._plane.shutdown(self._name)
        try:
            self._process.stop(timeout_s=self._timeouts.stop_s)
        finally:
            self._plane.close()

    def _check(self) -> None:
        self._process.check()
