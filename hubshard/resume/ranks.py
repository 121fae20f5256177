"""Which rank this is, and of how many: given, or those of torch.distributed. Never alone by mistake."""

from __future__ import annotations

import os
import sys

from hubshard.errors import FormatError, StoreError

__all__ = ["LostRankError", "check_alone", "check_process", "reading_ranks"]


class LostRankError(StoreError):
    """Another rank is gone: what it had done by then is not known."""


def reading_ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """The rank and the number of ranks among which the data is divided.

    Args:
        rank: of this process; with None those of the default process group, or 0 of 1 where there is none.
        world_size: the number of ranks; given where `rank` is.

    Raises:
        FormatError: only one of both is given; or the launcher started several processes whose process group does not
            exist yet, so that each would read everything.
    """
    if (rank is None) != (world_size is None):
        raise FormatError(f"rank={rank} and world_size={world_size}: give both or neither")
    if rank is not None and world_size is not None:
        return rank, world_size
    if sys.modules.get("torch") is not None:  # otherwise there is no process group
        import torch.distributed as dist  # noqa: PLC0415  # slow, and optional

        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
    check_alone(
        "read all the data", hint="Call torch.distributed.init_process_group() first, or pass rank= and world_size=."
    )
    return 0, 1


def check_process(pid: int) -> None:
    """Refuse to act in a process that was forked from the one which has the threads and the connections.

    Args:
        pid: of that one.

    Raises:
        FormatError: this is another.
    """
    if os.getpid() != pid:
        raise FormatError(
            f"this ResumeBranch is of process {pid}, and process {os.getpid()} was forked from it: its threads and "
            "connections are not here",
            hint="save and restore in the process that made it; or make another here, with a folder of its own",
        )


def check_alone(would: str, *, hint: str) -> None:
    """Refuse to act as the only process where a launcher has started several.

    Args:
        would: what each of them would do.
        hint: what to do instead.

    Raises:
        FormatError: several were started.
    """
    started = os.environ.get("WORLD_SIZE", "1")  # set by torchrun
    if started != "1":
        raise FormatError(
            f"{started} processes were started (WORLD_SIZE), and the process group does not exist yet: each of them "
            f"would {would}",
            hint=hint,
        )
