"""What torch.save wrote is read without importing or calling anything that it names."""

from __future__ import annotations

import argparse
import collections
import enum
import io
import os
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers import examples
from zero_tp.base.errors import UserError
from zero_tp.tools.checkpoint_import import unpickling
from zero_tp.tools.checkpoint_import.stored_tensors import FileTensor, read_whole
from zero_tp.tools.checkpoint_import.unpickling import (
    DTYPES,
    InertObject,
    load_pickle,
    load_torch,
    tensors_in,
)

SENTINEL: list[str] = []


class Kind(enum.Enum):
    FIRST = "first"


class Scaler:
    """A trainer's own class, with a function that must not run."""

    def __init__(self, path: str = "") -> None:
        self.scale = 8.0

    def __setstate__(self, state: Any) -> None:
        SENTINEL.append("state")


def remember(word: str) -> str:
    SENTINEL.append(word)
    return word


class Calls:
    """Pickled as a call of a function with arguments."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - {"complex64", "complex128"}))
@examples(3, 30)
@given(data=st.data())
def test_a_block_is_that_of_the_tensor(
    dtype: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Views with offsets and strides, of storages that several tensors share."""
    shape = data.draw(st.lists(st.integers(0, 5), min_size=0, max_size=3))
    whole = torch.randint(0, 2, (3, *shape)).to(DTYPES[dtype])
    view = whole[data.draw(st.integers(0, 2))]
    if view.ndim > 1 and data.draw(st.booleans()):
        view = view.transpose(0, 1)
    path = tmp_path_factory.mktemp("saved") / "file.pt"
    torch.save(
        {"whole": whole, "view": view, "parameter": [torch.nn.Parameter(whole, False)]}, path
    )
    stored = load_torch(path)
    index = tuple(
        slice(*sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))))
        for n in view.shape
    )
    expected = view[index]
    assert stored["view"].dtype == whole.dtype
    assert torch.equal(stored["view"].read(index).view(whole.dtype), expected)
    assert torch.equal(read_whole(stored["whole"]), whole)
    assert torch.equal(read_whole(stored["parameter"][0]), whole)


def test_foreign_classes_and_functions_are_inert(tmp_path: Path) -> None:
    saved = {
        "args": argparse.Namespace(lr=0.1, kind=Kind.FIRST),
        "scaler": Scaler(),
        "call": Calls(remember, "ran"),
        "open": Calls(open, str(tmp_path / "made"), "w"),
        "system": Calls(os.mkdir, str(tmp_path / "folder")),
        "evaluated": Calls(eval, "SENTINEL.append('evaluated')"),
        "plain": collections.OrderedDict(a={1, 2}, b=(torch.float32, torch.Size([3]))),
    }
    path = tmp_path / "file.pt"
    torch.save(saved, path)
    SENTINEL.clear()
    loaded = load_torch(path)
    assert SENTINEL == []
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file.pt"]
    assert loaded["args"].fields["lr"] == 0.1
    assert isinstance(loaded["args"].fields["kind"], InertObject)
    assert loaded["scaler"].fields == {"scale": 8.0}
    assert loaded["call"].args == ("ran",)
    assert loaded["open"].name.endswith(".open")
    assert loaded["plain"] == {"a": {1, 2}, "b": (torch.float32, (3,))}


def test_nothing_is_imported(tmp_path: Path) -> None:
    """`this` prints when it is imported."""
    path = tmp_path / "file.pkl"
    path.write_bytes(b"cthis\ns\n.")
    assert load_pickle(path).name == "this.s"
    assert "this" not in sys.modules


def test_damage_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"a": torch.randn(100)}, path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="cannot be read"):
        load_torch(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="not an archive of torch"):
        load_torch(path)
    with pytest.raises(UserError, match="missing"):
        load_torch(tmp_path / "absent.pt")


def test_a_file_that_ends_within_a_tensor(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"a": torch.randn(100)}, path)
    stored = load_torch(path)["a"]
    path.write_bytes(path.read_bytes()[: stored.start + 40])
    with pytest.raises(UserError, match="ends within a tensor"):
        read_whole(stored)


