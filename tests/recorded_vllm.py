"""vLLM's weight-transfer interface as three of its releases declare it, without vLLM: enough of a package to import our backend on.

`SIGNATURES` was read off the releases' own files; the engine tests compare the newest with what is installed.
"""

import abc
import dataclasses
import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ENGINE = {
    "0.24.0": {
        "__init__": ["self", "config", "parallel_config", "model"],
        "init_transfer_engine": ["self", "init_info"],
        "receive_weights": ["self", "update_info", "load_weights"],
        "shutdown": ["self"],
        "trainer_send_weights": ["iterator", "trainer_args"],
    },
    "0.25.1": {
        "__init__": ["self", "config", "vllm_config", "device", "model"],
        "init_transfer_engine": ["self", "init_info"],
        "start_weight_update": ["self"],
        "finish_weight_update": ["self"],
        "receive_weights": ["self", "update_info"],
        "shutdown": ["self"],
        "trainer_send_weights": ["iterator", "trainer_args"],
    },
    "0.32.0": {
        "__init__": ["self", "config", "vllm_config", "device", "model"],
        "init_transfer_engine": ["self", "init_info"],
        "start_weight_update": ["self"],
        "finish_weight_update": ["self"],
        "receive_weights": ["self", "update_info"],
        "shutdown": ["self"],
    },
}
"""Release -> the constructor and every abstract method of WeightTransferEngine -> its parameters."""
TRAINER = {"__init__": ["self", "client", "source", "is_sender"], "trainer_init": ["cls", "init_info", "client", "source"]}
"""Of 0.32's TrainerWeightTransferEngine; the other two have none."""


def installed_signatures(cls: type) -> dict[str, list[str]]:
    """The same of a real class."""
    names = ["__init__", *sorted(cls.__abstractmethods__)]  # type: ignore[attr-defined]
    return {name: [*inspect.signature(inspect.unwrap(_function(cls, name))).parameters] for name in names}


def _function(cls: type, name: str) -> Any:
    found = inspect.getattr_static(cls, name)
    return found.__func__ if isinstance(found, classmethod | staticmethod) else found


def _engine_class(release: str) -> type:
    recorded = ENGINE[release]

    def __init__(self: Any, *arguments: Any) -> None:
        names = recorded["__init__"][1:]
        assert len(arguments) == len(names), f"{release} gives {names}"
        for name, argument in zip(names, arguments, strict=True):
            setattr(self, name, argument)

    def parse_init_info(self: Any, given: dict[str, Any]) -> Any:
        return self.init_info_cls(**given)

    def parse_update_info(self: Any, given: dict[str, Any]) -> Any:
        return self.update_info_cls(**given)

    body: dict[str, Any] = {"__init__": __init__, "parse_init_info": parse_init_info, "parse_update_info": parse_update_info}
    for name in recorded:
        if name != "__init__":
            body[name] = abc.abstractmethod(lambda *arguments: None)
    return abc.ABCMeta("WeightTransferEngine", (), body)


class _Factory:
    """Both of vLLM's factories: names to (module, class)."""

    def __init__(self) -> None:
        self._registry: dict[str, tuple[str, str]] = {}

    def register_engine(self, name: str, module: str, class_name: str) -> None:
        if name in self._registry:
            raise ValueError(f"{name} is already registered")
        self._registry[name] = (module, class_name)

    def create_engine(self, name: str, *arguments: Any) -> Any:
        module, class_name = self._registry[name]
        return getattr(importlib.import_module(module), class_name)(*arguments)


@dataclasses.dataclass
class _InitInfo:
    pass


@dataclasses.dataclass
class _UpdateInfo24:
    """0.24 looks at these two of every backend's information."""

    _: dataclasses.KW_ONLY
    update_kind: str = "dense"
    num_updates_list: list[int] | None = None


@dataclasses.dataclass
class _UpdateInfo:
    pass


class Recorded:
    """One release, importable as `vllm` within `released`."""

    def __init__(self, release: str) -> None:
        self.release = release
        self.engines, self.trainers = _Factory(), _Factory()
        self.reloads: list[str] = []
        base, factory = types.ModuleType("base"), types.ModuleType("factory")
        vars(base).update(
            WeightTransferEngine=_engine_class(release),
            WeightTransferInitInfo=_InitInfo,
            WeightTransferUpdateInfo=_UpdateInfo24 if release == "0.24.0" else _UpdateInfo,
        )
        vars(factory).update(WeightTransferEngineFactory=self.engines)
        if release == "0.32.0":
            vars(factory).update(WeightTransferTrainerFactory=self.trainers)
        reload = types.ModuleType("reload")
        vars(reload).update(
            initialize_layerwise_reload=lambda model: self.reloads.append("initialize"),
            finalize_layerwise_reload=lambda model, model_config: self.reloads.append("finalize"),
        )
        self.modules = {
            "vllm.distributed.weight_transfer.base": base,
            "vllm.distributed.weight_transfer.factory": factory,
            "vllm.model_executor.model_loader.reload": reload,
        }
        for name in [*self.modules]:
            while name := name.rpartition(".")[0]:
                self.modules.setdefault(name, types.ModuleType(name))


@contextmanager
def released(release: str) -> Iterator[tuple[Recorded, Any]]:
    """Within: `import vllm` finds that release. Yields it, and our plugin, imported on it."""
    recorded = Recorded(release)
    ours = "weightlift.integrations.vllm_plugin"
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm" or name == ours}
    for name in kept:
        del sys.modules[name]
    sys.modules.update(recorded.modules)
    try:
        yield recorded, importlib.import_module(ours)
    finally:
        for name in [*recorded.modules, ours]:
            sys.modules.pop(name, None)
        sys.modules.update(kept)
