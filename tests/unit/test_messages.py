"""Names in messages."""

from __future__ import annotations

from hubshard.messages import brief, listed


def test_a_name_is_quoted_and_a_long_one_cut() -> None:
    assert brief("model.weight\n") == r"'model.weight\n'"
    assert brief("x" * 200) == repr("x" * 200)
    assert brief("x" * 201) == repr("x" * 200) + "..."


def test_many_names_are_counted_and_few_are_named() -> None:
    assert listed(["a", "b"], most=2) == "a, b"
    assert listed(["a", "b", "c", "d"], most=2) == "a, b and 2 more"
    assert listed([], most=2) == ""
