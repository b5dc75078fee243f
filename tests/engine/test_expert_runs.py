"""Calibrated runs of mixtures of experts: tokens follow the router, whatever their number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_families import expert_model, saved
from families import assert_same_tensors, read
from interruption import Stop, small_steps, stop_at_mark
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from steelyard import oneshot
from steelyard.engine import paired, passes
from steelyard.errors import CalibrationError, PlanError
from steelyard.modifiers import GPTQModifier, IMatrixGatherer, QuantizationModifier

EXPERTS = "model.layers.0.mlp.experts"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
KV = {"num_bits": 8, "type": "float", "strategy": "tensor"}


def tokens(count: int = 6, length: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 128, (length,), generator=generator) for _ in range(count)]


def groups(**weights: Any) -> dict[str, Any]:
    whole = {"num_bits": 4, "strategy": "group", "group_size": 32, **weights}
    return {"group_0": {"targets": ["Linear"], "weights": whole}}


RECIPES: dict[str, Any] = {
    "GPTQ": lambda: GPTQModifier(config_groups=groups(), ignore=["lm_head"]),
    "FP8": lambda: QuantizationModifier(scheme="FP8", ignore=["lm_head"]),
    "NVFP4": lambda: QuantizationModifier(scheme="NVFP4", ignore=["lm_head"]),
    "importance": lambda: [
        IMatrixGatherer(ignore=["lm_head"]),
        QuantizationModifier(config_groups=groups(observer="imatrix_mse"), ignore=["lm_head"]),
    ],
    "KV cache": lambda: GPTQModifier(
        config_groups=groups(), kv_cache_scheme=KV, ignore=["lm_head"]
    ),
}


def run(model: Any, output: Path | None, recipe: str, data: Any = None, **options: Any) -> Any:
    data = tokens() if data is None else data
    return oneshot(model, RECIPES[recipe](), data, output, show_progress=False, **options)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("qwen3_moe", tmp_path_factory.mktemp("experts") / "m")


@contextmanager
def routed_to(chosen: list[int]) -> Iterator[None]:
    """Let every router send every token to these experts, with equal weights."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    def forward(self: Any, hidden: torch.Tensor) -> Any:
        hidden = hidden.reshape(-1, hidden.shape[-1])
        index = torch.tensor(chosen).expand(len(hidden), -1)
        weights = torch.full(index.shape, 1 / len(chosen), dtype=hidden.dtype)
        return hidden @ self.weight.t(), weights, index

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen3MoeTopKRouter, "forward", forward)
        yield


@pytest.mark.parametrize("recipe", RECIPES)
def test_folder_and_module_give_the_same_bytes(recipe: str, source: Path, tmp_path: Path) -> None:
    result = run(source, tmp_path / "a", recipe)
    model = AutoModelForCausalLM.from_pretrained(source)
    run(model, tmp_path / "b", recipe)
    assert_same_tensors(tmp_path / "a", tmp_path / "b")
    experts = {name: m for name, m in result.modules.items() if ".experts." in name}
    assert len(experts) == 2 * 4 * 3
    for layer in range(2):
        seen = [experts[f"model.layers.{layer}.mlp.experts.{n}.up_proj"].tokens for n in range(4)]
        assert sum(seen) == 2 * 96, "two experts for each token"
    left = {item.name: item.reason for item in result.plan.left}
    assert "model.layers.0.mlp.gate" in left, "the router stays as it is"


