"""Packed bytes against compressed-tensors' own compressors."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from torch.testing import assert_close

from steelyard.errors import StrategyError
from steelyard.kernels.pack import quantize_and_pack
from steelyard.observers import Observer

FORMATS = {
    "W4A16": "pack-quantized",
    "W4A16_ASYM": "pack-quantized",
    "W8A16": "pack-quantized",
    "W8A8": "int-quantized",
    "FP8": "float-quantized",
    "FP8_DYNAMIC": "float-quantized",
    "FP8_BLOCK": "float-quantized",
    "NVFP4A16": "nvfp4-pack-quantized",
    "MXFP4A16": "mxfp4-pack-quantized",
    "MXFP8A16": "mxfp8-quantized",
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weight(dtype: torch.dtype, rows: int) -> torch.Tensor:
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)) * 0.05
    x[0, :5] = torch.tensor([0.0, -0.0, 1e-6, -1e-6, 0.4])
    x[1] = 0
    return x.to(dtype)


@pytest.mark.parametrize("backend", ["compiled", "reference"])
@pytest.mark.parametrize("rows", [32, 37])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme_name", FORMATS)
def test_bytes(isa: str, scheme_name: str, dtype: torch.dtype, rows: int, backend: str) -> None:
    scheme = preset_name_to_scheme(scheme_name, ["Linear"])
    x = weight(dtype, rows)
    observer = Observer.load_from_registry(
        "memoryless_minmax", base_name="weight", args=scheme.weights
    )
    q = observer(x).get_qparams()
    state = {"weight": x, "weight_scale": q["scale"], "weight_zero_point": q["zero_point"]}
    if q["global_scale"] is not None:
        state["weight_global_scale"] = q["global_scale"]
    expected = compress(FORMATS[scheme_name], state, scheme)
    packed = quantize_and_pack(
        x,
        q["scale"],
        q["zero_point"],
        scheme.weights,
        q["global_scale"],
        packed=FORMATS[scheme_name] == "pack-quantized",
        backend=backend,
    )
    assert packed.dtype == expected.dtype
    assert_close(packed.view(torch.uint8), expected.contiguous().view(torch.uint8), rtol=0, atol=0)


def compress(name: str, state: dict[str, torch.Tensor], scheme: object) -> torch.Tensor:
    compressed = BaseCompressor.get_value_from_registry(name).compress(dict(state), scheme)
    return compressed["weight_packed"] if "weight_packed" in compressed else compressed["weight"]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("columns", [32, 40, 97])
def test_words_of_every_width(isa: str, bits: int, columns: int) -> None:
    """The compiled words against the reference's; widths that straddle words among them."""
    args = preset_name_to_scheme("W8A8", ["Linear"]).weights.model_copy(update={"num_bits": bits})
    x = torch.randn(9, columns, generator=torch.Generator().manual_seed(bits))
    scale, _ = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=args)(x)
    both = [quantize_and_pack(x, scale, None, args, backend=b) for b in ("compiled", "reference")]
    assert both[0].shape == (9, -(-columns * bits // 32))
    assert_close(*both, rtol=0, atol=0)


def test_exact_is_never_worse(isa: str) -> None:
    """bf16 division misplaces values near the middle of two codes; fp32 division does not."""
    args = preset_name_to_scheme("W8A8", ["Linear"]).weights
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16)
    scale, _ = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=args)(x)

    def error(exact: bool) -> torch.Tensor:
        codes = quantize_and_pack(x, scale, None, args, packed=False, exact=exact)
        return (codes.double() * scale.double() - x.double()).abs()

    assert bool((error(True) <= error(False) + 1e-12).all())
    assert float(error(True).sum()) < float(error(False).sum())


def test_refusals() -> None:
    args = preset_name_to_scheme("NVFP4A16", ["Linear"]).weights
    with pytest.raises(StrategyError, match="two columns to a byte"):
        quantize_and_pack(torch.ones(2, 3), torch.ones(2, 1), None, args)
    with pytest.raises(StrategyError, match="two dimensions"):
        quantize_and_pack(torch.ones(2, 3, 4), torch.ones(2, 1), None, args)
