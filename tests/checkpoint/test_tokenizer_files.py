"""Of a tokenizer's folder its files are taken, and nothing that lies beside them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from steelyard.checkpoint import CheckpointWriter
from steelyard.checkpoint.tokenizer_files import tokenizer_files
from steelyard.errors import CheckpointError

TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "qwen.tiktoken",
    "tokenization_x.py",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tools.jinja",
    "preprocessor_config.json",
    "processor_config.json",
)
OTHER = (
    "config.json",
    "id_rsa",
    ".env",
    "tokenizer_keys.txt",
    "secrets.json",
    "data.jsonl",
    "train.parquet",
    "notes.txt",
    "model.safetensors",
    "additional_chat_templates/keys.txt",
    ".ssh/id_rsa",
    "data/tokenizer.json",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (*TOKENIZER, *OTHER):
        path = tmp_path / "given" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    os.mkfifo(tmp_path / "given" / "pipe")  # which is none of our business
    (tmp_path / "given" / "link").symlink_to("/etc/passwd")
    return tmp_path / "given"


def test_only_files_of_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    assert {str(path) for path in tokenizer_files(folder)} == set(TOKENIZER)
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add("x", torch.ones(1))
        writer.carry_tokenizer(folder)
        out = writer.finish({})
    found = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    assert found == {*TOKENIZER, "config.json", "model.safetensors", "provenance.json"}


def test_link_out_of_the_folder_is_refused(folder: Path) -> None:
    (folder / "vocab.json").unlink()
    (folder / "vocab.json").symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError, match="is a link to /etc/passwd, outside"):
        tokenizer_files(folder)
