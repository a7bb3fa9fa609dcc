"""The rollout process with vLLM: an `LLM` behind the same sample plane, its workers' weights kept fresh by weightlift.

    python -m weightlift.rl.rollout_vllm < settings.json

Owns: this process from its first line to its exit code. Must not know: tasks, rewards, the trainer's state. Started by rl/engine.py.
One thread does everything, in turn, as in rl/rollout.py. vLLM starts an engine process and worker processes of its own; the workers
subscribe to the trainer, not this process.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from weightlift.errors import OutOfOrder, RemoteProtocolError
from weightlift.integrations.vllm_control import OfflineControl, VLLMEngine
from weightlift.integrations.vllm_server import EXTENSION
from weightlift.rl.rollout import serve, watch_parent
from weightlift.samples import (
    FromEngine,
    GenerateReply,
    GenerateRequest,
    MemoryRequest,
    Sample,
    SampleEndpoint,
    SamplingParams,
    SaveRequest,
    ScoreReply,
    ScoreRequest,
    SyncReply,
    SyncRequest,
    remove_address,
)

__all__ = ["VLLMParts", "VLLMRolloutSettings", "main"]


class VLLMRolloutSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the process is told. folder: as of vllm_model.write_shell. options: of vllm.LLM. eos_ids: end a completion."""

    name: str
    trainer_pid: int
    weights_address: str
    samples_address: str
    folder: str
    options: dict[str, Any]
    eos_ids: list[int]


def main() -> int:
    """Run until told to end; returns the exit code."""
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=VLLMRolloutSettings)
    watch_parent(settings.trainer_pid, lambda: remove_address(settings.samples_address))
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM

    llm = LLM(model=settings.folder, worker_extension_cls=EXTENSION, **settings.options)
    engine = VLLMEngine(OfflineControl(llm), replica=settings.name)
    engine.connect(settings.weights_address)
    with SampleEndpoint(address=settings.samples_address, name=settings.name) as endpoint:
        serve(endpoint, VLLMParts(engine, llm, settings.eos_ids))
    engine.close()
    return 0


class VLLMParts:
    """Answers with vLLM; see rollout.Serving."""

    def __init__(self, engine: VLLMEngine, llm: Any, eos_ids: Sequence[int]) -> None:
        self._engine = engine
        self._llm = llm
        self._eos_ids = list(eos_ids)

    @property
    def version(self) -> int | None:
        """See Serving."""
        return self._engine.version

    def generate(self, request: GenerateRequest) -> FromEngine:
        """One request of vLLM for every prompt, with `samples` completions."""
        start = time.perf_counter()
        version = self._engine.ensure_serving()
        prompts = [{"prompt_token_ids": prompt.tokens} for prompt in request.prompts]
        outputs = self._llm.generate(prompts, self._params(request.sampling), use_tqdm=False)
        samples = [
            Sample(
                prompt_id=prompt.id,
                version=_version_of(one, version),
                tokens=list(one.token_ids),
                logprobs=[step[token].logprob for step, token in zip(one.logprobs, one.token_ids, strict=True)],
                finished=one.finish_reason == "stop",
            )
            for prompt, output in zip(request.prompts, outputs, strict=True)
            for one in output.outputs
        ]
        return GenerateReply(id=request.id, samples=samples, seconds=time.perf_counter() - start)

    def _params(self, sampling: SamplingParams) -> Any:
        import vllm

        return vllm.SamplingParams(
            n=sampling.samples,
            temperature=0.0 if sampling.greedy else sampling.temperature,
            max_tokens=sampling.max_new_tokens,
            seed=None if sampling.greedy else sampling.seed,
            stop_token_ids=self._eos_ids,
            logprobs=0,
            detokenize=False,
        )

    def score(self, request: ScoreRequest) -> FromEngine:
        """What vLLM says of the tokens of a prompt."""
        import vllm

        version = self._engine.ensure_serving()
        params = vllm.SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
        outputs = self._llm.generate([{"prompt_token_ids": tokens} for tokens in request.sequences], params, use_tqdm=False)
        logprobs = [
            [step[token].logprob for step, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)]
            for output, tokens in zip(outputs, request.sequences, strict=True)
        ]
        return ScoreReply(id=request.id, version=version, logprobs=logprobs)

    def sync(self, request: SyncRequest) -> FromEngine:
        """Pause, pull, reset caches, stamp, resume."""
        start = time.perf_counter()
        version = self._engine.update(request.timeout_s)
        logging.getLogger("weightlift.rl").info("version %d: %s", version, self._engine.load)
        return SyncReply(id=request.id, version=version, seconds=time.perf_counter() - start)

    def save(self, request: SaveRequest) -> FromEngine:
        """Not with vLLM."""
        raise OutOfOrder("vLLM holds repacked weights: there are no tensors to compare with the trainer's")

    def move_memory(self, request: MemoryRequest) -> FromEngine:
        """Not with this engine."""
        raise OutOfOrder("this engine does not share its devices: it has nothing to give away")


def _version_of(output: Any, version: int) -> int:
    """What vLLM itself stamped on the tokens, where it does; the requests of one call cannot be of two versions."""
    spans = getattr(output, "weight_versions", None)
    if spans and {span.version for span in spans} != {str(version)}:
        raise RemoteProtocolError(f"vLLM stamped {spans} on tokens that were asked of version {version}", version=version)
    return version


if __name__ == "__main__":
    sys.exit(main())
