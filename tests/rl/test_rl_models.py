"""The embedded model and tokenizer; and that trainer and engine see the same log-probabilities."""

from __future__ import annotations

import pathlib
import string

import pytest
import torch

from weightlift.errors import ConfigError
from weightlift.rl.config import TinyModelConfig
from weightlift.rl.models import build_tiny, load_folder, pad_left, pad_right, token_logprobs
from weightlift.rl.rollout import complete
from weightlift.samples import GenerateRequest, Prompt, SamplingParams

TINY = TinyModelConfig(hidden_size=32, layers=2, heads=2, max_tokens=64)


@pytest.fixture(scope="module")
def tiny():
    return build_tiny(TINY, seed=0)


def request(texts, text_model, **sampling):
    prompts = [Prompt(id=index, tokens=text_model.encode_prompt(text)) for index, text in enumerate(texts)]
    params = {"samples": 2, "max_new_tokens": 6, "temperature": 1.0, "greedy": False, "seed": 1, **sampling}
    return GenerateRequest(id=1, prompts=prompts, sampling=SamplingParams(**params))


def test_every_printable_character_survives_the_tokenizer(tiny):
    text = string.digits + string.ascii_letters + string.punctuation + " \n"
    tokens = tiny.encode_answer(text)
    assert len(tokens) == len(text) + 1
    assert tokens[-1] in tiny.eos_ids
    assert tiny.decode(tokens) == text


def test_a_prompt_begins_with_the_begin_token_and_one_token_a_character(tiny):
    tokens = tiny.encode_prompt("ab=")
    assert (len(tokens), tokens[0]) == (4, tiny.tokenizer.bos_token_id)


def test_the_seed_decides_the_weights_and_the_callers_random_state_stays():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    one, same, other = (build_tiny(TINY, seed=seed).model.state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_padding():
    left, right = pad_left([[1, 2], [3]], 0), pad_right([[1, 2], [3]], 0)
    assert (left.tokens.tolist(), left.mask.tolist()) == ([[1, 2], [0, 3]], [[1, 1], [0, 1]])
    assert (right.tokens.tolist(), right.mask.tolist()) == ([[1, 2], [3, 0]], [[1, 1], [1, 0]])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_engines_logprobs_are_the_trainers(tiny, temperature):
    """Prompts of different lengths, a cache in the engine and none in the trainer: the same numbers all the same."""
    asked = request(["a=", "hello=", "12345678="], tiny, samples=4, temperature=temperature)
    samples = complete(asked, 3, tiny)
    prompts = pad_left([asked.prompts[sample.prompt_id].tokens for sample in samples], tiny.pad_id)
    completions = pad_right([sample.tokens for sample in samples], tiny.pad_id)
    with torch.no_grad():
        logprobs = token_logprobs(tiny.model.eval(), prompts, completions, temperature=temperature)
    for row, sample in zip(logprobs, samples, strict=True):
        torch.testing.assert_close(row[: len(sample.tokens)], torch.tensor(sample.logprobs), atol=1e-4, rtol=0)


def test_samples_come_in_order_with_their_version_and_end_at_the_end_token(tiny):
    samples = complete(request(["a=", "b="], tiny, samples=3), 11, tiny)
    assert [sample.prompt_id for sample in samples] == [0, 0, 0, 1, 1, 1]
    assert {sample.version for sample in samples} == {11}
    for sample in samples:
        assert len(sample.tokens) == len(sample.logprobs) <= 6
        assert sample.finished == (sample.tokens[-1] in tiny.eos_ids)
        assert not any(token in tiny.eos_ids for token in sample.tokens[:-1])


def test_the_requests_seed_decides_the_samples(tiny):
    first, same, other = (complete(request(["a="], tiny, samples=8, seed=seed), 0, tiny) for seed in (5, 5, 6))
    assert first == same
    assert first != other


def test_greedy_takes_the_most_likely_token(tiny):
    one, two = (complete(request(["a="], tiny, samples=1, greedy=True, seed=seed), 0, tiny) for seed in (1, 2))
    assert one == two


def test_a_saved_model_loads_from_its_folder(tiny, tmp_path):
    tiny.model.save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    loaded = load_folder(tmp_path)
    assert loaded.encode_prompt("word=") == tiny.encode_prompt("word=")
    assert (loaded.pad_id, loaded.eos_ids) == (tiny.pad_id, tiny.eos_ids)
    weights = loaded.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in tiny.model.state_dict().items())


def test_a_folder_without_a_model_is_a_config_error(tmp_path: pathlib.Path):
    with pytest.raises(ConfigError, match="model must be a folder with a Hugging Face causal LM"):
        load_folder(tmp_path)
