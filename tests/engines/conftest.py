"""The tier `engines`: real vLLM, in processes of its own. Run by `make test-engines`, which installs it."""

import importlib.util
import pathlib

import pytest

HERE = pathlib.Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        reason = pytest.mark.skip(reason="vLLM is not installed here: make test-engines installs it")
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(reason)
