"""Publishing from several ranks under torchrun, against an embedded Hub: equal byte by byte to one process."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import HfApi
from huggingface_hub.hf_api import RepoFile

from hubshard.publish.ranks import owners_of
from tests import warm
from tests.old_torch import tensor_parallel
from tests.systems import KILLED

if TYPE_CHECKING:
    from tests.conftest import Hub

torch = pytest.importorskip("torch")
TCPStore = pytest.importorskip("torch.distributed").TCPStore
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(600)  # starting many processes takes its time on a busy machine

SCRIPT = Path(__file__).with_name("publish_ranks_script.py")
MIB = 2**20


@dataclass(frozen=True)
class Ranks:
    """What some ranks have published, and what they found."""

    world: int
    hub: Hub
    found: list[dict[str, Any]]

    def repo(self, name: str) -> str:
        return f"ranks-{self.world}/{name}"

    def files(self, name: str, revision: str = "main") -> dict[str, str]:
        """Path to the id of the content."""
        api = HfApi(endpoint=self.hub.url, token="hf_test")
        tree = api.list_repo_tree(self.repo(name), revision=revision, recursive=True)
        return {entry.path: entry.blob_id for entry in tree if isinstance(entry, RepoFile)}

    def commits(self, name: str) -> list[str]:
        api = HfApi(endpoint=self.hub.url, token="hf_test")
        return [commit.title for commit in api.list_repo_commits(self.repo(name))]


def on_ranks(world: int, hub: Hub, out: Path, *cases: str, xet: bool = True, torchrun: bool = False) -> Ranks:
    env = {**hub.client_env(xet=xet), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    if torchrun:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
        done = subprocess.run(
            [*run, SCRIPT, out, *cases], env=env, capture_output=True, text=True, timeout=580, check=False
        )
    else:
        done = warm.run([SCRIPT, out, *cases], imports="torch", ranks=world, env=env, timeout=580)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    return Ranks(world, hub, [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(world)])


@pytest.fixture(scope="module")
def two(module_hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return on_ranks(2, module_hub, tmp_path_factory.mktemp("two"), "fsdp", "even", "placements", "replicas", "refusals")


@pytest.fixture(scope="module")
def models(module_hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return on_ranks(2, module_hub, tmp_path_factory.mktemp("models"), "transformers_models")


@pytest.fixture(scope="module")
def tensor_parallel_models(module_hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return on_ranks(2, module_hub, tmp_path_factory.mktemp("models"), "transformers_tensor_parallel")


@pytest.fixture(scope="module")
def other_libraries(module_hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    missing = [name for name in ("diffusers", "peft") if find_spec(name) is None]
    if missing:
        pytest.skip(f"the extra test is not installed: no {', '.join(missing)}")
    return on_ranks(2, module_hub, tmp_path_factory.mktemp("others"), "other_libraries")


@pytest.fixture(scope="module")
def four(module_hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    cases = ("fsdp", "even", "hybrid", "placements", "tensor_parallel", "two_dimensions", "some")
    return on_ranks(4, module_hub, tmp_path_factory.mktemp("four"), *cases)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Ranks:
    made: Ranks = request.getfixturevalue(request.param)
    return made


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        *(("two", name) for name in ("fsdp", "fsdp-cast", "fsdp-state", "fsdp-tagged", "placements", "replicas")),
        *(("four", name) for name in ("fsdp", "fsdp-cast", "fsdp-state", "placements", "hybrid", "tensor-parallel")),
        *(("four", name) for name in ("two-dimensions", "submesh", "even")),
        *(("models", name) for name in ("llama", "llama-cast", "experts", "experts-cast")),
        *(("other_libraries", name) for name in ("unet", "lora")),
        pytest.param("tensor_parallel_models", "tensor-parallel-llama", marks=tensor_parallel),
    ],
    indirect=["ranks"],
)
def test_what_ranks_publish_is_byte_by_byte_what_one_process_would(ranks: Ranks, name: str) -> None:
    assert ranks.files(name) == ranks.files(f"{name}-whole")
    assert len(ranks.commits(name)) == 2  # the Hub's own first one, and ours
    assert len({json.dumps(found[name]) for found in ranks.found}) == 1
    assert ranks.found[0][name]["changed"]


@pytest.mark.parametrize("ranks", ["two", "four"], indirect=True)
def test_every_rank_sees_to_an_equal_share_of_the_bytes(ranks: Ranks) -> None:
    for name in ("even", "fsdp", "placements"):
        found = ranks.found[0][name]
        assert sum(found["rank_bytes"]) == found["total"]
        assert len(found["rank_bytes"]) == ranks.world
    found = ranks.found[0]["even"]
    assert found["shards"] == 43
    mean = found["total"] / ranks.world
    assert all(0.9 * mean <= share <= 1.1 * mean for share in found["rank_bytes"])


@pytest.mark.parametrize("shards", [40, 41, 45, 79, 400])
def test_with_ten_shards_per_rank_and_more_none_has_ten_percent_more_than_the_mean(shards: int) -> None:
    for ranks in (2, 3, 4):
        sizes = [5_000_000_000 - 7_000_000 * (n % 40) for n in range(shards - 1)] + [1_000_000_000]
        owners = owners_of(sizes, ranks, first_has=30_000_000)
        loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks)]
        assert max(loads) <= 1.1 * sum(sizes) / ranks


@pytest.mark.parametrize("ranks", ["two", "four"], indirect=True)
def test_tags_pull_requests_dry_runs_and_reruns_are_as_from_one_process(ranks: Ranks) -> None:
    found = ranks.found[0]
    api = HfApi(endpoint=ranks.hub.url, token="hf_test")
    assert found["unchanged"] == [False, 0]
    assert {tag.name: tag.target_commit for tag in api.list_repo_refs(ranks.repo("fsdp-tagged")).tags} == {
        "v1": found["fsdp-tagged"]["commit"]
    }
    assert ranks.commits("fsdp-tagged")[0] == "From all ranks"
    assert found["dry"] == [None, found["dry"][1]]
    assert not api.repo_exists(ranks.repo("dry"))
    (asked,) = api.get_repo_discussions(ranks.repo("fsdp"))
    assert asked.is_pull_request
    assert found["asked"].endswith(f"/discussions/{asked.num}")
    proposed = ranks.files("fsdp", f"refs/pr/{asked.num}")
    assert proposed.keys() != ranks.files("fsdp").keys()  # other shards, and none of the old ones
    assert len([branch.name for branch in api.list_repo_refs(ranks.repo("fsdp")).branches]) == 1


def test_parts_that_data_and_tensor_parallelism_cut_twice_were_among_them(four: Ranks) -> None:
    assert "_StridedShard" in four.found[0]["kinds"]


@tensor_parallel
def test_the_tensor_parallel_model_was_split(tensor_parallel_models: Ranks) -> None:
    assert len(tensor_parallel_models.found[0]["split"]) > 10


def test_a_rank_that_publishes_alone_what_is_split_over_several_is_told_so(two: Ranks) -> None:
    told = two.found[0]["alone"]
    assert "rank 0 publishes a model that is split over several ranks, and rank 1 has not come within 2 s" in told
    assert "call push_to_hub on all ranks" in told


def test_what_every_rank_holds_may_be_published_by_rank_0_alone_or_by_each_its_own(two: Ranks) -> None:
    assert two.files("alone")
    assert two.files("own-0") != two.files("own-1")
    assert "rank 0 has not called for the same" in two.found[1]["rank 1 alone"]


def test_ranks_that_do_not_publish_the_same_are_all_refused(two: Ranks) -> None:
    for found in two.found:
        for differing in ("options", "dry on one", "other hub"):
            assert found[differing].startswith("FormatError: rank 1 publishes ")
        assert "rank 1 holds another model than rank 0; they differ in 'few'" in found["model"]
        assert "'a' is placed as (Partial(sum),)" in found["partial"]


def test_what_fails_on_one_rank_ends_all_and_the_next_publish_works(two: Ranks) -> None:
    for failing, other in ((0, 1), (1, 0)):
        case = f"fails on {failing}"
        assert two.found[failing][case] == "its own"
        assert two.found[other][case].startswith(f"StoreError: rank {failing}: ZeroDivisionError: a bad day")
    assert [found["at last"] for found in two.found] == ["published", "published"]


def test_some_ranks_of_a_job_publish_what_is_split_over_them_however_many_groups_each_holds(four: Ranks) -> None:
    assert ["some" in found for found in four.found] == [True, False, False, True]
    assert four.files("some") == four.files("some-whole")


def _processes(
    world: int, env: Mapping[str, str], out: Path, case: str, *, port: int | None = None
) -> list[subprocess.Popen[str]]:
    # without torchrun, which would end the others itself when one has died
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = port or free.getsockname()[1]
    env = {**env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    return [
        subprocess.Popen(
            [sys.executable, SCRIPT, out, case],
            env={**env, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]


def test_a_rank_is_killed_the_others_end_by_themselves_and_the_next_run_sends_only_the_rest(
    hub: Hub, tmp_path: Path
) -> None:
    processes = _processes(2, hub.client_env(), tmp_path, "killed")
    errors = [process.communicate(timeout=400)[1] for process in processes]
    assert processes[1].returncode == KILLED, errors[1][-4000:]
    assert processes[0].returncode == 0, errors[0][-4000:]
    told = json.loads((tmp_path / "rank0.json").read_text())["killed"]
    assert told.startswith("StoreError: rank 1 is gone, or cannot be reached")
    api = HfApi(endpoint=hub.url, token="hf_test")
    assert api.list_repo_files("ranks-2/killed") == [".gitattributes"]  # nothing is shown
    (staging,) = [branch.name for branch in api.list_repo_refs("ranks-2/killed").branches if branch.name != "main"]
    kept = {path.removeprefix("staged/") for path in api.list_repo_files("ranks-2/killed", revision=staging)}
    kept -= {".gitattributes"}
    assert len(kept) >= 4  # of both ranks

    hub.reset_counters()
    ranks = on_ranks(2, hub, tmp_path, "resumed", torchrun=True)
    assert ranks.files("killed") == ranks.files("killed-whole")
    sent = {path for found in ranks.found for path in found["sent again"]}
    assert not sent & kept
    assert kept <= {path for found in ranks.found for path in found["skipped"]}
    assert len(ranks.commits("killed")) == 2
    assert [branch.name for branch in api.list_repo_refs("ranks-2/killed").branches] == ["main"]


@pytest.mark.parametrize("keeps_store", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_rank_0_of_replicas_is_killed_and_the_others_end_by_themselves(
    hub: Hub, tmp_path: Path, keeps_store: bool
) -> None:
    env = hub.client_env()
    if not keeps_store:  # as under torchrun, where it outlives the ranks
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    processes = _processes(3, env, tmp_path, "replicas_killed", port=None if keeps_store else store.port)
    errors = [process.communicate(timeout=400)[1] for process in processes]
    assert processes[0].returncode == KILLED, errors[0][-4000:]
    for rank in (1, 2):
        assert (tmp_path / f"rank{rank}.json").exists(), errors[rank][-4000:]
        told = json.loads((tmp_path / f"rank{rank}.json").read_text())["killed"]
        assert told.startswith("StoreError: ")
        assert ("the ranks cannot reach each other" if keeps_store else "rank 0, which publishes, is gone") in told
        assert "publish again: what was finished is not sent again" in told


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("xet", "most_bytes"), [pytest.param(False, 48 * MIB, marks=pytest.mark.slow), (True, 200 * MIB)]
)
def test_a_rank_holds_a_few_pieces_besides_its_part_of_the_model(
    hub: Hub, tmp_path: Path, xet: bool, most_bytes: int
) -> None:
    ranks = on_ranks(2, hub, tmp_path, "memory", xet=xet)
    for found in ranks.found:
        total, extra = found["memory"]
        assert total > 256 * MIB
        assert extra <= most_bytes  # with Xet, most of it is hf_xet's own, as much as one process would take
        assert max(found["rank_bytes"]) <= 1.1 * total / 2
