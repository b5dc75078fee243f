"""The model to quantize: a skeleton without weights and the files that hold them, or a loaded one.

Given a folder, the model class is built with its parameters on the meta device (buffers, such as
rotary frequencies, are real), and `loaded` fills one module at a time from the shards. Given a
loaded module, its weights are simply there.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module, Parameter

from steelyard.checkpoint import CheckpointView, Shards
from steelyard.errors import PipelineError
from steelyard.pipelines.files import FilesModel

__all__ = ["Source", "computing_in", "fast_dtype"]


class Source:
    """A causal language model, and where its weights are.

    model:  the skeleton, or the module that was given
    shards: the files behind the skeleton; None for a module that was given
    """

    def __init__(
        self, model: Any, shards: CheckpointView | None = None, keys: dict[str, str] | None = None
    ) -> None:
        self.model = model
        self.shards = shards
        self.keys = keys or {}

    @property
    def in_memory(self) -> bool:
        return all(p.device.type != "meta" for p in self.model.parameters())

    @classmethod
    def open(
        cls, model: Any, revision: str | None = None, trust_remote_code: bool = False
    ) -> Source:
        """Open a folder, a name on the hub, or a loaded module."""
        if isinstance(model, Module):
            return cls(model.eval())
        folder = Path(model)
        if not folder.is_dir():
            folder = _download(str(model), revision)
        from transformers import AutoConfig, AutoModelForCausalLM

        shards = CheckpointView(folder, cut=False)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if getattr(config, "quantization_config", None) is not None:  # which the view undoes
            del config.quantization_config
        options: dict[str, Any] = {"attn_implementation": "sdpa"} if _has_sdpa(config) else {}
        with _parameters_on_meta():
            skeleton = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config,
                dtype=_stored_dtype(config, shards),
                trust_remote_code=trust_remote_code,
                **options,
            )
        keys, missing = _keys(skeleton, shards)
        if missing:
            skeleton = _load_converted(folder, skeleton, missing, trust_remote_code)
        return cls(skeleton.eval(), shards, keys)

    @classmethod
    def from_files(cls, model: str | Path, revision: str | None = None) -> Source:
        """Open a folder, or a name on the hub, without asking for its model class."""
        folder = Path(model)
        view = CheckpointView(folder if folder.is_dir() else _download(str(model), revision))
        return cls(FilesModel(view), view, {name: name for name in view.names()})

    @property
    def dtype(self) -> torch.dtype:
        types: Iterator[torch.dtype] = (p.dtype for p in self.model.parameters())
        return next(dtype for dtype in types if dtype.is_floating_point)

    def key(self, name: str) -> str:
        """Return the name that the source has for a tensor of the model."""
        if name in self.keys:
            return self.keys[name]
        module, _, leaf = name.rpartition(".")
        weight = self.keys.get(f"{module}.weight")
        if weight is None:  # attention modules have none of their own: learn from a neighbour
            near = next((k for k in self.keys if k.startswith(f"{module}.")), None)
            if near is None:
                return name
            return self.keys[near].removesuffix(near.removeprefix(f"{module}.")) + leaf
        return f"{weight.removesuffix('weight')}{leaf}"

    @contextlib.contextmanager
    def loaded(self, module: Module, prefix: str, skip: tuple[str, ...] = ()) -> Iterator[None]:
        """Hold the weights of `module` in memory.

        skip: names of modules within the model that stay without
        """
        filled: list[tuple[Module, str]] = []
        try:
            if self.shards is not None:
                for name, parent in module.named_modules():
                    path = f"{prefix}.{name}".strip(".")
                    if any(path == s or path.startswith(f"{s}.") for s in skip):
                        continue
                    for leaf, parameter in list(parent._parameters.items()):
                        key = self.keys.get(f"{path}.{leaf}".strip("."))
                        if parameter is None or parameter.device.type != "meta" or key is None:
                            continue
                        value = self.shards.read(key).to(parameter.dtype)
                        parent._parameters[leaf] = Parameter(value, requires_grad=False)
                        filled.append((parent, leaf))
            yield
        finally:
            for parent, leaf in filled:
                held = parent._parameters[leaf]
                assert held is not None
                parent._parameters[leaf] = Parameter(held.data.to("meta"), requires_grad=False)
            if filled:
                _return_memory()


@contextlib.contextmanager
def computing_in(module: Module, dtype: torch.dtype) -> Iterator[None]:
    """Give `module` weights of another type for a while; what it had comes back unchanged.

    Quantization parameters keep theirs, which is the type that they are stored in.
    """
    kept: list[tuple[Parameter, torch.Tensor]] = []
    try:
        for name, parameter in module.named_parameters():
            real = parameter.device.type != "meta" and parameter.is_floating_point()
            if real and parameter.dtype != dtype and not name.endswith(("_scale", "_zero_point")):
                kept.append((parameter, parameter.data))
                parameter.data = parameter.data.to(dtype)
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


def fast_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type in which a forward pass is fastest: fp32 on a CPU without matrix units."""
    if device.type != "cpu" or stored == torch.float64:
        return stored
    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return stored if stored == torch.bfloat16 and has_tiles() else torch.float32


def _return_memory() -> None:
    """Give freed memory back to the system; glibc would keep as much as several layers."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = Module.register_parameter

    def on_meta(self: Module, name: str, parameter: Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = Parameter(parameter.detach().to("meta"), requires_grad=False)
        register(self, name, parameter)

    Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Module.register_parameter = register  # type: ignore[method-assign]


def _keys(model: Any, shards: Shards) -> tuple[dict[str, str], list[str]]:
    """Map the parameters of the model to their names in the files; return those without, too."""
    prefix = f"{model.base_model_prefix}."
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    keys, missing = {}, []
    for name, _ in model.named_parameters(remove_duplicate=False):
        names = [name, name.removeprefix(prefix), f"{prefix}{name}"]
        if name in tied:
            names += [tied[name], tied[name].removeprefix(prefix)]
        found = next((n for n in names if n in shards), None)
        if found is None:
            missing.append(name)
        else:
            keys[name] = found
    return keys, missing


def _load_converted(folder: Path, skeleton: Any, missing: list[str], trust: bool) -> Any:
    """Load a model whose class joins or renames what the files hold, such as stacked experts."""
    from transformers import AutoModelForCausalLM

    answer: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=next(skeleton.parameters()).dtype,
        trust_remote_code=trust,
        output_loading_info=True,
    )
    loaded, report = answer
    absent = sorted(report["missing_keys"])
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise PipelineError(
            f"{folder} has no tensor for {absent[0]}{more}, which {type(skeleton).__name__} needs"
        )
    return loaded


def _stored_dtype(config: Any, shards: Shards) -> torch.dtype:
    stated = getattr(config, "dtype", None)
    if isinstance(stated, torch.dtype):
        return stated
    sizes: dict[torch.dtype, int] = {}
    for name in shards.names():
        info = shards.info(name)
        if info.dtype.is_floating_point:
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    return max(sizes, key=lambda d: sizes[d])


def _has_sdpa(config: Any) -> bool:
    from transformers import AutoModelForCausalLM

    try:
        classes = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        return False
    one = classes[0] if isinstance(classes, tuple) else classes
    return bool(getattr(one, "_supports_sdpa", False))


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision))
    except Exception as error:
        raise PipelineError(
            f"{name!r} is neither a folder here nor a model that could be fetched: {error}"
        ) from None
