"""Loading from a Hub that is far away: 40 ms per request, 50 MB/s per connection.

`python tests/bench/bench_load_remote.py --folder DIR [--layers N] [--rounds N]` publishes a model of Llama's shape to
an embedded Hub on this machine, puts a throttle before it, and loads by HTTP ranges with hubshard (nothing is written
to disk), and with transformers (which downloads files, one stream each). The throttle answers ranges of weight files
itself, by sendfile, at the given pace per connection, and passes everything else on after the delay. Printed: seconds,
MB/s, the most anonymous memory over the result's own, and the bytes that the throttle sent.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

sys.path.insert(0, str(Path(__file__).parents[2]))
from hubshard.hubserver import running
from tests.bench.load_tools import load_average, make_model, measured, median

REPO = "org/model"
_CHUNK_BYTES = 2**20  # few of them, since the two cores that the loader needs send them
_FILE = re.compile(rf"/{REPO}/resolve/[^/]+/([^?]+\.safetensors)(?:\?|\Z)")
_RANGE = re.compile(r"bytes=(\d+)-(\d+)\Z")
UPLOAD = f"""
import sys
from huggingface_hub import HfApi
HfApi().create_repo("{REPO}", exist_ok=True)
HfApi().upload_folder(repo_id="{REPO}", folder_path=sys.argv[1])
"""
META = """
import transformers
from accelerate import init_empty_weights
with init_empty_weights():
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(folder)).to(torch.bfloat16)
"""
LOADERS = {
    "hubshard.load_into": META
    + f"""
import hubshard, hubshard.lazy
with Measured() as m:
    report = hubshard.load_into(model, "{REPO}")
m.report(result=sum(p.nbytes for p in model.parameters()), read=report.bytes_read)
""",
    "hubshard.load_into, one layer": META
    + f"""
import hubshard, hubshard.lazy
with Measured() as m:
    report = hubshard.load_into(model.model.layers[1], "{REPO}", prefix="model.layers.1.")
m.report(result=sum(p.nbytes for p in model.model.layers[1].parameters()), read=report.bytes_read)
""",
    "hubshard.from_pretrained": f"""
import transformers, hubshard, hubshard.lazy
transformers.LlamaForCausalLM
with Measured() as m:
    model = hubshard.from_pretrained("{REPO}")
m.report(result=sum(p.nbytes for p in model.parameters()), read=0)
""",
    "transformers, an empty cache": f"""
import transformers
transformers.LlamaForCausalLM
with Measured() as m:
    model = transformers.LlamaForCausalLM.from_pretrained("{REPO}")
m.report(result=0, read=sum(p.nbytes for p in model.parameters()))
""",
}


class Throttle:
    """Stands before a Hub, and makes it far away."""

    def __init__(self, port: int, folder: Path, *, delay_s: float, bytes_per_s: float) -> None:
        self.sent = 0
        self._lock = threading.Lock()
        throttle = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                time.sleep(delay_s)
                match = _FILE.match(unquote(self.path))
                if match and self.command == "GET" and (folder / match[1]).is_file():
                    throttle.send_file(self, folder / match[1], bytes_per_s)
                else:
                    throttle.forward(self, port)

            do_HEAD = do_POST = do_GET  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Clients that leave are none of our business."""

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def send_file(self, handler: BaseHTTPRequestHandler, path: Path, bytes_per_s: float) -> None:
        size = path.stat().st_size
        match = _RANGE.match(handler.headers.get("Range", ""))
        start, stop = (int(match[1]), min(int(match[2]) + 1, size)) if match else (0, size)
        handler.send_response(206 if match else 200)
        handler.send_header("Content-Length", str(stop - start))
        if match:
            handler.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        handler.end_headers()
        handler.wfile.flush()
        begun = time.perf_counter()
        with path.open("rb") as file:
            for position in range(start, stop, _CHUNK_BYTES):
                nbytes = min(_CHUNK_BYTES, stop - position)  # which leave when the last of them is due
                time.sleep(max(0.0, (position + nbytes - start) / bytes_per_s - (time.perf_counter() - begun)))
                handler.connection.sendfile(file, position, nbytes)
        with self._lock:
            self.sent += stop - start

    def forward(self, handler: BaseHTTPRequestHandler, port: int) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            connection.request(handler.command, handler.path, body, dict(handler.headers.items()))
            answer = connection.getresponse()
            data = answer.read()
        handler.send_response_only(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in {"transfer-encoding", "connection", "content-length"} or handler.command == "HEAD":
                handler.send_header(name, value)
        if handler.command != "HEAD":
            handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(data)


@contextlib.contextmanager
def far_away(folder: Path, *, delay_s: float, bytes_per_s: float) -> Iterator[Throttle]:
    """A throttled Hub that holds the model in `folder`."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as root, running(Path(root) / "hub") as url:
        env = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": f"{root}/home", "HF_TOKEN": "hf_test"}
        subprocess.run([sys.executable, "-c", UPLOAD, folder], env=env, check=True, capture_output=True)
        throttle = Throttle(int(url.rpartition(":")[2]), folder, delay_s=delay_s, bytes_per_s=bytes_per_s)
        yield throttle
        throttle.server.shutdown()


def one_run(throttle: Throttle, code: str, folder: Path) -> dict[str, Any] | None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as home:
        env = {"HF_ENDPOINT": throttle.url, "HF_HOME": home, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_test"}
        before = throttle.sent
        found = measured(code, folder, env=env | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"})
    return found and found | {"sent": throttle.sent - before}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loaders", type=int, nargs="*", default=range(len(LOADERS)), help="which, by number from 0")
    parser.add_argument("--delay", type=float, default=0.040, help="seconds per request")
    parser.add_argument("--pace", type=float, default=50e6, help="bytes per second and connection")
    options = parser.parse_args()
    make_model(options.folder, layers=options.layers, hidden=4096, inner=11008, vocab=32000, shards=6)
    print(f"load {load_average()}")
    runs: dict[str, list[dict[str, Any]]] = {}
    with far_away(options.folder, delay_s=options.delay, bytes_per_s=options.pace) as throttle:
        for _ in range(options.rounds):
            for name, code in [list(LOADERS.items())[number] for number in options.loaders]:
                found = one_run(throttle, code, options.folder)
                runs.setdefault(name, []).extend([found] if found else [])
    print("| loader | MB sent | s | MB/s | anonymous MB beyond the result |\n|---|--:|--:|--:|--:|")
    for name, some in runs.items():
        if not some:
            print(f"| {name} | failed |")
            continue
        sent, seconds = median(some, "sent") / 1e6, median(some, "s")
        beyond = (median(some, "anonymous") - median(some, "result")) / 1e6
        print(f"| {name} | {sent:.1f} | {seconds:.2f} | {sent / seconds:.0f} | {beyond:.0f} |")
    print(f"load afterwards {load_average()}")


if __name__ == "__main__":
    main()
