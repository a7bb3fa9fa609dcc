"""HuggingFaceLoader on a real transformers model: ties, generation caches, and that a sync changes what is generated."""

import pytest
import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from weightlift.loaders import HuggingFaceLoader
from weightlift.sources import MappingSource, ModuleSource
from weightlift.testing.pair import pair

pytestmark = pytest.mark.usefixtures("nothing_left")


def model(seed: int, *, tied: bool = True) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


def generated(net: Qwen3ForCausalLM, **options: object) -> list[int]:
    prompt = torch.tensor([[3, 5, 7]])
    with torch.no_grad():
        out = net.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False, **options)
    return [int(token) for token in out[0]]


@pytest.mark.parametrize("tied", [True, False])
def test_after_a_sync_the_engine_generates_what_the_trainer_would(tied: bool) -> None:
    trainer, engine = model(0, tied=tied), model(1, tied=tied)
    assert generated(trainer) != generated(engine)
    with pair(ModuleSource(trainer), HuggingFaceLoader(engine)) as ends:
        ends.sync(1).raise_any()
    assert generated(trainer) == generated(engine)
    assert (engine.lm_head.weight is engine.model.embed_tokens.weight) == tied


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_cache_that_generate_keeps_on_the_model_does_not_outlive_a_sync() -> None:
    trainer, engine = model(0), model(1)
    engine._cache = DynamicCache()
    with pair(ModuleSource(trainer), HuggingFaceLoader(engine)) as ends:
        ends.sync(1).raise_any()
    assert engine._cache is None


def test_a_checkpoint_without_the_tied_head_reaches_a_model_that_holds_it_apart() -> None:
    trainer, engine = model(0), model(1)
    engine.lm_head.weight = torch.nn.Parameter(engine.lm_head.weight.detach().clone())
    checkpoint = {name: tensor for name, tensor in trainer.state_dict().items() if name != "lm_head.weight"}
    with pair(MappingSource(checkpoint), HuggingFaceLoader(engine)) as ends:
        ends.sync(1).raise_any()
    assert torch.equal(engine.lm_head.weight, trainer.model.embed_tokens.weight)
    assert engine.lm_head.weight is not engine.model.embed_tokens.weight