STORAGE = object()


def rebuilt(*args: Any) -> bytes:
    """The pickle of a tensor of these arguments in a storage of 4 floats."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if value is STORAGE:
                return "storage", torch.FloatStorage, "0", "cpu", 4
            return None

    file = io.BytesIO()
    Pickler(file, 2).dump(Calls(torch._utils._rebuild_tensor_v2, *args))
    return file.getvalue()


@pytest.mark.parametrize(
    "args",
    [
        (STORAGE, 0, (5,), (1,), False, {}),
        (STORAGE, 1, (2, 2), (2, 1), False, {}),
        (STORAGE, -1, (2,), (1,), False, {}),
        (STORAGE, 0, (2,), (-1,), False, {}),
        ("text", 0, (2,), (1,), False, {}),
        (STORAGE, 0, (2.0,), (1,), False, {}),
    ],
)
def test_a_tensor_beyond_its_storage_is_refused(args: tuple[Any, ...], tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"a": torch.randn(4)}, path)
    changed = tmp_path / "changed.pt"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(changed, "w") as new:
        for info in old.infolist():
            is_pickle = info.filename.endswith("data.pkl")
            new.writestr(info, rebuilt(*args) if is_pickle else old.read(info))
    with pytest.raises(UserError, match="cannot be read"):
        load_torch(changed)


def test_a_tensor_of_a_foreign_function_is_a_record(tmp_path: Path) -> None:
    """Where a tensor is expected, the error names what would have to be called."""
    path = tmp_path / "file.pt"
    torch.save({"a": Calls(torch.nn.init.zeros_, torch.ones(2))}, path)
    record = load_torch(path)["a"]
    assert isinstance(record, InertObject) and not isinstance(record, FileTensor)
    assert record.name == "torch.nn.init.zeros_"
    with pytest.raises(UserError, match=r"model\.a is made by torch\.nn"):
        dict(tensors_in({"model": {"a": record}}, path=path))


ENCODE = b"c_codecs\nencode\n"
REBUILD = b"ctorch._utils\n_rebuild_tensor\n"
ATTRIBUTES = b"}Vfoo\nVbar\ns"
DEFAULTS = b"(N}V__defaults__\n(Vother\ntst"


@pytest.mark.parametrize("function", [ENCODE, REBUILD, b"ccollections\nOrderedDict\n"])
@pytest.mark.parametrize("state", [ATTRIBUTES, DEFAULTS])
def test_a_file_does_not_change_our_functions(
    function: bytes, state: bytes, tmp_path: Path
) -> None:
    """They would stay changed for the files that are read later."""
    path = tmp_path / "file.pkl"
    path.write_bytes(function + state + b"b.")
    functions = [unpickling._encoded, unpickling._Unpickler._tensor]
    before = [(function.__defaults__, dict(vars(function))) for function in functions]
    with pytest.raises(UserError, match="a state of what has none"):
        load_pickle(path)
    assert [(function.__defaults__, vars(function)) for function in functions] == before


def test_a_files_attributes_do_not_hide_a_dicts_methods(tmp_path: Path) -> None:
    path = tmp_path / "file.pkl"
    path.write_bytes(b"ccollections\nOrderedDict\n(tR}Vitems\nVbar\nsb.")
    assert list(tensors_in(load_pickle(path))) == []


def test_dicts_in_themselves_are_one_line(tmp_path: Path) -> None:
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"a": deep}
    cyclic: dict[str, Any] = {}
    cyclic |= {"a": cyclic, "b": cyclic}
    for value in (deep, cyclic):
        path = tmp_path / "file.pkl"
        path.write_bytes(pickle.dumps(value))
        with pytest.raises(UserError, match="in themselves, or too deep"):
            dict(tensors_in(load_pickle(path)))


def test_a_compressed_archive_is_not_unpacked(tmp_path: Path) -> None:
    """A small file could take any memory."""
    path = tmp_path / "file.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"." * 100)
    with pytest.raises(UserError, match="compressed"):
        load_torch(path)
