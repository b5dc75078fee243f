"""Algorithms of a user's own: what the engine gives them, and what becomes of their changes.

The values are held against transformers' own forward, seen by plain hooks of torch.
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
from steelyard.algorithms import Algorithm, Block, ExactSum, Largest, Needs, Seen, Smallest
from steelyard.checkpoint.provenance import read_provenance
from steelyard.distributed import Ranks
from steelyard.errors import (
    CalibrationError,
    CheckpointInvalid,
    PipelineError,
    PlanError,
    RecipeError,
)
from steelyard.modifiers import GPTQModifier, Modifier, QuantizationModifier

FP8 = {"scheme": "FP8_DYNAMIC", "ignore": ["lm_head"], "weight_observer": "memoryless_minmax"}
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    with own_registrations():
        yield


@pytest.fixture
def source(tmp_path: Path) -> Path:
    small_model("llama").save_pretrained(tmp_path / "m")
    return tmp_path / "m"


@Modifier.register("Noting")
class Noting(Modifier):
    algorithm: ClassVar[str] = "noting"


def noting(
    needs: Needs, transform: Any = lambda self, block, state: None
) -> tuple[Modifier, list[Seen]]:
    """Return a modifier whose algorithm notes all that it sees."""
    seen: list[Seen] = []

    @Algorithm.register("noting")
    class Note(Algorithm):
        def see(self, state: Any, each: Seen) -> None:
            seen.append(each)

    Note.needs = needs  # type: ignore[assignment,method-assign]
    Note.transform = transform  # type: ignore[method-assign]
    Note.transforms = True
    return Noting, seen  # type: ignore[return-value]


def samples() -> list[torch.Tensor]:
    return [row.unsqueeze(0) for batch in token_batches() for row in batch]


def run(source: Path, *modifiers: Modifier, out: str = "q", **options: Any) -> Path:
    recipe = [*modifiers, QuantizationModifier(**FP8)]
    data = None if options.pop("data", True) is None else samples()
    options.setdefault("shuffle_calibration_samples", False)
    oneshot(source, recipe, data, source.parent / out, **options)
    return source.parent / out


# -- what it sees ---------------------------------------------------------------------------------


def plain(source: Path, name: str) -> list[tuple[Any, Any, Any]]:
    return calls_of(source, name, samples())


@pytest.mark.parametrize("place", ["input", "output"])
def test_inputs_and_outputs(place: str, source: Path) -> None:
    kind, seen = noting(Needs(**{f"{place}s": True}))
    name = "model.layers.1.mlp.up_proj"
    run(source, kind(targets=[name]))
    expected = [args[0] if place == "input" else out for args, _, out in plain(source, name)]
    assert [each.batch for each in seen] == list(range(len(expected)))
    assert {(each.place, each.modules) for each in seen} == {(place, (name,))}
    for each, value in zip(seen, expected, strict=True):
        assert_close(each.value, value, rtol=1e-4, atol=1e-5)


def test_arguments_of_a_parent_module(source: Path) -> None:
    kind, seen = noting(Needs(calls=True))
    name = "model.layers.1.self_attn"
    run(source, kind(targets=[name]))
    for each, (_, kwargs, _) in zip(seen, plain(source, name), strict=True):
        args, given = each.value
        assert each.place == "call" and args == ()
        assert_close(given["hidden_states"], kwargs["hidden_states"], rtol=1e-4, atol=1e-5)
        assert_close(given["position_embeddings"][0], kwargs["position_embeddings"][0])


def test_attention_states(source: Path) -> None:
    """Their attention gives the output of the module: softmax(q k^T) v, written out here."""
    kind, seen = noting(Needs(attention=True, outputs=True))
    name = "model.layers.0.self_attn"
    run(source, kind(targets=[name]))
    by_place = {p: [s.value for s in seen if s.place == p] for p in ("query", "key", "value")}
    o_proj = read(source)[f"{name}.o_proj.weight"]
    expected = [out[0] for _, _, out in plain(source, name)]
    states = zip(by_place["query"], by_place["key"], by_place["value"], expected, strict=True)
    for q, k, v, output in states:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        masked = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        mixed = (masked.softmax(-1) @ v).transpose(1, 2).flatten(2)
        assert_close(mixed @ o_proj.float().t(), output, rtol=1e-4, atol=1e-5)


def test_a_second_pass(source: Path) -> None:
    kind, seen = noting(Needs(inputs=True, passes=2))
    run(source, kind(targets=["model.layers.0.mlp.up_proj"]))
    batches = len(samples())
    assert [(s.turn, s.batch) for s in seen] == [(t, b) for t in (0, 1) for b in range(batches)]
    for first, second in zip(seen[:batches], seen[batches:], strict=True):
        assert torch.equal(first.value, second.value)


def test_original_states_beside_the_quantized_ones(source: Path) -> None:
    found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def transform(self: Algorithm, block: Block, state: Any) -> None:
        if block.originals:
            found[block.name] = [(a.clone(), b.clone()) for a, b in block.originals]

    kind, seen = noting(Needs(originals=True, inputs=True), transform)
    run(source, kind(targets=["LlamaDecoderLayer", "re:.*layers.1.mlp$"]), propagate_error=True)
    expected = plain(source, "model.layers.1")
    for (before, after), (args, _, out) in zip(found["model.layers.1"], expected, strict=True):
        assert_close(before, args[0], rtol=1e-4, atol=1e-5)
        assert_close(after, out, rtol=1e-4, atol=1e-5)
    fed = [s.value for s in seen if s.modules == ("model.layers.1.mlp",)]
    here = plain(source, "model.layers.1.mlp")
    assert any((a - b[0][0]).abs().max() > 1e-3 for a, b in zip(fed, here, strict=True))


def test_gradients_inside_one_block(source: Path) -> None:
    """The gradient of the output's square by the gain of a norm, against finite differences."""
    checked: list[str] = []

    def transform(self: Algorithm, block: Block, state: Any) -> None:
        if block.name != "model.layers.1":
            return
        parameter = block.within["model.layers.1.input_layernorm"].weight
        parameter.requires_grad_(True)
        block.forward(0).square().mean().backward()
        gradient = parameter.grad.clone()
        parameter.requires_grad_(False)
        parameter.grad = None
        i = int(gradient.abs().argmax())
        with torch.no_grad():
            values = []
            for step in (0.05, -0.05):
                parameter[i] += step
                values.append(float(block.forward(0).double().square().mean()))
                parameter[i] -= step
        assert_close(gradient[i].double().item(), (values[0] - values[1]) / 0.1, rtol=2e-2, atol=0)
        checked.append(block.name)

    kind, _ = noting(Needs(gradients=True), transform)
    small_model("llama").float().save_pretrained(source.parent / "m32")
    run(source.parent / "m32", kind(targets=["re:.*input_layernorm$"]))
    assert checked == ["model.layers.1"]


