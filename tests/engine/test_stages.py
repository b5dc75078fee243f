"""Batches that wait inside of a layer: what they see, what comes out, and what may be dropped."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CONFIGS, read, small_model
from interruption import lasting
from torch.nn import Linear, Module
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from steelyard import oneshot
from steelyard.distributed import ThreadPool
from steelyard.engine import paired, passes
from steelyard.engine.held_memory import at_once, fits, held_bytes
from steelyard.engine.parts import Flow, Part
from steelyard.engine.passes import Passes
from steelyard.engine.solving import Solver
from steelyard.engine.stage_order import find_stages
from steelyard.engine.stages import Staged
from steelyard.errors import PipelineError
from steelyard.kernels.gptq_rounding import activation_order, solve
from steelyard.model.blocks import Batch, LayerSequence
from steelyard.model.placement import holding_budget
from steelyard.modifiers import GPTQModifier, IMatrixGatherer, QuantizationModifier
from steelyard.modifiers.smoothing import SmoothQuantModifier
from steelyard.observers.padding import real_tokens, without_padding

UNLIMITED = 1 << 50
STAGES = [
    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    ["self_attn.o_proj"],
    ["mlp.gate_proj", "mlp.up_proj"],
    ["mlp.down_proj"],
]


class Layer(Module):
    """Two projections of the input, and one of what they make; counts its own work."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = Linear(8, 6), Linear(8, 6), Linear(6, 8)
        self.starts: list[int] = []  # appended to by several threads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.starts.append(len(x))
        normed = x / x.abs().mean()
        return x + self.c(self.a(normed) * self.b(normed))


def inputs(count: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4 + i, 8, generator=generator) for i in range(count)]


def lengths(count: int = 5) -> list[int]:
    return [len(x) for x in inputs(count)]


def nothing(_batch: int, _x: torch.Tensor) -> None:
    pass


def forwards(layer: Module, data: list[torch.Tensor]) -> list[Callable[[], torch.Tensor]]:
    return [lambda x=x: layer(x) for x in data]


