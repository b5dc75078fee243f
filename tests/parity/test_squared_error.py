"""The error that is reported of a stored weight, against compressed-tensors' decompression."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import preset_name_to_scheme

from steelyard.formats import stored_as, stored_tensors
from steelyard.kernels.pack import squared_error
from steelyard.observers import Observer

SCHEMES = ["W4A16", "W4A16_ASYM", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4A16"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scheme_name", SCHEMES)
def test_is_that_of_the_decompressed_weight(isa: str, scheme_name: str, dtype: torch.dtype) -> None:
    scheme = preset_name_to_scheme(scheme_name, ["Linear"])
    args = scheme.weights
    weight = (torch.randn(130, 384, generator=torch.Generator().manual_seed(3)) * 0.1).to(dtype)
    qparams = Observer.load_from_registry("memoryless_mse", base_name="weight", args=args)(
        weight
    ).get_qparams()
    scale, zero_point, shared = qparams["scale"], qparams["zero_point"], qparams["global_scale"]
    zero_point = None if args.symmetric else zero_point
    got = [
        squared_error(weight, scale, zero_point, args, shared, backend=backend)
        for backend in ("compiled", "reference")
    ]
    state = {f"weight_{k}": v for k, v in qparams.items() if v is not None}
    stored = stored_tensors(weight, state, scheme)
    if stored["weight_scale"].dtype in (torch.bfloat16, torch.float16):  # decode in fp32
        stored["weight_scale"] = stored["weight_scale"].float()
    decoded = stored_as(scheme).compressor.decompress(stored, scheme)["weight"]
    expected = float((decoded.double() - weight.double()).square().sum())
    rounding = 0.02 if decoded.dtype != torch.float32 else 1e-4
    assert got[0] == pytest.approx(got[1], rel=1e-5)
    assert got[0] == pytest.approx(expected, rel=rounding)
