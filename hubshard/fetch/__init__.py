"""Fetch a model: resumed at the byte, checked by its hashes, shown whole or not at all."""

from __future__ import annotations

from hubshard.fetch.hub import pull

__all__ = ["pull"]