@torch.no_grad()
def halve(
    layer: Layer, budget: int, workers: int
) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Halve the weights of each stage when all batches wait at it."""
    seen: list[list[torch.Tensor]] = [[], []]
    flushed: list[int] = []
    stages = [[layer.a, layer.b], [layer.c]]
    every = forwards(layer, inputs())
    with ThreadPool(workers) as pool, Staged(stages, every, lengths(), budget, pool) as staged:
        for index, stage in enumerate(stages):

            def see(batch: int, x: torch.Tensor, index: int = index) -> None:
                assert batch == len(seen[index])
                seen[index].append(x.clone())

            staged.run_to(index, see, lambda index=index: flushed.append(len(seen[index])))
            assert flushed[-1] == 5
            for module in stage:
                module.weight.data.mul_(0.5)
        outputs = list(staged.finish())
    assert not any(m._forward_pre_hooks for m in layer.modules())
    return seen, outputs


# -- the scheduler --------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(("budget", "starts"), [(UNLIMITED, 5), (0, 15), (1200, None)])
def test_each_stage_sees_the_changes_before_it(
    budget: int, starts: int | None, workers: int
) -> None:
    layer, changed = Layer(), Layer()
    seen, outputs = halve(layer, budget, workers)
    count = len(layer.starts)
    assert 5 < count < 15 if starts is None else count == starts
    with torch.no_grad():
        for module in (changed.a, changed.b, changed.c):
            module.weight.mul_(0.5)
        for i, x in enumerate(inputs()):
            normed = x / x.abs().mean()
            assert_close(seen[0][i], normed, rtol=0, atol=0)
            assert_close(seen[1][i], changed.a(normed) * changed.b(normed), rtol=0, atol=0)
            assert_close(outputs[i], changed(x), rtol=0, atol=0)


@torch.no_grad()
def test_what_is_held_is_measured() -> None:
    layer, data = Layer(), inputs(1)
    stages = [[layer.a, layer.b], [layer.c]]
    with Staged(stages, forwards(layer, data), lengths(1), UNLIMITED) as staged:
        staged.run_to(0, nothing)
        rows = 4 * 4
        assert [size for _, size in staged._held.values()] == [rows * (8 + 8)]  # x, normed
        staged.run_to(1, nothing)
        assert [size for _, size in staged._held.values()] == [rows * (8 + 8 + 6)]
        assert staged.rate == 4 * (8 + 8 + 6)
        list(staged.finish())
        assert not staged._held
    assert held_bytes(None) == 0
    assert fits(5, [2, 3], 10) and not fits(6, [2, 3], 10)
    assert holding_budget(torch.device("cpu")) > 1 << 20


@torch.no_grad()
@pytest.mark.parametrize("workers", [1, 2])
def test_long_batches_after_short_ones_keep_to_the_budget(workers: int) -> None:
    """What a batch will hold is told from its length, before it has come to the stage."""
    layer = Layer()
    data = [torch.randn(n, 8) for n in [2] * workers + [64] * 12]
    per_token, most = 4 * (8 + 8), 0
    budget = per_token * (64 * 3 + 2 * workers)
    stages, sizes = [[layer.a, layer.b], [layer.c]], [len(x) for x in data]
    with (
        ThreadPool(workers) as pool,
        Staged(stages, forwards(layer, data), sizes, budget, pool) as staged,
    ):

        def flush() -> None:
            nonlocal most
            most = max(most, sum(sizes[i] for i in staged._held) * per_token)

        staged.run_to(0, nothing, flush)
        assert most <= budget + 64 * per_token  # one that does not fit is dropped when it was seen
        assert len(staged._held) == workers + 3
        staged.run_to(1, nothing)
        assert [len(out) for out in staged.finish()] == sizes
    assert at_once([], 1.0, 10) == 1 and at_once([5, 5, 5], 1.0, 10) == 2


@torch.no_grad()
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("place", ["forward", "see", "taking"])
def test_what_fails_leaves_nothing_behind(place: str, workers: int) -> None:
    layer, threads = Layer(), torch.get_num_threads()
    stages = [[layer.a, layer.b], [layer.c]]
    unwound: list[int] = []

    def forward(index: int, x: torch.Tensor) -> torch.Tensor:
        try:
            out = layer(x)
            if place == "forward" and index == 3:
                raise ValueError("here")
            return out
        finally:
            unwound.append(index)

    def see(batch: int, _x: torch.Tensor) -> None:
        if place == "see" and batch == 3:
            raise ValueError("here")

    every = [lambda i=i, x=x: forward(i, x) for i, x in enumerate(inputs(8))]
    with ThreadPool(workers) as pool:
        with (
            pytest.raises(ValueError, match="here"),
            Staged(stages, every, lengths(8), UNLIMITED, pool) as staged,
        ):
            for index in range(2):
                staged.run_to(index, see)
            with contextlib.closing(staged.finish()) as outputs:
                for _ in outputs:
                    if place == "taking":
                        raise ValueError("here")
        assert not staged._held
        assert sorted(unwound) == list(range(8 if place != "see" else len(unwound)))
        assert torch.get_num_threads() == threads
    assert not any(m._forward_pre_hooks for m in layer.modules())


@torch.no_grad()
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("way", ["swapped", "skipped", "other", "twice"])
def test_batches_that_go_another_way_are_refused(way: str, workers: int) -> None:
    layer = Layer()
    stages = [[layer.a, layer.b], [layer.c]]

    def stray() -> torch.Tensor:
        x = inputs(1)[0]
        if way == "swapped":
            return layer.c(x[:, :6])
        if way == "skipped":
            return layer.c(layer.a(x))
        product = layer.a(x) * layer.b(x.clone() if way == "other" else x)
        return layer.c(product) + (layer.a(x) if way == "twice" else 0)

    def drive() -> None:
        every = [*forwards(layer, inputs(2)), stray]
        with (
            ThreadPool(workers) as pool,
            Staged(stages, every, lengths(3), UNLIMITED, pool) as staged,
        ):
            for index in range(2):
                staged.run_to(index, nothing)
            list(staged.finish())

    with pytest.raises(PipelineError, match="basic"):
        drive()
    assert not any(m._forward_pre_hooks for m in layer.modules())


@torch.no_grad()
@pytest.mark.parametrize("workers", [1, 2])
def test_padding_of_a_batch_is_known_while_it_is_seen(workers: int) -> None:
    layer, data = Layer(), inputs(3)
    masks = [torch.tensor([[True] * (3 + i) + [False]]) for i in range(3)]

    def padded(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with without_padding(mask):
            return layer(x)

    each = [lambda x=x, mask=mask: padded(x, mask) for x, mask in zip(data, masks, strict=True)]
    rows: list[int] = []
    stages = [[layer.a, layer.b], [layer.c]]
    with ThreadPool(workers) as pool, Staged(stages, each, lengths(3), UNLIMITED, pool) as staged:
        for index in range(2):
            staged.run_to(index, lambda _, x: rows.append(len(real_tokens(x, "input"))))
            assert len(real_tokens(data[0], "input")) == 4  # it is not known outside
        list(staged.finish())
    assert rows == [3, 4, 5, 3, 4, 5]


# -- the stages of a layer ------------------------------------------------------------------------


@torch.no_grad()
def test_stages_of_llama() -> None:
    model = small_model("llama", torch.float32)
    layer = model.model.layers[0]
    linear = {n: m for n, m in layer.named_modules() if isinstance(m, Linear)}
    ids = torch.arange(3, 23).view(2, 10)
    expected = model(ids).logits
    reverse = dict(reversed(linear.items()))
    assert find_stages(reverse, lambda: model(ids), 20) == STAGES
    assert_close(model(ids).logits, expected, rtol=0, atol=0)
    assert find_stages({**linear, "norm": layer.input_layernorm}, lambda: model(ids), 20) is None


@torch.no_grad()
def test_modules_that_depend_on_the_data_have_no_stages() -> None:
    layer = Layer()
    modules = {"a": layer.a, "b": layer.b}
    x = inputs(1)[0]
    assert find_stages(modules, lambda: (layer.a(x), layer.b(x)), 4) == [["a", "b"]]
    assert find_stages(modules, lambda: (layer.b(x), layer.a(x + 1)), 4) == [["b"], ["a"]]
    assert find_stages(modules, lambda: layer.a(x), 4) is None
    assert find_stages(modules, lambda: (layer.a(x), layer.b(x), layer.a(x)), 4) is None
    assert find_stages(modules, lambda: (layer.a(x), layer.b(x[:3])), 4) is None


# -- GPTQ -----------------------------------------------------------------------------------------


def groups(size: int = 32, **args: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "strategy": "group", "group_size": size, **args}
    return {"group_0": {"targets": ["Linear"], "weights": weights}}


def tokens() -> list[torch.Tensor]:
    """Few different ones, so that inputs are far from independent; one row each."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 24, (1, 32), generator=generator) for _ in range(8)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    changes = {"hidden_size": 128, "num_hidden_layers": 2}
    small_model("llama", torch.float32, **changes).save_pretrained(folder)
    return folder