@pytest.mark.parametrize("recipe", ["GPTQ", "FP8", "importance"])
def test_neither_threads_nor_room_change_a_bit(
    recipe: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that wait, that start again for lack of memory, or come one by one to hooks."""
    run(source, tmp_path / "a", recipe)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        run(source, tmp_path / "b", recipe)
    finally:
        torch.set_num_threads(threads)
    assert_same_tensors(tmp_path / "a", tmp_path / "b")
    monkeypatch.setattr(paired, "holding_budget", lambda device: 0)
    monkeypatch.setattr(passes, "CONCURRENT_BYTES", 1)
    run(source, tmp_path / "c", recipe)
    assert_same_tensors(tmp_path / "a", tmp_path / "c")
    if recipe != "GPTQ":  # which solves later modules with what the earlier ones give
        monkeypatch.setattr(passes.Passes, "_stages", lambda self, part, flow: None)
        run(source, tmp_path / "d", recipe)
        assert_same_tensors(tmp_path / "a", tmp_path / "d")


@pytest.mark.parametrize("recipe", ["GPTQ", "FP8"])
def test_resumed_run_writes_the_same(
    recipe: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(source, tmp_path / "a", recipe)
    with small_steps():
        with monkeypatch.context() as patch, pytest.raises(Stop):
            stop_at_mark(patch, 1)
            run(source, tmp_path / "b", recipe)
        run(source, tmp_path / "b", recipe)
    assert_same_tensors(tmp_path / "a", tmp_path / "b")


# -- few tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_that_no_token_reaches_are_quantized_and_named(
    recipe: str, source: Path, tmp_path: Path
) -> None:
    with routed_to([1]):
        result = run(source, tmp_path / "q", recipe)
    counts = {n: result.modules[f"{EXPERTS}.{n}.gate_proj"].tokens for n in range(4)}
    assert counts == {0: 0, 1: 96, 2: 0, 3: 0}
    starved = [note for note in result.notes if note.startswith(EXPERTS)]
    assert len(starved) == 1 and "0 (0 tokens), 2 (0 tokens), 3 (0 tokens)" in starved[0]
    written = read(tmp_path / "q")
    assert all(bool(torch.isfinite(t.float()).all()) for n, t in written.items() if "scale" in n)
    if recipe == "GPTQ":
        for name in (f"{EXPERTS}.{n}.{leaf}" for n in range(4) for leaf in PROJECTIONS):
            details = result.modules[name].details
            assert details["fallback"] is None, "solved with the Hessian of the layer"
            assert details["loss"] > 0


@pytest.mark.filterwarnings("ignore:calibrating on 1 token only")
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_token_in_all(recipe: str, source: Path, tmp_path: Path) -> None:
    result = run(source, tmp_path / "q", recipe, [torch.tensor([5])])
    tokens = [result.modules[f"{EXPERTS}.{n}.up_proj"].tokens for n in range(4)]
    assert sorted(tokens) == [0, 0, 1, 1]


def test_ranges_cover_all_tokens_and_change_nothing_else(source: Path, tmp_path: Path) -> None:
    """With every token in every range, no weight and no other layer changes."""
    groups = {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8,
                "strategy": "tensor",
                "dynamic": False,
                "observer": "static_minmax",
            },
        }
    }
    for output, all_experts in (("a", True), ("b", False)):
        recipe = GPTQModifier(config_groups=groups, ignore=["lm_head"])
        oneshot(
            source,
            recipe,
            tokens(),
            tmp_path / output,
            moe_calibrate_all_experts=all_experts,
            propagate_error=False,
        )
    every, own = read(tmp_path / "a"), read(tmp_path / "b")
    differing = {name for name in every if not torch.equal(every[name], own[name])}
    assert differing and all(".experts." in n and "input_scale" in n for n in differing)
    for name in (n for n in every if n.endswith("down_proj.input_scale")):
        assert every[name] >= own[name], "more tokens make no range smaller"


def test_experts_need_tokens_where_ranges_are_their_own(source: Path, tmp_path: Path) -> None:
    """Integer scales are each expert's own, so one without tokens has none."""
    groups = {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "strategy": "channel"},
            "input_activations": {"num_bits": 8, "strategy": "tensor", "dynamic": False},
        }
    }
    recipe = QuantizationModifier(config_groups=groups, ignore=["lm_head"])
    with routed_to([1]), pytest.raises(CalibrationError, match=r"experts\.0\.gate_proj"):
        oneshot(source, recipe, tokens(), tmp_path / "q", moe_calibrate_all_experts=False)
    with routed_to([1]):
        oneshot(source, recipe, tokens(), tmp_path / "q", resume=False)
    assert f"{EXPERTS}.0.gate_proj.input_scale" in read(tmp_path / "q")


