"""Runs of `oneshot` and `evaluate` on the CPU and on the toy device, in a process that has it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from families import assert_same_tensors, small_model, token_batches
from toy_device import MEMORY, Transfer

QUICK = "weight_observer: memoryless_minmax, ignore: [lm_head]"
RECIPES = {
    "dynamic": f"QuantizationModifier: {{scheme: W8A8, {QUICK}}}",
    "gptq": f"GPTQModifier: {{scheme: W4A16, group_size: 16, {QUICK}}}",
    "cache": """
QuantizationModifier:
  scheme: FP8
  kv_cache_scheme: {num_bits: 8, type: float, strategy: tensor, dynamic: false, symmetric: true}
  weight_observer: memoryless_minmax
  ignore: [lm_head]
""",
    "static": """
QuantizationModifier:
  ignore: [lm_head]
  config_groups:
    group_0:
      targets: [Linear]
      weights: {num_bits: 8, strategy: channel, observer: memoryless_minmax}
      input_activations: {num_bits: 8, symmetric: false, observer: minmax}
""",
    "smooth": f"""
SmoothQuantModifier: {{smoothing_strength: 0.5}}
QuantizationModifier: {{scheme: W8A8, {QUICK}}}
""",
    "importance": """
IMatrixGatherer: {ignore: [lm_head]}
QuantizationModifier:
  ignore: [lm_head]
  config_groups:
    group_0:
      targets: [Linear]
      weights: {num_bits: 4, strategy: group, group_size: 32, observer: imatrix_mse}
