"""Rotations that fold into the weights: the model stays the same, whatever its architecture.

Oracles are transformers' own logits, of models in fp64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expert_families import expert_model
from families import assert_same_tensors, read, small_model, token_batches
from forked import start_forked
from interruption import Stop, small_steps, stop_at_mark
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

from steelyard import oneshot
from steelyard.algorithms.spinquant import SpinQuant
from steelyard.checkpoint.provenance import read_provenance
from steelyard.cli.app import run as steelyard
from steelyard.errors import PlanError, RecipeError
from steelyard.model.rewrites import rewrite_source
from steelyard.model.source import Source
from steelyard.model.untying import tied_heads
from steelyard.modifiers import GPTQModifier, QuantizationModifier
from steelyard.modifiers.awq import AWQModifier
from steelyard.modifiers.smoothing import SmoothQuantModifier
from steelyard.modifiers.spinquant import SpinQuantModifier
from steelyard.plan.plan import make_plan
from steelyard.recipes import load_recipe

TOKENS = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(3))
SMALL = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "pad_token_id": 0,
}
EIGHT_BITS = {
    "targets": ["Linear"],
    "weights": {
        "num_bits": 8,
        "strategy": "group",
        "group_size": 16,
        "observer": "memoryless_minmax",
    },
}
ROUNDED = QuantizationModifier(
    config_groups={"all": EIGHT_BITS}, ignore=["lm_head", "re:.*mlp.gate$"]
)


def uneven(model: Any) -> Any:
    """Give norms, biases and a few channels values that a wrong fold would not survive."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model


def tiny(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SMALL, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(3)
    return uneven(model.eval())


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(TOKENS, use_cache=False).logits.double()


def rotated(model: Any, **options: Any) -> tuple[torch.Tensor, list[str], list[str]]:
    """Rotate a loaded model; return its logits, the tensors that changed, and notes."""
    source, notes = Source.open(model), list[str]()
    with source.unstacked():
        source.untie(tied_heads(model))
        found = SpinQuant(SpinQuantModifier(**options)).rewrite(source, notes)
        changed = rewrite_source(source, found)
        return logits(model), changed, notes


# -- the model stays the same -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "options"),
    [
        ("llama", {}, {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}, {"transform_type": "random-matrix"}),
        ("llama", {}, {"transform_type": "random-hadamard", "randomize": True}),
        ("llama", {"hidden_size": 52}, {"transform_block_size": 4}),
        ("qwen2", {"tie_word_embeddings": True}, {}),
        ("qwen3", {}, {"rotations": ["r2"]}),
        ("gemma", {"tie_word_embeddings": True}, {}),
        ("gemma3_text", {}, {"rotations": ["R2"]}),
        ("phi3", {}, {}),
        ("granite", {}, {"rotations": ["R1"]}),
    ],
)
def test_logits_of_a_rotated_model(
    family: str, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    """In fp64, but for the norms, which transformers computes in fp32."""
    model = tiny(family, **changes)
    before = logits(model)
    values = {name: p.data.clone() for name, p in model.named_parameters()}
    after, changed, _ = rotated(model, **options)
    assert_close(after, before, rtol=0, atol=2e-6 * float(before.abs().max()))
    moved = [n for n, p in model.named_parameters() if n in values and not p.equal(values[n])]
    assert set(moved) <= set(changed)
    kind = "model.layers.1.self_attn.o_proj.weight"
    assert kind in moved and ("model.embed_tokens.weight" in moved) == (
        "R1" in SpinQuantModifier(**options).rotations
    )


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral", "llama4_text", "gpt_oss", "jamba"])
def test_logits_of_rotated_experts(family: str) -> None:
    """With shared experts and gates, stacked both ways, with biases, scaled at the input; Jamba
    has layers without attention."""
    model = uneven(expert_model(family, torch.float64))
    before = logits(model)
    after, _, notes = rotated(model)
    assert_close(after, before, rtol=0, atol=2e-6 * float(before.abs().max()))
    assert bool(notes) == (family == "jamba")


def test_a_rotation_spreads_outliers() -> None:
    model = tiny("llama")
    model.model.layers[0].self_attn.q_proj.weight.data[:, 5] *= 50
    peak = [w.abs().max() / w.norm() for w in [model.model.layers[0].self_attn.q_proj.weight.data]]
    rotated(model)
    weight = model.model.layers[0].self_attn.q_proj.weight.data
    assert weight.abs().max() / weight.norm() < 0.6 * peak[0]


# -- what cannot be rotated -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("gemma2", {}, "post_attention_layernorm multiplies the output of .*o_proj by a gain"),
        ("olmo2", {}, "post_attention_layernorm multiplies the output of .*o_proj by a gain"),
        ("starcoder2", {}, "input_layernorm is a LayerNorm, which subtracts the mean"),
        ("llama", {"transform_block_size": 7}, "7, which does not divide the 48 channels"),
    ],
)
def test_models_without_r1(family: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        rotated(tiny(family), **options)


def test_positions_that_the_embedding_adds() -> None:
    """A gain between the embedding and the first layer does not pass a rotation."""
    model = tiny("llama")
    gain = torch.linspace(0.5, 2, 48, dtype=torch.float64)
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: output * gain)
    with pytest.raises(PlanError, match=r"R1: the input of the first layer is more than rows of"):
        rotated(model)


