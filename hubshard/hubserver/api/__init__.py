"""The routes of the Hub, one module per part of its API."""

from __future__ import annotations