""",
}


def model_folder(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """Save a small model in fp32: in bf16, a CPU computes in another type than an accelerator."""
    small = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, **changes}
    small_model(family, torch.float32, **small).save_pretrained(folder)
    return folder


def data() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": batch} for batch in token_batches()]


def run(model: Any, recipe: str, output: Path, **options: Any) -> Any:
    from steelyard import oneshot

    given = None if recipe == "dynamic" else data()
    return oneshot(model, RECIPES[recipe], given, output, **options)


def same_bytes(folder: Path, family: str, recipe: str) -> list[Transfer]:
    """Run a recipe on both devices, and compare the files; return the transfers of the second."""
    model = model_folder(folder / "model", family)
    options = {"pipeline": "sequential"} if recipe == "dynamic" else {}  # else file by file
    run(model, recipe, folder / "cpu", device="cpu", **options)
    MEMORY[0].reset()
    run(model, recipe, folder / "toy", device="toy", **options)
    assert_nothing_left()
    assert_same_tensors(folder / "cpu", folder / "toy")
    return list(MEMORY[0].transfers)


def assert_nothing_left() -> None:
    """The device holds no tensor; but for two limits of a type, which compressed-tensors keeps."""
    from steelyard.checkpoint.figures import _places

    _places.cache_clear()
    gc.collect()
    assert MEMORY[0].used <= 64, MEMORY[0].blocks


def stream(folder: Path, faster: bool) -> tuple[list[str], bool]:
    """Run without data, with rates that favour one side; return the notes, and the side."""
    from steelyard.engine import stream_device

    model = model_folder(folder / "model")
    run(model, "dynamic", folder / "cpu", device="cpu")
    rates = {True: 1e-9 if faster else 3e-9, False: 4e-9}
    stream_device.measured = lambda planned, placement: rates[not placement.is_host]
    MEMORY[0].reset()
    found = run(model, "dynamic", folder / "toy", device="toy")
    assert_nothing_left()
    assert_same_tensors(folder / "cpu", folder / "toy")
    return list(found.notes), bool(MEMORY[0].transfers)


def measured_rates(folder: Path) -> tuple[float, float, int]:
    """Return the seconds per weight on both sides, and the transfers of the second."""
    from steelyard.engine.stream_device import measured
    from steelyard.model.placement import Placement

    found = run(model_folder(folder / "model"), "dynamic", folder / "cpu", device="cpu")
    planned = found.plan.quantized[0]
    here = measured(planned, Placement())
    MEMORY[0].reset()
    there = measured(planned, Placement(torch.device("toy", 0)))
    return here, there, len(MEMORY[0].transfers)


def without_room(folder: Path) -> list[Transfer]:
    """Run on a device whose free memory never holds four layers."""
    model = model_folder(folder / "model")
    MEMORY[0].reset(limit := 4 * 37_000)
    run(model, "dynamic", folder / "toy", device="toy", pipeline="sequential")
    assert MEMORY[0].peak <= limit
    return list(MEMORY[0].transfers)


def evaluations(folder: Path, family: str, recipe: str) -> tuple[Any, ...]:
    """Return the figures of an evaluation on both devices, and on one that has less memory."""
    from steelyard.evaluate import divergence, evaluate

    announced: list[int] = []
    estimate = divergence.device_bytes

    def noted(*args: Any) -> int:
        announced.append(estimate(*args))
        return announced[-1]

    divergence.device_bytes = noted
    model = model_folder(folder / "model", family)
    quantized = folder / "quantized"
    run(model, recipe, quantized, device="cpu")

    def figures(device: str, batch_size: int = 8) -> dict[str, Any]:
        options = {"device": device, "batch_size": batch_size}
        found = evaluate(model, quantized, rows(96), **options).as_dict()
        assert_nothing_left()
        return {name: value for name, value in found.items() if name != "seconds"}

    found, peaks = [figures("cpu")], {}
    for batch_size in (1, 8):
        MEMORY[0].reset()
        found.append(figures("toy", batch_size))
        peaks[batch_size] = MEMORY[0].peak
        assert 0 < MEMORY[0].peak <= announced[-1] <= 8 * MEMORY[0].peak
    MEMORY[0].reset((peaks[1] + peaks[8]) // 2)
    less = figures("toy")
    assert MEMORY[0].refused and MEMORY[0].peak <= MEMORY[0].limit
    return found[0], found[2], less


def comparisons(folder: Path) -> tuple[Any, Any]:
    """Return the errors of a comparison of schemes on both devices."""
    from steelyard.engine.weight_comparison import compare

    model, found = model_folder(folder / "model"), []
    for device in ("cpu", "toy"):
        compared = compare(model, ["FP8_DYNAMIC"], ["memoryless_minmax"], device=device)
        found.append([case.errors for case in compared.cases])
    assert MEMORY[0].peak > 0
    return found[0], found[1]


def choices(folder: Path) -> None:
    """Check what each value of `device` means, for a folder and for a module."""
    from toy_checks import raising

    from steelyard.errors import PlanError
    from steelyard.model.placement import placement_of

    toy, module = torch.device("toy", 0), torch.nn.Linear(2, 2)
    assert placement_of("auto", folder).device == toy
    assert placement_of("toy", folder).device == toy
    assert placement_of("toy:1", folder).device == torch.device("toy", 1)
    assert placement_of("cpu", folder).device == torch.device("cpu")
    assert placement_of("auto", module).device == torch.device("cpu")
    assert placement_of("auto", module.to("toy")).device == toy
    with raising(PlanError, "does not move a loaded module"):
        placement_of("cpu", module)
    with raising(PlanError, "torch sees 2"):
        placement_of("toy:2", folder)
    with raising(PlanError, "use auto, cpu or toy"):
        placement_of("xpu", folder)
    with raising(PlanError, "is not known"):
        placement_of("gpu", folder)


def rows(length: int, count: int = 8) -> list[list[int]]:
    """Return samples of random tokens."""
    drawn = torch.Generator().manual_seed(0)
    return torch.randint(3, 128, (count, length), generator=drawn).tolist()


def short_of_memory(folder: Path, family: str, recipe: str, length: int) -> list[str]:
    """Run with batches that do not fit, and compare with a run whose batches do; return notes."""
    from steelyard import oneshot

    model = model_folder(folder / "model", family)
    options = {"device": "toy", "batch_size": 8, "activations": "host"}
    MEMORY[0].reset()
    oneshot(model, RECIPES[recipe], rows(length), folder / "whole", **options)
    # less, and averages would count the parts of a batch, which the device cannot join
    share = 0.8 if recipe == "static" else 0.7
    MEMORY[0].reset(int(share * MEMORY[0].peak))
    found = oneshot(model, RECIPES[recipe], rows(length), folder / "halved", **options)
    assert MEMORY[0].refused and MEMORY[0].peak <= MEMORY[0].limit
    assert_nothing_left()
    assert_same_tensors(folder / "whole", folder / "halved")
    return [note for note in found.notes if "memory" in note]


def without_memory(folder: Path) -> str:
    """Run with less memory than one sample needs; return the message."""
    from steelyard import oneshot
    from steelyard.errors import PipelineError

    model = model_folder(folder / "model")
    options = {"device": "toy", "activations": "host", "max_seq_length": 96}
    MEMORY[0].reset()
    oneshot(model, RECIPES["static"], rows(96), folder / "one", **options)
    MEMORY[0].reset(MEMORY[0].peak // 2)
    try:
        oneshot(model, RECIPES["static"], rows(96), folder / "none", batch_size=8, **options)
    except PipelineError as error:
        return str(error)
    raise AssertionError("less memory was enough")


def same_in_each_place(folder: Path, recipe: str) -> list[tuple[int, str]]:
    """Run with hidden states in each place; return how many left, and the plan's words."""
    model, found = model_folder(folder / "model"), []
    run(model, recipe, folder / "cpu", device="cpu")
    for device, place in (("cpu", "disk"), ("toy", "device"), ("toy", "host"), ("toy", "disk")):
        MEMORY[0].reset()
        output = folder / f"{device}-{place}"
        done = run(model, recipe, output, device=device, activations=place)
        assert_nothing_left()
        assert_same_tensors(folder / "cpu", output)
        words = [each for each in done.plan.placing if each.startswith("hidden states")]
        back = [each for each in MEMORY[0].transfers if not each.to_device and len(each.shape) == 3]
        found.append((len(back), words[0]))
    return found


