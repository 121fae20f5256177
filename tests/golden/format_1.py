"""The golden checkpoints of format version 1: what they hold, and how they were written.

`python tests/golden/format_1.py` writes them anew into `tests/golden/format_1/`. Their bytes must never change: a
publish of the same tensors has to give the same files for ever, or nothing is deduplicated. If a change is wanted after
all, add a second version beside this one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hubshard.plan import ShardPlan, plan_shards
from hubshard.protocols import Buffer
from hubshard.shardfile import stream_shard
from hubshard.tensors import DTYPE_BITS, Box, TensorSpec

FOLDER = Path(__file__).with_suffix("")


@dataclass(frozen=True)
class Golden:
    """A checkpoint: its name is that of its folder."""

    name: str
    specs: Sequence[TensorSpec]
    max_shard_bytes: int
    variant: str | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)

    def plan(self) -> ShardPlan:
        return plan_shards(
            self.specs,
            max_shard_bytes=self.max_shard_bytes,
            variant=self.variant,
            aliases=self.aliases,
            metadata=self.metadata,
        )

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Path and content of each file, the index last."""
        plan = self.plan()
        for shard in plan.shards:
            yield shard.path, b"".join(map(bytes, stream_shard(shard, Content(self.specs), max_read_bytes=64)))
        if plan.index_path is not None:
            yield plan.index_path, plan.index()


@dataclass(frozen=True)
class Content:
    """Values that depend on the tensor's name alone; booleans are 0 and 1."""

    tensors: Sequence[TensorSpec]

    def specs(self) -> Sequence[TensorSpec]:
        return self.tensors

    def aliases(self) -> Mapping[str, str]:
        return {}

    def whole(self, spec: TensorSpec) -> bytes:
        data = hashlib.shake_256(spec.name.encode()).digest(spec.nbytes)
        return bytes(byte & 1 for byte in data) if spec.dtype == "BOOL" else data

    def read(self, name: str, box: Box) -> Buffer:
        spec = next(spec for spec in self.tensors if spec.name == name)
        # the stream asks for boxes that lie together: full rows of the first dimension, or single rows cut up
        start = 0
        for offset, size in zip(box.offset, spec.shape, strict=True):
            start = start * size + offset
        start, bits = start * spec.bits, box.numel * spec.bits
        return self.whole(spec)[start // 8 : (start + bits) // 8]


def _layers(count: int) -> list[TensorSpec]:
    specs = [TensorSpec("model.embed_tokens.weight", "BF16", (16, 4)), TensorSpec("model.norm.weight", "BF16", (4,))]
    for layer in range(count):
        specs.append(TensorSpec(f"model.layers.{layer}.mlp.weight", "BF16", (4, 8)))
        specs.append(TensorSpec(f"model.layers.{layer}.mlp.bias", "F32", (8,)))
    return specs


GOLDEN = [
    Golden("single", [TensorSpec("w", "F32", (2, 3)), TensorSpec("steps", "I64", ())], 10_000),
    Golden(
        "sharded",
        _layers(12),
        800,
        aliases={"lm_head.weight": "model.embed_tokens.weight"},
        metadata={"license": "apache-2.0"},
    ),
    Golden("variant", _layers(3), 600, variant="fp16"),
    Golden(
        "dtypes",
        [TensorSpec(f"{dtype}.2d", dtype, (2, 4)) for dtype in DTYPE_BITS],
        100_000,
    ),
    Golden(
        "names",
        [
            TensorSpec(name, "U8", (3,))
            for name in (
                "",
                "W",
                "w",
                "pt",
                "a b",
                'quote"',
                "back\\slash",
                "line\nbreak",
                "\u00e9\u4e2d\U0001f600",
                "\x7f\u2028",
            )
        ],
        900,
        aliases={"alias \u00e9": "w"},
        metadata={"by": 'some "one"'},
    ),
    Golden(
        "shapes",
        [
            TensorSpec("scalar", "F64", ()),
            TensorSpec("empty", "F32", (0, 7)),
            TensorSpec("ones", "I16", (1, 1, 1, 1)),
            TensorSpec("oversized", "U8", (700,)),
            TensorSpec("layers.10", "U8", (100,)),
            TensorSpec("layers.9", "U8", (100,)),
        ],
        500,
    ),
]


def main() -> None:
    for golden in GOLDEN:
        folder = FOLDER / golden.name
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for path, data in golden.files():
            (folder / path).write_bytes(data)


if __name__ == "__main__":
    main()
