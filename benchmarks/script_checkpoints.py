"""Do scripts for llm-compressor leave the same checkpoint after their import root is changed?

    python benchmarks/script_checkpoints.py [--json FILE] [WORD ...]

Runs each script of tests/support/moved_scripts.py with llm-compressor and with this package on the
included model, each in a process of its own, and compares the tensors of both checkpoints: names,
types and shapes, and how many bytes are equal. WORD selects scripts by their names.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path

import datasets  # noqa: F401  imported here once, for all processes
import llmcompressor
import torch
import transformers
from safetensors.torch import load_file

import steelyard
from steelyard.demo import model_folder

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from moved_scripts import SCRIPTS, script

ROOTS = {"peer": llmcompressor.__name__, "ours": steelyard.__name__}


def run(name: str, root: str, folder: Path) -> None:
    """Run a script in this process, without its output."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    warnings.simplefilter("ignore")  # of both packages; this compares files
    text = script(name, root, str(model_folder()), str(folder))
    exec(compile(text, name, "exec"), {"__name__": "__main__"})


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()
    }


def compared(ours: dict[str, torch.Tensor], peer: dict[str, torch.Tensor]) -> dict:
    """Return the tensors that differ, and the fraction of equal bytes by the end of their names."""
    kinds = [{n: (str(t.dtype), list(t.shape)) for n, t in each.items()} for each in (ours, peer)]
    names = sorted(kinds[0].keys() | kinds[1].keys())
    different = [n for n in names if kinds[0].get(n) != kinds[1].get(n)]
    equal: dict[str, list[int]] = {}
    for name in (n for n in names if n not in different):
        one, other = (each[name].contiguous().view(torch.uint8) for each in (ours, peer))
        counts = equal.setdefault(name.rpartition(".")[2], [0, 0])
        counts[0] += int((one == other).sum())
        counts[1] += one.numel()
    fractions = {leaf: same / total for leaf, (same, total) in sorted(equal.items())}
    return {"tensors": len(names), "different": different, "equal bytes": fractions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    forked = multiprocessing.get_context("fork")
    results = []
    for name in SCRIPTS:
        if options.words and not any(word in name for word in options.words):
            continue
        found: dict = {"script": name, "finished": {}}
        with tempfile.TemporaryDirectory() as place:
            for side, root in ROOTS.items():
                process = forked.Process(target=run, args=(name, root, Path(place) / side))
                process.start()
                process.join()
                found["finished"][side] = process.exitcode == 0
            if all(found["finished"].values()):
                found |= compared(*(tensors(Path(place) / side) for side in ("ours", "peer")))
        results.append(found)
        print(name, {k: v for k, v in found.items() if k != "script"}, flush=True)
    if options.json is not None:
        packages = ("llmcompressor", "compressed-tensors", "torch")
        versions = {each: version(each) for each in packages}
        versions["transformers"] = transformers.__version__
        content = {"versions": versions, "results": results}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
