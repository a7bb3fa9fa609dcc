"""Entry point of a worker process: `python -m weightlift.testing.child FILE FUNCTION JSON`. See processes.py."""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import pathlib
import signal
import sys


def main() -> None:
    """Load the file, call the function."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    path, function, arguments = sys.argv[1:4]
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    assert spec is not None, f"{path} is not a Python file"
    assert spec.loader is not None, f"{path} is not a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    getattr(module, function)(**json.loads(arguments))


if __name__ == "__main__":
    main()
