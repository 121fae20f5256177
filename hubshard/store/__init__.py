"""Where revisions of files live: a local directory, or a repo on the Hub."""

from __future__ import annotations
