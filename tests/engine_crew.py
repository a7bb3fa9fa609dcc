"""What the engine tests run in processes of their own: a vLLM `LLM` that takes orders, and trainers that can be killed."""

import json
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weightlift.errors import WeightliftError
from weightlift.testing.processes import Worker, say

FILE = pathlib.Path(__file__)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
EXTENSION = "weightlift.integrations.vllm_extension.WeightliftExtension"
LLM_ARGUMENTS: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 16,
    "dtype": "bfloat16",
    "seed": 0,
}


def offline(model: str, **arguments: Any) -> None:
    """An LLM that reads one order a line: {"do": method of `Host`, ...}."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM

    options = LLM_ARGUMENTS | arguments
    backend = "weight_transfer_config" in options
    if not backend:
        options.setdefault("worker_extension_cls", EXTENSION)
    host = (BackendHost if backend else Host)(LLM(model=model, **options))
    say(ready=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = getattr(host, order.pop("do"))(**order)
            say(ok=True, answer=answer)
        except WeightliftError as error:
            say(ok=False, kind=type(error).__name__, message=str(error), tensor=error.tensor, peer=error.peer)
        except Exception as error:
            say(ok=False, kind=type(error).__name__, message=str(error), tensor=None, peer=None)


class Host:
    """The orders."""

    def __init__(self, llm: Any) -> None:
        from weightlift.integrations.vllm_control import OfflineControl, VLLMEngine

        self.llm = llm
        self.control = OfflineControl(llm)
        self.engine = VLLMEngine(self.control, replica="rollout-0")

    def connect(self, address: str, **settings: Any) -> None:
        self.engine.connect(address, **settings)

    def update(self, timeout_s: float = 60.0) -> dict[str, Any]:
        version = self.engine.update(timeout_s)
        return {"version": version, "load": self.engine.load}

    def state(self) -> dict[str, Any]:
        return {"state": str(self.engine.state), "version": self.engine.version}

    def workers(self) -> list[dict[str, Any]]:
        return self.control.rpc("weightlift_state", (), 30.0)

    def memory(self) -> None:
        from weightlift.integrations.vllm_control import VLLMMemory

        VLLMMemory(self.engine, self.control)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, guarded: bool = True, **sampling: Any) -> list[Any]:
        if guarded:
            self.engine.ensure_serving()
        return _outputs(self.llm, prompts, max_tokens, **sampling)

    def call(self, method: str, **keywords: Any) -> Any:
        """A method of the LLM itself."""
        return getattr(self.llm, method)(**keywords)

    def rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        return list(self.llm.collective_rpc(method, timeout=60.0, args=tuple(args)))

    def usage(self) -> dict[str, Any]:
        """Descriptors and resident bytes of every process of the engine."""
        import psutil

        children = psutil.Process().children(recursive=True)
        return {
            "pids": [child.pid for child in children],
            "names": [" ".join(child.cmdline())[:200] for child in children],
            "fds": sum(child.num_fds() for child in children),
            "rss": sum(child.memory_info().rss for child in children),
        }


def _outputs(llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int, **sampling: Any) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=sampling.pop("temperature", 0.0), logprobs=0, ignore_eos=True, **sampling
    )
    found = []
    for output in llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False):
        one = output.outputs[0]
        logprobs = [step[token].logprob for step, token in zip(one.logprobs, one.token_ids, strict=True)]
        spans = [[span.version, span.start, span.end] for span in getattr(one, "weight_versions", None) or ()]
        found.append({"tokens": list(one.token_ids), "logprobs": logprobs, "versions": spans})
    return found


class BackendHost(Host):
    """An LLM whose workers were told nothing but `weight_transfer_config`, and a trainer that knows vLLM's interface only."""

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self.model: Any = None
        self.trainer: Any = None

    def trainer_init(self, folder: str, moe: bool = True, **info: Any) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        import weightlift
        from weightlift import Deadlines
        from weightlift.integrations.vllm_trainer import WeightliftTrainerInitInfo

        self.model = (make_moe if moe else make_qwen3)(pathlib.Path(folder))
        deadlines = Deadlines(announce_s=20.0, prepare_s=20.0, transfer_s=5.0, release_s=10.0, commit_s=10.0)
        self.trainer = WeightTransferTrainerFactory.trainer_init(
            WeightliftTrainerInitInfo(rank=0, address=weightlift.new_address(), deadlines=deadlines, timeout_s=30.0, **info),
            client=_LLMClient(self.llm),
            source=_source(self.model),
        )

    def send(self, stir: float = 0.0) -> None:
        if stir:
            stirred(self.model, stir)
        self.trainer.send_weights()

    def break_source(self, at: int) -> None:
        """The trainer's next round fails at a tensor."""
        self.trainer.source.break_at = at

    def gap(self, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        outputs = _outputs(self.llm, prompts, 8)
        self.llm.reset_prefix_cache()
        return {"gap": gap(self.model, prompts, outputs), "versions": [output["versions"] for output in outputs]}


class _LLMClient:
    """vLLM's VLLMWeightSyncClient, over an LLM in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.finish_weight_update(weight_version)


def _source(model: Any) -> Any:
    """vLLM's WeightSource, over the checkpoint tensors of a transformers model."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    from weightlift.sources import HuggingFaceSource
    from weightlift.tensors import torch_dtype

    class Checkpoint(WeightSource):
        def __init__(self) -> None:
            self.inner = HuggingFaceSource(model)
            self.break_at = -1

        def _entries(self) -> Any:
            return [entry for entry in self.inner.manifest().entries if not entry.alias_of]

        def metadata(self) -> Any:
            return [ParamMeta(entry.name, torch_dtype(entry.dtype), entry.shape) for entry in self._entries()]

        def __iter__(self) -> Any:
            for number, (entry, tensor) in enumerate(zip(self._entries(), self.inner.stream(), strict=True)):
                if number == self.break_at:
                    self.break_at = -1
                    raise RuntimeError("the gather failed")
                yield entry.name, tensor

    return Checkpoint()


class Refused(Exception):
    """What a host answered instead of a result."""

    def __init__(self, reply: Mapping[str, Any]) -> None:
        super().__init__(f"{reply['kind']}: {reply['message']}")
        self.kind = str(reply["kind"])
        self.message = str(reply["message"])
        self.tensor = reply["tensor"]
        self.peer = reply["peer"]


class Engine:
    """A test's hold on an `offline` process."""

    def __init__(self, model: pathlib.Path, **arguments: Any) -> None:
        self.worker = Worker(FILE, "offline", model=str(model), **arguments)
        try:
            self.worker.hear(240.0)
        except BaseException:
            self.worker.close()
            raise

    def tell(self, do: str, **what: Any) -> None:
        self.worker.tell(json.dumps({"do": do, **what}))

    def hear(self, timeout_s: float = 90.0) -> Any:
        reply = self.worker.hear(timeout_s)
        if not reply["ok"]:
            raise Refused(reply)
        return reply["answer"]

    def ask(self, do: str, *, within_s: float = 90.0, **what: Any) -> Any:
        self.tell(do, **what)
        return self.hear(within_s)

    def close(self) -> None:
        self.worker.close()


def trainer(model: str, address: str, version: int, stall_at: int) -> None:
    """A trainer process that publishes once, and stands still for ever at a tensor: to be killed there."""
    from transformers import AutoModelForCausalLM

    from weightlift import Publisher, ShmConfig
    from weightlift.protocol.manifest import Manifest
    from weightlift.sources import ModuleSource

    inner = ModuleSource(AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16))

    class Stalling:
        def manifest(self) -> Manifest:
            return inner.manifest()

        def stream(self) -> Any:
            import time

            for number, tensor in enumerate(inner.stream()):
                if number == stall_at:
                    say(stalled=True)
                    time.sleep(600.0)
                yield tensor

    # Small slots: some are in the engine before the source stands still.
    with Publisher(Stalling(), address, shm=ShmConfig(slot_bytes=8192)) as publisher:
        publisher.wait_for_peers(1)
        say(connected=True)
        sys.stdin.readline()
        publisher.publish(version)


