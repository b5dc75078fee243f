"""provenance.json is a statement that model-signing reads, and states what the run depended on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from families import small_model, token_batches

from steelyard import oneshot
from steelyard.checkpoint.provenance import read_provenance
from steelyard.modifiers import QuantizationModifier


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("statement")
    model = small_model("llama", hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    model.save_pretrained(folder / "base")
    for name in ("one", "two"):
        recipe = QuantizationModifier(scheme="FP8", ignore=["lm_head"])
        oneshot(str(folder / "base"), recipe, token_batches(), folder / name)
    return folder


def test_statement(made: Path) -> None:
    """The digest of the subject, and those of the files, computed by hand."""
    statement = json.loads((made / "one" / "provenance.json").read_text())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    resources = statement["predicate"]["resources"]
    names = [resource["name"] for resource in resources]
    assert names == sorted(names) and {"config.json", "recipe.yaml"} < set(names)
    digests = [hashlib.sha256((made / "one" / name).read_bytes()) for name in names]
    assert [r["digest"] for r in resources] == [digest.hexdigest() for digest in digests]
    whole = hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest()
    assert statement["subject"] == [{"name": "_", "digest": {"sha256": whole}}]


def test_model_signing_reads_it(made: Path) -> None:
    signing = pytest.importorskip("model_signing._signing.signing")
    statement = json.loads((made / "one" / "provenance.json").read_text())
    manifest = signing.dsse_payload_to_manifest(statement)
    found = {each.identifier: each.digest.digest_hex for each in manifest.resource_descriptors()}
    provenance = read_provenance(made / "one")
    assert provenance is not None
    assert found == {name: file.sha256 for name, file in provenance.files.items()}


def test_the_run_is_described(made: Path) -> None:
    provenance = read_provenance(made / "one")
    assert provenance is not None and provenance.run is not None
    run = provenance.run
    recipe = (made / "one" / "recipe.yaml").read_bytes()
    assert run.recipe == hashlib.sha256(recipe).hexdigest()
    assert run.calibration is not None
    batches = token_batches()
    assert run.calibration.tokens == sum(batch.numel() for batch in batches)
    assert run.versions.keys() == {"steelyard", "compressed-tensors", "torch"}
    assert run.figures["modules"] == 7
    assert run.options["pipeline"] == "auto" and run.options["batch_size"] == 1


def test_the_same_run_writes_the_same_bytes(made: Path) -> None:
    one, two = ((made / name / "provenance.json").read_bytes() for name in ("one", "two"))
    assert one == two and str(made).encode() not in one
