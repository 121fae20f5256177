"""Publish and resume models on the Hugging Face Hub: sharded, atomic, resumable, checked."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
