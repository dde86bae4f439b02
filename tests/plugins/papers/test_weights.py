"""Files of weights come back as they were written; whatever else a file holds is refused with its name."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_pipeline.errors import ModelError
from tvm_pipeline_papers.learned.weights import NOTE, WeightsNote, read_weights, write_weights

ARRAYS = {
    "layer/matrix": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
    "layer/bias": np.array([0.5, 0.25, -3.0, 1e-3], np.float32),
}
MADE = WeightsNote("test", 3, "python train.py --seed 5", 5, figures={"loss": 0.25})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("weights") / "written.npz"
    write_weights(path, ARRAYS, MADE)
    return path.read_bytes()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the module's tests write their files."""
    return tmp_path_factory.mktemp("weights") / "other.npz"


def refused(path: Path, content: bytes, *parts: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ModelError) as raised:
        read_weights(path, "test", 3)
    message = str(raised.value)
    assert str(path) in message
    assert all(part in message for part in parts), message


def packed(entries: Mapping[str, bytes]) -> bytes:
    """Return an archive as numpy writes it, with any bytes in its entries."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, entry in entries.items():
            archive.writestr(f"{name}.npy", entry)
    return content.getvalue()


def entries(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name.removesuffix(".npy"): archive.read(name) for name in archive.namelist()}


def npy(array: npt.NDArray[np.generic]) -> bytes:
    content = io.BytesIO()
    np.save(content, array, allow_pickle=True)
    return content.getvalue()


def npy_of_header(header: str, data: bytes = bytes(8)) -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x02\x00" + len(text).to_bytes(4, "little") + text + data


def test_weights_come_back_with_their_note(path: Path) -> None:
    note = write_weights(path, ARRAYS, MADE)
    weights, read = read_weights(path, "test", 3)
    assert read == note
    assert read.sha256 != ""
    assert msgspec.structs.replace(read, sha256="") == MADE
    assert weights.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert weights[name].dtype == np.float32
        assert np.array_equal(weights[name], array.astype(np.float16).astype(np.float32))


@given(place=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255))
def test_a_changed_byte_is_found_or_changes_nothing(written: bytes, path: Path, place: float, mask: int) -> None:
    """An archive has bytes that nothing reads, such as the time of an entry."""
    at = int(place * len(written))
    path.write_bytes(written[:at] + bytes([written[at] ^ mask]) + written[at + 1 :])
    try:
        weights, note = read_weights(path, "test", 3)
    except ModelError:
        refused(path, path.read_bytes())
        return
    assert msgspec.structs.replace(note, sha256="") == MADE
    assert all(np.array_equal(weights[name], array.astype(np.float16)) for name, array in ARRAYS.items())


@given(st.floats(0, 1, exclude_max=True))
def test_a_file_that_ends_early_is_refused(written: bytes, path: Path, share: float) -> None:
    refused(path, written[: int(share * len(written))])


@given(st.binary(max_size=200), st.sampled_from([b"", b"PK\x03\x04", b"PK\x05\x06", b"\x93NUMPY\x01\x00", b"\x80\x04"]))
def test_any_other_bytes_are_refused(path: Path, content: bytes, magic: bytes) -> None:
    refused(path, magic + content)


def test_other_files_are_refused(written: bytes, path: Path, tmp_path: Path) -> None:
    refused(path, npy(ARRAYS["layer/bias"]), "it is one array")
    refused(path, packed({"layer/bias": npy(ARRAYS["layer/bias"])}), NOTE)
    refused(path, packed(entries(written) | {"readme": b"hello"}), "an entry is no array")
    for missing in (tmp_path / "none.npz", tmp_path):
        with pytest.raises(ModelError, match=f"cannot read {missing}"):
            read_weights(missing, "test", 3)


class Touches:
    """An object whose unpickling writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.path), "w")


def test_a_pickle_is_not_unpacked(written: bytes, path: Path, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    pickled = npy(np.array([Touches(touched)], object))
    refused(path, packed(entries(written) | {"layer/bias": pickled}), "pickle")
    refused(path, pickle.dumps(Touches(touched)), "pickle")
    assert not touched.exists()
    pickle.loads(pickle.dumps(Touches(touched)))  # the object does what the test is about
    assert touched.exists()


@pytest.mark.parametrize("dtype", ["float32", "float64", "int16", "complex64", "S4", "datetime64[s]", "f2,f2"])
def test_other_types_of_numbers_are_refused(written: bytes, path: Path, dtype: str) -> None:
    refused(path, packed(entries(written) | {"layer/bias": npy(np.zeros(4, dtype))}), "float16")


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(written: bytes, path: Path, number: float) -> None:
    refused(path, packed(entries(written) | {"layer/bias": npy(np.array([0, number], np.float16))}), "finite")


@pytest.mark.parametrize("shape", ["(1 << 40,)", "(1099511627776,)", "(4611686018427387904, 4)", "(-1,)", "(2, 'x')"])
def test_shapes_that_no_data_fills_are_refused(written: bytes, path: Path, shape: str) -> None:
    header = npy_of_header(f"{{'descr': '<f2', 'fortran_order': False, 'shape': {shape}}}")
    refused(path, packed(entries(written) | {"layer/bias": header}))


@given(
    st.sampled_from(["{1: 2, 'descr': 3}", "((" * 400, "{'descr': [], 'fortran_order': 0, 'shape': ()}"])
    | st.text(max_size=60)
)
def test_any_header_is_refused(written: bytes, path: Path, header: str) -> None:
    refused(path, packed(entries(written) | {"layer/bias": npy_of_header(header)}))


def test_an_entry_that_unpacks_to_too_much_is_refused(written: bytes, path: Path) -> None:
    content = packed(entries(written) | {"zeros": bytes(65 << 20)})
    assert len(content) < 100_000
    refused(path, content, "it unpacks to more than 67108864 bytes")


def test_weights_of_another_network_or_version_are_refused(path: Path) -> None:
    for purpose, version in (("test", 2), ("other", 3)):
        write_weights(path, ARRAYS, msgspec.structs.replace(MADE, purpose=purpose, version=version))
        refused(path, path.read_bytes(), f"weights of {purpose}, version {version}", "test, version 3", MADE.command)


@pytest.mark.parametrize(
    "changed",
    [
        {"layer/bias": np.array([0.5, 0.25, -3.0, 1e-2], np.float16)},
        {"layer/bias": np.array([[0.5, 0.25], [-3.0, 1e-3]], np.float16)},
        {"layer/bias": np.array([0.25, 0.5, -3.0, 1e-3], np.float16)},
        {"layer/extra": np.zeros(1, np.float16)},
    ],
    ids=["value", "shape", "order", "name"],
)
def test_arrays_that_are_not_those_of_the_hash_are_refused(
    written: bytes, path: Path, changed: dict[str, npt.NDArray[np.float16]]
) -> None:
    refused(path, packed(entries(written) | {name: npy(array) for name, array in changed.items()}), "hash")


@given(st.recursive(st.none() | st.integers() | st.text(max_size=9), st.lists, max_leaves=4))
def test_any_other_note_is_refused(written: bytes, path: Path, value: object) -> None:
    note = npy(np.frombuffer(msgspec.json.encode({"purpose": value}), np.uint8))
    refused(path, packed(entries(written) | {NOTE: note}), "no weights of a network")
