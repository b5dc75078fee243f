"""A good checkpoint has no problems; each way to break it is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

from steelyard.checkpoint import check_checkpoint, validate_checkpoint
from steelyard.checkpoint.contents import read_contents
from steelyard.checkpoint.validator import _whole
from steelyard.checkpoint.written import WrittenCheckpoint
from steelyard.errors import CheckpointError, CheckpointInvalid
from steelyard.formats import format_of

MakeModel = Callable[..., Any]
Q = "model.layers.0.q_proj"
K = "model.layers.0.k_proj"
SCHEMES = ["W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK"]
SCHEMES += ["NVFP4", "MXFP4", "MXFP8"]


def report(model: Any) -> dict[str, float]:
    """Return the relative squared error of each weight, decoded in fp32."""
    compressor = BaseCompressor.get_value_from_registry(format_of(model.scheme))
    errors = {}
    for module in model.modules:
        prefix = f"{module}."
        state = {n.removeprefix(prefix): t for n, t in model.stored.items() if n.startswith(prefix)}
        state.pop("bias", None)
        if state["weight_scale"].element_size() > 1:
            state["weight_scale"] = state["weight_scale"].float()
        decoded = compressor.decompress(state, model.scheme)["weight"].double()
        weight = model.source.read(f"{module}.weight").double()
        errors[module] = float((decoded - weight).square().sum() / weight.square().sum())
    return errors


def problems(model: Any, **options: Any) -> list[str]:
    return validate_checkpoint(model.folder, source=model.source, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_good(small_model: MakeModel, scheme: str, dtype: torch.dtype) -> None:
    model = small_model(scheme, dtype)
    folder = model.write()
    assert problems(model, reported=report(model)) == []
    assert validate_checkpoint(folder) == []  # its own config alone is enough


def test_good_in_shards(small_model: MakeModel) -> None:
    model = small_model()
    folder = model.write(max_shard_bytes=20_000)
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert problems(model, reported=report(model), fused=[(Q, K)]) == []


def test_good_with_a_preset_that_is_new(
    small_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of known formats needs no word of it here."""
    args = QuantizationArgs(num_bits=6, strategy="group", group_size=64, symmetric=False)
    monkeypatch.setitem(PRESET_SCHEMES, "W6A16_ASYM", {"weights": args})
    model = small_model("W6A16_ASYM")
    folder = model.write()
    assert problems(model, reported=report(model)) == []
    module = next(m for m in read_contents(folder).modules if m.name == Q)
    assert (module.kind, module.format) == ("int6 asymmetric group 64", "pack-quantized")


# -- structure ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "local"),
    [
        ("W4A16", "weight_scale"),
        ("W4A16", "weight_shape"),
        ("W4A16", "weight_packed"),
        ("W4A16_ASYM", "weight_zero_point"),
        ("W8A8", "weight_scale"),
        ("FP8", "input_scale"),
        ("NVFP4", "weight_global_scale"),
        ("NVFP4", "input_global_scale"),
        ("MXFP4", "weight_scale"),
        ("MXFP8", "weight"),
    ],
)
@pytest.mark.parametrize("with_source", [True, False])
def test_missing_tensor(small_model: MakeModel, scheme: str, local: str, with_source: bool) -> None:
    model = small_model(scheme)
    del model.stored[f"{Q}.{local}"]
    model.write()
    found = problems(model) if with_source else validate_checkpoint(model.folder)
    assert len(found) == 1
    if with_source:
        assert found[0].startswith(f"{Q}.{local} is missing")
    else:  # where the shape cannot be told, the module is named
        assert found[0].startswith((f"{Q}.{local} is missing", f"{Q}.weight does not fit"))


def test_module_that_was_forgotten(small_model: MakeModel) -> None:
    """Not ignored, and still there in full: the server would look for scales."""
    model = small_model()
    for name in [name for name in model.stored if name.startswith(f"{K}.")]:
        del model.stored[name]
    model.stored[f"{K}.weight"] = model.source.read(f"{K}.weight")
    model.write()
    found = problems(model, reported={})
    assert any(line.startswith(f"{K}.weight_scale is missing") for line in found)
    assert any(line.startswith(f"{K}.weight is left over") for line in found)


