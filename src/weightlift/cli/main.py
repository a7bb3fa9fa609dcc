"""`weightlift`: finds the command and hands over to its file.

Owns: the list of commands. Must not know: what they do. A command's module is imported when it is asked for: `weightlift doctor` must
work where the extras of `weightlift train` are not installed. Options of a command are parsed by tyro from its config dataclass.
"""

from __future__ import annotations

import importlib
import sys
from typing import NamedTuple

import tyro

__all__ = ["main"]


class _Command(NamedTuple):
    """`config` is the dataclass that tyro parses, `module.run(config) -> int` the command."""

    module: str
    config: str
    summary: str


_COMMANDS = {
    ("train",): _Command("weightlift.cli.train", "TrainConfig", "GRPO with one weight sync per step, on this machine"),
    ("bench", "shm"): _Command("weightlift.cli.bench_shm", "BenchShmConfig", "shared memory against the two-copy limit"),
    ("bench", "gather"): _Command(
        "weightlift.cli.bench_gather", "BenchGatherConfig", "a sharded trainer's gather against a plain export"
    ),
    ("verify",): _Command("weightlift.cli.verify", "VerifyConfig", "explain differences between trainer and engine"),
    ("doctor",): _Command("weightlift.cli.doctor", "DoctorConfig", "which transports can be used here, and why not"),
}


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `weightlift` script; ends the process with the command's exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    for name, command in _COMMANDS.items():
        if tuple(words[: len(name)]) == name:
            sys.exit(_run(name, command, words[len(name) :]))
    asked_for_help = words[:1] in (["-h"], ["--help"])
    print(_usage(), file=sys.stdout if asked_for_help else sys.stderr)
    sys.exit(0 if asked_for_help else 2)


def _run(name: tuple[str, ...], command: _Command, words: list[str]) -> int:
    try:
        module = importlib.import_module(command.module)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("weightlift"):
            raise
        print(f"weightlift {' '.join(name)} needs {error.name}: pip install 'weightlift[demo]'", file=sys.stderr)
        return 2
    config = tyro.cli(getattr(module, command.config), args=words, prog=f"weightlift {' '.join(name)}")
    return int(module.run(config))


def _usage() -> str:
    lines = [f"  weightlift {' '.join(name):12} {command.summary}" for name, command in _COMMANDS.items()]
    return "usage: weightlift COMMAND [options]; weightlift COMMAND --help\n\n" + "\n".join(lines)
