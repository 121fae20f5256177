from __future__ import annotations

import subprocess
import sys
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hubshard.errors import FormatError
from hubshard.sources.dtypes import parse_float_dtype
from hubshard.sources.state_dict import StateDictSource
from hubshard.tensors import Box, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
else:
    torch = pytest.importorskip("torch")

MIB = 2**20


def whole(source: StateDictSource, name: str) -> bytes:
    (spec,) = (spec for spec in source.specs() if spec.name == name)
    return bytes(source.read(name, spec.box))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_tied_weights_are_stored_once_under_the_first_name_in_natural_order() -> None:
    w = torch.ones(4, 4)
    source = StateDictSource({"layers.10.w": w, "layers.2.w": w, "other": torch.zeros(2)})
    assert source.aliases() == {"layers.10.w": "layers.2.w"}
    assert [spec.name for spec in source.specs()] == ["layers.2.w", "other"]
    assert whole(source, "layers.2.w") == raw(w)


def test_the_caller_chooses_which_tied_name_is_stored() -> None:
    w = torch.ones(4, 4)
    source = StateDictSource({"emb": w, "head": w, "last": w}, keep=["head"])
    assert source.aliases() == {"emb": "head", "last": "head"}


def test_a_name_to_keep_that_is_not_there_is_refused() -> None:
    with pytest.raises(FormatError, match="'nowhere'"):
        StateDictSource({"emb": torch.ones(2)}, keep=["nowhere"])


@pytest.mark.parametrize("reserved", ["format", "total_size", "total_parameters"])
def test_a_tied_name_that_metadata_would_hide_is_the_one_that_is_stored(reserved: str) -> None:
    shared = torch.arange(4.0)
    source = StateDictSource({"a": shared, reserved: shared, "z": shared}, keep={"z"})
    assert [spec.name for spec in source.specs()] == [reserved]
    assert source.aliases() == {"a": reserved, "z": reserved}


def test_a_tied_parameter_and_its_detached_copy_are_one() -> None:
    w = torch.nn.Parameter(torch.ones(3))
    assert StateDictSource({"a": w, "b": w.detach(), "c": w.data}).aliases() == {"b": "a", "c": "a"}


def test_disjoint_views_of_one_buffer_are_all_stored() -> None:
    flat = torch.arange(10.0)
    source = StateDictSource({"a": flat[:4], "b": flat[4:].view(2, 3)})
    assert source.aliases() == {}
    assert whole(source, "a") + whole(source, "b") == raw(flat)


@pytest.mark.parametrize(
    "other",
    [
        lambda w: w[:2],
        lambda w: w[1:],
        lambda w: w.t(),
        lambda w: w.reshape(-1),
        lambda w: w.view(torch.int32),
        lambda w: w.unsqueeze(0),
    ],
)
def test_views_that_overlap_but_are_not_the_same_are_each_stored(other: Any) -> None:
    w = torch.arange(16.0).reshape(4, 4)
    source = StateDictSource({"w": w, "view": other(w)})
    assert source.aliases() == {}
    assert whole(source, "w") == raw(w)
    assert whole(source, "view") == raw(other(w))


def test_equal_values_at_another_address_are_not_tied() -> None:
    assert StateDictSource({"a": torch.ones(3), "b": torch.ones(3)}).aliases() == {}


def test_the_stride_of_a_dimension_of_one_does_not_untie() -> None:
    w = torch.arange(4.0)
    assert StateDictSource({"a": w.as_strided((1, 4), (4, 1)), "b": w.as_strided((1, 4), (9, 1))}).aliases() == {
        "b": "a"
    }


def test_a_tensor_and_its_conjugate_are_not_tied() -> None:
    w = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    source = StateDictSource({"w": w, "conj": w.conj(), "imag": w.conj().imag})
    assert source.aliases() == {}
    assert whole(source, "conj") == raw(w.conj().resolve_conj())
    assert whole(source, "imag") == raw(w.conj().imag.clone().resolve_neg())


def test_empty_tensors_are_never_tied() -> None:
    empty = torch.zeros(0, 3)
    assert StateDictSource({"a": empty, "b": empty}).aliases() == {}


def test_a_lone_slice_writes_its_own_bytes() -> None:
    source = StateDictSource({"a": torch.arange(16.0)[8:12]})
    assert whole(source, "a") == raw(torch.arange(8.0, 12.0))


