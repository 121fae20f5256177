"""Paths of files: what is refused, and that the two rules differ where they should."""

from __future__ import annotations

import pytest

from hubshard.errors import FormatError
from hubshard.paths import check_case, check_plain_path, check_store_path, file_and_folder, path_in


def test_the_root_has_no_name_in_a_path() -> None:
    assert [path_in(folder, "x") for folder in ("", "a", "a/b")] == ["x", "a/x", "a/b/x"]
    assert [path_in(folder, "") for folder in ("", "a", "a/b")] == ["", "a/", "a/b/"]


@pytest.mark.parametrize(
    "file",
    [
        "a.safetensors",
        "a/b.safetensors",
        "a b.txt",
        ".gitattributes",
        "\u00e9\u4e2d.txt",
        "console.txt",
        "com.txt",
        "nul-1.txt",
        "x" * 255,
    ],
)
def test_plain_paths_are_taken(file: str) -> None:
    check_plain_path(file, path="i")


@pytest.mark.parametrize(
    "file",
    [
        *("", "/", ".", "..", "/etc/passwd", "../x", "a/../b", "a/./b", "a//b", "a/", "//server/share/x", "~/../x/.."),
        *("\\x", "a\\b", "..\\x", "\\\\server\\share\\x", "C:\\x", "C:/x", "c:x", "x:stream", "a/b:c"),
        *("a\0b", "a\nb", "a\x7fb", "a\x1b[2Jb", "a\u202eb", "a\ud800b", "a\u2028b", "a\u200bb"),
        *(
            "con",
            "CON",
            "con.safetensors",
            "a/nul.txt",
            "COM1",
            "lpt9.x",
            "aux .txt",
            "com\u00b9.txt",
            "CONOUT$",
            "prn.",
        ),
        *("a.", "a ", "... ", ".. /x", "a./b", "x" * 256, "\u4e2d" * 86),
    ],
)
def test_paths_that_mean_something_else_on_some_system_are_refused(file: str) -> None:
    with pytest.raises(FormatError, match=r"^i: the file name") as caught:
        check_plain_path(file, path="i")
    assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    ("one", "other"), [("a/x.safetensors", "A/x.safetensors"), ("\u00e9", "e\u0301"), ("stra\u00dfe", "STRASSE")]
)
def test_file_names_that_some_disk_holds_to_be_one_are_refused(one: str, other: str) -> None:
    with pytest.raises(FormatError, match=r"one file on a disk without regard to (case|Unicode)"):
        check_case([one, "z", other], path="i")


def test_one_file_named_twice_is_no_clash() -> None:
    check_case(["a", "a", "b"], path="i")


@pytest.mark.parametrize("file", ["a/b.safetensors", "aux.json", "a.", "note: 1", "a\u202eb", "x" * 256])
def test_a_store_takes_names_that_some_disk_cannot_hold(file: str) -> None:
    assert check_store_path(file) == file


@pytest.mark.parametrize(
    "file", ["", "/x", "../x", "a/./b", "a//b", "a\\b", "C:", "C:/x", "c:x", "a\nb", ".git/config", "a/.GIT/b"]
)
def test_a_store_takes_nothing_that_leaves_its_root_or_is_gits_own(file: str) -> None:
    with pytest.raises(FormatError, match=r"no path of a file in a store|in a \.git folder"):
        check_store_path(file)


def test_a_file_that_would_be_a_folder_is_found_whichever_of_both_is_new() -> None:
    for new, there in ((["unet"], ["unet/a"]), (["unet/a"], ["unet"]), (["unet", "unet/a", "b"], [])):
        assert file_and_folder(new, there) == ("unet", "unet/a")
    assert file_and_folder(["A/x/y"], ["a/X"]) == ("a/X", "A/x/y"), "but for the case"
    assert file_and_folder(["c"], ["unet", "unet/a"]) is None, "that is none of ours"
    assert file_and_folder(["a/b", "a.b", "ab/c", "b"], ["a/c", "ab.c"]) is None


def test_a_path_that_no_repo_takes_for_its_length_is_refused() -> None:
    check_store_path("d/" * 511 + "ab")
    with pytest.raises(FormatError, match="has 1025 characters, and no repo takes paths of more than 1024"):
        check_store_path("d/" * 512 + "a")