def test_a_layer_that_reads_channels_one_by_one() -> None:
    model = tiny("llama")
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output.abs())
    with pytest.raises(PlanError, match=r"layers\.0 computes something else.*Use rotations: \[R2"):
        rotated(model)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"learnable": True}, "rotations are not trained here"),
        ({"rotations": ["R3"]}, "R3 rotates queries and keys .* vLLM has no such"),
        ({"randomize": True}, "set transform_type to random-hadamard or random-matrix"),
        ({"targets": ["Linear"]}, "targets has no effect"),
        ({"transform_type": "givens"}, "transform_type"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        SpinQuantModifier(**options)


# -- whole runs -------------------------------------------------------------------------------


def saved(folder: Path, family: str = "llama", dtype: Any = torch.bfloat16, **changes: Any) -> Path:
    uneven(small_model(family, dtype, num_hidden_layers=2, **changes)).save_pretrained(folder)
    return folder


def samples() -> list[torch.Tensor]:
    return [row.unsqueeze(0) for row in token_batches()[0]]


def test_a_folder_and_a_module_give_the_same_bytes_and_logits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The head is untied; what no step claims to have changed has the source's bytes."""
    source = saved(tmp_path / "m", "qwen2", torch.float32, tie_word_embeddings=True)
    result = oneshot(source, [SpinQuantModifier(), ROUNDED], output_dir=tmp_path / "q")
    assert "SpinQuantModifier changed 23 tensors" in str(result)
    assert "lm_head (stored beside model.embed_tokens, unquantized)" in str(result)
    model = AutoModelForCausalLM.from_pretrained(source)
    before = logits(model)
    oneshot(model, [SpinQuantModifier(), ROUNDED])
    model.save_pretrained(tmp_path / "again")
    assert_same_tensors(tmp_path / "q", tmp_path / "again")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)
    assert float((logits(loaded) - before).norm() / before.norm()) < 0.02
    assert steelyard(["validate", str(tmp_path / "q"), "--source", str(source)]) == 0
    provenance = read_provenance(tmp_path / "q")
    assert provenance is not None and "lm_head.weight" in (provenance.changed or ())
    assert "model.layers.0.self_attn.q_proj.bias" not in (provenance.changed or ())
    capsys.readouterr()
    bias = "model.layers.0.self_attn.q_proj.bias"
    assert torch.equal(read(tmp_path / "q")[bias], read(source)[bias])


