"""The rollout process: Hugging Face `generate` behind a sample plane, its weights kept fresh by a Subscriber.

    python -m weightlift.rl.rollout < settings.json

Owns: this process from its first line to its exit code. Must not know: tasks, rewards, the trainer's state. Started by
rl/processes.py.

One thread does everything, in turn: receive a request, answer it. A sync and a generation can therefore never overlap,
and the version stamped on a sample is the version that made all of its tokens. Ends: ShutdownRequest (exit code 0); an
error outside of a request (code 1, the reason in the log); the trainer is gone, however it went (code 3, within about
half a second: a second thread watches).
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec
import torch

from weightlift import Subscriber
from weightlift.errors import OutOfOrder
from weightlift.handoff import SimulatedDevice, Sleeper
from weightlift.loaders import HuggingFaceLoader
from weightlift.loaders.base import Loader
from weightlift.rl.booked import BookedMemory
from weightlift.rl.config import TinyModelConfig
from weightlift.rl.models import TextModel, build_tiny, load_folder, pad_left, sequence_logprobs
from weightlift.samples import (
    FailureReply,
    FromEngine,
    GenerateReply,
    GenerateRequest,
    MemoryReply,
    MemoryRequest,
    Sample,
    SampleEndpoint,
    SaveReply,
    SaveRequest,
    ScoreReply,
    ScoreRequest,
    ShutdownRequest,
    SyncReply,
    SyncRequest,
    remove_address,
)
from weightlift.verify.snapshot import save_tensors

__all__ = ["EXIT_ORPHANED", "Colocated", "Parts", "RolloutSettings", "Serving", "main", "serve", "watch_parent"]

EXIT_ORPHANED: Final = 3
_WATCH_S: Final = 0.25
_IDLE_S: Final = 1.0


class Colocated(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine shares devices with a trainer. device: file of the simulated device, or None on a real one. kv_bytes: what it
    books for its KV cache there (the cache of `generate` itself lives only as long as a request)."""

    device: str | None
    kv_bytes: int


class RolloutSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the process is told, as one JSON object on its standard input.

    model: folder of a Hugging Face causal LM, or None for the embedded model. seed: of the embedded model's first weights,
    which are never served: it differs from the trainer's on purpose, so that version 0 has to come through a sync.
    """

    name: str
    trainer_pid: int
    weights_address: str
    samples_address: str
    model: str | None
    tiny: TinyModelConfig
    seed: int
    threads: int
    colocated: Colocated | None = None


def main() -> int:
    """Run until told to end; returns the exit code."""
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=RolloutSettings)
    # First: building a model imports transformers, which takes seconds, and an orphan must be able to end during them.
    watch_parent(settings.trainer_pid, lambda: remove_address(settings.samples_address))
    torch.set_num_threads(settings.threads)
    folder = settings.model
    text_model = build_tiny(settings.tiny, seed=settings.seed) if folder is None else load_folder(pathlib.Path(folder))
    text_model.model.eval().requires_grad_(False)
    memory = _memory(settings, text_model)
    sleeper = None if memory is None else Sleeper(memory)
    loader: Loader = HuggingFaceLoader(text_model.model)
    with (
        SampleEndpoint(address=settings.samples_address, name=settings.name) as endpoint,
        Subscriber(
            loader=loader if sleeper is None else sleeper.loader(loader), address=settings.weights_address, name=settings.name
        ) as subscriber,
    ):
        engine = Parts(subscriber, text_model, memory, None if sleeper is None else sleeper.attach(subscriber))
        serve(endpoint, engine)
    return 0


def _memory(settings: RolloutSettings, text_model: TextModel) -> BookedMemory | None:
    if settings.colocated is None:
        return None
    path = settings.colocated.device
    device = None if path is None else SimulatedDevice(pathlib.Path(path), settings.name)
    return BookedMemory(text_model.model, settings.colocated.kv_bytes, device)


class Serving(Protocol):
    """What answers the requests. Every method raises what the trainer is to hear."""

    @property
    def version(self) -> int | None:
        """The version that is served; None for none."""

    def generate(self, request: GenerateRequest) -> FromEngine: ...
    def score(self, request: ScoreRequest) -> FromEngine: ...
    def sync(self, request: SyncRequest) -> FromEngine: ...
    def save(self, request: SaveRequest) -> FromEngine: ...
    def move_memory(self, request: MemoryRequest) -> FromEngine: ...


def serve(endpoint: SampleEndpoint, engine: Serving) -> None:
    """Answer requests until ShutdownRequest. A request that raises is answered with its error; the process lives on."""
    endpoint.hello()
    while True:
        request = endpoint.receive(timeout_s=_IDLE_S)
        if request is None:
            continue
        if isinstance(request, ShutdownRequest):
            return
        try:
            reply = _answer(request, engine)
        except Exception as error:  # whatever it is, the trainer waits for an answer and gets the reason
            reply = FailureReply.of(error, id=request.id, version=engine.version)
        endpoint.reply(reply)


def _answer(request: GenerateRequest | ScoreRequest | SyncRequest | SaveRequest | MemoryRequest, engine: Serving) -> FromEngine:
    match request:
        case GenerateRequest():
            return engine.generate(request)
        case ScoreRequest():
            return engine.score(request)
        case SyncRequest():
            return engine.sync(request)
        case SaveRequest():
            return engine.save(request)
        case MemoryRequest():
            return engine.move_memory(request)


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """What the process serves with. memory, sleeper: where it shares devices with a trainer."""

    subscriber: Subscriber
    text_model: TextModel
    memory: BookedMemory | None = None
    sleeper: Sleeper | None = None

    @property
    def version(self) -> int | None:
        """See Serving."""
        return self.subscriber.version

    def ensure_ready(self) -> int:
        """The version to generate with; raises where nothing may be generated."""
        return self.subscriber.ensure_serving() if self.sleeper is None else self.sleeper.ensure_ready()

    def generate(self, request: GenerateRequest) -> FromEngine:
        """Complete the prompts. The version is read before the first token: torn or missing weights raise and produce
        nothing."""
        start = time.perf_counter()
        version = self.ensure_ready()
        samples = complete(request, version, self.text_model)
        return GenerateReply(id=request.id, samples=samples, seconds=time.perf_counter() - start)

    def score(self, request: ScoreRequest) -> FromEngine:
        """See Serving."""
        version = self.ensure_ready()
        return ScoreReply(id=request.id, version=version, logprobs=sequence_logprobs(self.text_model.model, request.sequences))

    def sync(self, request: SyncRequest) -> FromEngine:
        """Take part in the round."""
        start = time.perf_counter()
        report = self.subscriber.pull(timeout_s=request.timeout_s)
        return SyncReply(id=request.id, version=report.version, seconds=time.perf_counter() - start)

    def save(self, request: SaveRequest) -> FromEngine:
        """Write the file."""
        save_tensors(pathlib.Path(request.path), self.text_model.model)
        return SaveReply(id=request.id, version=-1 if self.version is None else self.version)

    def move_memory(self, request: MemoryRequest) -> FromEngine:
        """Sleep, or wake a part."""
        if self.sleeper is None or self.memory is None:
            raise OutOfOrder("this engine does not share its devices: it has nothing to give away")
        match request.action:
            case "sleep":
                self.sleeper.sleep(request.level)
            case "wake_weights":
                self.sleeper.wake_weights()
            case "wake_kv_cache":
                self.sleeper.wake_kv_cache()
        return MemoryReply(
            id=request.id,
            version=-1 if self.version is None else self.version,
            weight_bytes=self.memory.weight_bytes(),
            kv_bytes=self.memory.kv_resident,
        )


def watch_parent(pid: int, clean_up: Callable[[], Any]) -> None:
    """End this process when its parent is no longer `pid`: a trainer that was killed cannot tell anybody to stop.

    A thread, because the main thread may be deep inside `generate`; `os._exit`, because nothing that is left is worth
    waiting for.
    """

    def watch() -> None:
        while os.getppid() == pid:
            time.sleep(_WATCH_S)
        clean_up()
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def complete(request: GenerateRequest, version: int, text_model: TextModel) -> list[Sample]:
    """`generate` for every prompt times `samples`, in the order of the request, each stamped with `version`."""
    sampling = request.sampling
    owners = [prompt for prompt in request.prompts for _ in range(sampling.samples)]
    prompts = pad_left([prompt.tokens for prompt in owners], text_model.pad_id)
    torch.manual_seed(sampling.seed)
    with torch.inference_mode():
        # mypy: transformers is untyped, and Module.__getattr__ gives a union.
        output = text_model.model.generate(  # type: ignore[operator]
            input_ids=prompts.tokens,
            attention_mask=prompts.mask,
            generation_config=_generation_config(request, text_model),
        )
        tokens = output.sequences[:, prompts.tokens.shape[1] :]
        # From the raw logits and the temperature alone: the full distribution that was sampled from, float32.
        logits = torch.stack(output.logits, dim=1).float() / sampling.temperature
        logprobs = torch.log_softmax(logits, dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    samples = []
    for prompt, row, row_logprobs in zip(owners, tokens.tolist(), logprobs.tolist(), strict=True):
        length, finished = _length(row, text_model.eos_ids)
        samples.append(
            Sample(
                prompt_id=prompt.id,
                version=version,
                tokens=row[:length],
                logprobs=row_logprobs[:length],
                finished=finished,
            )
        )
    return samples


def _length(tokens: list[int], eos_ids: tuple[int, ...]) -> tuple[int, bool]:
    """Tokens up to and including the first end-of-sequence token, and whether there is one."""
    for index, token in enumerate(tokens):
        if token in eos_ids:
            return index + 1, True
    return len(tokens), False


def _generation_config(request: GenerateRequest, text_model: TextModel) -> Any:
    """A whole configuration, not changes to the folder's own: its top-k or penalties would make the log-probabilities
    untrue."""
    from transformers import GenerationConfig

    sampling = request.sampling
    chosen: dict[str, Any] = (
        {"do_sample": False}
        if sampling.greedy
        else {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
    )
    return GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=sampling.max_new_tokens,
        pad_token_id=text_model.pad_id,
        eos_token_id=list(text_model.eos_ids),
        return_dict_in_generate=True,
        output_logits=True,
        **chosen,
    )


if __name__ == "__main__":
    sys.exit(main())
