"""Where hubshard meets other libraries; each module needs its library, and imports it."""

from __future__ import annotations
