"""What loading tells: all bytes, retries on the way, and failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hubshard import push_to_hub
from hubshard.errors import FormatError
from hubshard.events import Event
from hubshard.lazy import from_pretrained, load_into
from tests.faults.proxy import proxied, say

if TYPE_CHECKING:
    from tests.conftest import Hub

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture
def model() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    return transformers.LlamaForCausalLM(config)


def test_a_model_of_a_local_folder_tells_of_all_its_bytes(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    events: list[Event] = []
    from_pretrained(tmp_path, on_event=events.append)
    assert [events[0].kind, events[-1].kind] == ["start", "end"]
    assert events[0].path == str(tmp_path)
    totals = events[-1].totals
    assert totals is not None
    assert totals.received_bytes >= events[0].nbytes > 0


def test_a_model_of_a_repo_tells_of_all_its_bytes_and_of_retries(
    hub: Hub, model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    push_to_hub(model, "org/model", endpoint=hub.url, token="hf_test")
    code = """
    import json, sys
    import hubshard
    events = []
    hubshard.from_pretrained("org/model", on_event=events.append)
    print(json.dumps([[event.kind, event.path, event.nbytes, event.detail] for event in events]))
    print(events[-1].totals.received_bytes, events[-1].totals.retries)
    """
    with proxied(hub.port) as proxy:
        proxy.fail(r"GET /.*resolve/.*model\.safetensors", say(503), say(503))
        said, sums = hub.client(code, env={"HF_ENDPOINT": proxy.url}).splitlines()[-2:]
    events = json.loads(said)
    assert [kind for kind, *_ in events if kind == "retry"] == ["retry"] * 2
    assert all("503" in detail for kind, _, _, detail in events if kind == "retry")
    received, retries = map(int, sums.split())
    assert retries == 2
    assert received >= events[[kind for kind, *_ in events].index("start")][2]


def test_a_checkpoint_that_does_not_fit_is_an_event_too(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    events: list[Event] = []
    with pytest.raises(FormatError):
        load_into(torch.nn.Linear(2, 2), tmp_path, on_event=events.append)
    assert [event.kind for event in events] == ["error"]
    assert events[0].detail.startswith("FormatError: ")
