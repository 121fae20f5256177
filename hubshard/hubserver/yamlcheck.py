"""The metadata of a card: the YAML between two `---` lines at the top of README.md."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

__all__ = ["Verdict", "check", "metadata"]

_FRONT_MATTER = re.compile(r"\A\ufeff?\s*---[ \t]*\r?\n(.*?)(?:\r?\n)?^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
_STRINGS = ("pipeline_tag", "library_name", "license_name", "license_link", "pretty_name", "sdk", "title")
_STRING_LISTS = ("tags", "datasets", "metrics", "base_model", "language", "license", "task_categories", "task_ids")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_SDKS = ("gradio", "streamlit", "docker", "static")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with a card (`errors` refuse it) and what is odd (`warnings`)."""

    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def metadata(content: str) -> dict[str, Any]:
    """The metadata of a card; empty where there is none, or none that can be read."""
    match = _FRONT_MATTER.search(content)
    if match is None:
        return {}
    try:
        found = yaml.safe_load(match.group(1))
    except (yaml.YAMLError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def check(content: str, kind: str) -> Verdict:
    """Look over the card of a repo of a kind (`model`, `dataset`, `space`)."""
    match = _FRONT_MATTER.search(content)
    if match is None or not match.group(1).strip():
        return Verdict(warnings=("empty or missing yaml metadata in repo card",))
    try:
        found = yaml.safe_load(match.group(1))
    except (yaml.YAMLError, ValueError) as error:
        return Verdict(errors=(f"YAML metadata cannot be read: {' '.join(str(error).split())}",))
    if not isinstance(found, dict):
        return Verdict(errors=("YAML metadata must be a mapping of keys to values",))
    return Verdict(errors=(*_strings(found), *_lists(found), *_structures(found), *_space(found, kind)))


def _strings(found: dict[str, Any]) -> list[str]:
    return [f'"{key}" must be a string' for key in _STRINGS if not isinstance(found.get(key, ""), str)]


def _lists(found: dict[str, Any]) -> list[str]:
    wrong = []
    for key in _STRING_LISTS:
        value = found.get(key)
        items = value if isinstance(value, list) else [value]
        if value is not None and not all(isinstance(item, str) for item in items):
            wrong.append(f'"{key}" must be a string or a list of strings')
    license_id = found.get("license")
    if isinstance(license_id, str) and not _LICENSE.fullmatch(license_id):
        wrong.append(f'"license" must be the identifier of a licence, not {license_id!r}')
    return wrong


def _structures(found: dict[str, Any]) -> list[str]:
    wrong = [f'"{key}" must be a mapping' for key in ("co2_eq_emissions",) if isinstance(found.get(key), list | str)]
    index = found.get("model-index")
    if index is None:
        return wrong
    if not isinstance(index, list):
        return [*wrong, '"model-index" must be an array']
    for at, model in enumerate(index):
        if not isinstance(model, dict) or not isinstance(model.get("name"), str):
            wrong.append(f'"model-index[{at}].name" is required')
        elif not isinstance(model.get("results", []), list):
            wrong.append(f'"model-index[{at}].results" must be an array')
        else:
            wrong += _results(model.get("results", []), at)
    return wrong


def _results(results: list[Any], at: int) -> list[str]:
    wrong = []
    for number, result in enumerate(results):
        where = f"model-index[{at}].results[{number}]"
        if not isinstance(result, dict):
            wrong.append(f'"{where}" must be a mapping')
            continue
        task, metrics = result.get("task"), result.get("metrics")
        if not isinstance(task, dict) or not isinstance(task.get("type"), str):
            wrong.append(f'"{where}.task.type" is required')
        if not isinstance(metrics, list):
            wrong.append(f'"{where}.metrics" is required and must be an array')
    return wrong


def _space(found: dict[str, Any], kind: str) -> list[str]:
    if kind == "space" and isinstance(found.get("sdk"), str) and found["sdk"] not in _SDKS:
        return [f'"sdk" must be one of {", ".join(_SDKS)}']
    return []
