"""What is wrong with the metadata of a card is named."""

from __future__ import annotations

import pytest

from hubshard.hubserver.yamlcheck import check, metadata

GOOD = """---
license: apache-2.0
language: [en, de]
tags: [safetensors]
base_model: org/base
model-index:
- name: m
  results:
  - task: {type: text-generation}
    metrics: [{type: accuracy, value: 1.0}]
---
# Title
"""


def card(text: str) -> str:
    return f"---\n{text}\n---\n"


def test_a_good_card_has_nothing_wrong() -> None:
    verdict = check(GOOD, "model")
    assert (verdict.errors, verdict.warnings) == ((), ())
    assert metadata(GOOD)["license"] == "apache-2.0"


def test_a_card_that_was_written_on_windows_is_read_alike() -> None:
    assert metadata(GOOD.replace("\n", "\r\n")) == metadata(GOOD)


@pytest.mark.parametrize("content", ["# Only a title", "", "---\n---\n", "text\n---\nlicense: mit\n---\n"])
def test_a_card_without_metadata_is_a_warning(content: str) -> None:
    verdict = check(content, "model")
    assert verdict.errors == ()
    assert verdict.warnings == ("empty or missing yaml metadata in repo card",)
    assert metadata(content) == {}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("license: [1]", '"license"'),
        ("license: Not A Licence", '"license"'),
        ("tags: {a: b}", '"tags"'),
        ("language: 3", '"language"'),
        ("pipeline_tag: [a]", '"pipeline_tag"'),
        ("a: [unclosed", "cannot be read"),
        ("just text", "must be a mapping"),
        ("model-index: x", '"model-index" must be an array'),
        ("model-index: [{results: []}]", '"model-index[0].name" is required'),
        ("model-index: [{name: m, results: [{}]}]", "task.type"),
        ("when: 2026-99-99 99:99:99", "cannot be read"),
    ],
)
def test_wrong_metadata_is_named(text: str, named: str) -> None:
    assert any(named in error for error in check(card(text), "model").errors)


def test_a_space_needs_a_known_sdk() -> None:
    assert check(card("sdk: excel"), "space").errors
    assert not check(card("sdk: gradio"), "space").errors
