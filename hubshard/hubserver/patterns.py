"""Which paths the patterns of `.gitignore` and `.gitattributes` name (see the manual pages of git)."""

from __future__ import annotations

import functools
import re

__all__ = ["INITIAL_ATTRIBUTES", "is_ignored", "is_lfs"]

_LFS_SUFFIXES = (
    "7z",
    "arrow",
    "bin",
    "bz2",
    "ckpt",
    "ftz",
    "gz",
    "h5",
    "joblib",
    "mlmodel",
    "model",
    "msgpack",
    "npy",
    "npz",
    "onnx",
    "ot",
    "parquet",
    "pb",
    "pickle",
    "pkl",
    "pt",
    "pth",
    "rar",
    "safetensors",
    "tar",
    "tflite",
    "tgz",
    "wasm",
    "xz",
    "zip",
    "zst",
)
_LFS_PATTERNS = [
    *(f"*.{suffix}" for suffix in _LFS_SUFFIXES),
    "*.lfs.*",
    "*.tar.*",
    "saved_model/**/*",
    "*tfevents*",
]

_WILDCARDS = {"*": "[^/]*", "?": "[^/]"}

INITIAL_ATTRIBUTES = "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in sorted(_LFS_PATTERNS))
"""The `.gitattributes` of a new repo."""


def is_ignored(path: str, rules: str) -> bool:
    """Whether a `.gitignore` with these rules, at the top of the repo, keeps a file out.

    The last rule that matches the file, or a folder above it, decides; below an ignored folder nothing is let in
    again.
    """
    parts = path.split("/")
    for depth in range(1, len(parts) + 1):
        if _verdict("/".join(parts[:depth]), is_folder=depth < len(parts), rules=rules):
            return True
    return False


def is_lfs(path: str, attributes: str) -> bool:
    """Whether a `.gitattributes` with these lines makes a file a large one: the last line that says so counts."""
    chosen = False
    for pattern, words in _attributes(attributes):
        if pattern.fullmatch(path):
            chosen = _filter(words, default=chosen)
    return chosen


def _verdict(path: str, *, is_folder: bool, rules: str) -> bool:
    ignored = False
    for pattern, negated, folders_only in _ignore_rules(rules):
        if (is_folder or not folders_only) and pattern.fullmatch(path):
            ignored = not negated
    return ignored


def _filter(words: tuple[str, ...], *, default: bool) -> bool:
    chosen = default
    for word in words:
        name, _, value = word.lstrip("-!").partition("=")
        if name == "filter":
            chosen = value == "lfs"
    return chosen


@functools.lru_cache(maxsize=64)
def _ignore_rules(rules: str) -> tuple[tuple[re.Pattern[str], bool, bool], ...]:
    found = []
    for line in rules.splitlines():
        text = re.sub(r"(?<!\\) +$", "", line.rstrip("\r"))
        if not text or text.startswith("#"):
            continue
        negated, text = text.startswith("!"), text.removeprefix("!")
        folders_only, text = text.endswith("/"), text.rstrip("/")
        if text:
            found.append((_compile(text.removeprefix("\\")), negated, folders_only))
    return tuple(found)


@functools.lru_cache(maxsize=64)
def _attributes(attributes: str) -> tuple[tuple[re.Pattern[str], tuple[str, ...]], ...]:
    lines = (line.split() for line in attributes.splitlines() if line.strip() and not line.startswith("#"))
    return tuple((_compile(pattern.strip('"')), tuple(words)) for pattern, *words in lines)


def _compile(pattern: str) -> re.Pattern[str]:
    """A pattern without a slash matches in every folder, any other from the top of the repo."""
    anchored = "/" in pattern
    text = pattern.removeprefix("/")
    out, at = "" if anchored else "(?:.*/)?", 0
    while at < len(text):
        step, made = _token(text, at)
        out += made
        at += step
    return re.compile(out, re.DOTALL)


def _token(text: str, at: int) -> tuple[int, str]:
    """How many characters of the pattern are one token, and the regular expression of it."""
    starts_part = at == 0 or text[at - 1] == "/"
    closing = text.find("]", at + 2) if text[at] == "[" else -1
    if starts_part and text.startswith("**/", at):
        found = 3, "(?:.*/)?"
    elif starts_part and text[at:] == "**":
        found = 2, ".+"
    elif text[at] in _WILDCARDS:
        found = 1, _WILDCARDS[text[at]]
    elif text[at] == "\\" and at + 1 < len(text):
        found = 2, re.escape(text[at + 1])
    elif closing > 0:
        inner = text[at + 1 : closing].replace("\\", "\\\\")
        found = closing + 1 - at, f"[{'^' + inner[1:] if inner[0] in '!^' else inner}]"
    else:
        found = 1, re.escape(text[at])
    return found
