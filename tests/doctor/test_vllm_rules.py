"""vLLM's rules for schemes, case by case; each is written down in its sources."""

from __future__ import annotations

from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

from steelyard.doctor.vllm_rules import ServedLayer, Unservable, VllmConfig, vllm_layers
from steelyard.doctor.vllm_schemes import check_cache, vllm_scheme
from steelyard.formats import format_of

QKV = ("a.q_proj", "a.k_proj", "a.v_proj")
GATE_UP = ("m.gate_proj", "m.up_proj")
EXPERTS = tuple(f"m.experts.{i}.{leaf}" for i in (0, 1) for leaf in ("w1", "w2", "w3"))


def scheme(targets: list[str], bits: int, ignore: list[str], *names: str) -> list[int | None]:
    """Return the bits of each layer; the first group has 4 with these targets, `Linear` has 8."""
    groups: dict[str, Any] = {"a": {"targets": targets, "weights": {"num_bits": 4}}}
    if bits:
        groups["b"] = {"targets": ["Linear"], "weights": {"num_bits": bits}}
    config = VllmConfig(QuantizationConfig(config_groups=groups, ignore=ignore))
    found = [config.scheme_of(layer) for layer in vllm_layers(names)]
    return [
        None if each is None or each.weights is None else each.weights.num_bits for each in found
    ]


def test_layers() -> None:
    modules = [*QKV, "a.o_proj", "m.gate", *EXPERTS, "lm_head", "embed_tokens", *GATE_UP]
    assert list(vllm_layers(modules)) == [
        ServedLayer("a.qkv_proj", "ParallelLinear", QKV),
        ServedLayer("a.o_proj", "ParallelLinear", ("a.o_proj",)),
        ServedLayer("m.gate", "ParallelLinear", ("m.gate",)),
        ServedLayer("lm_head", "ParallelLMHead", ("lm_head",)),
        ServedLayer("embed_tokens", "VocabParallelEmbedding", ("embed_tokens",)),
        ServedLayer("m.gate_up_proj", "ParallelLinear", GATE_UP),
        ServedLayer(
            "m.experts",
            "RoutedExperts",
            (EXPERTS[0], EXPERTS[2], *EXPERTS[3::2], EXPERTS[1], EXPERTS[4]),
        ),
    ]


@pytest.mark.parametrize(
    ("targets", "others", "ignore", "names", "expected"),
    [
        (["Linear"], 0, [], QKV, [4]),
        (["re:.*q_proj"], 8, [], QKV, [8]),  # the class wins over the parts
        (["re:.*v_proj"], 8, [], QKV, [4]),  # which matches qkv_proj
        (["re:.*up_proj"], 8, [], GATE_UP, [4]),
        (list(QKV), 0, [], QKV, [4]),
        (list(QKV[:2]), 0, [], QKV, [None]),  # all parts must match
        (["a.qkv_proj"], 8, [], QKV, [4]),
        (["Linear"], 0, list(QKV), QKV, [None]),
        (["Linear"], 0, ["a.qkv_proj"], QKV, [None]),
        (["Linear"], 0, [], ("lm_head", "embed_tokens"), [None, None]),
        (["lm_head", "Embedding"], 0, [], ("lm_head", "embed_tokens"), [4, 4]),
        (["linear"], 0, [], ("a.o_proj",), [4]),  # any case
        (["Linear"], 0, [], ("m.gate",), [None]),  # a router
        (["re:.*w[123]"], 0, [], EXPERTS, [None]),  # looked up by other names
        (["re:.*(gate|up|down)_proj"], 8, [], EXPERTS, [4]),
        (["Linear"], 0, [], EXPERTS, [4]),
        (["Linear"], 0, ["re:.*experts.1.*"], EXPERTS, [4]),  # only expert 0 is looked at
        (["Linear"], 0, ["re:.*experts.0.*"], EXPERTS, [None]),
    ],
)
def test_scheme(
    targets: list[str],
    others: int,
    ignore: list[str],
    names: tuple[str, ...],
    expected: list[int | None],
) -> None:
    assert scheme(targets, others, ignore, *names) == expected


@pytest.mark.parametrize(("ignore", "names"), [(["a.q_proj"], QKV), (["re:.*down_proj"], EXPERTS)])
def test_refused(ignore: list[str], names: tuple[str, ...]) -> None:
    with pytest.raises(Unservable, match=r"ignore names a\.q_proj|several schemes"):
        scheme(["Linear"], 0, ignore, *names)


SERVED = {
    "W4A16": "WNA16",
    "W4A16_ASYM": "WNA16",
    "W8A16": "WNA16",
    "W8A8": "W8A8Int8",
    "FP8": "W8A8Fp8",
    "FP8_DYNAMIC": "W8A8Fp8",
    "FP8_BLOCK": "W8A8Fp8",
    "NVFP4A16": "W4A4Fp4 (16-bit activations)",
    "NVFP4": "W4A4Fp4",
    "MXFP4A16": "W4A4Mxfp4",
    "MXFP4": "W4A4Mxfp4",
    "MXFP8": "W8A8Mxfp8",
}


@pytest.mark.parametrize("name", sorted(SERVED.keys() & PRESET_SCHEMES.keys()))
def test_presets(name: str) -> None:
    given = preset_name_to_scheme(name, ["Linear"])
    assert vllm_scheme(given, format_of(given)) == SERVED[name]


@pytest.mark.parametrize(
    ("name", "format"), [("W8A16", "int-quantized"), ("W8A8", "mixed-precision")]
)
def test_formats_that_no_scheme_reads(name: str, format: str) -> None:
    with pytest.raises(Unservable, match=f"stored as {format}"):
        vllm_scheme(preset_name_to_scheme(name, ["Linear"]), format)


def test_cache() -> None:
    config = QuantizationConfig(config_groups={}, kv_cache_scheme={"num_bits": 8, "type": "int"})
    with pytest.raises(Unservable, match="8-bit floats"):
        check_cache(config.kv_cache_scheme)
