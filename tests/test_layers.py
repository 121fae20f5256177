"""The architecture as a table, checked over the syntax tree of every module: who imports whom, and how large it is."""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import hubshard

ROOT = Path(hubshard.__file__).parent

LAYERS = {
    # a module may import those of lower layers; within LEVEL_LAYERS those of its own layer too
    0: {
        "tensors",
        "errors",
        "sizes",
        "events",
        "target",
        "locks",
        "disk",
        "messages",
        "periodic",
        "names",
        "paths",
        "extras",
    },
    1: {"protocols", "manifest", "header", "index", "jsonfile", "watch", "readers"},
    2: {"plan", "reads", "engine", "shardfile", "digests"},
    3: {"store", "sources"},
    4: {"steps"},
    5: {"ranks"},
    6: {"publish", "fetch", "lazy", "history", "convert", "report", "resume"},
    7: {"dcp", "integrations", "promotion"},
    8: {"cli"},
    9: {"__init__", "__main__"},
}
LEVEL_LAYERS = {0, 1, 2}
APART = {"hubserver": 1}
"""A program of its own: the highest layer that it may import; only `APART_USERS` may import it."""
APART_USERS = {"cli"}
KNOWN = set().union(*LAYERS.values()) | set(APART)

THIRD_PARTY = {
    # who may import which package at all; "*" is everybody
    "torch": {"sources/*", "ranks/*", "lazy/*", "resume/*", "integrations/*", "dcp.py", "cli/demo/client.py"},
    "numpy": {"sources/*", "lazy/*", "resume/*"},
    "safetensors": {"sources/*", "lazy/*", "cli/demo/client.py"},
    "transformers": {"sources/*", "lazy/*", "integrations/*", "cli/demo/client.py"},
    "accelerate": {"lazy/*", "integrations/*"},
    "peft": {"sources/*"},
    "torchdata": {"resume/data/adapters.py"},
    "datasets": {"resume/data/adapters.py"},
    "deepspeed": {"integrations/*"},
    "huggingface_hub": {"store/hub*.py", "fetch/hub.py", "cli/demo/client.py"},
    "hf_xet": {"store/hub*.py"},
    "typer": {"cli/*"},
    "rich": {"cli/*"},
    "starlette": {"hubserver/*"},
    "uvicorn": {"hubserver/*"},
    "python_multipart": {"hubserver/*"},
    "yaml": {"hubserver/*"},
    "typing_extensions": {"*"},
    "lz4": {"hubserver/*"},
    "blake3": {"hubserver/*"},
}
PICKLERS = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
PICKLING_CALLS = {
    # of torch.distributed
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
LATE = {
    "torch",
    "numpy",
    "safetensors",
    "transformers",
    "accelerate",
    "peft",
    "deepspeed",
    "hf_xet",
    "huggingface_hub",
    "torchdata",
    "datasets",
}
"""Optional or slow packages: they, and modules of ours that import them on top, may be imported inside a function."""
LATE_OURS = {"cli/*", "__init__.py"}
"""Who may import modules of ours inside a function, so that `hubshard --help` stays fast."""

MAX_FILE_LINES = 400
MAX_MEDIAN_LINES = 12
MAX_P95_LINES = 45


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name: by which file, in which line, of what, and when: on "top", for "typing", in a "function"."""

    path: str
    line: int
    target: str
    when: str

    def __str__(self) -> str:
        return f"hubshard/{self.path}:{self.line} imports {self.target}"


@cache
def modules() -> dict[str, ast.Module]:
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8")) for path in sorted(ROOT.rglob("*.py"))
    }


@cache
def imports() -> tuple[Import, ...]:
    return tuple(found for path, tree in modules().items() for found in _imports_of(path, tree, when="top"))


def _imports_of(path: str, node: ast.AST, *, when: str) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        for target in _targets(child, path):
            yield Import(path, getattr(child, "lineno", 0), target, when)
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _imports_of(path, child, when="function")
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            yield from _imports_of(path, child, when="typing")
        else:
            yield from _imports_of(path, child, when=when)


@cache
def _slow_modules() -> set[str]:
    """Modules of ours that import an optional or slow package on top, or another module that does."""
    slow: set[str] = set()
    while True:
        paths = {
            found.path
            for found in imports()
            if found.when == "top" and (found.target.split(".")[0] in LATE or found.target.rpartition(".")[0] in slow)
        }
        found_now = {".".join(["hubshard", *Path(path).with_suffix("").parts]) for path in paths}
        if found_now == slow:
            return slow
        slow = found_now


def _targets(node: ast.AST, path: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        package = ["hubshard", *Path(path).parts[:-1]]
        base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
    return [f"{base}.{alias.name}" for alias in node.names]


def _unit(path: str) -> str:
    """The entry of the table that a file belongs to."""
    return Path(path).parts[0].removesuffix(".py")


def _our_unit(target: str) -> str | None:
    """The entry of the table that an imported name belongs to; None for what is not ours."""
    parts = target.split(".")
    if parts[0] != "hubshard":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in KNOWN else "__init__"


def _layer(unit: str) -> int | None:
    return next((layer for layer, units in LAYERS.items() if unit in units), None)


def _allowed(importer: str, target: str) -> bool:
    if importer == target:
        return True
    if target in APART:
        return importer in APART_USERS
    below = _layer(target)
    if below is None or target == "__init__":
        # the version is the one thing that lower layers may want of the package itself
        return importer in {"cli", "integrations"} and target == "__init__"
    if importer in APART:
        return below <= APART[importer]
    own = _layer(importer)
    return own is not None and (below < own or (below == own and own in LEVEL_LAYERS))


def _matches(path: str, patterns: set[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _functions() -> Iterator[tuple[str, int]]:
    """Where each function stands, and its lines, docstring left out."""
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"hubshard/{path}:{node.lineno} {node.name}", _lines(node)


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    is_docstring = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    docstring = (first.end_lineno or 0) - first.lineno + 1 if is_docstring else 0
    return (node.end_lineno or 0) - node.lineno + 1 - docstring


def test_every_module_stands_in_the_table() -> None:
    assert {_unit(path) for path in modules()} <= KNOWN


def test_no_import_goes_up_nor_sideways_between_independent_modules() -> None:
    wrong = [
        str(found)
        for found in imports()
        if (target := _our_unit(found.target)) is not None and not _allowed(_unit(found.path), target)
    ]
    assert wrong == []


def test_third_party_packages_are_imported_only_where_the_table_allows() -> None:
    wrong = [
        str(found)
        for found in imports()
        if (package := found.target.split(".")[0]) not in {*sys.stdlib_module_names, "hubshard"}
        and not _matches(found.path, THIRD_PARTY.get(package, set()))
    ]
    assert wrong == []


def test_imports_stand_on_top_but_for_optional_and_slow_packages() -> None:
    wrong = [
        str(found)
        for found in imports()
        if found.when == "function"
        and found.target.split(".")[0] not in LATE
        and found.target.rpartition(".")[0] not in _slow_modules()
        and not (_our_unit(found.target) is not None and _matches(found.path, LATE_OURS))
    ]
    assert wrong == []


def test_nothing_is_pickled_nor_unpickled() -> None:
    wrong = [str(found) for found in imports() if found.target.split(".")[0] in PICKLERS]
    for path, tree in modules().items():
        for node in ast.walk(tree):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in PICKLING_CALLS or (name == "load" and ast.unparse(node) == "torch.load"):
                wrong.append(f"hubshard/{path} {ast.unparse(node)}")
    assert wrong == []


def test_files_are_small() -> None:
    sizes = {path: len((ROOT / path).read_text("utf-8").splitlines()) for path in modules()}
    assert {path: size for path, size in sizes.items() if size > MAX_FILE_LINES} == {}


def test_functions_are_small() -> None:
    sizes = sorted((lines, where) for where, lines in _functions())
    lines = [size for size, _ in sizes]
    assert statistics.median(lines) <= MAX_MEDIAN_LINES, sizes[-20:]
    assert lines[int(len(lines) * 0.95)] <= MAX_P95_LINES, sizes[-20:]


def test_the_rules_find_what_they_forbid() -> None:
    assert not _allowed("plan", "store")
    assert not _allowed("publish", "fetch")
    assert not _allowed("store", "sources")
    assert not _allowed("hubserver", "plan")
    assert not _allowed("store", "hubserver")
    assert _allowed("publish", "store")
    assert _allowed("cli", "hubserver")
    assert _allowed("hubserver", "header")
    tree = ast.parse("from .. import plan\ndef f():\n    import torch.nn\nif TYPE_CHECKING:\n    import numpy\n")
    assert [(found.target, found.when) for found in _imports_of("store/hub.py", tree, when="top")] == [
        ("hubshard.plan", "top"),
        ("torch.nn", "function"),
        ("numpy", "typing"),
    ]
