"""Writes the table in docs/models.md: the result of each family of models in each scheme.

    python tools/model_table.py                runs all families and writes the page's table
    python tools/model_table.py llama bert     prints their rows

A cell is a run on a small random model (`tests/support/model_matrix.py`), quantized and loaded by
transformers again:

    loads     every tensor that is not quantized has the source's value, and every quantized one a
              value within its rounding, under the class's own names; logits are near the source's
    written   written, but transformers does not load it; the plan warned of that
    refused   refused in the plan, before any work
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CompressedTensorsConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/support"))

from model_matrix import MATRIX, Sample, matrix_model, matrix_samples  # noqa: E402

from steelyard import oneshot  # noqa: E402
from steelyard.errors import SteelyardError  # noqa: E402
from steelyard.modifiers import GPTQModifier, QuantizationModifier  # noqa: E402

__all__ = ["PAGE", "Row", "page_reasons", "page_rows", "try_family"]

PAGE = ROOT / "docs" / "models.md"
_BEGIN, _END = "<!-- table: tools/model_table.py -->", "<!-- end of the table -->"
GROUP = 32  # columns: every width of the matrix divides
SCHEMES = ("W4A16", "FP8 static", "GPTQ W4A16", "NVFP4A16")
TOLERANCE = {"W4A16": 0.2, "FP8 static": 0.1, "GPTQ W4A16": 0.3, "NVFP4A16": 0.2}
_IGNORED = re.compile(r"\.experts\.\d+\.\w+\.input_scale$")  # transformers has no use for them
LOGITS = 0.5  # relative error: rounding stays below it, a weight that was not loaded is above


@dataclass
class Row:
    """Results of one family.

    share:   of the parameters, quantized by W4A16
    cells:   by scheme
    reasons: by scheme: why it was refused, or what the plan warned of
    """

    family: str
    share: float = 0.0
    cells: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def line(self, numbers: dict[str, int]) -> str:
        """Return the row of the table; `numbers` are those of the reasons below it."""
        cells = []
        for scheme in SCHEMES:
            reason = self.reasons.get(scheme)
            note = "" if reason is None else f" ({numbers.get(_plain(reason), reason)})"
            cells.append(self.cells[scheme] + note)
        return (
            " | ".join([f"| {self.family}", MATRIX[self.family].kind, f"{self.share:.0%}", *cells])
            + " |"
        )


def recipe(scheme: str, family: str) -> QuantizationModifier:
    options: dict[str, Any] = {"targets": "Linear", "ignore": ["lm_head", *MATRIX[family].ignore]}
    if "W4A16" in scheme:
        options["group_size"] = GROUP
    if scheme == "GPTQ W4A16":
        return GPTQModifier(scheme="W4A16", **options)
    return QuantizationModifier(scheme="FP8" if scheme == "FP8 static" else scheme, **options)


def try_family(family: str, folder: Path) -> Row:
    """Run a family in every scheme; raise if a checkpoint is wrong without a warning."""
    samples, source = matrix_samples(family), folder / "source"
    matrix_model(family).save_pretrained(folder / "random")
    model = load(family, folder / "random")  # in the types that the class keeps
    model.save_pretrained(source)
    row = Row(family)
    for scheme in SCHEMES:
        data = None if scheme in ("W4A16", "NVFP4A16") else samples
        target = folder / scheme.replace(" ", "-")
        try:
            result = oneshot(source, recipe(scheme, family), dataset=data, output_dir=target)
        except SteelyardError as error:
            row.cells[scheme], row.reasons[scheme] = "refused", str(error)
            continue
        warned = [text for text in result.warnings if "transformers" in text]
        if warned:
            row.cells[scheme], row.reasons[scheme] = "written", warned[0]
        else:
            compare(source, target, family, scheme, samples)
            row.cells[scheme] = "loads"
        if scheme == "W4A16":
            row.share = quantized_share(target, model)
            from_module(family, source, target, folder / "from-module", samples)
    return row


def load(family: str, folder: Path) -> Any:
    """Load with transformers; raise if tensors are missing or unexpected."""
    kind = getattr(transformers, MATRIX[family].name)
    options = {"dtype": torch.bfloat16, "output_loading_info": True}
    if "quantization_config" in json.loads((folder / "config.json").read_text("utf-8")):
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You passed `quantization_config`")  # on purpose
        model, info = kind.from_pretrained(folder, **options)
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        found = sorted(name for name in info.get(key, ()) if not _IGNORED.search(name))
        if found:
            raise AssertionError(f"{folder.name}: {key} {found[:4]}")
    return model.eval()


@torch.no_grad()
def compare(source: Path, target: Path, family: str, scheme: str, samples: list[Sample]) -> None:
    """Compare a checkpoint, as transformers loads it, with the source."""
    plain, loaded = load(family, source), load(family, target)
    before = logits(plain, samples[0])
    found = dict(loaded.named_parameters())
    quantized = 0
    for name, value in plain.named_parameters():
        if name not in found:
            if any(other.startswith(f"{name.rpartition('.')[0]}.0.") for other in found):
                quantized += 1  # a list of experts where it is quantized, as in Llama 4
                continue
            raise AssertionError(f"{family}, {scheme}: the loaded model has no {name}")
        other = found[name].float()
        off = float((other - value.float()).norm() / value.float().norm().clamp_min(1e-9))
        if off > TOLERANCE[scheme]:
            raise AssertionError(f"{family}, {scheme}: {name} is off by {off:.2f}")
        quantized += off > 0
    if not quantized:
        raise AssertionError(f"{family}, {scheme}: no weight was quantized")
    off = float((logits(loaded, samples[0]) - before).norm() / before.norm())
    if not off < LOGITS:
        raise AssertionError(f"{family}, {scheme}: logits are off by {off:.2f}")


@torch.no_grad()
def logits(model: Any, sample: Sample) -> torch.Tensor:
    given = {k: v.bfloat16() if v.is_floating_point() else v for k, v in sample.items()}
    return model(**given).logits.float()


def from_module(
    family: str, source: Path, expected: Path, target: Path, samples: list[Sample]
) -> None:
    """Quantize the loaded module: bytes and logits must equal those of the folder."""
    from families import assert_same_tensors

    model = load(family, source)
    oneshot(model, recipe("W4A16", family), output_dir=target)
    assert_same_tensors(expected, target)


def quantized_share(folder: Path, model: Any) -> float:
    """Return the share of the model's parameters that are stored as codes."""
    from families import read

    tensors = read(folder)
    shapes = [value for name, value in tensors.items() if name.endswith("weight_shape")]
    codes = sum(int(shape.prod()) for shape in shapes)
    return codes / sum(parameter.numel() for parameter in model.parameters())


