"""evaluate, the command: the numbers of the Python call."""

from __future__ import annotations

from pathlib import Path

from commands import Command

from steelyard.evaluate import evaluate


def test_document_is_that_of_the_python_call(
    steelyard: Command, workplace: Path, model: Path, tmp_path: Path
) -> None:
    quantized, data = tmp_path / "q", workplace / "held-out.txt"
    assert steelyard("quantize", model, "-o", quantized, "--scheme", "W4A16").code == 0
    limits = ["--samples", 3, "--max-seq-length", 32]
    arguments = ("evaluate", model, quantized, "--data", data, *limits)
    answer = steelyard(*arguments, "--json")
    assert answer.code == 0, answer.err
    expected = evaluate(model, quantized, str(data), num_samples=3, max_seq_length=32).as_dict()
    found = answer.document
    assert (found["schema"], found["command"]) == (1, "evaluate")
    assert {k: found[k] for k in expected.keys() - {"seconds"}} == {
        k: v for k, v in expected.items() if k != "seconds"
    }
    assert expected["kl_divergence"] > 0
    lines = steelyard(*arguments).out.splitlines()
    assert lines[1].split() == [
        "perplexity",
        f"{expected['base_perplexity']:.3f}",
        f"{expected['perplexity']:.3f}",
    ]
    assert lines[2].split()[-1] == f"{expected['kl_divergence']:.4g}"
    assert lines[3].split()[-2] == f"{100 * expected['top1_agreement']:.1f}"


def test_missing_data(steelyard: Command, model: Path) -> None:
    answer = steelyard("evaluate", model, model)
    assert (answer.code, answer.out) == (2, "")
    assert "missing option '--data'" in answer.err
    gone = steelyard("evaluate", model, model, "--data", "none.txt")
    assert gone.code == 1
    assert "there is no file 'none.txt'" in gone.err
