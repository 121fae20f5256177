"""Records what the real hf_xet client uploads for three small files: run by hand when the format changes.

    python tests/golden/xet/make_golden.py

Writes the xorb, the shard, and hash vectors of a larger file, beside this script.
"""

from __future__ import annotations

import json
import os
import random
import struct
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HERE = Path(__file__).parent
RECORDED: dict[str, bytes] = {}


def golden_files() -> dict[str, bytes]:
    """What was uploaded: content that the client packs in each of the three ways."""
    return {
        "text": b"".join(b"line %06d of a text that repeats itself\n" % number for number in range(900)),
        "floats": struct.pack("<6000f", *(1 + number / 65536 for number in range(6000))),
        "noise": random.Random(1).randbytes(9001),
    }


class _Recorder(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        RECORDED[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        answers = {"xorbs": {"was_inserted": True}, "shards": {"result": 1}}
        version, _, rest = self.path.strip("/").partition("/")
        answer = answers.get(rest.partition("/")[0]) if version == "v1" else None
        self._answer(200 if answer else 404, json.dumps(answer or {}).encode())

    def do_GET(self) -> None:
        self._answer(404, b"")

    def log_message(self, *_: object) -> None: ...

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def upload(url: str, contents: dict[str, bytes]) -> dict[str, str]:
    """Upload; the Xet file hash of each name."""
    import hf_xet

    commit = hf_xet.XetSession().new_upload_commit(
        endpoint=url, token="recorded", token_expiry_unix_secs=int(time.time()) + 3600
    )
    hashes = {}
    for name, data in contents.items():
        stream = commit.start_upload_stream(name=name)
        stream.write(data)
        hashes[name] = stream.finish().xet_info.hash
    commit.wait_to_finish()
    return hashes


def main() -> None:
    from hubshard.hubserver.xet.hashing import to_hex
    from hubshard.hubserver.xet.xorb import ChunkParser

    server = ThreadingHTTPServer(("127.0.0.1", 0), _Recorder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    hashes = upload(url, golden_files())
    xorb = next(path for path in RECORDED if "/v1/xorbs/" in path)
    (HERE / "golden.xorb").write_bytes(RECORDED[xorb])
    (HERE / "golden.shard").write_bytes(RECORDED["/v1/shards"])
    facts = {"xorb": xorb.rpartition("/")[2], "files": hashes}

    RECORDED.clear()
    large = upload(url, {"large": random.Random(2).randbytes(6_000_000)})["large"]
    path = next(path for path in RECORDED if "/v1/xorbs/" in path)
    parser = ChunkParser("large")
    parser.feed(RECORDED[path])
    index = parser.finish()
    nodes = [[to_hex(value), nbytes] for value, nbytes in index.nodes(0, len(index))]
    vectors = {"chunks": nodes, "xorb": path.rpartition("/")[2], "file": large}
    (HERE / "golden.json").write_text(json.dumps(facts | {"vectors": vectors}, indent=1) + "\n")
    server.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        os.environ["HF_HOME"] = home
        main()