def make_qwen3(folder: pathlib.Path, *, seed: int = 0, tied: bool = True, hidden: int = 64, layers: int = 2) -> Any:
    """A small Qwen3 in bfloat16, saved to a folder; returns the model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=100,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.2,  # answers that depend on the weights
    )
    return _saved(Qwen3ForCausalLM, config, folder, seed)


def make_moe(folder: pathlib.Path, *, seed: int = 0) -> Any:
    """A small Qwen3-MoE: transformers keeps its experts fused, its checkpoint has one name an expert and projection."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    return _saved(Qwen3MoeForCausalLM, config, folder, seed)


def _saved(cls: Any, config: Any, folder: pathlib.Path, seed: int) -> Any:
    torch.manual_seed(seed)
    model = cls(config).to(torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


def stirred(model: Any, amount: float = 0.1) -> None:
    """Other weights, all of them."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * amount)


@torch.no_grad()
def own_logprobs(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Of the tokens after the prompt, as the trainer's model has them."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(input_ids=ids).logits.float()[0, len(prompt) - 1 : -1]
    return [float(value) for value in torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0]]


def gap(model: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Mapping[str, Any]]) -> float:
    """The largest difference between the engine's log-probabilities and the model's own."""
    return max(
        abs(a - b)
        for prompt, output in zip(prompts, outputs, strict=True)
        for a, b in zip(output["logprobs"], own_logprobs(model, prompt, output["tokens"]), strict=True)
    )
