"""What an evaluation says of itself: JSON, text and a table."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import subprocess
import sys

import pytest
from rich.console import Console

from steelyard.evaluate import Evaluation

FOUND = Evaluation(
    base="m",
    quantized="q",
    samples=2,
    tokens=4096,
    base_perplexity=10.0,
    perplexity=10.5,
    kl_divergence=0.0123456,
    kl_p99=0.5,
    kl_max=1.25,
    top1_agreement=0.9875,
    seconds=12.34,
    notes=("two samples",),
)


def test_dict_survives_json() -> None:
    content = FOUND.as_dict()
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert Evaluation(**{**content, "notes": tuple(content["notes"])}) == FOUND


def test_infinite_perplexity_is_null_in_json() -> None:
    content = dataclasses.replace(FOUND, perplexity=math.inf).as_dict()
    assert content["perplexity"] is None
    assert content["base_perplexity"] == 10.0


def test_text_has_every_number() -> None:
    text = str(FOUND)
    for part in (
        "compared with m",
        "4,096 of 2 samples",
        "10.0000",
        "10.5000 (+5.00%)",
        "0.012346 nats",
        "0.500000",
        "1.250000",
        "98.75%",
        "12.3",
        "note: two samples",
    ):
        assert part in text


def test_table_has_every_row() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(FOUND)
    for label, value in FOUND.rows():
        assert label in out.getvalue()
        assert value in out.getvalue()
    assert "two samples" in out.getvalue()


def test_it_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FOUND.tokens = 1  # type: ignore[misc]


def test_import_waits_with_heavy_packages_until_the_function_is_used() -> None:
    heavy = "sys.modules.keys() & {'torch', 'compressed_tensors', 'transformers'}"
    code = (
        f"import sys\nfrom steelyard.evaluate import Evaluation\nprint(len({heavy}))\n"
        f"from steelyard.evaluate import evaluate\nprint(len({heavy}), evaluate.__name__)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["0", "3", "evaluate"]


def test_unknown_name_is_an_attribute_error() -> None:
    import steelyard.evaluate

    with pytest.raises(AttributeError, match="no attribute 'evalute'"):
        steelyard.evaluate.evalute  # noqa: B018
