"""Scores and measured divergences of schemes, against autograd on the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from families import small_model
from transformers import AutoModelForCausalLM

from steelyard.algorithms.as_stored import rounded_inputs, rounded_weights, with_scheme
from steelyard.algorithms.assigned_schemes import AssignedSchemes
from steelyard.algorithms.scheme_scores import gradient_scores
from steelyard.distributed import ThreadPool
from steelyard.model.layerwise import LayerwiseModel
from steelyard.model.source import Source


def schemes_of(*names: str) -> list[Any]:
    found = []
    for name in names:
        scheme = preset_name_to_scheme(name, ["Linear"])
        if scheme.weights.strategy == "group":
            scheme.weights.group_size = 16
        found.append(scheme)
    return found


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    small_model(request.param, torch.float32, num_hidden_layers=2).save_pretrained(folder)
    return folder


def rows() -> list[dict[str, torch.Tensor]]:
    chance = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(3, 128, (1, n), generator=chance)} for n in (24, 17, 20)]


def linear_names(model: Any) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and ".layers." in name
        and not name.endswith("mlp.gate")
    ]


def change(module: Any, scheme: Any, x: torch.Tensor) -> torch.Tensor:
    """Return by how much the output of a module changes under a scheme."""
    weight = module.weight.data
    holder = with_scheme(scheme, tuple(weight.shape), weight.dtype)
    rounded = rounded_weights({"m": holder}, {"m": weight}, {})["m"]
    rounding = rounded_inputs(holder, x, torch.stack([x.amin(0), x.amax(0)]))
    return (x if rounding is None else rounding(x)) @ rounded.T - x @ weight.T


def test_scores_are_those_of_autograd(folder: Path) -> None:
    schemes = schemes_of("W4A16", "W8A16", "W8A8")
    source = Source.open(folder)
    names = [name for name in linear_names(source.model) if "shared" not in name]
    given = dict.fromkeys(names, schemes)
    done: list[float] = []
    found = {
        threads: gradient_scores(
            LayerwiseModel(source, "base"), rows(), given, ThreadPool(threads), done.append
        )
        for threads in (1, 3)
    }
    assert sum(done) == pytest.approx(2)
    assert found[1].keys() == found[3].keys()
    for name, scores in found[1].items():
        assert torch.equal(scores, found[3][name])  # whatever the number of threads

    opened = Source.open(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    expected = dict.fromkeys(names, torch.zeros(3, dtype=torch.float64))
    with opened.unstacked():
        model, tokens = opened.model.eval(), 0
        modules = dict(model.named_modules())
        for number, row in enumerate(rows()):
            seen: dict[str, Any] = {}

            def watch(name: str, seen: Any = seen) -> Any:
                def hook(_: Any, args: Any, made: torch.Tensor) -> None:
                    made.retain_grad()
                    seen[name] = args[0].detach(), made

                return hook

            handles = [modules[name].register_forward_hook(watch(name)) for name in names]
            log_p = model(**row).logits[0].log_softmax(-1)
            drawn = torch.Generator().manual_seed(number << 32)
            labels = torch.multinomial(log_p.detach().exp(), 1, generator=drawn)
            log_p.gather(-1, labels).sum().backward()
            tokens += len(log_p)
            for name, (x, output) in seen.items():
                if output.grad is None:
                    continue
                x, g = x.reshape(-1, x.shape[-1]), output.grad.reshape(-1, output.shape[-1])
                if len(x):
                    changes = [change(modules[name], scheme, x) for scheme in schemes]
                    more = [(g * each).sum(-1).double().square().sum() for each in changes]
                    expected[name] = expected[name] + torch.stack(more)
            for handle in handles:
                handle.remove()
        opened.restack([])
    reached = {name for name, sums in expected.items() if bool(sums.sum())}
    assert reached <= found[1].keys()
    assert reached >= {name for name in names if "experts" not in name}
    for name in reached:
        torch.testing.assert_close(
            found[1][name], expected[name] / (2 * tokens), rtol=2e-3, atol=1e-12
        )


def test_divergences_are_those_of_the_rounded_model(folder: Path) -> None:
    source = Source.open(folder)
    names = linear_names(source.model)
    (four,) = schemes_of("W4A16")
    assignment = {name: four if i % 2 else None for i, name in enumerate(names)}
    with AssignedSchemes(LayerwiseModel(source, "base"), rows(), ThreadPool(1)) as assigned:
        assigned.start(lambda share: None)
        found = assigned.divergences(assignment, lambda share: None)
        nothing = assigned.divergences(dict.fromkeys(names), lambda share: None)
    assert nothing == pytest.approx([0.0] * 3, abs=1e-12)

    opened = Source.open(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    with opened.unstacked(), torch.no_grad():
        model = opened.model.eval()
        before = [model(**row).logits[0].double().log_softmax(-1) for row in rows()]
        for name, scheme in assignment.items():
            if scheme is not None:
                weight = model.get_submodule(name).weight
                holder = with_scheme(scheme, tuple(weight.shape), weight.dtype)
                rounded = rounded_weights({"m": holder}, {"m": weight.data}, {})
                weight.data = rounded["m"]
        after = [model(**row).logits[0].double().log_softmax(-1) for row in rows()]
        opened.restack([])
    expected = [
        float((p.exp() * (p - q)).sum(-1).mean()) for p, q in zip(before, after, strict=True)
    ]
    assert found == pytest.approx(expected, rel=1e-3)
    assert min(found) > 1e-4