@pytest.mark.parametrize("need", ["originals", "gradients", "layers"])
def test_a_model_as_a_whole_has_no_blocks(need: str, source: Path) -> None:
    kind, _ = noting(Needs(**{need: True}))
    with pytest.raises(
        PlanError, match=r"Noting works block by block, but pipeline=\"basic\" runs"
    ):
        run(source, kind(targets=["re:.*input_layernorm$"]), pipeline="basic")


# -- what it changes ------------------------------------------------------------------------------


def halving(in_place: bool = False) -> Any:
    def transform(self: Algorithm, block: Block, state: Any) -> None:
        for name in block.modules:
            tensor = block.tensor(f"{name}.weight")
            if in_place:
                tensor.mul_(0.5)
            else:
                block.change(f"{name}.weight", tensor * 0.5)

    return transform


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("data", [True, None])
def test_changed_tensors_are_written(in_place: bool, data: Any, source: Path) -> None:

    kind, _ = noting(Needs(inputs=True) if data else Needs(), halving(in_place))
    out = run(source, kind(targets=[NORM.removesuffix(".weight")]), data=data)
    before, after = read(source), read(out)
    assert torch.equal(after[NORM], before[NORM] * 0.5)
    both = before.keys() & after.keys() - {NORM}
    same = [name for name in both if after[name].dtype == before[name].dtype]
    assert len(same) > 5 and all(torch.equal(after[name], before[name]) for name in same)
    provenance = read_provenance(out)
    assert provenance is not None and provenance.changed == [NORM]
    assert f"Noting changed 1 tensor, such as {NORM}" in (out / "report.json").read_text()


