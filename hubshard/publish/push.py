"""`push_to_hub`: what is given becomes what is published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from hubshard.events import OnEvent, ignore
from hubshard.names import check_variant
from hubshard.publish.delivery import Delivery, Published, deliver
from hubshard.publish.from_store import from_store
from hubshard.publish.left_out import Choice
from hubshard.publish.outgoing import Layout, Outgoing, from_memory
from hubshard.publish.sharing import sharing
from hubshard.sizes import parse_size
from hubshard.sources.dtypes import parse_float_dtype
from hubshard.store.hub_client import Token
from hubshard.store.opening import open_target
from hubshard.store.patience import Patience

__all__ = ["Published", "push_to_hub"]


def push_to_hub(
    source: Any,
    repo_id: str,
    *,
    revision: str = "main",
    max_shard_size: int | str = "5GB",
    variant: str | None = None,
    dtype: Any = None,
    tag: str | None = None,
    move_tag: bool = False,
    private: bool | None = None,
    create_pr: bool = False,
    expected_head: str | None = None,
    message: str | None = None,
    companions: Sequence[object] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    staging: Literal["branch", "none"] = "branch",
    staging_batch_size: int | str = "256MB",
    scratch: str | Path | None = None,
    streams: int | None = None,
    dry_run: bool = False,
    token: Token = None,
    endpoint: str | None = None,
    max_retries: int = 5,
    stall_seconds: float = 30.0,
    process_group: Any = None,
    on_event: OnEvent = ignore,
) -> Published:
    """Publish a model to a Hub repo, in one commit that readers see whole or not at all.

    Tensors are streamed; no shard file is written. What a killed run had finished is found again by content, on any
    machine. The commit also removes the weight files of the same folder, stem and variant that are not published now,
    beside weights that go along as they are too.

    An adapter of peft and a model in one folder are loaded as the adapter on its base. So a model takes the place of an
    adapter in its folder, with a warning, and an adapter is refused where a model lies; a source that holds both is
    published as it is.

    Names have the stem that their loader looks for: `model`, `adapter_model` of peft, `diffusion_pytorch_model`. Of a
    pipeline of diffusers, each component is laid out in its own folder. Of a model of peft, the adapters alone are
    published, that called "default" in the root, others in folders of their names; peft reads each from one file.

    A model that is split over ranks (FSDP2, tensor parallelism: its parameters are DTensors) is published by all of
    them, each of which must call this with the same arguments. Each rank streams shards of its own, gathered in pieces
    of 8 MiB from those that hold them, and rank 0 makes the commit; what is published is byte by byte what one process
    would publish of the whole model. With ten shards or more per rank, as `max_shard_size` makes them, no rank sends
    10 % more than their mean. A model that every rank holds in full is published by rank 0, whether others call or not.

    Args:
        source: a directory or file of safetensors, `org/name[@revision]` of another repo, a state dict, an
            `nn.Module`, a model of transformers, diffusers or peft, a pipeline of diffusers, or a `Source`.
        repo_id: "org/name"; made if it does not exist.
        revision: branch to publish to; made from main if it does not exist.
        max_shard_size: bound per shard, header included: bytes, or as in "5GB", "512MiB".
        variant: as in `model.fp16.safetensors`; other variants in the repo are left alone. Of a directory or repo, its
            weights of that variant are read, or else the plain ones, in each folder.
        dtype: cast floating tensors to it, such as "bfloat16"; needs torch. Configs of transformers tell of it,
            unless a variant is named: the other variants share the configs, which so keep their dtype.
        tag: made on the new commit; no branch may have that name.
        move_tag: whether an existing tag may be moved.
        private: visibility of a repo that is made; refused where an existing one differs.
        create_pr: open a pull request rather than move the branch.
        expected_head: commit that the branch must be at, in full or its first 7 or more digits.
        message: title of the commit.
        companions: tokenizers, processors: whatever has `save_pretrained`, to go along with a model in memory.
        include: patterns of a directory's files that go along, all by default. What holds secrets as a rule (`.env`,
            private keys), a trainer's state and its folders, and `.gitignore` stay, unless a pattern names them, as
            `.env.example` does; `["*", ".env.example"]` takes it along with all else.
        exclude: patterns of files that stay, and of components whose weights they match.
        staging: "branch" keeps finished shards on a staging branch, so that a killed run goes on anywhere; "none" shows
            nothing of them until the end.
        staging_batch_size: how much may wait for a commit on that branch.
        scratch: a folder through which each large file goes, two at a time, for sources that are expensive to read
            twice where Xet is off; None to stream.
        streams: files that go at once, of each rank. A file goes no faster than one core can cut it into chunks
            (some 250 to 400 MB/s), so a fast line needs several; each takes up to 256 MB of memory, and a kill costs
            those that were under way. None for so many that it costs one shard, or 256 MB where that is more, and at
            most 64 MiB of the next one, which may go while the Hub takes note of the last.
        dry_run: plan, and check what a publish checks before it sends anything, for which the Hub is asked; nothing is
            written.
        token: as in huggingface_hub, its login by default; or a function that is asked before each request, for tokens
            that expire while a publish runs.
        endpoint: of the Hub; HF_ENDPOINT by default.
        max_retries: of one request or commit, after its first try.
        stall_seconds: of silence that are a failure where bytes should come; where the server has to work, a multiple.
            Of other ranks, 4 times as much silence is borne, and 10 times as long is waited for them to call.
        process_group: the ranks that publish together; None for all of torch.distributed, if it was initialised; False
            for this process alone, whatever others do.
        on_event: is told of every step; on several ranks, each tells of its own.

    Raises:
        FormatError: something in the source that cannot be published; nothing was written.
        NotFoundError: no such source, or a pipeline without a component that it names; nothing was written.
        ConflictError: the branch or tag is not where it should be; nothing is shown.
        IntegrityError: the Hub does not hold what was sent.
        StoreError: the Hub refused, or failed again and again.
    """
    check_variant(variant)
    layout = Layout(parse_size(max_shard_size), variant, None if dtype is None else parse_float_dtype(dtype))
    to = Delivery(
        repo_id=repo_id,
        revision=revision,
        tag=tag,
        move_tag=move_tag,
        private=private,
        create_pr=create_pr,
        expected_head=expected_head,
        message=message,
        staging=staging,
        staging_batch_size=staging_batch_size,
        scratch=scratch,
        streams=streams,
        dry_run=dry_run,
        token=token,
        endpoint=endpoint,
        max_retries=max_retries,
        stall_seconds=stall_seconds,
        on_event=on_event,
    )

    with sharing(source, process_group, stall_seconds=stall_seconds) as (together, whole):

        def collect(patience: Patience) -> Outgoing:
            if not isinstance(source, str | Path):
                return from_memory(source, layout, companions=companions, whole=whole)
            is_left = Choice((), exclude).is_left
            opened = open_target(source, token=token, endpoint=endpoint, patience=patience, passes_over=is_left)
            return from_store(opened, layout, include=include, exclude=exclude)

        return deliver(to, collect, together)