@pytest.mark.parametrize(
    ("local", "value", "expected"),
    [
        ("weight_scale", torch.ones(48, 2, dtype=torch.float64), "torch.float64 (48, 2)"),
        ("weight_scale", torch.ones(48, 1, dtype=torch.bfloat16), "torch.bfloat16 (48, 1)"),
        ("weight_packed", torch.zeros(48, 31, dtype=torch.int32), "torch.int32 (48, 31)"),
        ("weight_packed", torch.zeros(48, 32, dtype=torch.int64), "torch.int64 (48, 32)"),
    ],
)
def test_wrong_type_or_shape(
    small_model: MakeModel, local: str, value: torch.Tensor, expected: str
) -> None:
    model = small_model()
    model.stored[f"{Q}.{local}"] = value
    model.write()
    found = problems(model, reported=report_of_others(model))
    assert len(found) == 1
    assert found[0].startswith(f"{Q}.{local} is {expected}; expected torch.")


def report_of_others(model: Any) -> dict[str, float]:
    model.modules = [module for module in model.modules if module != Q]
    return report(model)


def test_left_over(small_model: MakeModel) -> None:
    model = small_model()
    model.stored[f"{Q}.weight"] = model.source.read(f"{Q}.weight")
    model.stored[f"{K}.weight_zero_point"] = torch.zeros(48, 2, dtype=torch.int8)
    model.write()
    found = problems(model)
    assert {line.split(" is left over")[0] for line in found} == {
        f"{K}.weight_zero_point",
        f"{Q}.weight",
    }


def test_quantized_though_ignored(small_model: MakeModel) -> None:
    model = small_model()
    model.config.ignore.append(K)
    model.write()
    found = problems(model)
    assert f"{K}.weight_scale exists, but the config does not quantize {K}" in found
    assert all(line.startswith(f"{K}.") for line in found)


def test_missing_shard(small_model: MakeModel) -> None:
    model = small_model()
    folder = model.write(max_shard_bytes=20_000)
    last = sorted(folder.glob("*.safetensors"))[-1]
    last.unlink()
    (line,) = problems(model)
    assert last.name in line and "not there" in line


@pytest.mark.parametrize("content", [None, "{}", "nonsense", '{"quantization_config": {}}'])
def test_config_that_is_no_help(small_model: MakeModel, content: str | None) -> None:
    model = small_model()
    path = model.write() / "config.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    (line,) = problems(model)
    assert "config.json has no usable quantization_config" in line


def test_config_that_quantizes_nothing(small_model: MakeModel) -> None:
    model = small_model()
    plain = {name: model.source.read(name) for name in model.source}
    model.config.ignore += model.modules
    model.write(plain)
    (line,) = problems(model)
    assert "no quantized module" in line


# -- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "what"),
    [(float("nan"), "not finite"), (float("inf"), "not finite"), (0.0, "zero"), (-1.0, "negative")],
)
@pytest.mark.parametrize(
    ("scheme", "local"),
    [("W4A16", "weight_scale"), ("FP8", "input_scale"), ("NVFP4", "input_global_scale")],
)
def test_bad_scale(
    small_model: MakeModel, scheme: str, local: str, value: float, what: str
) -> None:
    model = small_model(scheme)
    scale = model.stored[f"{Q}.{local}"].clone()
    scale.view(-1)[0] = value
    model.stored[f"{Q}.{local}"] = scale
    model.write()
    (line,) = validate_checkpoint(model.folder, allow_negative=False)
    assert line == f"{Q}.{local} has 1 of {scale.numel()} values that are {what}"


@pytest.mark.parametrize("scheme", ["NVFP4", "MXFP4"])
def test_bad_scale_in_one_byte(small_model: MakeModel, scheme: str) -> None:
    model = small_model(scheme)
    scale = model.stored[f"{Q}.weight_scale"].clone()
    scale.view(torch.uint8)[3, 1] = 0x7F if scheme == "NVFP4" else 0xFF
    model.stored[f"{Q}.weight_scale"] = scale
    model.write()
    (line,) = validate_checkpoint(model.folder)
    assert line == f"{Q}.weight_scale has 1 of {scale.numel()} values that are not finite"


def test_negative_scales_by_consent(small_model: MakeModel) -> None:
    model = small_model()
    model.stored[f"{Q}.weight_scale"] = -model.stored[f"{Q}.weight_scale"]
    model.write()
    assert validate_checkpoint(model.folder, allow_negative=True) == []
    assert validate_checkpoint(model.folder) == [], "every kernel for W4A16 reads them"
    (line,) = validate_checkpoint(model.folder, allow_negative=False)
    assert line.startswith(f"{Q}.weight_scale") and "negative" in line


