"""The models that benchmarks move: shapes only, filled with cheap distinct values.

Owns: the shapes. qwen3-0.6b: Qwen3-0.6B as its checkpoint names it, tied head left out. moe-20k: many small experts. one-huge: one
tensor far larger than any bucket, and 50 small ones. empty: one element, to time a round without bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch

__all__ = ["WORKLOADS", "Workload", "make_module", "make_tensors"]

Workload = Literal["qwen3-0.6b", "moe-20k", "one-huge", "empty"]
WORKLOADS: tuple[Workload, ...] = ("qwen3-0.6b", "moe-20k", "one-huge", "empty")


def make_tensors(workload: Workload, *, fill: bool) -> dict[str, torch.Tensor]:
    """name -> bf16 tensor on the CPU. fill: values that differ between tensors and between neighbours; else zeros, touched."""
    tensors = {}
    for position, (name, shape) in enumerate(_SHAPES[workload]()):
        tensor = torch.zeros(*shape, dtype=torch.bfloat16)
        if fill:
            flat = tensor.view(torch.int16).view(-1)
            flat.copy_(torch.arange(flat.numel()) % 16381 + position % 7)
        tensors[name] = tensor
    return tensors


def make_module(workload: Workload, *, seed: int) -> torch.nn.Module:
    """The same shapes as a tree of modules with bf16 parameters, whose `model.layers.<n>` are what trainers wrap; random values."""
    root = torch.nn.Module()
    generator = torch.Generator().manual_seed(seed)
    for name, shape in _SHAPES[workload]():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        values = torch.empty(*shape, dtype=torch.bfloat16)
        values.view(torch.int16).random_(0, 16000, generator=generator)
        module.register_parameter(leaf, torch.nn.Parameter(values))
    return root


def _qwen3() -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, heads, kv_heads, head = 1024, 3072, 16, 8, 128
    yield "model.embed_tokens.weight", (151936, hidden)
    for layer in range(28):
        at = f"model.layers.{layer}"
        yield f"{at}.self_attn.q_proj.weight", (heads * head, hidden)
        yield f"{at}.self_attn.k_proj.weight", (kv_heads * head, hidden)
        yield f"{at}.self_attn.v_proj.weight", (kv_heads * head, hidden)
        yield f"{at}.self_attn.o_proj.weight", (hidden, heads * head)
        yield f"{at}.self_attn.q_norm.weight", (head,)
        yield f"{at}.self_attn.k_norm.weight", (head,)
        yield f"{at}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{at}.mlp.up_proj.weight", (inner, hidden)
        yield f"{at}.mlp.down_proj.weight", (hidden, inner)
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)


def _moe() -> Iterator[tuple[str, tuple[int, ...]]]:
    for layer in range(25):
        for expert in range(266):
            for name, shape in (("gate_proj", (96, 263)), ("up_proj", (96, 263)), ("down_proj", (263, 96))):
                yield f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight", shape
        yield f"model.layers.{layer}.input_layernorm.weight", (1024,)
        yield f"model.layers.{layer}.mlp.gate.weight", (266, 1024)


def _one_huge() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "huge", (187500, 4000)
    for i in range(50):
        yield f"small.{i}", (64, 64)


def _empty() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "one", (1,)


_SHAPES: dict[Workload, Callable[[], Iterator[tuple[str, tuple[int, ...]]]]] = {
    "qwen3-0.6b": _qwen3,
    "moe-20k": _moe,
    "one-huge": _one_huge,
    "empty": _empty,
}
