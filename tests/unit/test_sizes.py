"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hubshard.errors import FormatError
from hubshard.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        (5, 5),
        ("5", 5),
        ("5B", 5),
        ("5KB", 5_000),
        ("5kb", 5_000),
        ("5 GB", 5 * 10**9),
        (" 5GB\n", 5 * 10**9),
        ("5GiB", 5 * 2**30),
        ("5gib", 5 * 2**30),
        ("1.5KiB", 1536),
        ("0.1TB", 10**11),
        ("2TiB", 2 * 2**40),
        ("0.29MB", 290_000),  # exact, not by way of a float
        (10**18, 10**18),
    ],
)
def test_sizes_are_read(written: int | str, nbytes: int) -> None:
    assert parse_size(written) == nbytes


@pytest.mark.parametrize(
    "written",
    [
        *(
            "",
            "GB",
            "5G",
            "5PB",
            "5 G B",
            "-5GB",
            "+5GB",
            "1e9",
            "0x10",
            "1_000",
            "5.GB",
            ".5GB",
            "1,5GB",
            "nan",
            "inf",
        ),
        *("\u0665GB", "5GB5", "0", "0GB", "0.1B", "9" * 5000, "0." + "1" * 5000 + "GB"),
        *(0, -1, True, 5.0, None, b"5GB"),
    ],
)
def test_nonsense_is_refused(written: str) -> None:
    with pytest.raises(FormatError):
        parse_size(written)


@given(st.integers(1, 10**15), st.sampled_from(["KB", "MiB", "TB"]))
def test_whole_numbers_of_units_are_exact(count: int, unit: str) -> None:
    factor = {"KB": 1000, "MiB": 2**20, "TB": 10**12}[unit]
    assert parse_size(f"{count}{unit}") == count * factor


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.7, "1.00 kB"),
        (1000, "1.00 kB"),
        (999_994, "999.99 kB"),
        (999_996, "1.00 MB"),
        (5_000_000_000, "5.00 GB"),
        (17 * 10**12, "17.00 TB"),
        (17 * 10**15, "17000.00 TB"),
    ],
)
def test_sizes_are_written(nbytes: float, text: str) -> None:
    assert format_size(nbytes) == text