def page_rows(text: str) -> dict[str, str]:
    """Return the rows of the page, by family."""
    return {match[1]: match[0] for match in re.finditer(r"^\| ([a-z0-9_]+) \|.*$", text, re.M)}


def page_reasons(text: str) -> dict[str, int]:
    """Return the reasons below the table, with their numbers."""
    return {match[2]: int(match[1]) for match in re.finditer(r"^(\d+)\. (.*)$", text, re.M)}


def _plain(reason: str) -> str:
    """Return a message as one line, without the names that differ from family to family."""
    reason = reason.partition("nothing was done:")[2] or reason
    reason = re.sub(r"/\S*/(source|from-module)\b", "the model", reason)
    reason = re.sub(r", such as \S+?,", "", reason)
    return " ".join(reason.replace("\n  - ", "; ").strip(" ;-\n").split())


def written(text: str, rows: list[Row]) -> str:
    """Return the page with a new table and new reasons."""
    reasons = dict.fromkeys(_plain(reason) for row in rows for reason in row.reasons.values())
    numbers = {reason: number for number, reason in enumerate(reasons, 1)}
    head, _, rest = text.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    columns = ["family", "kind", "quantized", *SCHEMES]
    table = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    table += [row.line(numbers) for row in rows]
    below = [f"{number}. {reason}" for reason, number in numbers.items()]
    return "\n".join([head + _BEGIN, "", *table, "", *below, "", _END + tail])


def main(families: list[str]) -> None:
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    rows, failed = [], []
    for family in families or MATRIX:
        with tempfile.TemporaryDirectory() as folder:
            try:
                rows.append(try_family(family, Path(folder)))
            except Exception as error:
                failed.append(family)
                print(f"{family}: {type(error).__name__}: {error}"[:600], flush=True)
                continue
        print(rows[-1].line({}), flush=True)
    if failed:
        raise SystemExit(f"{', '.join(failed)}: wrong; the page stays as it is")
    if not families:
        PAGE.write_text(written(PAGE.read_text("utf-8"), rows), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
