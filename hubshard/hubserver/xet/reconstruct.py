"""Reconstructions: where a client finds the chunks of a range of a file.

The answer is that of the public CAS API (https://huggingface.co/docs/xet/api).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hubshard.hubserver.xet.hashing import to_hex

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hubshard.hubserver.xet.files import FileMap, Term
    from hubshard.hubserver.xet.storage import XorbStore

__all__ = ["reconstruction"]


def reconstruction(
    file: FileMap, xorbs: XorbStore, start: int, stop: int, url_for: Callable[[Term], str]
) -> dict[str, Any]:
    """The terms that hold bytes [start, stop) of a file, and the URLs of their chunks.

    Args:
        file: the file.
        xorbs: where its chunks are.
        start: first byte.
        stop: one past the last byte; the range is not empty and lies in the file.
        url_for: a URL that gives the serialized chunks of a run.
    """
    placed = [_trim(offset, term, xorbs, start, stop) for offset, term in file.overlapping(start, stop)]
    terms = [term for _, term in placed]
    fetch = {to_hex(xorb): [_fetch_entry(run, url_for) for run in runs] for xorb, runs in _runs(terms).items()}
    return {
        "offset_into_first_range": start - placed[0][0],
        "terms": [_term_entry(term) for term in terms],
        "fetch_info": fetch,
    }


def _trim(offset: int, term: Term, xorbs: XorbStore, start: int, stop: int) -> tuple[int, Term]:
    """(file offset, term) without the leading and trailing chunks that lie outside [start, stop)."""
    if start <= offset and offset + term.nbytes <= stop:
        return offset, term
    index = xorbs.index(term.xorb)
    base = index.unpacked_offset(term.start)
    first = index.chunk_at(base + max(start - offset, 0))
    last = index.chunk_at(base + min(stop - offset, term.nbytes) - 1) + 1
    lead = index.unpacked_offset(first)
    trimmed = replace(
        term,
        start=first,
        stop=last,
        nbytes=index.unpacked_offset(last) - lead,
        packed_start=index.packed_offset(first),
        packed_stop=index.packed_offset(last),
    )
    return offset + lead - base, trimmed


def _runs(terms: Sequence[Term]) -> dict[bytes, list[Term]]:
    """For each xorb the runs of chunks to fetch: those of the terms, overlapping and touching ones joined."""
    by_xorb: dict[bytes, list[Term]] = {}
    for term in sorted(terms, key=lambda item: (item.start, item.stop)):
        runs = by_xorb.setdefault(term.xorb, [])
        if runs and term.start <= runs[-1].stop:
            last = runs[-1]
            runs[-1] = replace(
                last, stop=max(last.stop, term.stop), packed_stop=max(last.packed_stop, term.packed_stop)
            )
        else:
            runs.append(term)
    return by_xorb


def _term_entry(term: Term) -> dict[str, Any]:
    return {
        "hash": to_hex(term.xorb),
        "unpacked_length": term.nbytes,
        "range": {"start": term.start, "end": term.stop},
    }


def _fetch_entry(run: Term, url_for: Callable[[Term], str]) -> dict[str, Any]:
    return {
        "range": {"start": run.start, "end": run.stop},
        "url": url_for(run),
        "url_range": {"start": run.packed_start, "end": run.packed_stop - 1},
    }
