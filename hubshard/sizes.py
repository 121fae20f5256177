"""Sizes in bytes, as people write them and as we print them, and the usual size of one read."""

from __future__ import annotations

import re

from hubshard.errors import FormatError

__all__ = ["READ_BYTES", "format_size", "parse_size"]

READ_BYTES = 8 * 2**20
"""Of one read of something long: enough for full speed, small enough to fit any budget several times (bytes)."""

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)}
_UNITS |= {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", start=1)}
_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*\Z", re.ASCII)


def parse_size(size: int | str) -> int:
    """Bytes of a size such as 5_000_000, "5GB" (10^9 each) or "5GiB" (2^30 each); case does not matter.

    Raises:
        FormatError: not a size, or not positive.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        nbytes = size
    else:
        match = _SIZE.match(size) if isinstance(size, str) else None
        if match is None or match[2].upper() not in _UNITS:
            raise FormatError(f"{size!r} is not a size", hint="write it as 5GB, 512MiB or a number of bytes")
        whole, _, fraction = match[1].partition(".")
        unit = _UNITS[match[2].upper()]
        nbytes = int(whole + fraction) * unit // 10 ** len(fraction)
    if nbytes <= 0:
        raise FormatError(f"the size {size!r} is not positive", hint="write it as 5GB, 512MiB or a number of bytes")
    return nbytes


def format_size(nbytes: float) -> str:
    """`nbytes` for people, in powers of 1000: "999 B", "5.00 GB"."""
    if round(nbytes) < 1000:
        return f"{nbytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        nbytes /= 1000
        if nbytes < 999.995:
            return f"{nbytes:.2f} {unit}"
    return f"{nbytes / 1000:.2f} TB"