@torch.no_grad()
def expected_weights(
    source: Path, scales: Path, ours: dict[str, torch.Tensor], staged: bool, weighed: bool
) -> dict[str, torch.Tensor]:
    """Every weight in turn, with a forward of the whole model from its start for each stage.

    ours:    weights to go on with, so that a tie that went the other way has no consequences
    weighed: divide each token by the size of the hidden state, but for q, k and v
    """
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    stored = read(scales)
    plain = QuantizationModifier(config_groups=groups(observer="memoryless_minmax"))
    args = plain.config.config_groups["group_0"].weights
    found: dict[str, torch.Tensor] = {}
    for index in range(2):
        layer = model.model.layers[index]
        solved: dict[Any, torch.Tensor] = {}
        for stage in STAGES:
            first = layer.get_submodule(stage[0])
            seen: list[torch.Tensor] = []
            hidden: list[torch.Tensor] = []
            hooks = [
                each.register_forward_pre_hook(lambda _m, a, s=some: s.append(a[0][0].double()))
                for each, some in ((first, seen), (layer, hidden))
            ]
            for batch in tokens():
                model(batch)
            for hook in hooks:
                hook.remove()
            counts = [torch.ones(len(x), dtype=torch.float64) for x in seen]
            if weighed and stage != STAGES[0]:
                counts = [1 / x.square().mean(-1) for x in hidden]
                counts = [each / each.mean() for each in counts]
            pairs = zip(seen, counts, strict=True)
            hessian = sum(x.t() @ (count[:, None] * x) for x, count in pairs).float()
            for name in stage:
                module, full = layer.get_submodule(name), f"model.layers.{index}.{name}"
                scale, order = stored[f"{full}.weight_scale"], activation_order(hessian)
                found[full] = solve(module.weight, hessian, scale, None, args, order=order).weight
                solved[module] = ours[full]
            for module in list(solved) if staged else ():
                module.weight.copy_(solved.pop(module))
        for module, weight in solved.items():
            module.weight.copy_(weight)
    return found


