"""What the tests of this folder share: a small checkpoint to break."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    preset_name_to_scheme,
)
from safetensors.torch import save_file
from stored_parameters import calibrate

from steelyard.checkpoint import (
    CheckpointWriter,
    Shards,
    quantization_config_dict,
)
from steelyard.formats import format_of, stored_tensors

Tensors = dict[str, torch.Tensor]


class SmallModel:
    """A source checkpoint of two layers and its quantized copy, with errors as reported."""

    def __init__(self, folder: Path, scheme: QuantizationScheme, dtype: torch.dtype) -> None:
        self.scheme = scheme
        generator = torch.Generator().manual_seed(0)
        self.modules = [f"model.layers.{i}.{m}" for i in (0, 1) for m in ("q_proj", "k_proj")]
        tensors = {f"{m}.weight": torch.randn(48, 256, generator=generator) for m in self.modules}
        tensors["model.layers.0.q_proj.bias"] = torch.randn(48, generator=generator)
        tensors["model.embed_tokens.weight"] = torch.randn(64, 256, generator=generator)
        tensors["model.norm.weight"] = torch.randn(256, generator=generator)
        tensors["lm_head.weight"] = torch.randn(64, 256, generator=generator)
        tensors = {name: (value * 0.05).to(dtype) for name, value in tensors.items()}
        (folder / "source").mkdir()
        save_file(tensors, folder / "source" / "model.safetensors")
        (folder / "source" / "tokenizer.json").write_text("{}")
        self.source = Shards(folder / "source")
        self.stored: Tensors = {}
        self.reported: dict[str, float] = {}
        for name, value in tensors.items():
            module = name.removesuffix(".weight")
            if module not in self.modules:
                self.stored[name] = value
                continue
            for local, part in stored_tensors(value, calibrate(value, scheme), scheme).items():
                self.stored[f"{module}.{local}"] = part
        self.config = QuantizationConfig(
            config_groups={"group_0": scheme},
            ignore=["lm_head"],
            format=format_of(scheme),
            quantization_status="compressed",
        )
        self.folder = folder / "quantized"

    def write(
        self,
        tensors: Tensors | None = None,
        max_shard_bytes: int = 10**9,
        changed: Collection[str] = (),
    ) -> Path:
        content = self.stored if tensors is None else tensors
        with CheckpointWriter(
            self.folder, overwrite=True, max_shard_bytes=max_shard_bytes, source=self.source
        ) as writer:
            for name, tensor in content.items():
                writer.add(name, tensor)
            writer.carry(self.source)
            config = {"quantization_config": quantization_config_dict(self.config)}
            return writer.finish(config, changed=changed)


@pytest.fixture
def small_model(tmp_path: Path) -> Callable[..., SmallModel]:
    def make(scheme: str = "W4A16", dtype: torch.dtype = torch.bfloat16) -> SmallModel:
        return SmallModel(tmp_path, preset_name_to_scheme(scheme, ["Linear"]), dtype)

    return make