@pytest.mark.parametrize(("recipe", "leaf"), [("FP8", "scale"), ("NVFP4", "global_scale")])
def test_inputs_of_all_experts_have_one_scale(
    recipe: str, leaf: str, source: Path, tmp_path: Path
) -> None:
    run(source, tmp_path / "q", recipe, moe_calibrate_all_experts=False)
    written = read(tmp_path / "q")
    for projection in PROJECTIONS:
        scales = [written[f"{EXPERTS}.{n}.{projection}.input_{leaf}"] for n in range(4)]
        for other in scales[1:]:
            assert_close(other, scales[0], rtol=0, atol=0)
    own = [written[f"{EXPERTS}.{n}.gate_proj.weight_{leaf}"] for n in range(4)]
    assert len({float(scale) for scale in own}) > 1, "weights keep scales of their own"


# -- what stays -----------------------------------------------------------------------------------


def test_half_of_the_experts_are_refused(source: Path, tmp_path: Path) -> None:
    recipe = GPTQModifier(config_groups=groups(), ignore=["lm_head", "re:.*experts\\.3\\..*"])
    with pytest.raises(PlanError, match=r"experts\.3.* stacks all experts of .*ignore them all"):
        oneshot(source, recipe, tokens(), tmp_path / "q")


@pytest.mark.parametrize("family", ["qwen2_moe", "llama4_text"])
def test_routers_stay_unless_they_are_named(family: str) -> None:
    model = expert_model(family, torch.bfloat16)
    recipe = QuantizationModifier(config_groups=groups(), ignore=["lm_head"])
    plan = oneshot(model, recipe, dry_run=True).plan
    routers = [item for item in plan.left if item.reason.startswith("sends tokens")]
    assert routers and not any(".experts." in item.name for item in routers)
    assert not any(p.name in {item.name for item in routers} for p in plan.quantized)
    named = groups()
    named["group_0"]["targets"] = ["Linear", f"re:.*{routers[0].name.rpartition('.')[2]}$"]
    recipe = QuantizationModifier(config_groups=named, ignore=["lm_head"])
    plan = oneshot(model, recipe, dry_run=True).plan
    assert routers[0].name in {planned.name for planned in plan.quantized}


def test_experts_that_are_ignored_stay_as_they_are_stored(tmp_path: Path) -> None:
    """Stacked in the files, they stay stacked, from a folder and from a module."""
    folder = saved("granitemoe", tmp_path / "m")
    recipe = GPTQModifier(config_groups=groups(), ignore=["lm_head", "re:.*experts.*"])
    oneshot(folder, recipe, tokens(), tmp_path / "a")
    oneshot(AutoModelForCausalLM.from_pretrained(folder), recipe, tokens(), tmp_path / "b")
    assert_same_tensors(tmp_path / "a", tmp_path / "b")
    before, after = read(folder), read(tmp_path / "a")
    stacks = [name for name in before if "_linear.weight" in name]
    assert len(stacks) == 4
    assert_close({n: after[n] for n in stacks}, {n: before[n] for n in stacks}, rtol=0, atol=0)


def test_tensors_that_the_class_drops_stay(tmp_path: Path) -> None:
    """Layers that predict more than one token, which transformers does not load."""
    from safetensors.torch import load_file, save_file

    folder = saved("qwen3_moe", tmp_path / "m")
    file = folder / "model.safetensors"
    more = {"mtp.layers.0.self_attn.q_proj.weight": torch.randn(64, 64).bfloat16()}
    save_file({**load_file(file), **more}, file, metadata={"format": "pt"})
    run(folder, tmp_path / "a", "GPTQ")
    assert_close({n: read(tmp_path / "a")[n] for n in more}, more, rtol=0, atol=0)
    recipe = QuantizationModifier(config_groups=groups(), ignore=["lm_head"])
    result = oneshot(folder, recipe, None, tmp_path / "b")
    assert "mtp.layers.0.self_attn.q_proj" in result.modules
