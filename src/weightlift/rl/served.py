"""`vllm serve` as the loop's engine: samples through the OpenAI client, syncs through weightlift's control of the server.

Owns: the server process of a run, requests and answers over HTTP. Must not know: tasks, rewards, how weights travel.
"""

from __future__ import annotations

import concurrent.futures
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any, Final

from weightlift.errors import OutOfOrder, PeerLost, RemoteProtocolError
from weightlift.handoff import SleepLevel
from weightlift.integrations.background import in_background
from weightlift.integrations.vllm_control import HttpControl, VLLMEngine
from weightlift.integrations.vllm_guard import HEADER
from weightlift.integrations.vllm_server import CPU_ENVIRONMENT, ServerProcess
from weightlift.rl.config import TrainConfig
from weightlift.samples import Sample, SamplingParams

__all__ = ["ServedEngine"]

_MODEL: Final = "policy"
_TOKENS: Final = {"return_token_ids": True, "return_tokens_as_token_ids": True, "detokenize": False}
"""Token ids in and out: the server needs no tokenizer, and no text is taken apart differently than it was put together."""


class ServedEngine:
    """One server on this host; see rl/engine.Engine.

    Args:
        folder: as of vllm_model.write_shell. options: of vllm.LLM; here they become the command line. eos_ids: end a completion.
        directory: gets the log.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        weights_address: str,
        directory: pathlib.Path,
        folder: pathlib.Path,
        options: dict[str, Any],
        eos_ids: Sequence[int],
        name: str = "rollout-0",
    ) -> None:
        self._timeouts = config.timeouts
        self._address = weights_address
        self._eos_ids = list(eos_ids)
        # A socket of its own in a private directory: no port to be guessed, taken or asked by others. Its path must stay short.
        self._directory = tempfile.TemporaryDirectory(prefix="wl-serve-")
        socket = pathlib.Path(self._directory.name) / "s"
        arguments = [*_flags(options), "--served-model-name", _MODEL]
        self._server = ServerProcess(
            str(folder),
            socket=socket,
            log_path=directory / f"{name}.log",
            arguments=arguments,
            environment={**CPU_ENVIRONMENT, "OMP_NUM_THREADS": str(config.threads)},
        )
        self._control = HttpControl(self._server.url, socket=socket)
        self._engine = VLLMEngine(self._control, replica=name)
        self._tickets: dict[int, concurrent.futures.Future[int]] = {}
        self._client: Any = None

    def wait_ready(self) -> None:
        """Wait for the server, then have its workers subscribe."""
        import httpx
        import openai

        self._server.wait_ready(self._timeouts.start_s)
        transport = httpx.HTTPTransport(uds=str(self._server.socket))
        self._client = openai.OpenAI(
            base_url=f"{self._server.url}/v1",
            api_key="none",
            max_retries=0,
            timeout=self._timeouts.generate_s,
            http_client=httpx.Client(transport=transport, trust_env=False),
        )
        self._engine.connect(self._address, timeout_s=self._timeouts.sync_s)

    def begin_sync(self, version: int) -> int:
        """See Engine: the control call waits for the round in the background."""
        self._server.check()
        self._tickets[version] = in_background(self._engine.update, self._timeouts.sync_s)
        return version

    def finish_sync(self, ticket: int) -> int:
        """See Engine."""
        return self._tickets.pop(ticket).result(2 * self._timeouts.sync_s)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[list[Sample]]:
        """One request for all prompts."""
        version = self._engine.ensure_serving()
        answer = self._complete(
            prompts,
            n=sampling.samples,
            temperature=0.0 if sampling.greedy else sampling.temperature,
            max_tokens=sampling.max_new_tokens,
            seed=None if sampling.greedy else sampling.seed,
            logprobs=0,
            extra_body=_TOKENS | {"stop_token_ids": self._eos_ids},
        )
        if len(answer.choices) != len(prompts) * sampling.samples:
            raise RemoteProtocolError(f"{len(prompts) * sampling.samples} samples were asked for, {len(answer.choices)} came")
        samples = [
            Sample(
                prompt_id=choice.index // sampling.samples,
                version=version,
                tokens=list(choice.token_ids),
                logprobs=list(choice.logprobs.token_logprobs),
                finished=choice.finish_reason == "stop",
            )
            for choice in sorted(answer.choices, key=lambda choice: choice.index)
        ]
        return [samples[start : start + sampling.samples] for start in range(0, len(samples), sampling.samples)]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See Engine."""
        self._engine.ensure_serving()
        answer = self._complete(
            sequences,
            max_tokens=1,
            temperature=1.0,
            extra_body=_TOKENS | {"prompt_logprobs": 0},
        )
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        return [
            [step[str(token)]["logprob"] for step, token in zip(choice.prompt_logprobs[1:], tokens[1:], strict=True)]
            for choice, tokens in zip(choices, sequences, strict=True)
        ]

    def _complete(self, prompts: Sequence[Sequence[int]], **options: Any) -> Any:
        """The server's answer; RemoteProtocolError if its tokens are not all of the version that is served."""
        import openai

        self._server.check()
        version = self._engine.ensure_serving()
        try:
            raw = self._client.completions.with_raw_response.create(model=_MODEL, prompt=[list(p) for p in prompts], **options)
        except openai.OpenAIError as error:
            self._server.check()
            raise PeerLost(f"vllm serve did not answer: {error}", peer="vllm", remedy="read its log.") from error
        if raw.headers.get(HEADER) != str(version):
            raise RemoteProtocolError(f"the server answered with version {raw.headers.get(HEADER)}, expected {version}")
        return raw.parse()

    def save(self, directory: pathlib.Path) -> None:
        """Not with vLLM."""
        raise OutOfOrder("vLLM holds repacked weights: there are no tensors to compare with the trainer's")

    def sleep(self, level: SleepLevel) -> None:
        """Not with this engine."""
        raise OutOfOrder("this engine does not share its devices: it has nothing to give away")

    def wake_weights(self) -> None:
        """Never asleep."""

    def wake_kv_cache(self) -> None:
        """Never asleep."""

    def close(self) -> None:
        """End the server and all that it started."""
        if self._client is not None:
            self._client.close()
        self._control.close()
        self._server.close(self._timeouts.stop_s)
        self._directory.cleanup()


def _flags(options: dict[str, Any]) -> list[str]:
    """vllm.LLM's keyword arguments as the command line has them."""
    flags = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        flags += [flag] if value is True else [flag, str(value)]
    return flags
