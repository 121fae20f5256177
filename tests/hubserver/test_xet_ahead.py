"""Files that are hashed while their xorbs come: what is known of them then, and that nothing false is believed."""

from __future__ import annotations

import hashlib
import itertools
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from hubshard.errors import IntegrityError
from hubshard.hubserver.xet.hashing import chunk_hash, merkle_root

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hubshard.hubserver.xet.shard import ShardFile
    from tests.hubserver.conftest import Storage

PARTS = [[random.Random(10 * xorb + chunk).randbytes(5000 + chunk) for chunk in range(3)] for xorb in range(3)]
XORBS = [merkle_root([(chunk_hash(data), len(data)) for data in part]) for part in PARTS]
FIRST, OTHER, THIRD = (chunk_hash(part[0]) for part in PARTS)
ORDERS = list(itertools.permutations(range(3)))


def begin(storage: Storage, order: Sequence[int]) -> None:
    for number in order:
        storage.files.ahead.xorb_begins(storage.repo_id, XORBS[number])


def store(storage: Storage, order: Sequence[int]) -> None:
    for number in order:
        storage.make_xorb(PARTS[number])
        storage.files.ahead.xorb_stored(storage.repo_id, XORBS[number])


def file_of(storage: Storage, *, last: int = 3) -> ShardFile:
    """The file that is made of all chunks, or of all but the last ones."""
    chunks = [*PARTS[0], *PARTS[1], *PARTS[2][:last]]
    return storage.make_file([(XORBS[0], 0, 3), (XORBS[1], 0, 3), (XORBS[2], 0, last)], b"".join(chunks))


def known(storage: Storage, file: ShardFile) -> int:
    """How many terms of a file were hashed; what was hashed is right."""
    digest, count = storage.files.ahead.beginning(storage.repo_id, file.terms)
    assert digest.digest() == hashlib.sha256(b"".join(itertools.chain(*PARTS[:count]))).digest()
    return count


@pytest.mark.parametrize("stored", ORDERS)
def test_xorbs_that_begin_in_order_are_hashed_in_whatever_order_they_come(
    storage: Storage, stored: Sequence[int]
) -> None:
    storage.files.ahead.file_begins(storage.repo_id, FIRST)
    begin(storage, (0, 1, 2))
    store(storage, stored)
    assert known(storage, file_of(storage)) == 3
    assert known(storage, file_of(storage)) == 0  # it was told once


@pytest.mark.parametrize(("begun", "count"), [((0, 2, 1), 1), ((1, 0, 2), 1), ((2, 1, 0), 1), ((1, 2, 0), 1)])
def test_xorbs_that_begin_out_of_order_count_up_to_the_first_wrong_one(
    storage: Storage, begun: Sequence[int], count: int
) -> None:
    storage.files.ahead.file_begins(storage.repo_id, FIRST)
    begin(storage, begun)
    store(storage, (0, 1, 2))
    assert known(storage, file_of(storage)) == count


def test_a_file_that_ends_inside_a_xorb_is_known_up_to_that_xorb(storage: Storage) -> None:
    storage.files.ahead.file_begins(storage.repo_id, FIRST)
    begin(storage, (0, 1, 2))
    store(storage, (0, 1, 2))
    assert known(storage, file_of(storage, last=2)) == 2


def test_of_many_files_at_once_none_is_hashed_until_some_were_registered(storage: Storage) -> None:
    for chunk in (FIRST, OTHER, THIRD):
        storage.files.ahead.file_begins(storage.repo_id, chunk)
    begin(storage, (0, 1, 2))
    store(storage, (0, 1, 2))
    assert storage.files.register(file_of(storage), storage.repo_id)
    for _ in range(2):  # the client was killed after the first time
        storage.files.ahead.file_begins(storage.repo_id, FIRST)
    begin(storage, (0,))
    store(storage, (0,))
    assert known(storage, file_of(storage)) == 0, "three are on their way"
    storage.files.ahead.file_begins(storage.repo_id, FIRST)
    begin(storage, (0, 1))
    store(storage, (0, 1))
    assert known(storage, file_of(storage)) == 2


@pytest.mark.parametrize("stored", ORDERS)
@pytest.mark.parametrize("asked", [0, 1, 2])
@pytest.mark.parametrize("registered", [(0, 2), (2, 0)])
def test_two_files_of_which_one_begins_before_the_shard_of_the_other_has_come(
    storage: Storage, stored: Sequence[int], asked: int, registered: tuple[int, int]
) -> None:
    ahead = storage.files.ahead
    ahead.file_begins(storage.repo_id, FIRST)
    begin(storage, (0, 1)[:asked])
    ahead.file_begins(storage.repo_id, THIRD)
    begin(storage, ((0, 1, 2))[asked:])
    store(storage, stored)
    one = storage.make_file([(XORBS[0], 0, 3), (XORBS[1], 0, 3)], b"".join([*PARTS[0], *PARTS[1]]))
    other = storage.make_file([(XORBS[2], 0, 3)], b"".join(PARTS[2]))
    found = {}
    for number in registered:
        digest, found[number] = ahead.beginning(storage.repo_id, (one if number == 0 else other).terms)
        if found[number]:
            assert digest.hexdigest() == (one if number == 0 else other).sha256
    assert found == {0: 2 if registered[0] == 0 else 0, 2: 1}


@pytest.mark.parametrize("begun", ORDERS)
@pytest.mark.parametrize("stored", [(0, 1, 2), (2, 1, 0)])
@pytest.mark.parametrize("last", [2, 3])
def test_a_wrong_sha256_is_refused_in_every_order_and_the_right_one_taken(
    storage: Storage, begun: Sequence[int], stored: Sequence[int], last: int
) -> None:
    for is_true in (False, True):
        storage.files.ahead.file_begins(storage.repo_id, FIRST)
        begin(storage, begun)
        store(storage, stored)
        file = file_of(storage, last=last)
        if is_true:
            assert storage.files.register(file, storage.repo_id)
        else:
            with pytest.raises(IntegrityError, match="its content has sha256"):
                storage.files.register(replace(file, sha256="0" * 64), storage.repo_id)


def test_a_file_whose_xorb_was_lost_meanwhile_is_not_known(storage: Storage) -> None:
    storage.files.ahead.file_begins(storage.repo_id, FIRST)
    begin(storage, (0, 1, 2))
    store(storage, (1, 2))
    storage.make_xorb(PARTS[0])
    file = file_of(storage)
    storage.files.xorbs.delete(XORBS[0])
    storage.files.ahead.xorb_stored(storage.repo_id, XORBS[0])
    assert known(storage, file) == 0


def test_what_is_remembered_of_repos_has_a_bound(storage: Storage) -> None:
    storage.files.ahead.file_begins(storage.repo_id, FIRST)
    for other in range(1000, 1064):
        storage.files.ahead.file_begins(other, FIRST)
    begin(storage, (0, 1, 2))
    store(storage, (0, 1, 2))
    assert known(storage, file_of(storage)) == 0
