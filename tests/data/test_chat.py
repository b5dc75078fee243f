"""Chat templates: the text that transformers renders, and an end for those that have none."""

from __future__ import annotations

from typing import Any

import pytest
from sample_rows import CHAT, make_tokenizer

from steelyard.data import chat
from steelyard.data.chat import ChatRenderer
from steelyard.errors import DataError

MESSAGES = [{"role": "user", "content": "w1 \ud800"}, {"role": "assistant", "content": "w2 \n"}]
USUAL = [
    CHAT,
    "{{ bos_token }}{% for m in messages %}[{{ m.role | upper }}]{{ m.content | trim }}"
    "{% endfor %}",
    "{% if tools %}x{% endif %}{{ messages | tojson }}{{ add_generation_prompt }}",
]
ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = a * b %}{% endfor %}"
    "{% endfor %}",
    "{{ 9 ** (9 ** 9) }}",
]
LARGE = [
    "{% set n = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}"
    "{% endfor %}{{ n.x }}",
    "{{ 'x' * 100000000 }}",
]


def tokenizer_with(template: str) -> Any:
    made = make_tokenizer()
    made.chat_template = template
    return made


def test_text_is_that_of_transformers() -> None:
    renderer = ChatRenderer(tokenizer_with(USUAL[0]))
    for template in USUAL:
        renderer.tokenizer.chat_template = template
        expected = renderer.tokenizer.apply_chat_template(MESSAGES, tokenize=False)
        assert renderer.render(MESSAGES) == expected
    renderer.tokenizer.chat_template = "{{ raise_exception('no system') }}"
    with pytest.raises(Exception, match="no system"):
        renderer.render(MESSAGES)
    renderer.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat_template"):
        renderer.render(MESSAGES)


def test_template_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = ChatRenderer(tokenizer_with(""))
    for template in LARGE:  # in one process, which survives them
        renderer.tokenizer.chat_template = template
        with pytest.raises(DataError, match=r"needs more than|characters|MemoryError"):
            renderer.render(MESSAGES)
    monkeypatch.setattr(chat, "SECONDS", 0.5)
    for template in ENDLESS:
        renderer = ChatRenderer(tokenizer_with(template))
        with pytest.raises(DataError, match="needs more than"):
            renderer.render(MESSAGES)