def test_negative_scales_beside_quantized_activations_need_consent(
    small_model: MakeModel,
) -> None:
    model = small_model("W8A8")
    model.stored[f"{Q}.weight_scale"] = -model.stored[f"{Q}.weight_scale"]
    model.write()
    assert validate_checkpoint(model.folder, allow_negative=True) == []
    (line,) = validate_checkpoint(model.folder)
    assert line.startswith(f"{Q}.weight_scale") and "negative" in line


def test_negative_scales_never_for_floats(small_model: MakeModel) -> None:
    model = small_model("FP8_DYNAMIC")
    model.stored[f"{Q}.weight_scale"] = -model.stored[f"{Q}.weight_scale"]
    model.write()
    (line,) = validate_checkpoint(model.folder, allow_negative=True)
    assert line.startswith(f"{Q}.weight_scale has 48 of 48")


def test_zero_point_outside_the_type(small_model: MakeModel) -> None:
    model = small_model("W4A16_ASYM")
    model.scheme.format = "int-quantized"
    model.config.format = "int-quantized"
    for module in model.modules:
        model.stored.pop(f"{module}.weight_packed")
        model.stored.pop(f"{module}.weight_shape")
        model.stored[f"{module}.weight"] = torch.zeros(48, 256, dtype=torch.int8)
        model.stored[f"{module}.weight_zero_point"] = torch.full((48, 2), 7, dtype=torch.int8)
    model.write()
    assert validate_checkpoint(model.folder) == []
    model.stored[f"{Q}.weight_zero_point"][5, 1] = 8
    model.write()
    (line,) = validate_checkpoint(model.folder)
    assert line == f"{Q}.weight_zero_point has 1 values outside -8 to 7"


def test_wrong_weight_shape(small_model: MakeModel) -> None:
    model = small_model()
    model.stored[f"{Q}.weight_shape"] = torch.tensor([48, 255])
    model.write()
    found = problems(model)
    assert any(f"{Q}.weight_shape says (48, 255); expected (48, 256)" in line for line in found)


def test_cache_scales(small_model: MakeModel) -> None:
    model = small_model()
    model.config.kv_cache_scheme = QuantizationArgs(num_bits=8, type="float", strategy="tensor")
    model.write()
    (line,) = validate_checkpoint(model.folder)
    assert line.startswith("k_scale and v_scale are missing")
    attention = "model.layers.0.self_attn"
    one = torch.ones(1, dtype=torch.bfloat16)
    model.write({**model.stored, f"{attention}.k_scale": one, f"{attention}.v_scale": one})
    assert problems(model) == []
    model.write({**model.stored, f"{attention}.k_scale": one})
    assert problems(model)[0].startswith(f"{attention}.v_scale is missing")
    model.write({**model.stored, f"{attention}.k_scale": one, f"{attention}.v_scale": one * 0})
    assert problems(model) == [f"{attention}.v_scale has 1 of 1 values that are zero"]


# -- fusion -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "local"),
    [
        ("NVFP4", "weight_global_scale"),
        ("NVFP4", "input_global_scale"),
        ("FP8", "weight_scale"),
        ("FP8", "input_scale"),
    ],
)
def test_fused_partners_differ(small_model: MakeModel, scheme: str, local: str) -> None:
    model = small_model(scheme)
    fused = [(Q, K)]
    shared = {
        n: s
        for n in ("weight_global_scale", "input_global_scale", "weight_scale")
        if (s := model.stored.get(f"{Q}.{n}")) is not None and s.numel() == 1
    }
    model.stored.update({f"{K}.{name}": scale for name, scale in shared.items()})
    model.write()
    assert validate_checkpoint(model.folder, fused=fused) == []
    model.stored[f"{K}.{local}"] = model.stored[f"{Q}.{local}"] * 2
    model.write()
    (line,) = validate_checkpoint(model.folder, fused=fused)
    assert line.startswith(f"{K}.{local} is ") and f"{Q}.{local}" in line


def test_fused_partners_may_differ_per_group(small_model: MakeModel) -> None:
    model = small_model("W4A16")
    model.write()
    assert validate_checkpoint(model.folder, fused=[(Q, K)]) == []


