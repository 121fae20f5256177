"""A minimal model card: what is true of any published model, and nothing that is not known."""

from __future__ import annotations

import json
from collections.abc import Sequence

__all__ = ["model_card"]


def model_card(
    name: str, *, library: str, parameters: int, tags: Sequence[str] = (), base_model: str | None = None
) -> bytes:
    """The bytes of a README.md with metadata as the Hub reads it (https://huggingface.co/docs/hub/model-cards).

    Args:
        name: the class of the model.
        library: `library_name` of the metadata.
        parameters: how many.
        tags: of the metadata.
        base_model: the repo of the model that it is an adapter of.
    """
    # a JSON string is a YAML string
    lines = ["---", f"library_name: {json.dumps(library)}"]
    if base_model is not None:
        lines += [f"base_model: {json.dumps(base_model)}"]
    if tags:
        lines += ["tags:", *(f"- {json.dumps(tag)}" for tag in tags)]
    lines += [
        "---",
        "",
        f"# {name}",
        "",
        f"A model of class `{name}` with {parameters:,} parameters, stored as safetensors.",
    ]
    return ("\n".join(lines) + "\n").encode("utf-8")
