"""Files that PyTorch saved: their tensors are read, and nothing in them is run."""

from __future__ import annotations

import os
import pickle
import subprocess
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from levserve.errors import StartupError
from levserve.weights.torch_file import TorchTensor, read_state_dict, read_torch_file
from tests.conftest import GOLDEN
from tests.torch_files import Tensor, dumps, write_archive, write_torch_file

NUMBERS = np.arange(24, dtype=np.float32).reshape(4, 6)
SAVED = {
    "whole": NUMBERS,
    "transposed": NUMBERS.T,
    "part": NUMBERS[1:3, 2:4],
    "parameter": NUMBERS / 2,
    "half": NUMBERS.astype(np.float16),
    "bfloat16": NUMBERS.astype(ml_dtypes.bfloat16),
    "double": NUMBERS.astype(np.float64),
    "long": NUMBERS.astype(np.int64),
    "bool": NUMBERS > 11,
    "scalar": np.float32(2.5),
    "empty": np.zeros((0, 3), np.float32),
}
"""What tests/make_golden.py has PyTorch save."""


def refusal_of(path: Path) -> str:
    with pytest.raises(StartupError) as refusal:
        read_state_dict(path)
    assert str(path) in str(refusal.value) and "\n" not in str(refusal.value)
    return str(refusal.value)


# What PyTorch itself has written


def test_tensors_of_every_kind_are_read() -> None:
    tensors = read_state_dict(GOLDEN / "torch.bin")
    assert tensors.keys() == SAVED.keys()
    for name, expected in SAVED.items():
        found = tensors[name].array
        assert found.dtype == expected.dtype and not found.flags.writeable
        np.testing.assert_array_equal(found, expected, err_msg=name)


def test_a_state_dict_is_read_with_what_pytorch_notes_on_it() -> None:
    tensors = read_state_dict(GOLDEN / "torch-state-dict.bin")
    assert {name: tensor.array.shape for name, tensor in tensors.items()} == {"weight": (3, 2), "bias": (3,)}


def test_the_format_before_1_6_is_refused_with_what_to_do() -> None:
    assert "save it again with a later version, or as safetensors" in refusal_of(GOLDEN / "torch-legacy.bin")


def test_what_tests_write_is_what_pytorch_writes(tmp_path: Path) -> None:
    tensors = read_state_dict(write_torch_file(tmp_path / "x.bin", {"a": NUMBERS, "b": NUMBERS[0]}))
    np.testing.assert_array_equal(tensors["a"].array, NUMBERS)
    np.testing.assert_array_equal(tensors["b"].array, NUMBERS[0])


# What runs code in PyTorch, or tries to


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.arguments


MALICIOUS = [
    (os.system, "posix.system"),
    (subprocess.check_output, "subprocess.check_output"),
    (eval, "builtins.eval"),
    (exec, "builtins.exec"),
    (__import__, "builtins.__import__"),
    (getattr, "builtins.getattr"),
    (np.load, "numpy.load"),
]


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(("function", "named"), MALICIOUS)
def test_a_file_that_calls_a_function_runs_nothing_and_names_it(
    function: Any, named: str, protocol: int, tmp_path: Path
) -> None:
    trace = tmp_path / "ran"
    command = (
        f"touch {trace}"
        if "." in named and not named.startswith("builtins")
        else f"open({str(trace)!r}, 'w')"
    )
    pickled = pickle.dumps({"weight": Call(function, command)}, protocol)
    refusal = refusal_of(write_archive(tmp_path / "evil.bin", pickled, {}))
    assert named.split(".")[-1] in refusal and "nothing was run" in refusal
    assert not trace.exists()


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x04\x8c\x0ctorch._utils\x8c\x1e_rebuild_tensor_v2.__globals__\x93.",
        b"\x80\x04\x8c\x0ctorch._utils\x8c\x1a_rebuild_tensor_v2.__call__\x93.",
        b"ctorch\nFloatStorage.__class__\n.",
        b"ccollections\nOrderedDict.__init__.__globals__\n.",
        b"ctorch.serialization\nload\n.",
        b"ctorch._utils\n_rebuild_tensor_v2\n}S'x'\nI1\nsb.",  # sets an attribute of the function
        b"ctorch._utils\n_rebuild_tensor_v2\n(N}S'__call__'\nI1\nstb.",
        b"ccollections\nOrderedDict\n}S'x'\nI1\nsb.",
        b"ccollections\nOrderedDict\n(N}S'keys'\nI1\nstb.",
        b"ctorch\nFloatStorage\n}S'x'\nI1\nsb.",
        b"\x82\x01.",  # an extension by its number
        b"S'just text'\n.",
        b"(lp0\n.",
        b"",
    ],
)
def test_a_pickle_reaches_nothing_beyond_the_names_it_may_use(pickled: bytes, tmp_path: Path) -> None:
    refusal_of(write_archive(tmp_path / "evil.bin", pickled, {}))
    assert not hasattr(OrderedDict, "x") and callable(OrderedDict.keys)
    assert read_state_dict(GOLDEN / "torch.bin").keys() == SAVED.keys()