@pytest.mark.parametrize("weighed", [False, True])
def test_weights_are_those_of_a_plain_loop(weighed: bool, source: Path, tmp_path: Path) -> None:
    chosen = groups(observer="memoryless_minmax")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    left_out = {"refinements": 0, "drift_correction": False, "token_weights": weighed}
    plain = GPTQModifier(config_groups=chosen, ignore=["lm_head"], **left_out)
    oneshot(model, plain, tokens(), tmp_path)
    ours = {n: model.get_submodule(n).weight.data for n in expected_names()}
    close, far, other = (
        {n: float((ours[n] - w).abs().gt(1e-6).float().mean()) for n, w in found.items()}
        for found in (
            expected_weights(source, tmp_path, ours, staged, weighs)
            for staged, weighs in ((True, weighed), (False, weighed), (True, not weighed))
        )
    )
    assert max(close.values()) < 0.01  # ties that another order of summation decides
    assert min(n for name, n in other.items() if "mlp" in name) > 0.01
    assert close.keys() == ours.keys()
    first, others = far["model.layers.0.self_attn.q_proj"], far["model.layers.0.mlp.down_proj"]
    assert first < 0.01 < others  # the second of two passes would show in all but the first


@torch.no_grad()
def layer_output(model: Any, index: int, batch: torch.Tensor) -> torch.Tensor:
    found: list[torch.Tensor] = []
    hook = model.model.layers[index].register_forward_hook(lambda _m, _a, out: found.append(out))
    model(batch)
    hook.remove()
    return found[0]


def expected_names() -> list[str]:
    return [f"model.layers.{i}.{name}" for i in range(2) for stage in STAGES for name in stage]