def test_recipes_of_llm_compressor(tmp_path: Path) -> None:
    text = """
    test_stage:
      transform_modifiers:
        SpinQuantModifier:
          rotations: [R1, R2]
          transform_type: hadamard
          mappings:
            embedding: re:.*embed_tokens$
            attn: re:.*self_attn$
            attn_q: re:.*q_proj$
            attn_k: re:.*k_proj$
            attn_v: re:.*v_proj$
            attn_o: re:.*o_proj$
            mlp_in: [re:.*up_proj$, re:.*gate_proj$]
            mlp_out: re:.*down_proj$
            lm_head: lm_head
          norm_mappings:
            - {norm: re:.*input_layernorm$, linears: [re:.*q_proj$, re:.*k_proj$, re:.*v_proj$]}
            - {norm: re:.*post_attention_layernorm$, linears: [re:.*up_proj$, re:.*gate_proj$]}
            - {norm: model.norm, linears: lm_head}
    """
    mapped, plain = load_recipe(text).modifiers[0], SpinQuantModifier()
    models = [tiny("llama"), tiny("llama")]
    for model, modifier in zip(models, (mapped, plain), strict=True):
        source = Source.open(model)
        rewrite_source(source, SpinQuant(modifier).rewrite(source, []))
    for (name, one), other in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(
    ("rotations", "scheme", "modifier", "told"),
    [
        (["R1", "R2"], "W4A16", QuantizationModifier, "round with GPTQModifier"),
        (["R1"], "NVFP4A16", QuantizationModifier, "round with GPTQModifier"),
        (["R1"], "NVFP4", GPTQModifier, "TransformModifier balances such"),
        (["R1"], "MXFP4", QuantizationModifier, "TransformModifier balances such"),
        (["R2"], "NVFP4", QuantizationModifier, None),
        (["R1"], "W8A8", QuantizationModifier, None),
        (["R1"], "W4A16", GPTQModifier, None),
    ],
)
def test_where_r1_costs_more_than_it_gains(
    rotations: list[str], scheme: str, modifier: Any, told: str | None
) -> None:
    steps = [
        SpinQuantModifier(rotations=rotations),
        modifier(scheme=scheme, ignore=["lm_head"], bypass_divisibility_checks=True),
    ]
    said = [each for each in make_plan(tiny("llama"), modifiers=steps).warnings if "R1" in each]
    assert len(said) == (told is not None)
    assert told is None or told in said[0]


def test_mappings_that_miss_a_module() -> None:
    names = {f"attn_{x}": f"re:.*{x}_proj$" for x in "qkvo"}
    mappings = {**names, "embedding": "re:.*embed_tokens$", "lm_head": "lm_head"}
    mappings |= {"mlp_in": "re:.*up_proj$", "mlp_out": "re:.*down_proj$"}
    with pytest.raises(PlanError, match=r"layers\.0 computes something else"):
        rotated(tiny("llama"), mappings=mappings)


@pytest.mark.parametrize("before", [SmoothQuantModifier(), ROUNDED])
def test_the_rotation_comes_first(before: Any, tmp_path: Path) -> None:
    source, name = saved(tmp_path / "m"), type(before).__name__
    with pytest.raises(PlanError, match=f"move it before {name}"):
        oneshot(
            source,
            [before, SpinQuantModifier(), *([] if before is ROUNDED else [ROUNDED])],
            samples(),
            tmp_path / "q",
        )


RECIPES = {
    "data-free": [SpinQuantModifier(), ROUNDED],
    "balanced": [
        SpinQuantModifier(),
        AWQModifier(n_grid=2),
        GPTQModifier(config_groups={"all": EIGHT_BITS}, ignore=["lm_head", "re:.*mlp.gate$"]),
    ],
}


def run(kind: str, source: Path, out: Path) -> Any:
    data = None if kind == "data-free" else samples()
    return oneshot(source, RECIPES[kind], data, out, shuffle_calibration_samples=False)


def rank_of_two(rank: int, kind: str, source: Path, folder: Path) -> None:
    store = dist.FileStore(str(folder / f"store-{kind}"), 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    run(kind, source, folder / f"ranks-{kind}")
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", RECIPES)
def test_ranks_and_a_resumed_run_write_the_same_bytes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(tmp_path / "m", "qwen3_moe")
    with small_steps():
        run(kind, source, tmp_path / "whole")
        with monkeypatch.context() as patch:
            stop_at_mark(patch, 1)
            with pytest.raises(Stop):
                run(kind, source, tmp_path / "stopped")
        result = run(kind, source, tmp_path / "stopped")
    assert any("resumed after" in note for note in result.notes)
    assert_same_tensors(tmp_path / "whole", tmp_path / "stopped")
    ranks = [start_forked(rank_of_two, rank, kind, source, tmp_path) for rank in range(2)]
    for process in ranks:
        process.join(240)
        process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    assert_same_tensors(tmp_path / "whole", tmp_path / f"ranks-{kind}")
    changed = [read_provenance(tmp_path / n) for n in ("whole", "stopped", f"ranks-{kind}")]
    assert len({tuple(each.changed or ()) for each in changed if each is not None}) == 1