def test_attributes_that_a_file_sets_on_its_mapping_are_not_used(tmp_path: Path) -> None:
    """In this file, `items` of the mapping is a number."""
    pickled = b"ccollections\nOrderedDict\n(tR(N}S'items'\nI1\nstb."
    assert read_state_dict(write_archive(tmp_path / "x.bin", pickled, {})) == {}


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ({"shape": (5, 6)}, "beyond the end of its storage"),
        ({"offset": 1}, "beyond the end of its storage"),
        ({"strides": (7, 1)}, "beyond the end of its storage"),
        ({"shape": (1 << 40,), "strides": (0,)}, "beyond the end of its storage"),
        ({"strides": (-6, 1)}, "-6 is not a size"),
        ({"shape": (1 << 40, 1 << 40)}, "beyond the end of its storage"),
        ({"shape": (1 << 70, 1)}, "is not a size"),
        ({"strides": (1,)}, "2 dimensions and 1 strides"),
        ({"shape": (1,) * 9, "strides": (1,) * 9}, "9 dimensions"),
        ({"shape": "wide"}, "wrong values"),
        ({"count": 25}, "storage a has fewer than 25 numbers"),
        ({"kind": "torch.StorageOfNoKind"}, "unknown persistent id"),
        ({"kind": ["FloatStorage"]}, "unhashable"),
    ],
)
def test_a_tensor_that_reads_beyond_its_numbers_is_refused(
    told: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    pickled = dumps({"a": Tensor("a", NUMBERS, **told)})
    assert problem in refusal_of(write_archive(tmp_path / "x.bin", pickled, {"a": NUMBERS}))


def test_other_things_than_tensors_are_named(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "x.bin", dumps({"a": Tensor("a", NUMBERS), "step": 7}), {"a": NUMBERS})
    assert "'step' is of type int, not a tensor" in refusal_of(path)
    saved = read_torch_file(path)
    assert isinstance(saved, dict) and saved["step"] == 7 and isinstance(saved["a"], TorchTensor)


# Damaged files


@pytest.mark.parametrize(
    ("content", "problem"), [(b"", "not a zip archive"), (b"PK\3\4 and no more", "cannot read")]
)
def test_a_file_of_another_kind_is_refused(content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    assert problem in refusal_of(tmp_path / "x.bin")


def test_an_archive_of_another_kind_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive:
        archive.writestr("notes.txt", "none")
    assert "it has no data.pkl" in refusal_of(tmp_path / "x.bin")
    with zipfile.ZipFile(tmp_path / "x.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"." * 100)
    assert "compressed" in refusal_of(tmp_path / "x.bin")


def test_numbers_in_the_order_of_other_machines_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive:
        archive.writestr("archive/data.pkl", dumps({}))
        archive.writestr("archive/byteorder", "big")
    assert "big-endian" in refusal_of(tmp_path / "x.bin")


def test_a_damaged_file_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    path, random = tmp_path / "x.bin", np.random.default_rng(0)
    whole = np.frombuffer((GOLDEN / "torch.bin").read_bytes(), np.uint8)
    for number in range(600):
        damaged = whole.copy()
        places = random.integers(0, len(whole), 3) if number % 2 else random.integers(0, 1_500, 3)
        damaged[places] = random.integers(0, 256, 3)
        kept = len(whole) if number % 3 else int(random.integers(1, len(whole)))
        path.write_bytes(damaged[:kept].tobytes())
        try:
            for tensor in read_state_dict(path).values():
                tensor.array.copy()
        except StartupError as refusal:
            assert "\n" not in str(refusal)
