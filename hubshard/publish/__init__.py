"""Publish a model: sharded, streamed without scratch files, nothing sent twice, shown by one commit."""

from __future__ import annotations

from hubshard.publish.push import Published, push_to_hub
from hubshard.publish.staging import abandon, staging_branches

__all__ = ["Published", "abandon", "push_to_hub", "staging_branches"]
