"""Publish a model: sharded, streamed without scratch files, nothing sent twice, shown by one commit."""

from __future__ import annotations

from hubshard.publish.push import Published, push_to_hub

__all__ = ["Published", "push_to_hub"]
