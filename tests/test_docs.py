"""The code in README.md and docs/ runs, each page from top to bottom in one namespace."""

import json
import re
from pathlib import Path

import pytest
from pages import own_registrations, write_files

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
YAML_BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder in which `path/to/model` is a model, and `calibration.jsonl` is text for it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("workplace")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = folder / "path" / "to" / "model"
    LlamaForCausalLM(config).save_pretrained(model)
    words = ["<unk>", "sample", "of", "the", "calibration", "text", *map(str, range(20))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(model)
    rows = [{"text": f"sample {i} of the calibration text"} for i in range(20)]
    (folder / "calibration.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_every_recipe_in_the_pages_loads():
    from steelyard.recipes import load_recipe

    loaded = {
        page.stem: [load_recipe(r).modifiers for r in YAML_BLOCK.findall(page.read_text("utf-8"))]
        for page in PAGES
    }
    first = loaded["recipes"][:3]
    assert first[0] == first[1] == first[2], "the page says that they are the same"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_runs(page, monkeypatch, workplace):
    monkeypatch.chdir(workplace)
    monkeypatch.syspath_prepend(workplace)
    write_files(page, workplace)
    text = page.read_text(encoding="utf-8")
    blocks = PYTHON_BLOCK.findall(text)
    assert blocks, f"{page.name} has no python block"
    namespace = {"__name__": page.stem}
    with own_registrations():
        for block in blocks:
            line = text[: text.index(block)].count("\n")
            exec(compile("\n" * line + block, str(page), "exec"), namespace)


def test_default_observers_are_stated():
    """README lists no observers: `ls observers` and docs/observers.md do, from the registry."""
    from steelyard.names import ACTIVATION_OBSERVER, WEIGHT_OBSERVER

    weights, activations = f"`{WEIGHT_OBSERVER}`", f"`{ACTIVATION_OBSERVER}`"
    readme = (ROOT / "README.md").read_text()
    assert f"default is {weights} for weights and {activations} for activations" in readme
    recipes = (ROOT / "docs" / "recipes.md").read_text()
    assert f"By default, weights get {weights}, and activations {activations}" in recipes
    page = (ROOT / "docs" / "observers.md").read_text()
    for name, values in ((WEIGHT_OBSERVER, "weights"), (ACTIVATION_OBSERVER, "activations")):
        section = page.split(f"### `{name}`\n")[1].split("\n### ")[0]
        assert f"The default for {values}" in section
    assert page.count("The default for ") == 2
