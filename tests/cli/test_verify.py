"""`weightlift verify`: every kind of difference is told apart, on files and on a run."""

import json
import pathlib
from collections.abc import Callable

import pytest
import torch

from weightlift.cli.main import main
from weightlift.verify.explain import explain
from weightlift.verify.snapshot import append_digests, load_digests, load_tensors, save_tensors

Tensors = dict[str, torch.Tensor]


def trainer() -> Tensors:
    generator = torch.Generator().manual_seed(3)
    return {
        "model.embed.weight": torch.randn(16, 8, generator=generator),
        "model.layers.0.q.weight": torch.randn(8, 8, generator=generator),
        "model.layers.0.k.weight": torch.randn(8, 8, generator=generator),
        "model.layers.0.up.weight": torch.randn(12, 8, generator=generator),
        "model.layers.0.bias": torch.zeros(8),
        "model.layers.1.bias": torch.zeros(8),
        "model.scale": torch.tensor(0.1),
        "model.steps": torch.arange(6),
    }


def changed(name: str, change: Callable[[Tensors], torch.Tensor]) -> Tensors:
    engine = {key: tensor.clone() for key, tensor in trainer().items()}
    engine[name] = change(engine)
    return engine


Q, K, UP, EMBED = "model.layers.0.q.weight", "model.layers.0.k.weight", "model.layers.0.up.weight", "model.embed.weight"

CASES: dict[str, tuple[str, Callable[[Tensors], torch.Tensor], str, str]] = {
    "transposed": (UP, lambda t: t[UP].t().contiguous(), "transposed", "axes in the order [1, 0]"),
    "transposed square": (Q, lambda t: t[Q].t().contiguous(), "transposed", "[1, 0]"),
    "swapped": (Q, lambda t: t[K].clone(), "swapped", f"holds the values of {K}"),
    "cast": (EMBED, lambda t: t[EMBED].bfloat16(), "cast", "bfloat16 in the engine: values were rounded"),
    "cast without loss": ("model.layers.0.bias", lambda t: torch.zeros(8).half(), "cast", "every value survives"),
    "rounded on the way": (EMBED, lambda t: t[EMBED].bfloat16().float(), "cast", "rounded to bfloat16 on the way"),
    "padding": (EMBED, lambda t: torch.cat([t[EMBED], torch.zeros(4, 8)]), "shape", "the first 16 rows are equal: padding?"),
    "another shape": (UP, lambda t: torch.ones(3, 3, 3), "shape", "[3, 3, 3] in the engine, [12, 8] in the trainer"),
    "never written": (UP, lambda t: torch.full((12, 8), float("nan")), "values", "NaN throughout: never written?"),
    "zero": (UP, lambda t: torch.zeros(12, 8), "values", "0 throughout: never written?"),
    "a scalar": ("model.scale", lambda t: torch.tensor(0.5), "values", "first the scalar: 0.1"),
    "integers": ("model.steps", lambda t: torch.tensor([0, 1, 2, 9, 4, 5]), "values", "1 of 6 elements differ, first [3]: 3"),
    "negative zero": ("model.layers.0.bias", lambda t: -torch.zeros(8), "values", "the same numbers in other bits"),
    "another dtype": ("model.steps", lambda t: torch.arange(6).float() + 1, "values", "float32 in the engine, int64"),
}


@pytest.mark.parametrize("case", CASES)
def test_each_kind_is_told_apart(case: str) -> None:
    name, change, kind, text = CASES[case]
    (finding,) = explain(trainer(), changed(name, change))
    assert (finding.name, finding.kind) == (name, kind)
    assert text in finding.detail


def test_two_names_that_were_swapped_are_both_named() -> None:
    engine = changed(Q, lambda t: t[K].clone())
    engine[K] = trainer()[Q]
    assert {(f.name, f.kind) for f in explain(trainer(), engine)} == {(Q, "swapped"), (K, "swapped")}


def test_missing_and_unexpected_with_near_matches() -> None:
    engine = trainer()
    engine["layers.0.q.weight"] = engine.pop(Q)
    missing, unexpected = explain(trainer(), engine)
    assert (missing.name, missing.kind, unexpected.name, unexpected.kind) == (Q, "missing", "layers.0.q.weight", "unexpected")
    assert "near: " in missing.detail
    assert "near: " in unexpected.detail


def test_constant_tensors_are_not_called_swapped() -> None:
    engine = changed("model.layers.0.bias", lambda t: torch.ones(8))
    (finding,) = explain(trainer(), engine)
    assert finding.kind == "values"


def versions(directory: pathlib.Path) -> list[Tensors]:
    """Four versions of the trainer, their digests in a file."""
    made = []
    for version in range(4):
        tensors = {name: t + version if t.is_floating_point() else t for name, t in trainer().items()}
        append_digests(directory / "digests.jsonl", version, tensors)
        made.append(tensors)
    return made


def test_a_stale_tensor_is_dated(tmp_path: pathlib.Path) -> None:
    history = versions(tmp_path)
    engine = {**history[3], Q: history[1][Q]}
    (finding,) = explain(history[3], engine, load_digests(tmp_path / "digests.jsonl"))
    assert (finding.name, finding.kind) == (Q, "stale")
    assert finding.detail == "stale since version 2: holds the values of version 1, not of 3"


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["verify", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_command_on_two_files(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_tensors(one, trainer())
    save_tensors(other, changed(EMBED, lambda t: t[EMBED].bfloat16()))
    assert command(str(one), str(one)) == 0
    assert "all 8 tensors are the trainer's, bit for bit" in capsys.readouterr().out
    assert command(str(one), str(other)) == 1
    assert "1 cast" in capsys.readouterr().out
    assert command(str(one), str(other), "--allow-cast") == 0
    capsys.readouterr()
    assert command(str(one), str(other), "--json") == 1
    assert json.loads(capsys.readouterr().out)["b.safetensors"][0]["name"] == EMBED


def test_the_command_on_a_run(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = versions(tmp_path)
    save_tensors(tmp_path / "trainer.safetensors", history[3])
    save_tensors(tmp_path / "rollout-0.safetensors", history[3])
    assert command("--out", str(tmp_path)) == 0
    save_tensors(tmp_path / "rollout-1.safetensors", history[2])
    assert command("--out", str(tmp_path)) == 1
    out = capsys.readouterr().out
    assert "rollout-0.safetensors: all 8" in out
    assert "7 stale" in out, "the integers did not change"


@pytest.mark.parametrize("words", [[], ["one.safetensors"], ["--out", "nowhere"], ["no", "file"]], ids=str)
def test_wrong_values_are_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*words) == 2
    assert "ConfigError" in capsys.readouterr().err


def test_a_snapshot_of_a_module_has_canonical_names(tmp_path: pathlib.Path) -> None:
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3), "b": torch.nn.Linear(2, 3)})
    module["b"].weight = module["a"].weight  # type: ignore[union-attr]
    save_tensors(tmp_path / "x.safetensors", torch.compile(module, backend="eager"))
    assert set(load_tensors(tmp_path / "x.safetensors")) == {"a.weight", "a.bias", "b.weight", "b.bias"}
