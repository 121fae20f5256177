"""The public surface: its names, their documentation, and what importing them costs."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import hubshard
from hubshard.header import encode_header
from hubshard.tensors import TensorSpec

if TYPE_CHECKING:
    from tests.conftest import Hub

PUBLIC = {
    "Checkpoint",
    "ConflictError",
    "Difference",
    "Event",
    "FormatError",
    "HubshardError",
    "IncompleteError",
    "IntegrityError",
    "LazyTensor",
    "LoadReport",
    "NotFoundError",
    "Offloaded",
    "OnEvent",
    "Problem",
    "Promoted",
    "Published",
    "ResumableLoader",
    "ResumableSampler",
    "ResumeBranch",
    "RolledBack",
    "ShardedHubMixin",
    "StepBranch",
    "StoreError",
    "TrainState",
    "UnsafeFormatError",
    "Verification",
    "__version__",
    "diff",
    "from_pretrained",
    "load_into",
    "offload",
    "open_checkpoint",
    "promote",
    "pull",
    "push_to_hub",
    "rollback",
    "verify",
}
"""Add a name here only with a reason: every one of them is a promise."""

WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "numpy", "accelerate"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
"""


def _python(code: str, *args: str, cwd: Path | None = None) -> str:
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_public_names_are_exactly_those_promised() -> None:
    assert set(hubshard.__all__) == PUBLIC
    assert len(hubshard.__all__) == len(PUBLIC)
    assert set(dir(hubshard)) >= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__", "OnEvent"}))
def test_every_public_name_is_documented_and_annotated(name: str) -> None:
    value = getattr(hubshard, name)
    assert inspect.getdoc(value), name
    if inspect.isfunction(value):
        _assert_annotated(value)
    for member, function in vars(value).items():
        if inspect.isfunction(function) and not member.startswith("_"):
            assert inspect.getdoc(function), f"{name}.{member}"
            _assert_annotated(function)


def _assert_annotated(function: object) -> None:
    signature = inspect.signature(function)  # type: ignore[arg-type]
    named = [parameter for key, parameter in signature.parameters.items() if key not in {"self", "cls"}]
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in named), function
    assert signature.return_annotation is not inspect.Signature.empty, function


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="push_to_hubb"):
        hubshard.push_to_hubb  # noqa: B018


def test_what_the_readme_names_of_dcp_is_there_once_hubshard_is_imported() -> None:
    pytest.importorskip("torch")
    code = (
        "import hubshard, sys; assert 'torch' not in sys.modules; print(hubshard.dcp.HubWriter, hubshard.dcp.HubReader)"
    )
    assert _python(code).count("hubshard.resume.dcp") == 2


def test_importing_hubshard_imports_no_heavy_package() -> None:
    code = "import hubshard, sys; print([m for m in ('torch', 'transformers', 'hf_xet', 'numpy') if m in sys.modules])"
    assert _python(code).strip() == "[]"


def test_every_public_name_resolves_without_torch_installed() -> None:
    code = f"{WITHOUT_TORCH}\nimport hubshard\nprint(len([getattr(hubshard, name) for name in hubshard.__all__]))"
    assert int(_python(code)) == len(PUBLIC)


def test_the_command_line_answers_help_without_torch_and_imports_little() -> None:
    code = (
        f"{WITHOUT_TORCH}\nfrom hubshard.cli import main\nsys.argv = ['hubshard', '--help']\n"
        "try:\n    main()\nfinally:\n"
        "    print([m for m in ('huggingface_hub', 'hf_xet', 'starlette', 'safetensors') if m in sys.modules])"
    )
    assert _python(code).strip().endswith("[]")


def test_a_directory_is_published_pulled_and_opened_without_torch_and_numpy(hub: Hub, tmp_path: Path) -> None:
    specs = [TensorSpec("a", "F32", (1000,)), TensorSpec("b", "BF16", (30, 7))]
    raw = encode_header(specs, {"format": "pt"}) + bytes(range(220)) * 20 + bytes(20)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(raw)
    code = """
    import sys
    import hubshard
    source, copy = sys.argv[1:]
    published = hubshard.push_to_hub(source, "org/light", max_shard_size="4500B")
    hubshard.pull("org/light", local_dir=copy)
    for place in (copy, "org/light"):
        with hubshard.open_checkpoint(source) as first, hubshard.open_checkpoint(place) as second:
            assert {name: first[name].read() for name in first} == {name: second[name].read() for name in second}
    print(published.shards)
    """
    printed = hub.client(WITHOUT_TORCH + textwrap.dedent(code), tmp_path / "model", tmp_path / "copy")
    assert printed.strip() == "2"