def test_half_a_fused_layer(small_model: MakeModel) -> None:
    model = small_model()
    model.write()
    (line,) = validate_checkpoint(model.folder, fused=[(Q, "lm_head"), ("lm_head", "model.norm")])
    assert line == f"lm_head is fused with {Q}, but only one of them is quantized"


# -- against the source -------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_corrupted_weight(small_model: MakeModel, scheme: str) -> None:
    model = small_model(scheme)
    reported = report(model)
    name = next(f"{Q}.{s}" for s in ("weight_packed", "weight") if f"{Q}.{s}" in model.stored)
    damaged = model.stored[name].clone()
    damaged.view(torch.uint8)[7] ^= 0x11
    model.stored[name] = damaged
    model.write()
    assert validate_checkpoint(model.folder) == []  # bytes like any other, without a source
    (line,) = problems(model, reported=reported)
    assert line.startswith(f"{Q}.weight decodes with a relative error of ")


def test_reported_error_is_held_to_one_percent(small_model: MakeModel) -> None:
    model = small_model("W8A8")
    model.write()
    reported = report(model)
    assert problems(model, reported={**reported, Q: reported[Q] / 1.009}) == []
    (line,) = problems(model, reported={**reported, Q: reported[Q] / 1.011})
    assert line.startswith(f"{Q}.weight decodes")


def test_every_weight_is_decoded_and_some_of_them_whole(small_model: MakeModel) -> None:
    model = small_model()
    model.write()
    findings = check_checkpoint(model.folder, source=model.source, digests=False)
    assert findings.problems == [] and findings.rows is not None
    assert (findings.rows.modules, findings.rows.rows, findings.rows.total) == (4, 192, 192)
    # a reported error is held against whatever is decoded whole, which small weights are
    reported = dict.fromkeys(model.modules, 0.0)
    assert len(problems(model, reported=reported, samples=0)) == 4
    written = WrittenCheckpoint(model.folder, None)
    assert _whole(written, model.source, reported, 2) == [model.modules[0], model.modules[-1]]
    assert _whole(written, model.source, reported, 9) == model.modules
    assert _whole(written, model.source, None, 2) == []


def test_reported_module_that_is_not_quantized(small_model: MakeModel) -> None:
    model = small_model()
    model.write()
    (line,) = problems(model, reported={**report(model), "lm_head": 0.1})
    assert line.startswith("lm_head.weight has a reported error")


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", f"{Q}.bias"])
def test_unquantized_tensors_are_kept(small_model: MakeModel, name: str) -> None:
    model = small_model()
    original = model.stored.pop(name)
    model.write()
    assert problems(model) == [f"{name} is in the source, but missing here"]
    model.write({**model.stored, name: original.float()})
    (line,) = problems(model)
    assert line.startswith(f"{name} is torch.float32")
    changed = original.clone()
    changed.view(-1)[0] += 1
    model.write({**model.stored, name: changed})
    assert problems(model) == [f"{name} is not quantized, but its values differ from the source"]
    assert problems(model, same_bytes=False) == []


def test_error_is_one_of_ours() -> None:
    with pytest.raises(CheckpointError, match="out is broken"):
        raise CheckpointInvalid("out is broken")


def test_groups_by_name_and_pattern(small_model: MakeModel) -> None:
    """A module has the scheme of its own name first, then of a pattern, then of its class."""
    model = small_model("W4A16")
    folder = model.write()
    path = folder / "config.json"
    config = json.loads(path.read_text())
    groups = config["quantization_config"]["config_groups"]
    byte_group = json.loads(json.dumps(groups["group_0"]))
    byte_group["weights"]["num_bits"] = 8
    groups["by_pattern"] = {**byte_group, "targets": ["re:.*q_proj"]}
    path.write_text(json.dumps(config))
    found = validate_checkpoint(Path(folder))
    assert {line.split(" ")[0] for line in found} == {
        f"model.layers.{i}.q_proj.weight_packed" for i in (0, 1)
    }
    groups["by_name"] = {**groups["group_0"], "targets": [Q]}
    path.write_text(json.dumps(config))
    found = validate_checkpoint(Path(folder))
    assert {line.split(" ")[0] for line in found} == {"model.layers.1.q_proj.weight_packed"}
