"""Checkpoint names and slices: what `save_pretrained` writes is the judge, for models that transformers keeps in another form."""

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import weightlift.sources as sources
from weightlift.errors import ConfigError
from weightlift.sources import HuggingFaceSource, ModuleSource, StableSource, checkpoint_source

SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 3, "num_local_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MODELS = {
    "Qwen3": SMALL | {"tie_word_embeddings": True},
    "Qwen3, untied": SMALL | {"tie_word_embeddings": False},
    "Llama": SMALL,
    "Qwen3Moe": SMALL | EXPERTS,
    "Mixtral": SMALL | EXPERTS,
    "Olmoe": SMALL | EXPERTS,
    "Qwen2Moe": SMALL | EXPERTS | {"shared_expert_intermediate_size": 8},
}


def build(kind: str) -> Any:
    """A small model of a kind, with its own random values."""
    import transformers

    family = kind.partition(",")[0]
    config = getattr(transformers, f"{family}Config")(**MODELS[kind])
    torch.manual_seed(1)
    return getattr(transformers, f"{family}ForCausalLM")(config)


@pytest.mark.parametrize("kind", MODELS)
def test_names_and_bytes_are_those_of_the_saved_checkpoint(kind: str, tmp_path: pathlib.Path) -> None:
    model = build(kind)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    source = HuggingFaceSource(model)
    entries = [entry for entry in source.manifest().entries if not entry.alias_of]
    sent = dict(zip((entry.name for entry in entries), source.tensors(), strict=True))
    assert set(sent) == set(saved)
    for entry in entries:
        assert torch.equal(sent[entry.name], saved[entry.name])
        assert tuple(sent[entry.name].shape) == entry.shape


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral"])
def test_experts_are_views_and_follow_the_training(kind: str) -> None:
    """No copies: the bytes are the parameters' own, and what an optimiser step changes is what is sent next."""
    model = build(kind)
    source = HuggingFaceSource(model)
    manifest = source.manifest()
    before = source.tensors()
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert {tensor.untyped_storage().data_ptr() for tensor in before} <= storages
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    assert source.manifest() is manifest
    assert all(new is old for new, old in zip(source.tensors(), before, strict=True))
    names = [entry.name for entry in manifest.entries]
    assert sum(".experts.0." in name for name in names) == 2 * 3
    assert not any("gate_up_proj" in name for name in names)


def test_a_replaced_parameter_is_seen() -> None:
    model = build("Qwen3Moe")
    source = HuggingFaceSource(model)
    source.manifest()
    first = source.tensors()
    experts = model.model.layers[0].mlp.experts
    experts.gate_up_proj = torch.nn.Parameter(torch.zeros_like(experts.gate_up_proj))
    source.manifest()
    changed = [new is not old for new, old in zip(source.tensors(), first, strict=True)]
    assert any(changed)
    position = [entry.name for entry in source.manifest().entries].index("model.layers.0.mlp.experts.1.gate_proj.weight")
    assert not source.tensors()[position].any()


def test_tied_names_stay_aliases() -> None:
    manifest = HuggingFaceSource(build("Qwen3")).manifest()
    assert manifest.by_name["lm_head.weight"].alias_of == "model.embed_tokens.weight"


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_a_wrapped_model_has_the_same_names() -> None:
    model = build("Qwen3Moe")
    names = [entry.name for entry in HuggingFaceSource(model).manifest().entries]
    assert [entry.name for entry in HuggingFaceSource(torch.compile(model)).manifest().entries] == names


def test_a_streaming_source_is_cut_on_the_way() -> None:
    model = build("Qwen3Moe")
    inner = ModuleSource(model)

    class Streaming:
        def manifest(self) -> Any:
            return inner.manifest()

        def stream(self) -> Iterator[torch.Tensor]:
            for tensor in inner.stream():
                yield tensor.t().contiguous().t() if tensor.ndim == 2 else tensor  # other strides, other memory

    whole = HuggingFaceSource(model)
    cut = checkpoint_source(model, Streaming())
    assert not isinstance(cut, StableSource)
    assert cut.manifest() == whole.manifest()
    for streamed, kept in zip(cut.stream(), whole.tensors(), strict=True):
        assert torch.equal(streamed, kept)


def test_what_is_no_transformers_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="transformers model"):
        HuggingFaceSource(torch.nn.Linear(2, 2))


def test_a_conversion_that_computes_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is more than a slice must not be sent as if it were one."""
    from transformers import core_model_loading

    def doubled(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor * 2 if name.endswith("norm.weight") else tensor for name, tensor in state.items()}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", doubled)
    with pytest.raises(ConfigError, match=r"computes model\.norm\.weight|computes model\.layers") as caught:
        HuggingFaceSource(build("Llama")).manifest()
    assert caught.value.tensor is not None


def test_the_names_are_public() -> None:
    assert {"HuggingFaceSource", "checkpoint_source"} <= set(sources.__all__)
