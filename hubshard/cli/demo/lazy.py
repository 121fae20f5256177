"""Open a repo lazily and hash each tensor from ranged reads; the demo runs this as a program of its own.

Usage: `python -m hubshard.cli.demo.lazy TARGET`; prints JSON: SHA-256 per tensor.
"""

from __future__ import annotations

import hashlib
import json
import sys

from hubshard.lazy import open_checkpoint

__all__: list[str] = []

_BLOCK_BYTES = 16 * 2**20


def _hashes(target: str) -> dict[str, str]:
    found = {}
    with open_checkpoint(target) as checkpoint:
        for name, tensor in checkpoint.items():
            digest = hashlib.sha256()
            for box in tensor.spec.box.blocks(bits=tensor.spec.bits, max_bytes=_BLOCK_BYTES):
                digest.update(tensor.read(box))
            found[name] = digest.hexdigest()
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_hashes(sys.argv[1])) + "\n")