def test_later_algorithms_start_from_the_changed_block(source: Path) -> None:
    """A weight that is halved and quantized has half the scale, and the same codes."""
    kind, _ = noting(Needs(), halving())
    name = "model.layers.0.mlp.down_proj"
    changed, unchanged = run(source, kind(targets=[name]), data=None), source.parent / "plain"
    oneshot(source, QuantizationModifier(**FP8), output_dir=unchanged)
    one, other = read(changed), read(unchanged)
    assert torch.equal(one[f"{name}.weight_scale"], other[f"{name}.weight_scale"] / 2)
    codes = [each[f"{name}.weight"].view(torch.uint8) for each in (one, other)]
    assert torch.equal(*codes)


def test_a_loaded_module_gives_the_same(source: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    kind, _ = noting(Needs(inputs=True), halving())
    out = run(source, kind(targets=["re:.*input_layernorm$"]))
    model = AutoModelForCausalLM.from_pretrained(source)
    recipe = [kind(targets=["re:.*input_layernorm$"]), QuantizationModifier(**FP8)]
    oneshot(model, recipe, samples(), tmp_path / "loaded")
    assert_same_tensors(out, tmp_path / "loaded")


def test_a_change_must_fit(source: Path) -> None:
    def transform(self: Algorithm, block: Block, state: Any) -> None:
        block.change(NORM, block.tensor(NORM)[:3])

    kind, _ = noting(Needs(), transform)
    with pytest.raises(PipelineError, match=r"input_layernorm.weight has shape \(64,\) and canno"):
        run(source, kind(targets=["model.layers.1.mlp"]), data=None)


def test_a_tensor_of_another_block_is_refused(source: Path) -> None:
    def transform(self: Algorithm, block: Block, state: Any) -> None:
        block.change(NORM, torch.zeros(64))

    kind, _ = noting(Needs(), transform)
    with pytest.raises(PipelineError, match=f"model.layers.0 has no tensor {NORM}; a block holds"):
        run(source, kind(targets=["model.layers.0.mlp"]), data=None)


def test_nan_is_refused(source: Path) -> None:
    def transform(self: Algorithm, block: Block, state: Any) -> None:
        block.change(NORM, block.tensor(NORM) * float("nan"))

    kind, _ = noting(Needs(), transform)
    with pytest.raises((CheckpointInvalid, ValueError), match=NORM):
        run(source, kind(targets=["model.layers.1.mlp"]), data=None)


# -- recipes --------------------------------------------------------------------------------------


def test_a_modifier_without_an_algorithm_is_refused(source: Path) -> None:
    @Modifier.register("Idle")
    class Idle(Modifier):
        pass

    with pytest.raises(RecipeError, match="Idle names no algorithm, so it would do nothing"):
        run(source, Idle(), data=None)
    with pytest.raises(RecipeError, match="Idle names no algorithm"):
        oneshot(source, "Idle: {}\nQuantizationModifier: {scheme: W4A16}", dry_run=True)


def test_an_unknown_algorithm_is_refused(source: Path) -> None:
    @Modifier.register("Other")
    class Other(Modifier):
        algorithm: ClassVar[str] = "nearst"

    with pytest.raises(RecipeError, match="'nearst', which is not registered: did you mean 'near"):
        run(source, Other(), data=None)


def test_transforms_alone_are_refused_before_any_work(source: Path, tmp_path: Path) -> None:
    kind, seen = noting(Needs(inputs=True), halving())
    recipe = kind(targets=["re:.*input_layernorm$"])
    with pytest.raises(PlanError, match="no modifier of the recipe quantizes: add one that does"):
        oneshot(source, recipe, samples(), tmp_path / "q")
    assert not seen


def mlp_and_attention(**options: Any) -> list[Modifier]:
    gptq = {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32, "type": "int"}}
    return [
        GPTQModifier(
            config_groups={"mlp": {"targets": ["re:.*mlp.*_proj$"], **gptq}}, ignore=["lm_head"]
        ),
        QuantizationModifier(
            scheme="FP8_DYNAMIC",
            targets=["re:.*self_attn.*_proj$"],
            weight_observer="memoryless_minmax",
            **options,
        ),
    ]


