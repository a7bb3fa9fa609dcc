"""`weightlift verify`: explains differences between what a trainer and an engine hold.

Owns: which files are compared, what is printed. Must not know: how differences are told apart (verify/explain.py).
Exit codes: 0 the same bytes under the same names (or only casts, with --allow-cast), 1 differences, 2 a wrong value.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from weightlift.errors import ConfigError
from weightlift.verify.explain import Finding, explain
from weightlift.verify.snapshot import load_digests, load_tensors

__all__ = ["VerifyConfig", "run"]

_MOST_ROWS = 60


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VerifyConfig:
    """Compare a trainer's tensors with an engine's, by name.

    files: TRAINER.safetensors ENGINE.safetensors; or none, with --out.
    out: directory of a `weightlift train` run: its trainer is compared with each of its engines, and stale tensors are dated.
    digests: file of digests of earlier versions, for two files (a run has its own).
    allow_cast: a difference of the kind "cast" does not count.
    json: print one JSON object instead of a table.
    """

    files: Annotated[tuple[pathlib.Path, ...], tyro.conf.Positional] = ()
    out: pathlib.Path | None = None
    digests: pathlib.Path | None = None
    allow_cast: bool = False
    json: bool = False

    def pairs(self) -> list[tuple[pathlib.Path, pathlib.Path]]:
        """(trainer, engine) files; ConfigError if there are none."""
        if self.out is None:
            if len(self.files) != 2:
                raise ConfigError(f"files must be a trainer's and an engine's, or --out a run; got {len(self.files)} files")
            return [(self.files[0], self.files[1])]
        if self.files:
            raise ConfigError("files must not be given together with --out")
        trainer, engines = self.out / "trainer.safetensors", sorted(self.out.glob("rollout-*.safetensors"))
        if not trainer.exists() or not engines:
            raise ConfigError(f"{self.out} holds no snapshots (trainer.safetensors, rollout-*.safetensors): train with --snapshot")
        return [(trainer, engine) for engine in engines]


def run(config: VerifyConfig) -> int:
    """Compare and print; returns the exit code."""
    history_file = config.digests if config.out is None else config.out / "digests.jsonl"
    try:
        history = {} if history_file is None else load_digests(history_file)
        if config.digests is not None and not history:
            raise ConfigError(f"{config.digests} holds no digests")
        compared = []
        for trainer_file, engine_file in config.pairs():
            trainer, engine = load_tensors(trainer_file), load_tensors(engine_file)
            compared.append((engine_file.name, len(trainer), explain(trainer, engine, history)))
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return 2
    counted = [f for _, _, found in compared for f in found if not (config.allow_cast and f.kind == "cast")]
    if config.json:
        print(json.dumps({name: [dataclasses.asdict(finding) for finding in found] for name, _, found in compared}))
    else:
        for name, tensors, found in compared:
            _print(name, tensors, found)
    return 1 if counted else 0


def _print(engine: str, tensors: int, found: list[Finding]) -> None:
    console = Console(soft_wrap=True)
    if not found:
        console.print(f"{engine}: all {tensors} tensors are the trainer's, bit for bit", highlight=False)
        return
    kinds = {kind: sum(finding.kind == kind for finding in found) for kind in sorted({finding.kind for finding in found})}
    summary = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    console.print(f"{engine}: {len(found)} differences in {tensors} tensors ({summary})", highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("tensor", "kind", "what happened"):
        table.add_column(column, overflow="fold")
    for finding in found[:_MOST_ROWS]:
        table.add_row(finding.name, finding.kind, finding.detail)
    console.print(table, highlight=False, markup=False)
    if len(found) > _MOST_ROWS:
        console.print(f"and {len(found) - _MOST_ROWS} more (--json prints all)", highlight=False)
