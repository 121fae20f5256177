"""Large files: uploads whole and in parts, what a repo holds, and giving it up."""

from __future__ import annotations

import hashlib
import itertools
import random
import time
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from hubshard.hubserver import Settings
from hubshard.hubserver.errors import ApiError
from hubshard.hubserver.multipart import PartWriter, Prefixes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Api, Hub, StartHub

PART = 100_000
LARGE_PART = 400_000  # so large that its beginning is written before its end has come
names = itertools.count()


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


@pytest.fixture
def api(module_hub: Hub) -> Api:
    return module_hub.api()


def new_repo(api: Api) -> str:
    name = f"large-{next(names)}"
    assert api("POST", "/api/repos/create", {"name": name}).status == 200
    return f"models/hubshard/{name}"


def ask(api: Api, repo: str, data: bytes, **changes: Any) -> dict[str, Any]:
    """What the batch API says about one object."""
    item = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), **changes}
    route = f"/{repo.removeprefix('models/')}.git/info/lfs/objects/batch"
    answer = api("POST", route, {"operation": "upload", "transfers": ["basic", "multipart"], "objects": [item]})
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json["objects"][0]
    return found


def commit(api: Api, repo: str, data: bytes, path: str = "m.bin", **options: Any) -> int:
    line = {"path": path, "algo": "sha256", "oid": hashlib.sha256(data).hexdigest(), "size": len(data)}
    return api.commit(repo, ("lfsFile", line), **options).status


def read(api: Api, repo: str, path: str = "m.bin", revision: str = "main") -> bytes:
    return api("GET", f"/{repo.removeprefix('models/')}/resolve/{revision}/{path}").body


def test_an_upload_is_stored_verified_and_not_asked_for_twice(api: Api) -> None:
    repo, data = new_repo(api), noise(300_000)
    actions = ask(api, repo, data)["actions"]
    assert api("POST", actions["verify"]["href"], {"size": len(data)}).status == 404
    assert api("PUT", actions["upload"]["href"], data).status == 200
    assert api("POST", actions["verify"]["href"], {"size": len(data)}).status == 200
    assert api("POST", actions["verify"]["href"], {"size": 1}).status == 400
    assert "actions" not in ask(api, repo, data)
    assert commit(api, repo, data) == 200
    assert read(api, repo) == data


def test_what_one_repo_holds_another_must_upload(api: Api) -> None:
    data = noise(1000, 1)
    one, other = new_repo(api), new_repo(api)
    api.upload(one, data)
    assert "actions" in ask(api, other, data)
    assert commit(api, other, data) == 400


@pytest.mark.parametrize("sent", [noise(999, 2), noise(1000, 3), noise(1001, 2), b""])
def test_bytes_that_were_not_announced_are_refused(api: Api, sent: bytes) -> None:
    repo, data = new_repo(api), noise(1000, 2)
    answer = api("PUT", ask(api, repo, data)["actions"]["upload"]["href"], sent)
    assert answer.status in {400, 413}
    assert commit(api, repo, data) == 400


def test_an_upload_url_is_signed(api: Api) -> None:
    repo, data = new_repo(api), noise(1000, 4)
    href = ask(api, repo, data)["actions"]["upload"]["href"]
    assert api("PUT", href[:-3] + "AAA", data).status == 403
    assert api("PUT", href.partition("?")[0], data).status == 403


@pytest.mark.parametrize("changes", [{"oid": "abc"}, {"oid": "A" * 64}, {"size": -1}, {"size": "many"}])
def test_an_object_that_cannot_be_is_an_error_of_its_own(api: Api, changes: dict[str, Any]) -> None:
    answer = ask(api, new_repo(api), b"data", **changes)
    assert answer["error"]["code"] == 422
    assert "actions" not in answer


@pytest.fixture
def parts(start_hub: StartHub) -> Api:
    return start_hub(Settings(lfs_part_bytes=PART)).api()