def test_an_expanded_tensor_writes_all_its_elements() -> None:
    source = StateDictSource({"a": torch.tensor([5.0]).expand(3, 4)})
    assert whole(source, "a") == raw(torch.full((3, 4), 5.0))


def test_tensors_that_require_grad_are_read() -> None:
    assert whole(StateDictSource({"w": torch.ones(3, requires_grad=True)}), "w") == raw(torch.ones(3))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("float8_e4m3fn", "F8_E4M3"),
        ("float8_e4m3fnuz", "F8_E4M3FNUZ"),
        ("float8_e5m2", "F8_E5M2"),
        ("float8_e5m2fnuz", "F8_E5M2FNUZ"),
        ("float8_e8m0fnu", "F8_E8M0"),
        ("bfloat16", "BF16"),
        ("uint16", "U16"),
        ("uint32", "U32"),
        ("uint64", "U64"),
        ("int8", "I8"),
        ("bool", "BOOL"),
        ("complex64", "C64"),
    ],
)
def test_every_dtype_of_the_format_is_read_bit_by_bit(name: str, code: str) -> None:
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    dtype = getattr(torch, name)
    size = torch.zeros(1, dtype=dtype).element_size()
    content = torch.randint(0, 2 if name == "bool" else 256, (6 * size,), dtype=torch.uint8)
    tensor = content.view(dtype).reshape(2, 3)
    source = StateDictSource({"t": tensor.t()})
    assert source.specs() == (TensorSpec("t", code, (3, 2)),)
    elements = [content[i * size : (i + 1) * size] for i in (0, 3, 1, 4, 2, 5)]
    assert whole(source, "t") == raw(torch.cat(elements))


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no float4")
def test_packed_float4_counts_two_elements_per_byte() -> None:
    content = torch.arange(12, dtype=torch.uint8)
    source = StateDictSource({"t": content.view(torch.float4_e2m1fn_x2).reshape(3, 4)})
    assert source.specs() == (TensorSpec("t", "F4", (3, 8)),)
    assert whole(source, "t") == raw(content)
    assert bytes(source.read("t", Box((1, 2), (2, 4)))) == bytes([5, 6, 9, 10])
    with pytest.raises(FormatError, match=r"'t'.*whole bytes"):
        source.read("t", Box((0, 1), (1, 4)))


def _distributed() -> Any:
    class DTensor(torch.Tensor):
        pass

    return torch.ones(2).as_subclass(DTensor)


def _wrapper() -> Any:
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            raise NotImplementedError

    return torch.Tensor._make_wrapper_subclass(Wrapper, (2,))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "meta": (lambda: torch.empty(3, device="meta"), "meta device"),
    "complex128": (lambda: torch.zeros(2, dtype=torch.complex128), "torch.complex128"),
    "complex32": (lambda: torch.zeros(2, dtype=torch.complex32), "torch.complex32"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "torch.sparse_coo"),
    "distributed": (_distributed, "DTensor"),
    "wrapper": (_wrapper, "Wrapper"),
    "uninitialised": (lambda: torch.nn.LazyLinear(2).weight, "not initialised"),
    "a list": (lambda: [1.0], "list"),
    "bytes": (lambda: b"x", "bytes"),
    "None": (lambda: None, "NoneType"),
    "nested dict": (dict, "dict"),
    "object array": (lambda: np.array([None]), "object"),
    "text array": (lambda: np.array(["a"]), "<U1"),
    "complex128 array": (lambda: np.zeros(2, "c16"), "complex128"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_cannot_be_stored_is_refused_by_name_before_anything(kind: str) -> None:
    make, says = REFUSED[kind]
    with pytest.raises(FormatError, match="'m'") as caught:
        StateDictSource({"a": torch.ones(2), "m": make()})
    assert says in str(caught.value)
    assert caught.value.hint


def test_all_names_with_the_same_reason_are_listed() -> None:
    with pytest.raises(FormatError, match=r"'m0', 'm1'.* and 2 more is on the meta device"):
        StateDictSource({f"m{i}": torch.empty(3, device="meta") for i in range(12)})


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_a_name_that_the_format_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(FormatError):
        StateDictSource({name: torch.ones(2)})


def test_a_key_that_is_no_string_is_refused() -> None:
    with pytest.raises(FormatError, match="key 3"):
        StateDictSource({3: torch.ones(2)})  # type: ignore[dict-item]


def test_a_parameter_of_a_class_of_its_own_with_plain_bytes_is_read() -> None:
    class Named(torch.nn.Parameter):
        pass

    assert whole(StateDictSource({"w": Named(torch.ones(3))}), "w") == raw(torch.ones(3))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("bfloat16", "BF16"),
        ("bf16", "BF16"),
        ("BF16", "BF16"),
        ("torch.float16", "F16"),
        ("fp16", "F16"),
        (torch.float32, "F32"),
        ("double", "F64"),
    ],
)
def test_a_floating_dtype_is_known_by_all_its_names(text: object, code: str) -> None:
    assert parse_float_dtype(text) == code


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "", "BFLOAT", "4bit"])
def test_another_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(FormatError, match="cannot be cast"):
        StateDictSource({"a": torch.ones(2)}, dtype=dtype)


