"""A shard as a stream of bytes: its header, then its tensors in pieces; no file and no whole tensor is ever held."""

from __future__ import annotations

from collections.abc import Iterator

from hubshard.errors import IntegrityError
from hubshard.plan import Shard
from hubshard.protocols import Buffer, Source

__all__ = ["stream_shard"]


def stream_shard(shard: Shard, source: Source, *, max_read_bytes: int) -> Iterator[Buffer]:
    """The bytes of `shard`, in buffers of at most `max_read_bytes`, none of them empty.

    A buffer is larger only where a packed dtype forbids the cut. Each is valid until the next is asked for.

    Raises:
        IntegrityError: the source delivered another number of bytes than its spec promises.
    """
    header = memoryview(shard.header)
    for start in range(0, len(header), max_read_bytes):
        yield header[start : start + max_read_bytes]
    for spec in shard.specs:
        if not spec.numel:
            continue
        for block in spec.box.blocks(bits=spec.bits, max_bytes=max_read_bytes):
            buffer = source.read(spec.name, block)
            nbytes = memoryview(buffer).nbytes
            if nbytes * 8 != block.numel * spec.bits:
                raise IntegrityError(
                    f"tensor {spec.name!r}: the source gave {nbytes} bytes for {block.shape} of {spec.dtype}, not "
                    f"{block.numel * spec.bits // 8}: did it change while it was read?"
                )
            yield buffer