def put_parts(api: Api, upload: dict[str, Any], data: bytes, *, backwards: bool) -> list[dict[str, Any]]:
    urls = {int(number): url for number, url in upload["header"].items() if number.isdigit()}
    assert sorted(urls) == list(range(1, -(-len(data) // PART) + 1))
    found = []
    for number, url in sorted(urls.items(), reverse=backwards):
        answer = api("PUT", url, data[(number - 1) * PART : number * PART])
        assert answer.status == 200
        found.append({"partNumber": number, "etag": answer.headers["ETag"]})
    return found


@pytest.mark.parametrize("backwards", [False, True])
def test_a_large_upload_goes_in_parts_in_any_order(parts: Api, backwards: bool) -> None:
    repo, data = new_repo(parts), noise(3 * PART + 17, 5)
    upload = ask(parts, repo, data)["actions"]["upload"]
    assert upload["header"]["chunk_size"] == str(PART)
    body = {"oid": hashlib.sha256(data).hexdigest(), "parts": put_parts(parts, upload, data, backwards=backwards)}
    assert parts("POST", upload["href"], body).status == 200
    assert parts("POST", upload["href"], body).status == 200  # the answer was lost
    assert commit(parts, repo, data) == 200
    assert read(parts, repo) == data


@pytest.mark.parametrize("backwards", [False, True])
def test_parts_that_are_missing_or_wrong_make_no_object(parts: Api, backwards: bool) -> None:
    repo, data = new_repo(parts), noise(3 * PART, 6)
    upload, oid = ask(parts, repo, data)["actions"]["upload"], hashlib.sha256(data).hexdigest()
    sent = put_parts(parts, upload, data, backwards=backwards)
    wrong = [{**sent[0], "etag": '"other"'}, *sent[1:]]
    for listed in (sent[1:], wrong, []):
        assert parts("POST", upload["href"], {"oid": oid, "parts": listed}).status == 400
    parts("PUT", upload["header"]["2"], noise(PART, 7))
    assert parts("POST", upload["href"], {"oid": oid, "parts": sent}).status == 400
    assert parts("PUT", upload["header"]["1"].replace("part/1", "part/9"), b"x").status == 400
    assert parts("PUT", upload["header"]["1"], noise(PART + 1)).status == 413
    assert commit(parts, repo, data) == 400
    other = put_parts(parts, upload, noise(3 * PART, 8), backwards=backwards)
    assert parts("POST", upload["href"], {"oid": oid, "parts": other}).status == 400
    again = put_parts(parts, upload, data, backwards=backwards)
    assert parts("POST", upload["href"], {"oid": oid, "parts": again}).status == 200


def test_a_part_that_is_sent_twice_counts_once_and_as_it_came_last(parts: Api) -> None:
    repo, data = new_repo(parts), noise(3 * PART, 11)
    upload, oid = ask(parts, repo, data)["actions"]["upload"], hashlib.sha256(data).hexdigest()
    parts("PUT", upload["header"]["1"], noise(PART, 12))
    parts("PUT", upload["header"]["2"], data[PART : 2 * PART])
    sent = put_parts(parts, upload, data, backwards=False)
    parts("PUT", upload["header"]["2"], noise(PART, 13))
    assert parts("POST", upload["href"], {"oid": oid, "parts": sent}).status == 400
    sent[1]["etag"] = parts("PUT", upload["header"]["2"], data[PART : 2 * PART]).headers["ETag"]
    assert parts("POST", upload["href"], {"oid": oid, "parts": sent}).status == 200
    assert commit(parts, repo, data) == 200
    assert read(parts, repo) == data


def both_began(hub: Hub) -> bool:
    """Whether something of the first two parts was written."""
    content = b"".join(path.read_bytes() for path in hub.root.glob("parts/*/content"))
    return content[:1] == content[LARGE_PART : LARGE_PART + 1] == b"\xff"


@contextmanager
def half_sent(url: str, data: bytes) -> Iterator[HTTPConnection]:
    """A request on its way, of whose body the first half was written."""
    parts = urlsplit(url)
    with closing(HTTPConnection(parts.netloc, timeout=60)) as line:
        line.putrequest("PUT", f"{parts.path}?{parts.query}")
        line.putheader("Content-Length", str(len(data)))
        line.endheaders()
        line.send(data[: len(data) // 2])
        yield line


def test_who_still_sends_a_part_changes_nothing_when_it_came_again(start_hub: StartHub) -> None:
    hub = start_hub(Settings(lfs_part_bytes=LARGE_PART))
    parts = hub.api()
    repo, data = new_repo(parts), noise(2 * LARGE_PART, 14)
    upload, oid = ask(parts, repo, data)["actions"]["upload"], hashlib.sha256(data).hexdigest()
    evil = b"\xff" * LARGE_PART
    with half_sent(upload["header"]["1"], evil) as before, half_sent(upload["header"]["2"], evil) as beside:
        while not both_began(hub):
            time.sleep(0.01)
        urls = {number: upload["header"][number] for number in ("1", "2")}
        sent = [
            {"partNumber": 1, "etag": parts("PUT", urls["1"], data[:LARGE_PART]).headers["ETag"]},
            {"partNumber": 2, "etag": parts("PUT", urls["2"], data[LARGE_PART:]).headers["ETag"]},
        ]
        before.send(evil[LARGE_PART // 2 :])
        assert before.getresponse().status == 409
        assert parts("POST", upload["href"], {"oid": oid, "parts": sent}).status == 200
        beside.send(evil[LARGE_PART // 2 :])
        assert beside.getresponse().status == 409
    assert commit(parts, repo, data) == 200
    assert read(parts, repo) == data


def test_who_is_overtaken_before_it_writes_takes_no_part_away(tmp_path: Path) -> None:
    upload = "a" * 32

    class Overtaken(Prefixes):
        def enter(self, upload: str, number: int, writer: PartWriter) -> None:
            super().enter(upload, number, writer)
            if not writers:
                writers.append(writer)
                with closing(PartWriter(tmp_path, self, upload, number, 0)) as other:
                    other.write(b"part")
                    etags.append(other.commit())

    writers: list[PartWriter] = []
    etags: list[str] = []
    with pytest.raises(ApiError, match="sent again"):
        PartWriter(tmp_path, Overtaken(), upload, 1, 0)
    assert (tmp_path / "parts" / upload / "1").read_text() == etags[0]


def test_large_files_are_listed_and_given_up_with_their_history(api: Api) -> None:
    repo, kept, gone = new_repo(api), noise(2000, 9), noise(3000, 10)
    api.upload(repo, kept)
    api.upload(repo, gone)
    commit(api, repo, kept, "kept.bin")
    commit(api, repo, gone, "gone.bin", summary="adds it")
    api("POST", f"/api/{repo}/tag/main", {"tag": "v1"})
    api.commit(repo, ("deletedFile", {"path": "gone.bin"}), summary="removes it")
    listed = {item["filename"]: item for item in api("GET", f"/api/{repo}/lfs-files").json}
    assert {name: item["size"] for name, item in listed.items()} == {"kept.bin": 2000, "gone.bin": 3000}
    before = [item["id"] for item in api("GET", f"/api/{repo}/commits/main").json]
    body = {"deletions": {"sha": [listed["gone.bin"]["fileOid"]], "rewriteHistory": True}}
    assert api("POST", f"/api/{repo}/lfs-files/batch", body).status == 200
    assert [item["filename"] for item in api("GET", f"/api/{repo}/lfs-files").json] == ["kept.bin"]
    after = api("GET", f"/api/{repo}/commits/main").json
    assert [item["title"] for item in after] == ["removes it", "adds it", "a commit", "initial commit"]
    assert [item["id"] in before for item in after] == [False, False, True, True]
    assert [item["path"] for item in api("GET", f"/api/{repo}/tree/v1").json] == [".gitattributes", "kept.bin"]
    assert read(api, repo, "kept.bin") == kept
    assert "actions" in ask(api, repo, gone)
    assert api("POST", f"/api/{repo}/lfs-files/batch", body).status == 404


def test_a_large_file_given_up_without_its_history_is_named_and_cannot_be_read(api: Api) -> None:
    repo, data = new_repo(api), noise(500, 11)
    sha256 = api.upload(repo, data)
    commit(api, repo, data)
    api("POST", f"/api/{repo}/lfs-files/batch", {"deletions": {"sha": [sha256], "rewriteHistory": False}})
    answer = api("GET", f"/{repo.removeprefix('models/')}/resolve/main/m.bin")
    assert answer.error[:2] == (404, "EntryNotFound")
    assert "deleted" in answer.json["error"]


def test_a_copy_to_another_repo_moves_no_bytes(api: Api, module_hub: Hub) -> None:
    source, target, data = new_repo(api), new_repo(api), noise(700, 12)
    sha256 = api.upload(source, data)
    item = {"sha256": sha256, "xetHash": "0" * 64, "filename": "m.bin"}
    unknown = {"sha256": "0" * 64, "filename": "n.bin"}
    body = {"target": {"type": "model", "name": target.removeprefix("models/")}, "files": [item, unknown]}
    answer = api("POST", f"/api/{source}/lfs-files/duplicate", body).json
    assert [failure["sha256"] for failure in answer["failed"]] == ["0" * 64]
    assert commit(api, target, data) == 200
    assert read(api, target) == data
    assert module_hub.counters(target)["lfs_received"] == 0


def test_headers_of_all_shards_come_in_one_answer(api: Api) -> None:
    repo = new_repo(api)
    header = b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    shard = len(header).to_bytes(8, "little") + header + b"1234"
    api.upload(repo, shard)
    commit(api, repo, shard, "model-00001-of-00001.safetensors")
    index = b'{"metadata": {"total_size": 4}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}'
    api.put(repo, "model.safetensors.index.json", index)
    answer = api("GET", f"/api/{repo}/safetensors-metadata/model.safetensors.index.json").json
    assert answer["index"] == {"metadata": {"total_size": 4}}
    assert list(answer["headers"]["model-00001-of-00001.safetensors"]) == ["w"]
    assert api("GET", f"/api/{repo}/safetensors-metadata/.gitattributes").status == 422
    assert api("GET", f"/api/{repo}/safetensors-metadata/nope.json").error[1] == "EntryNotFound"