SCHEMES: dict[str, dict[str, Any]] = {
    "W4A16": {"config_groups": groups()},
    "FP8 static": {"scheme": "FP8", "activation_observer": "static_minmax"},
    "NVFP4": {"scheme": "NVFP4"},
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_flows_on_is_what_the_quantized_layer_gives(
    scheme: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And static scales of inputs are those of the inputs that are served."""
    flowed: list[list[torch.Tensor]] = [[], []]
    put = LayerSequence.put

    originals: list[list[torch.Tensor]] = [[], []]

    def noting(sequence: LayerSequence, index: int, batch: Batch, output: Any) -> None:
        last = flowed if len(originals[index]) > len(flowed[index]) else originals
        last[index].append(output)  # the original of a batch comes first
        put(sequence, index, batch, output)

    monkeypatch.setattr(LayerSequence, "put", noting)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    modifier = GPTQModifier(ignore=["lm_head"], **SCHEMES[scheme])
    oneshot(model, modifier, tokens(), tmp_path, shuffle_calibration_samples=False)
    largest = dict.fromkeys(expected_names(), 0.0)
    for name in largest:

        def note(_module: Module, args: Any, name: str = name) -> None:
            largest[name] = max(largest[name], float(args[0].abs().max()))

        model.get_submodule(name).register_forward_pre_hook(note)
    outputs: list[list[torch.Tensor]] = [[], []]
    for index in range(2):
        model.model.layers[index].register_forward_hook(
            lambda _m, _a, out, index=index: outputs[index].append(out)
        )
    with torch.no_grad():
        for batch in tokens():
            model(batch)
    assert_close(outputs, flowed)
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for index in range(2):
        for batch, original in zip(tokens(), originals[index], strict=True):
            assert_close(layer_output(plain, index, batch), original)
    for name, value in largest.items():
        module = model.get_submodule(name)
        if scheme == "FP8 static":
            assert_close(float(module.input_scale), value / 448, rtol=1e-5, atol=0)
        elif scheme == "NVFP4":
            expected = 448 * 6 / value
            assert_close(float(module.input_global_scale), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("drift", [False, True])
def test_every_module_runs_once_for_each_batch_and_memory_changes_no_bit(
    drift: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modifier = GPTQModifier(config_groups=groups(), ignore=["lm_head"], drift_correction=drift)
    linear = torch.nn.functional.linear
    counts: dict[int, int] = {}
    for budget in (UNLIMITED, 0, 300_000):
        calls: list[int] = []

        def counting(*args: Any, calls: list[int] = calls) -> torch.Tensor:
            if type(args[0]) is torch.Tensor:  # else the plan looks for layers that run twice
                calls.append(1)
            return linear(*args)

        with monkeypatch.context() as patch:
            patch.setattr(paired, "holding_budget", lambda _device, budget=budget: budget)
            patch.setattr(torch.nn.functional, "linear", counting)
            oneshot(source, modifier, tokens(), tmp_path / str(budget))
        counts[budget] = len(calls)
        for file in (tmp_path / str(UNLIMITED)).iterdir():
            assert lasting(tmp_path / str(budget) / file.name) == lasting(file)
    models = 2 if drift else 1
    first = 2 * 7 * 2  # output errors: the first batch runs twice more, in fp32
    counts = {budget: count - first for budget, count in counts.items()}
    assert counts[UNLIMITED] == models * 2 * 7 * 8
    again = 3 * 3 + 2 * 1 + 1 * 2  # q, k and v for three stages more, o for two, gate and up
    assert counts[0] == models * 2 * (7 + again) * 8
    assert counts[UNLIMITED] < counts[300_000] < counts[0]


@pytest.mark.parametrize("budget", [UNLIMITED, 0])
def test_weights_are_wide_only_where_batches_are_still_to_pass(
    budget: int, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None while modules are solved; those of one stage where every batch waits behind others."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    layer, wide = model.model.layers[1], []

    def noting(kind: str, method: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            names = [name for stage in STAGES for name in stage]
            found = [n for n in names if layer.get_submodule(n).weight.dtype == torch.float32]
            wide.append((kind, found))
            return method(*args, **kwargs)

        return noted

    monkeypatch.setenv("STEELYARD_FORWARD", "fp32")
    monkeypatch.setattr(paired, "holding_budget", lambda _device: budget)
    monkeypatch.setattr(Solver, "solve", noting("solve", Solver.solve))
    monkeypatch.setattr(Staged, "run_to", noting("run", Staged.run_to))
    monkeypatch.setattr(Staged, "finish", noting("run", Staged.finish))
    oneshot(model, GPTQModifier(config_groups=groups(), ignore=["lm_head"]), tokens())
    expected: list[tuple[str, list[str]]] = [("run", [])]
    for index in range(4):
        passed = STAGES[0 if budget == 0 else index : index + 1]
        expected += [("solve", []), ("run", [name for stage in passed for name in stage])]
    assert wide[9:] == expected, "of the second layer"
    assert all(found == [] for _, found in wide[:9])


@pytest.mark.parametrize("asked", ["stored", "fp32"])
def test_the_type_of_batches_is_forced_and_reported(
    asked: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(
        tmp_path / "m"
    )
    used: Counter[torch.dtype] = Counter()
    linear = torch.nn.functional.linear

    def noting(x: torch.Tensor, *args: Any) -> torch.Tensor:
        used[x.dtype] += 1
        return linear(x, *args)

    monkeypatch.setenv("STEELYARD_FORWARD", asked)
    monkeypatch.setattr(torch.nn.functional, "linear", noting)
    modifier = GPTQModifier(config_groups=groups(), ignore=["lm_head"])
    result = oneshot(tmp_path / "m", modifier, tokens(), tmp_path / "out")
    name = {"stored": "bfloat16", "fp32": "float32"}[asked]
    of_output_errors = 2 * 7 * 2  # each module, before and after, is always in fp32
    assert (used[torch.float32] > of_output_errors) == (asked == "fp32")
    line = f"batches are computed in {name}, as STEELYARD_FORWARD asks"
    assert line in result.notes
    assert line in str(result.plan).splitlines()
    assert line in json.loads((tmp_path / "out" / "report.json").read_text())["notes"]


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        (QuantizationModifier(scheme="FP8", ignore=["lm_head"]), "bfloat16"),
        (GPTQModifier(scheme="W8A8", ignore=["lm_head"]), "bfloat16"),
        (
            [SmoothQuantModifier(), QuantizationModifier(scheme="FP8", ignore=["lm_head"])],
            "float32",
        ),
    ],
)
def test_batches_are_in_fp32_where_an_algorithm_compares_them(
    recipe: Any, name: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STEELYARD_FORWARD")
    monkeypatch.setattr("steelyard.model.precision._multiplies_bf16", lambda: "avx512_bf16")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    plan = oneshot(model, recipe, tokens(), dry_run=True).plan
    assert f"batches are computed in {name}, " in str(plan)


@pytest.mark.parametrize("family", [f for f in CONFIGS if f != "gpt2"])  # which has no Linear
def test_families(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    in_stages = Passes._in_stages

    def noting(self: Passes, part: Part, flow: Flow, stages: Any) -> Any:
        taken.append(len(stages))
        return in_stages(self, part, flow, stages)

    monkeypatch.setattr(Passes, "_in_stages", noting)
    small_model(family).save_pretrained(tmp_path / "m")
    modifier = GPTQModifier(config_groups=groups(), ignore=["lm_head"])
    result = oneshot(tmp_path / "m", modifier, tokens(), tmp_path / "q")
    assert taken == [4] * 3  # of experts, too: gate and up of all, then down of all
    assert all(m.details["loss"] > 0 for m in result.modules.values())


@pytest.mark.parametrize("propagate", [True, False])
@pytest.mark.parametrize("scheme", ["FP8", "importance", "dynamic"])
def test_batches_beside_each_other_write_what_hooks_write(
    scheme: str, propagate: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each module is called once for each batch, and shows its observers the same in its order."""
    chosen: dict[str, dict[str, Any]] = {
        "FP8": {"scheme": "FP8"},
        "importance": {"config_groups": groups(observer="imatrix_mse")},
        "dynamic": {"scheme": "W4AFP8", "targets": ["Linear"]},
    }
    recipe: list[Any] = [QuantizationModifier(ignore=["lm_head"], **chosen[scheme])]
    if scheme != "FP8":
        recipe.insert(0, IMatrixGatherer(ignore=["lm_head"]))
    taken: list[int] = []
    beside = Passes._concurrently

    def noting(self: Passes, *args: Any) -> None:
        taken.append(self.pool.count)
        beside(self, *args)

    monkeypatch.setattr(Passes, "_concurrently", noting)
    monkeypatch.setattr(
        passes, "CONCURRENT_BYTES", 100_000
    )  # so that the eight go in several rounds
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            output = tmp_path / str(count)
            oneshot(source, recipe, tokens(), output, propagate_error=propagate)
        torch.set_num_threads(1)
        monkeypatch.setattr(Passes, "_stages", lambda *_: None)
        oneshot(source, recipe, tokens(), tmp_path / "hooks", propagate_error=propagate)
    finally:
        torch.set_num_threads(threads)
    assert taken == [1, 1, 3, 3]  # two layers each: one path, whatever the number of threads
    for file in (tmp_path / "hooks").iterdir():
        for count in ("1", "3"):
            assert lasting(tmp_path / count / file.name) == lasting(file)
