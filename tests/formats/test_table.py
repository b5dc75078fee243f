"""One descriptor per format, and nobody else who knows what it holds."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from stored_parameters import calibrate
from torch.testing import assert_close

import steelyard
from steelyard.errors import StrategyError
from steelyard.formats import DENSE, FORMATS, format_named, stored_as, stored_tensors, tensor_names

SOURCE = Path(steelyard.__file__).parent
PRESETS = [name for name, preset in PRESET_SCHEMES.items() if preset.get("weights") is not None]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def test_a_format_is_listed_under_its_own_name() -> None:
    for name, format in FORMATS.items():
        assert (format.name, format_named(name)) == (name, format)
        assert format.description
    assert len({format.description for format in FORMATS.values()}) == len(FORMATS)


def test_every_preset_has_a_format_with_a_compressor() -> None:
    for name in PRESETS:
        format = stored_as(preset_name_to_scheme(name, ["Linear"]))
        assert format.name != DENSE
        assert format.compressor is BaseCompressor.get_value_from_registry(format.name)


def test_unknown_format() -> None:
    with pytest.raises(StrategyError, match="did you mean 'int-quantized'"):
        format_named("in-quantized")


@pytest.mark.parametrize("name", PRESETS)
def test_grid_is_that_of_the_codes(name: str) -> None:
    """Every decoded weight is a code of the type, times the step, from the offset on."""
    scheme = preset_name_to_scheme(name, ["Linear"])
    args = scheme.weights
    assert args is not None
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)) * 0.05
    format = stored_as(scheme)
    qparams = {k: v for k, v in calibrate(weight, scheme).items() if k.startswith("weight_")}
    stored = stored_tensors(weight, qparams, scheme)
    grid = format.grid(stored, scheme)
    if args.type == "float" and args.num_bits == 6:
        assert grid is None
        return
    assert grid is not None
    codes = (format.decode(stored, scheme) - grid.offset) / grid.step
    if args.type == "int":
        expected = codes.round()
        assert expected.min() >= -(2 ** (args.num_bits - 1))
        assert expected.max() <= 2 ** (args.num_bits - 1) - 1
    elif args.num_bits == 8:
        expected = codes.to(torch.float8_e4m3fn).float()
    else:
        nearest = (codes.abs()[..., None] - E2M1).abs().argmin(-1)
        expected = torch.copysign(E2M1[nearest], codes)
    assert_close(codes, expected, rtol=0.02, atol=1e-3)  # decoded in bf16 where scales are codes


NAMES = {
    *FORMATS,
    *(getattr(tensor_names, each) for each in tensor_names.__all__ if each.isupper()),
}
NAMES -= {"weight", "dense"}  # which are words of torch, and of layers, as well
# packages that ask the descriptor; those below set parameters on modules by these names
ASKING = ("checkpoint", "cli", "engine", "evaluate", "model", "modifiers", "plan", "report")


def named_in(source: str) -> list[str]:
    """Return the names of formats and stored tensors that stand in a source as text."""
    nodes = ast.walk(ast.parse(source))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return sorted(text for text in texts if isinstance(text, str) and text in NAMES)


def test_only_formats_names_formats_and_their_tensors() -> None:
    found = {
        str(path.relative_to(SOURCE)): names
        for package in ASKING
        for path in sorted((SOURCE / package).rglob("*.py"))
        if (names := named_in(path.read_text("utf-8")))
    }
    assert found == {}


def test_the_search_finds_names() -> None:
    source = 'if format == "pack-quantized":\n    x = t["weight_packed"]\n'
    assert named_in(source) == ["pack-quantized", "weight_packed"]