def held_and_said(folder: Path, family: str, recipe: str) -> tuple[int, int]:
    """Return the most memory that a run took, and what its plan said."""
    from steelyard import oneshot

    model = model_folder(folder / "model", family, hidden_size=128, intermediate_size=256)
    options = {"num_calibration_samples": 8, "max_seq_length": 24, "batch_size": 2}
    given = None if recipe == "dynamic" else rows(24)
    more = {"pipeline": "sequential"} if recipe == "dynamic" else options
    MEMORY[0].reset()
    found = oneshot(model, RECIPES[recipe], given, folder / "toy", device="toy", **more)
    return MEMORY[0].peak, found.plan.device_memory


def resumed(folder: Path) -> None:
    """Stop a run after its first layer, and resume it with hidden states in another place."""
    from steelyard.checkpoint import writer
    from steelyard.engine.layer_run import LayerRun

    model = model_folder(folder / "model")
    run(model, "gptq", folder / "cpu", device="cpu")
    writer.CheckpointWriter.due = lambda self, cost=0.0: True  # a mark after each layer
    record = LayerRun._record

    def stopped(self: LayerRun, index: int) -> None:
        if index == 1:
            raise KeyboardInterrupt
        record(self, index)

    LayerRun._record = stopped
    try:
        run(model, "gptq", folder / "toy", device="toy", activations="host")
        raise AssertionError("the run was not stopped")
    except KeyboardInterrupt:
        LayerRun._record = record
    found = run(model, "gptq", folder / "toy", device="toy", activations="disk")
    assert any(note.startswith("resumed after") for note in found.notes), found.notes
    assert_same_tensors(folder / "cpu", folder / "toy")
