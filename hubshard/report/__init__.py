"""What a checkpoint is, whether it is whole, and how two of them differ. Nothing is written."""

from __future__ import annotations

from hubshard.report.diff import Difference, diff
from hubshard.report.verify import Problem, Verification, verify

__all__ = ["Difference", "Problem", "Verification", "diff", "verify"]