def test_a_cast_changes_floating_tensors_of_sixteen_bits_and_more_alone() -> None:
    tensors = {
        "f32": torch.randn(3, 4).t(),
        "f64": torch.randn(5, dtype=torch.float64),
        "bf16": torch.randn(2).to(torch.bfloat16),
        "int": torch.arange(3),
        "bool": torch.tensor(data=True),
        "c64": torch.randn(2, dtype=torch.complex64),
        "f8": torch.randn(4).to(torch.float8_e4m3fn),
    }
    source = StateDictSource(tensors, dtype="bfloat16")
    expected = {name: t.to(torch.bfloat16) if name in {"f32", "f64", "bf16"} else t for name, t in tensors.items()}
    for spec in source.specs():
        assert whole(source, spec.name) == raw(expected[spec.name]), spec.name
        assert spec.nbytes == len(raw(expected[spec.name]))
    assert bytes(source.read("f32", Box((1, 0), (2, 3)))) == raw(expected["f32"][1:3])


def test_tied_weights_stay_tied_when_cast() -> None:
    w = torch.ones(3)
    assert StateDictSource({"a": w, "b": w}, dtype="float16").aliases() == {"b": "a"}


def test_arrays_are_not_cast_and_the_error_says_so() -> None:
    assert StateDictSource({"a": np.arange(3)}, dtype="float16").specs() == (TensorSpec("a", "I64", (3,)),)
    with pytest.raises(FormatError, match=r"'a'.*only torch tensors are cast"):
        StateDictSource({"a": np.zeros(3)}, dtype="float16")


def test_a_contiguous_tensor_is_read_without_a_copy_and_cannot_be_written_through() -> None:
    w = torch.zeros(4, 4)
    source = StateDictSource({"w": w})
    view = memoryview(source.read("w", Box((1, 0), (2, 4))))
    assert view.readonly
    w[1, 0] = 1.0
    assert bytes(view) == raw(w[1:3])


def test_reading_a_transposed_tensor_by_blocks_copies_no_more_than_a_block() -> None:
    array = np.zeros((2048, 4096), "f4").T
    source = StateDictSource({"w": array})
    tracemalloc.start()
    for block in source.specs()[0].box.blocks(bits=32, max_bytes=MIB):
        source.read("w", block)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * MIB


PEAK = """
import resource, sys, torch
from hubshard.sources.state_dict import StateDictSource
flat = torch.ones(2**26)
source = StateDictSource({"t": flat.view(2**13, 2**13).t(), "c": flat}, dtype="bfloat16")
for spec in source.specs():
    source.read(spec.name, next(spec.box.blocks(bits=16, max_bytes=2**20)))
scale = 1 if sys.platform == "darwin" else 1024
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
for spec in source.specs():
    for block in spec.box.blocks(bits=16, max_bytes=8 * 2**20):
        source.read(spec.name, block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale - before)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs the resource module")
def test_casting_and_transposing_by_blocks_holds_no_second_copy_of_a_tensor() -> None:
    result = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 64 * MIB  # the tensor has 256 MiB


def test_a_state_dict_of_arrays_needs_no_torch() -> None:
    code = (
        "import sys, numpy as np\n"
        "from hubshard.sources.state_dict import StateDictSource\n"
        "source = StateDictSource({'a': np.arange(3)})\n"
        "source.read('a', source.specs()[0].box)\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
