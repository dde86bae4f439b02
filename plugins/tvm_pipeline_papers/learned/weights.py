"""Weights of a trained network in one `.npz` file, with a note of what they are for and where they are from.

The arrays are stored as float16 and read as float32. Nothing in such a file is code: it is read without pickle, and
what is not an array of numbers is refused.
"""

from __future__ import annotations

import hashlib
import io
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from tvm_pipeline.errors import ModelError
from tvm_pipeline.files import read_bytes, write_bytes

Floats = npt.NDArray[np.float64]
Floats32 = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Weights = Mapping[str, Floats32]

MOST_WEIGHTS_BYTES = 64 << 20
NOTE = "note"  # the entry of the file that is no weight

# What zipfile, numpy and msgspec raise where a file is not what `write_weights` wrote.
_DAMAGED = (
    *(ValueError, KeyError, OSError, EOFError, RuntimeError, MemoryError, SyntaxError, TypeError),
    *(tokenize.TokenError, zipfile.BadZipFile, zlib.error, msgspec.MsgspecError),
)


class WeightsNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What weights are.

    Attributes:
        purpose: the network that they are for, such as `respect`.
        version: of the network's inputs and layers; code of another version refuses them.
        command: what made them.
        seed: of all random numbers of that command.
        sha256: of the arrays, as `write_weights` computed it.
        figures: what the training measured, by name.
    """

    purpose: str
    version: int
    command: str
    seed: int
    sha256: str = ""
    figures: dict[str, float] = {}


def write_weights(path: Path | str, weights: Weights, note: WeightsNote) -> WeightsNote:
    """Write the file, and return the note with its hash."""
    stored = {name: np.asarray(array, np.float16) for name, array in sorted(weights.items())}
    note = msgspec.structs.replace(note, sha256=_sha256(stored))
    content = io.BytesIO()
    described = np.frombuffer(msgspec.json.encode(note), np.uint8)
    np.savez_compressed(content, **stored, **{NOTE: described})  # type: ignore[arg-type]  # numpy names its options too
    write_bytes(path, content.getvalue())
    return note


def read_weights(path: Path | str, purpose: str, version: int) -> tuple[dict[str, Floats32], WeightsNote]:
    """Return the weights, as float32, and their note.

    Raises:
        ModelError: the file is damaged, was changed after it was written, or is for another network or version.
    """
    content = read_bytes(path, ModelError, MOST_WEIGHTS_BYTES)
    try:
        loaded = np.load(io.BytesIO(content), allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise ValueError("it is one array, and no file of several")
        with loaded as file:
            # What an entry unpacks to is known before it is unpacked.
            if sum(entry.file_size for entry in file.zip.infolist()) > MOST_WEIGHTS_BYTES:
                raise ValueError(f"it unpacks to more than {MOST_WEIGHTS_BYTES} bytes")
            stored = {name: file[name] for name in file.files}
        if not all(isinstance(array, np.ndarray) for array in stored.values()):
            raise ValueError("an entry is no array")
        note = msgspec.json.decode(stored.pop(NOTE).tobytes(), type=WeightsNote)
        if any(array.dtype != np.float16 or not np.isfinite(array).all() for array in stored.values()):
            raise ValueError("an array is not one of finite numbers of float16")
    except _DAMAGED as e:
        raise ModelError(f"{path}: no weights of a network ({e}); train them again, or install the package anew") from e
    if note.purpose != purpose or note.version != version:
        raise ModelError(
            f"{path}: weights of {note.purpose}, version {note.version}; this is {purpose}, version {version}; train "
            f"them again (they were made by `{note.command}`)"
        )
    if note.sha256 != _sha256(stored):
        raise ModelError(
            f"{path}: the hash of the weights is not the one that they were written with; the file was changed or "
            "damaged: train them again, or install the package anew"
        )
    return {name: array.astype(np.float32) for name, array in stored.items()}, note


def _sha256(arrays: Mapping[str, npt.NDArray[np.float16]]) -> str:
    found = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()
