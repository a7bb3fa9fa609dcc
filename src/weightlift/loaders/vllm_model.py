"""One model inside a vLLM worker, as far as weights go: the only file that touches vLLM's model classes and its reload.

Owns: the twin on the meta device, finding live modules (through LoRA wrappers), vLLM's layerwise reload of some modules, and the
observation whether what vLLM does to a module after loading changes anything. Must not know: plans, buckets, rounds.
vLLM is imported when it is used, never with this file.

Tried with vLLM 0.32 on the CPU; `initialize_layerwise_reload`, `finalize_layerwise_reload` and `initialize_model` are vLLM's own
entries for its weight transfer backends, in 0.24 as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch

__all__ = ["VLLMModel", "unwrapped_loaders"]

_FORWARD_CONTEXTS: Final = ("static_forward_context", "static_all_moe_layers")
_OPTIONAL: Final = frozenset({"k_scale", "v_scale", "q_scale", "prob_scale", "_k_scale", "_v_scale", "_q_scale", "_prob_scale"})
_BENIGN: Final = frozenset({"_already_called_process_weights_after_loading", "_original_do_torchao_reload", "_do_torchao_reload"})
_LORA: Final = "base_layer"


class VLLMModel:
    """A live model of a vLLM worker.

    Args:
        model: the live module. vllm_config: of the worker. model_config: of this model (the draft model has its own).
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, model_config: Any = None) -> None:
        self.model = model
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config if model_config is None else model_config

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """What vLLM's code expects around it."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            yield

    @property
    def spread(self) -> bool:
        """Whether a rank of this engine may rightly ignore a sent tensor: pipeline stages and expert parallelism."""
        parallel = self.vllm_config.parallel_config
        return parallel.pipeline_parallel_size > 1 or bool(parallel.enable_expert_parallel)

    def twin(self) -> torch.nn.Module:
        """The same model in checkpoint format, as this rank would load it, on the meta device."""
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        compilation = self.vllm_config.compilation_config
        kept = {name: getattr(compilation, name) for name in _FORWARD_CONTEXTS if hasattr(compilation, name)}
        try:
            # Attention layers enter themselves there by name, and refuse a second one of the same name.
            for name, value in kept.items():
                setattr(compilation, name, type(value)())
            with set_default_torch_dtype(self.model_config.dtype), torch.device("meta"), self.context():
                return initialize_model(vllm_config=self.vllm_config, model_config=self.model_config)  # type: ignore[no-any-return]
        finally:
            for name, value in kept.items():
                setattr(compilation, name, value)

    def optional(self, parameters: Iterable[str]) -> set[str]:
        """Parameters that a checkpoint need not have: scales of the KV cache."""
        return {name for name in parameters if name.rpartition(".")[2] in _OPTIONAL}

    def module(self, path: str) -> torch.nn.Module:
        """The live module at a path of the twin; inside its LoRA wrapper, if it has one."""
        module = self.model
        for part in path.split(".") if path else ():
            module = getattr(_bare(module), part)
        return _bare(module)

    def loader_name(self, path: str, name: str) -> str:
        """A checkpoint name as the live `load_weights` wants it, for a tensor that goes to the module at `path`."""
        module = self.model
        for part in path.split(".") if path else ():
            module = getattr(_bare(module), part)
        if _bare(module) is module:
            return name
        stem, _, leaf = name.rpartition(".")
        return f"{stem}.{_LORA}.{leaf}"

    def sharers(self, path: str) -> list[torch.nn.Module]:
        """Other modules that hold a parameter of this one: an LM head that is tied to the embedding.

        vLLM's reload fills their weight through the owner and leaves what they derived from it (a packed copy) as it was.
        """
        owner = self.module(path)
        places = {tensor.data_ptr() for tensor in owner._parameters.values() if tensor is not None and tensor.numel()}
        return [
            module
            for module in self.model.modules()
            if module is not owner
            and any(t is not None and t.numel() and t.data_ptr() in places for t in module._parameters.values())
        ]

    def reload(self, paths: Iterable[str], weights: list[tuple[str, torch.Tensor]]) -> None:
        """vLLM's layerwise reload of these modules: checkpoint format, `load_weights`, post-processing, into the live storage. Then
        the post-processing of those that share their parameters."""
        paths = list(paths)
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        modules = [self.module(path) for path in paths]
        with self.context(), torch.no_grad():
            try:
                for module in modules:
                    _forget_kernel(module)
                    initialize_layerwise_reload(module)
                self.model.load_weights(weights)  # type: ignore[operator]
            except BaseException:
                for module in modules:
                    _roll_back(module)
                raise
            finally:
                for module in modules:
                    finalize_layerwise_reload(module, self.model_config)
            for path in paths:
                for module in self.sharers(path):
                    method = getattr(module, "quant_method", None)
                    if method is not None and hasattr(method, "process_weights_after_loading"):
                        method.process_weights_after_loading(module)

    def finish(self) -> None:
        """What vLLM does after the last weight: attention layers derive from the others what they need."""
        with self.context(), torch.no_grad():
            for module in self.model.modules():
                if _deferred(module):
                    module.process_weights_after_loading(self.model_config.dtype)  # type: ignore[operator]

    @contextlib.contextmanager
    def observed(self, paths: Iterable[str]) -> Iterator[dict[str, bool]]:
        """Within: path -> whether what vLLM does to the module after loading left it exactly as it was loaded."""
        verdict = dict.fromkeys(paths, True)
        methods: dict[int, Any] = {}
        watched: dict[int, dict[torch.nn.Module, str]] = {}  # layers may share a method
        for path in verdict:
            for module in (self.module(path), *self.sharers(path)):
                method = getattr(module, "quant_method", None)
                if method is not None and hasattr(method, "process_weights_after_loading"):
                    methods[id(method)] = method
                    watched.setdefault(id(method), {})[module] = path
        try:
            for key, method in methods.items():
                method.process_weights_after_loading = _spy(method, watched[key], verdict)
            yield verdict
        finally:
            for method in methods.values():
                vars(method).pop("process_weights_after_loading", None)


def _bare(module: torch.nn.Module) -> torch.nn.Module:
    """A module without its LoRA wrapper. By class name: no LoRA code is loaded for an engine without it."""
    while any(cls.__name__ == "BaseLayerWithLoRA" for cls in type(module).__mro__):
        module = getattr(module, _LORA)
    return module


def _deferred(module: torch.nn.Module) -> bool:
    from vllm.model_executor.layers import attention

    try:
        return bool(attention.is_deferred_attention_layer(module))
    except AttributeError:  # vLLM 0.24 asks for the classes
        kinds = tuple(getattr(attention, name) for name in ("Attention", "MLAAttention") if hasattr(attention, name))
        return isinstance(module, kinds) and hasattr(module, "process_weights_after_loading")


def _forget_kernel(module: torch.nn.Module) -> None:
    """On the CPU, vLLM 0.32 packs experts only while it makes their kernel, and keeps the kernel over a reload: the reloaded weights
    would stay unpacked under a kernel for packed ones. Without a kernel it does all of it again."""
    method = getattr(module, "quant_method", None)
    parameter = next(iter(module._parameters.values()), None)
    if getattr(method, "moe_kernel", None) is not None and parameter is not None and parameter.device.type == "cpu":
        method.moe_kernel = None  # type: ignore[union-attr]


def _roll_back(module: torch.nn.Module) -> None:
    """Forget what was loaded into a module that failed, so that finalising it puts its live tensors back."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in module.modules():
        info = get_layerwise_info(layer)
        info.load_numel = 0
        info.loaded_weights.clear()