def test_two_quantizing_modifiers(source: Path, tmp_path: Path) -> None:
    """Each works as it does alone: attention exactly, the MLP on what quantized attention gives."""
    from transformers import AutoModelForCausalLM

    gptq, fp8 = mlp_and_attention()
    result = oneshot(source, [gptq, fp8], token_batches(), tmp_path / "both")
    oneshot(source, fp8, output_dir=tmp_path / "fp8")
    both, alone = read(tmp_path / "both"), read(tmp_path / "fp8")
    attention = [name for name in alone if "self_attn" in name]
    assert len(attention) == 3 * 4 * 2
    assert all(
        torch.equal(both[n].view(torch.uint8), alone[n].view(torch.uint8)) for n in attention
    )
    assert "model.layers.0.mlp.up_proj.weight_packed" in both
    assert all("loss" in m.details for n, m in result.modules.items() if ".mlp." in n)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "both")
    with torch.no_grad():
        assert bool(torch.isfinite(model(token_batches()[0]).logits).all())
    groups = model.config.quantization_config.quantization_config.config_groups
    assert {g.format for g in groups.values()} == {"pack-quantized", "float-quantized"}


def test_order_of_modifiers_does_not_matter_for_apart_targets(source: Path, tmp_path: Path) -> None:
    one, other = mlp_and_attention()
    oneshot(source, [one, other], token_batches(), tmp_path / "a")
    oneshot(source, [other, one], token_batches(), tmp_path / "b")
    assert_same_tensors(tmp_path / "a", tmp_path / "b")


def test_two_that_claim_one_module_are_refused(source: Path) -> None:
    recipe = [QuantizationModifier(**FP8), GPTQModifier(scheme="W4A16", ignore=["lm_head"])]
    plan = oneshot(source, recipe, dry_run=True).plan
    assert plan.errors[0] == (
        "QuantizationModifier and GPTQModifier both quantize 21 modules such as "
        "model.layers.0.self_attn.q_proj: make their targets differ, or add it to the ignore of one"
    )


def test_two_of_a_kind_have_numbers(source: Path) -> None:
    recipe = [QuantizationModifier(**FP8), QuantizationModifier(**FP8)]
    assert (
        "QuantizationModifier 1 and QuantizationModifier 2 both"
        in (oneshot(source, recipe, dry_run=True).plan.errors[0])
    )


def test_patterns_that_would_match_more_become_names(source: Path, tmp_path: Path) -> None:
    """One modifier ignores what another targets: no single list of patterns says that."""
    from transformers import AutoModelForCausalLM

    mlp = QuantizationModifier(**{**FP8, "ignore": ["lm_head", "re:.*self_attn.*"]})
    attention = QuantizationModifier(scheme="W8A8", targets=["re:.*self_attn.*_proj$"])
    oneshot(source, [mlp, attention], output_dir=tmp_path / "q")
    tensors = read(tmp_path / "q")
    assert tensors["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == torch.int8
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "q")
    with torch.no_grad():
        assert bool(torch.isfinite(model(token_batches()[0]).logits).all())


# -- statistics -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Largest, Smallest, ExactSum])
def test_statistics_against_one_reduction(kind: Any) -> None:
    batches = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)) * 1e3
    statistic = kind()
    for batch in batches:
        statistic.add(batch)
    expected = {
        Largest: batches.amax(0),
        Smallest: batches.amin(0),
        ExactSum: batches.double().sum(0),
    }[kind]
    assert_close(statistic.value, expected, rtol=1e-12, atol=0)
    backwards = kind()
    for batch in batches.flip(0):
        backwards.add(batch)
    backwards.join(Ranks())
    assert torch.equal(backwards.value, statistic.value)
    with pytest.raises(CalibrationError, match=r"has shape \(7,\) and cannot add \(3,\)"):
        statistic.add(torch.zeros(3))
