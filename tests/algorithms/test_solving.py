"""Algorithms that quantize: what the engine shows them before `solve`, and what `solve` may do.

As in test_algorithm.py, the values are held against transformers' own forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from families import assert_same_tensors, read, small_model, token_batches
from module_calls import calls_of
from pages import own_registrations
from torch.testing import assert_close

from steelyard import oneshot
from steelyard.algorithms import Algorithm, Block, ModuleResult, Needs, Seen
from steelyard.algorithms.nearest import Nearest
from steelyard.errors import PipelineError
from steelyard.modifiers import Modifier, QuantizationModifier

DOWN = "model.layers.1.mlp.down_proj"
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    with own_registrations():
        yield


@pytest.fixture
def source(tmp_path: Path) -> Path:
    small_model("llama").float().save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def samples() -> list[torch.Tensor]:
    return [row.unsqueeze(0) for batch in token_batches() for row in batch]


def run(
    source: Path,
    wanted: Needs,
    solving: Any = lambda block: None,
    targets: str = DOWN,
    propagate: bool = False,
    **options: Any,
) -> list[Seen]:
    """Quantize one module with an algorithm that notes all that it sees; return it."""
    seen: list[Seen] = []

    @Modifier.register("Own")
    class Own(QuantizationModifier):
        algorithm: ClassVar[str] = "own"

    @Algorithm.register("own")
    class OwnAlgorithm(Nearest):
        streams = False
        needs = wanted  # type: ignore[assignment]

        def see(self, state: Any, each: Seen) -> None:
            seen.append(each)

        def solve(self, block: Block, state: Any) -> dict[str, ModuleResult]:
            solving(block)
            return super().solve(block, state)

    recipe = Own(scheme="FP8_DYNAMIC", targets=[targets], **options)
    given = {"shuffle_calibration_samples": False, "propagate_error": propagate}
    oneshot(source, recipe, samples(), source.parent / "q", **given)
    return seen


@pytest.mark.parametrize("place", ["input", "output", "call"])
@pytest.mark.parametrize("passes", [1, 2])
def test_values_at_a_quantized_module(place: str, passes: int, source: Path) -> None:
    seen = run(source, Needs(**{f"{place}s": True}, passes=passes))
    expected = calls_of(source, DOWN, samples())
    order = [(turn, batch) for turn in range(passes) for batch in range(len(expected))]
    assert [(each.turn, each.batch) for each in seen] == order
    assert {(each.place, each.modules) for each in seen} == {(place, (DOWN,))}
    for each in seen:
        args, _, out = expected[each.batch]
        value = {"input": each.value, "output": each.value, "call": each.value[0]}[place]
        value = value[0] if place == "call" else value
        assert_close(value, out if place == "output" else args[0], rtol=1e-4, atol=1e-5)


def test_attention_states_beside_a_quantized_cache(source: Path) -> None:
    seen = run(source, Needs(attention=True), targets="re:.*o_proj$", kv_cache_scheme=CACHE)
    name = "model.layers.1.self_attn"
    expected = [out for _, _, out in calls_of(source, f"{name}.v_proj", samples())]
    values = [each.value for each in seen if each.place == "value" and each.modules == (name,)]
    for value, out in zip(values, expected, strict=True):
        assert_close(value.transpose(1, 2).flatten(2), out, rtol=1e-4, atol=1e-5)


def test_targets_without_attention_states_are_refused(source: Path) -> None:
    with pytest.raises(PipelineError, match=r"layers\.1 has attention states, but .*down_proj has"):
        run(source, Needs(attention=True))


def test_originals_while_modules_are_solved(source: Path) -> None:
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(block: Block) -> None:
        if block.name == "model.layers.1":
            found.extend(block.originals)

    run(source, Needs(originals=True), note)
    expected = calls_of(source, "model.layers.1", samples())
    for (before, after), (args, _, out) in zip(found, expected, strict=True):
        assert_close(before, args[0], rtol=1e-4, atol=1e-5)
        assert_close(after, out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("propagate", [False, True])
def test_gradients_while_modules_are_solved(propagate: bool, source: Path) -> None:
    """The gradient of the block's output by a weight, against that of transformers' own layer."""
    found: list[torch.Tensor] = []

    def differentiate(block: Block) -> None:
        if DOWN not in block.modules:
            return
        weight = block.modules[DOWN].weight
        weight.requires_grad_(True)
        block.forward(0).square().mean().backward()
        found.append(weight.grad.clone())
        weight.requires_grad_(False)
        weight.grad = None

    run(source, Needs(gradients=True), differentiate, propagate=propagate)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    kept: list[torch.Tensor] = []
    layer = model.get_submodule("model.layers.1")
    layer.register_forward_hook(lambda _m, _args, out: kept.append(out))
    model(input_ids=samples()[0], use_cache=False)
    kept[0].square().mean().backward()
    assert_close(found[0], model.get_submodule(DOWN).weight.grad, rtol=1e-3, atol=1e-7)


def test_batches_run_only_for_those_that_say_so(source: Path) -> None:
    def solving(block: Block) -> None:
        if block.modules:
            block.forward(0)

    with pytest.raises(PipelineError, match=r"unless the algorithm states Needs\(gradients=True\)"):
        run(source, Needs(inputs=True), solving)


# -- several stages ---------------------------------------------------------------------------


MLP = "GPTQModifier: {scheme: W8A16, targets: ['re:.*mlp.*_proj$']}"
ATTENTION = "QuantizationModifier: {scheme: FP8_DYNAMIC, targets: ['re:.*self_attn.*_proj$']}"


def test_modifiers_in_several_stages_are_those_of_one(tmp_path: Path) -> None:
    small_model("llama", hidden_size=128, intermediate_size=128).save_pretrained(tmp_path / "m")
    one = f"a_stage:\n  a_modifiers:\n    {MLP}\n    {ATTENTION}\n"
    two = f"a_stage:\n  a_modifiers:\n    {MLP}\nb_stage:\n  b_modifiers:\n    {ATTENTION}\n"
    for name, recipe in (("one", one), ("two", two)):
        oneshot(tmp_path / "m", recipe, token_batches(), tmp_path / name)
    assert_same_tensors(tmp_path / "one", tmp_path / "two")
    written = read(tmp_path / "two")
    assert "model.layers.0.mlp.up_proj.weight_packed" in written
    assert written["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn


def test_inputs_of_the_unquantized_model_beside_those_of_the_quantized(source: Path) -> None:
    needs = Needs(inputs=True, staged=True, propagate=True, original_inputs=True)
    seen = run(source, needs, targets="re:.*_proj$", propagate=True)
    assert {name for each in seen for name in each.modules} >= {DOWN, DOWN.replace("1", "0")}
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.o_proj", DOWN):
        expected = calls_of(source, name, samples())
        found = [each for each in seen if name in each.modules]
        assert [each.batch for each in found] == list(range(len(expected)))
        for each, (args, _, _) in zip(found, expected, strict=True):
            assert each.original is not None
            assert_close(each.original, args[0], rtol=1e-4, atol=1e-5)
            drifted = not torch.equal(each.original, each.value)
            assert drifted == (name != "model.layers.0.self_attn.q_proj")