@contextlib.contextmanager
def unwrapped_loaders(model: torch.nn.Module) -> Iterator[None]:
    """Within: parameters load at once. Layers that quantise online buffer what they get and process it when they have it all."""
    wrapped = []
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        bare = loader
        while getattr(bare, "__name__", "") == "online_process_loader":
            bare = bare.__wrapped__  # type: ignore[union-attr]
        if bare is not loader:
            wrapped.append((parameter, loader))
            parameter.weight_loader = bare  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for parameter, loader in wrapped:
            parameter.weight_loader = loader  # type: ignore[attr-defined]


def _spy(method: Any, watched: Mapping[torch.nn.Module, str], verdict: dict[str, bool]) -> Callable[..., Any]:
    """A method's post-processing, which says of the watched modules whether it changed anything about them."""
    original: Callable[..., Any] = method.process_weights_after_loading

    def spy(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = watched.get(layer)
        if path is None:
            return original(layer, *args, **kwargs)
        before, values = _look(layer, method), {name: _bits(tensor).clone() for name, tensor in _tensors(layer).items()}
        result = original(layer, *args, **kwargs)
        same = before == _look(layer, method)
        verdict[path] &= same and all(torch.equal(_bits(tensor), values[name]) for name, tensor in _tensors(layer).items())
        return result

    return spy


def _tensors(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in (*layer._parameters.items(), *layer._buffers.items()) if tensor is not None}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.detach()


def _look(layer: torch.nn.Module, method: Any) -> tuple[Any, ...]:
    """Everything that may not change if loading plain values is all there is to do."""
    tensors: Mapping[str, torch.Tensor] = _tensors(layer)
    places = {n: (id(t), t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for n, t in tensors.items()}
    own = {name: id(value) for name, value in vars(layer).items() if name not in _BENIGN}
    shared = {name: id(value) for name, value in vars(method).items() if name != "process_weights_after_loading"}
    return places, own, shared
