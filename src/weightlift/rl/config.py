"""Settings of a training run: frozen, checked when made, one object for everything.

Owns: the dataclasses, their checks, their way to JSON. Must not know: torch, processes. `weightlift train` builds a
`TrainConfig` from the command line; the run directory keeps it as `config.json`.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import msgspec

from weightlift.config import check_int, check_seconds
from weightlift.errors import ConfigError

__all__ = [
    "GrpoConfig",
    "ProblemsConfig",
    "SamplingConfig",
    "EngineConfig",
    "TimeoutConfig",
    "TinyModelConfig",
    "TrainConfig",
    "TrainerKind",
    "WarmStartConfig",
    "check_number",
]

EngineKind: TypeAlias = Literal["huggingface", "vllm", "vllm-serve"]
TrainerKind: TypeAlias = Literal["single", "ddp", "fsdp1", "fsdp2"]
_T = TypeVar("_T")


def check_number(name: str, value: object, *, above: float | None = None, at_least: float | None = None) -> None:
    """Raise ConfigError unless value is a finite number in the range."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf")
    if above is not None:
        if not ok or not value > above:  # type: ignore[operator]
            raise ConfigError(f"{name} must be a finite number above {above:g}, got {value!r}")
    elif not ok or (at_least is not None and value < at_least):  # type: ignore[operator]
        raise ConfigError(f"{name} must be a finite number of at least {at_least:g}, got {value!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProblemsConfig:
    """Which problems of the data set, and how they are asked."""

    options: dict[str, int] | None = None
    """The data set's own options; None takes a preset (rl/tasks.py), or the data set's defaults."""
    pool: int = 12_000
    """Problems drawn; duplicates among them are dropped."""
    held_out: int | None = None
    """Problems kept from training, for the evaluation before and after; None takes 256, or 32 with --model."""
    style: Literal["auto", "compact", "question"] = "auto"
    """compact: "word=" or "3-7="; question: in words. auto takes compact, or question with --model."""

    def __post_init__(self) -> None:
        check_int("problems.pool", self.pool, at_least=2)
        if self.held_out is not None:
            check_int("problems.held_out", self.held_out, at_least=1)
        if self.style not in ("auto", "compact", "question"):
            raise ConfigError(f"problems.style must be auto, compact or question, got {self.style!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TinyModelConfig:
    """The embedded model: a Qwen3 decoder with a character tokenizer, tied embeddings, seeded random weights,
    float32."""

    hidden_size: int = 128
    """Width; a multiple of twice the heads."""
    layers: int = 2
    """Decoder layers."""
    heads: int = 4
    """Attention heads."""
    max_tokens: int = 512
    """Longest sequence in tokens."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "layers", "heads", "max_tokens"):
            check_int(f"tiny.{name}", getattr(self, name), at_least=1)
        # Rotary embeddings turn pairs, so that the width of a head is even.
        if self.hidden_size % (2 * self.heads):
            raise ConfigError(f"tiny.hidden_size must be a multiple of 2 * heads = {2 * self.heads}, got {self.hidden_size}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartConfig:
    """Supervised steps before the first sync, so that reinforcement learning finds some right answers to reinforce."""

    steps: int | None = None
    """Optimiser steps at most; None takes 300, or 0 with --model."""
    until_loss: float = 0.4
    """Ends early when the mean loss of ten steps falls below this, in nats a token: weak on purpose, a third of the answers right."""
    batch_size: int = 64
    """Problems a step."""
    learning_rate: float = 2e-3
    """Of AdamW, after 20 steps up."""

    def __post_init__(self) -> None:
        if self.steps is not None:
            check_int("warm_start.steps", self.steps, at_least=0)
        check_int("warm_start.batch_size", self.batch_size, at_least=1)
        check_number("warm_start.until_loss", self.until_loss, at_least=0.0)
        check_number("warm_start.learning_rate", self.learning_rate, above=0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How the rollout engine samples."""

    prompts: int | None = None
    """Different prompts a step; None takes 64, or 4 with --model."""
    group_size: int = 8
    """Completions a prompt: they are each other's baseline."""
    max_new_tokens: int | None = None
    """Longest completion; None takes 8, or 64 with --model."""
    temperature: float = 1.0
    """Divides the logits, in the engine and in the loss alike."""

    def __post_init__(self) -> None:
        if self.prompts is not None:
            check_int("sampling.prompts", self.prompts, at_least=1)
        # A group of one is its own mean: every advantage would be zero.
        check_int("sampling.group_size", self.group_size, at_least=2)
        if self.max_new_tokens is not None:
            check_int("sampling.max_new_tokens", self.max_new_tokens, at_least=1)
        check_number("sampling.temperature", self.temperature, above=0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GrpoConfig:
    """The update. The arithmetic is in rl/grpo.py."""

    learning_rate: float | None = None
    """Peak, after `lr_warmup_steps`; None takes 3e-4, or 1e-6 with --model."""
    lr_warmup_steps: int = 10
    """Steps over which the learning rate rises."""
    minibatches: int = 2
    """Optimiser steps a sync; each sees its share of the prompts."""
    clip_low: float = 0.2
    """The ratio is not rewarded below 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is not rewarded above 1 + clip_high."""
    kl_coefficient: float = 0.0
    """Weight of the KL term to the weights at version 0; above 0 keeps a second copy of the model."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""

    def __post_init__(self) -> None:
        if self.learning_rate is not None:
            check_number("grpo.learning_rate", self.learning_rate, above=0.0)
        check_int("grpo.lr_warmup_steps", self.lr_warmup_steps, at_least=0)
        check_int("grpo.minibatches", self.minibatches, at_least=1)
        check_number("grpo.clip_low", self.clip_low, above=0.0)
        check_number("grpo.clip_high", self.clip_high, above=0.0)
        if self.clip_low >= 1.0:
            raise ConfigError(f"grpo.clip_low must be below 1, got {self.clip_low!r}")
        check_number("grpo.kl_coefficient", self.kl_coefficient, at_least=0.0)
        check_number("grpo.max_grad_norm", self.max_grad_norm, above=0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the rollout engine computes; for vLLM."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of vLLM's weights; the trainer keeps its own. The huggingface engine computes in float32."""
    tensor_parallel: int = 1
    """Worker processes that share the model."""
    max_sequences: int = 256
    """At the same time."""
    tolerance: float | None = None
    """After every sync the engine is asked how likely some fixed texts are, and must agree with the trainer to this many nats a token;
    None takes 0.5 for bfloat16 and 0.01 for float32."""
    check_texts: int = 4
    """How many texts; 0 for no check."""

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float32"):
            raise ConfigError(f"engine_options.dtype must be bfloat16 or float32, got {self.dtype!r}")
        check_int("engine_options.tensor_parallel", self.tensor_parallel, at_least=1)
        check_int("engine_options.max_sequences", self.max_sequences, at_least=1)
        check_int("engine_options.check_texts", self.check_texts, at_least=0)
        if self.tolerance is not None:
            check_number("engine_options.tolerance", self.tolerance, above=0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutConfig:
    """How long the trainer waits for the rollout process, in seconds."""

    start_s: float = 300.0
    """Until the engine has imported its libraries, built its model and said hello; vLLM takes 20 to 90 s on a CPU."""
    generate_s: float = 300.0
    """For one batch of samples."""
    sync_s: float = 60.0
    """For one weight sync."""
    stop_s: float = 5.0
    """For the rollout process to end by itself, before it is killed."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_seconds(f"timeouts.{field.name}", getattr(self, field.name))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One run of `weightlift train`."""

    out: pathlib.Path | None = None
    """Directory for the run's files; default runs/<time>."""
    seed: int = 0
    """Of everything random."""
    steps: int = 200
    """GRPO steps; every one ends in a weight sync."""
    sync: bool = True
    """--no-sync publishes the first weights only: the rollout process samples from them for the whole run."""
    engine: EngineKind = "huggingface"
    """What samples: `generate` in a process of its own, vLLM in a process of its own (`LLM`), or `vllm serve`, asked over HTTP."""
    trainer: TrainerKind = "single"
    """How the model is trained: in one process, or by several with ddp, fsdp1 or fsdp2."""
    trainer_processes: int = 1
    """Trainer ranks on this host; more than 1 needs ddp, fsdp1 or fsdp2."""
    colocate: bool = False
    """Trainer and engine take turns: the engine sleeps while the trainer trains, and parameters and optimizer state are off the
    device while the engine generates. Without a GPU the device is simulated, with a budget in which the order matters."""
    sleep_level: Literal[1, 2] = 2
    """With --colocate: 1 offloads the engine's weights while it sleeps, 2 discards them (every step syncs anyway)."""
    checkpoint_every: int = 0
    """Steps between checkpoints (torch.distributed.checkpoint) in OUT/checkpoints; 0 for none."""
    resume: pathlib.Path | None = None
    """OUT of an earlier run: goes on after its last checkpoint with that run's settings; only --out and --steps are taken from here."""
    model: pathlib.Path | None = None
    """Folder of a Hugging Face causal LM to train instead of the embedded model."""
    threads: int | None = None
    """torch threads of the engine, and of all trainer ranks together; the two take turns. None takes 2, but leaves a core to vLLM: its
    worker spins for a second after every batch, and two threads on two cores that wait for each other are slower than one."""
    transport: str | None = None
    """How the weights travel; as of Publisher."""
    verify: Literal["off", "sample", "full"] = "sample"
    """How much of what the engine holds is compared with the trainer's weights before a version counts."""
    snapshot: bool = True
    """Keep digests of every version and, at the end, the tensors of both sides: `weightlift verify --out RUN` compares them."""
    task: str | None = None
    """Data set of reasoning-gym; None takes spell_backward, or chain_sum with --model."""
    problems: ProblemsConfig = dataclasses.field(default_factory=ProblemsConfig)
    tiny: TinyModelConfig = dataclasses.field(default_factory=TinyModelConfig)
    warm_start: WarmStartConfig = dataclasses.field(default_factory=WarmStartConfig)
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    grpo: GrpoConfig = dataclasses.field(default_factory=GrpoConfig)
    engine_options: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    timeouts: TimeoutConfig = dataclasses.field(default_factory=TimeoutConfig)

    def __post_init__(self) -> None:
        check_int("seed", self.seed, at_least=0)
        check_int("steps", self.steps, at_least=1)
        if self.threads is not None:
            check_int("threads", self.threads, at_least=1)
        check_int("trainer_processes", self.trainer_processes, at_least=1)
        check_int("checkpoint_every", self.checkpoint_every, at_least=0)
        if self.trainer not in get_args(TrainerKind):
            raise ConfigError(f"trainer must be one of {', '.join(get_args(TrainerKind))}, got {self.trainer!r}")
        if self.sleep_level not in (1, 2):
            raise ConfigError(f"sleep_level must be 1 or 2, got {self.sleep_level!r}")
        if self.engine not in get_args(EngineKind):
            raise ConfigError(f"engine must be one of {', '.join(get_args(EngineKind))}, got {self.engine!r}")
        if self.engine != "huggingface" and self.colocate:
            raise ConfigError(f"engine must be huggingface with --colocate (vLLM has no sleep mode on a CPU), got {self.engine!r}")
        if self.trainer == "single" and self.trainer_processes > 1:
            raise ConfigError(f"trainer must be ddp, fsdp1 or fsdp2 for {self.trainer_processes} trainer_processes, got 'single'")
        if self.colocate and not self.sync and self.sleep_level == 2:
            raise ConfigError("sleep_level must be 1 with --colocate and --no-sync (discarded weights need a sync), got 2")
        if self.resume is not None and not (self.resume / "checkpoints").is_dir():
            raise ConfigError(f"resume must be the directory of a run with checkpoints, got {str(self.resume)!r}")
        if self.model is not None and not self.model.is_dir():
            raise ConfigError(f"model must be a folder with a Hugging Face causal LM, got {str(self.model)!r}")
        if self.sampling.prompts is not None and self.grpo.minibatches > self.sampling.prompts:
            raise ConfigError(
                f"grpo.minibatches must be at most sampling.prompts {self.sampling.prompts}, got {self.grpo.minibatches}"
            )

    def resolved(self) -> TrainConfig:
        """The same run with every None that depends on the model replaced by its value; `out` and `model` stay."""
        tiny = self.model is None
        problems, sampling = self.problems, self.sampling
        exact = 0.5 if self.engine != "huggingface" and self.engine_options.dtype == "bfloat16" else 0.01
        style = problems.style if problems.style != "auto" else ("compact" if tiny else "question")
        return dataclasses.replace(
            self,
            threads=_or(self.threads, 2 if self.engine == "huggingface" else max(1, min(2, (os.cpu_count() or 1) - 1))),
            task=_or(self.task, "spell_backward" if tiny else "chain_sum"),
            engine_options=dataclasses.replace(self.engine_options, tolerance=_or(self.engine_options.tolerance, exact)),
            problems=dataclasses.replace(problems, style=style, held_out=_or(problems.held_out, 256 if tiny else 32)),
            warm_start=dataclasses.replace(self.warm_start, steps=_or(self.warm_start.steps, 300 if tiny else 0)),
            sampling=dataclasses.replace(
                sampling,
                prompts=_or(sampling.prompts, 64 if tiny else 4),
                max_new_tokens=_or(sampling.max_new_tokens, 8 if tiny else 64),
            ),
            grpo=dataclasses.replace(self.grpo, learning_rate=_or(self.grpo.learning_rate, 3e-4 if tiny else 1e-6)),
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TrainConfig:
        """What `to_dict` made; ConfigError for anything else."""
        try:
            return msgspec.convert(data, cls, dec_hook=lambda kind, value: kind(value))
        except (msgspec.ValidationError, TypeError) as error:
            raise ConfigError(f"config must be that of a training run, got one in which {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able data, paths as strings."""
        data = dataclasses.asdict(self)
        for name in ("out", "model", "resume"):
            data[name] = None if data[name] is None else str(data[name])
        return data


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value
