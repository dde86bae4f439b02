"""Weights as PyTorch saved them before version 1.6, read without PyTorch.

Such a file is three pickles, one of the tensors, one of the keys of their storages, and then the storages as they lie
in memory (`torch.serialization._legacy_save`). A pickle may call any function, so only what a state dict needs is let
through. Next: `efficientnet_lite0.py`.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001


def read_state_dict(path: Path) -> dict[str, np.ndarray]:
    """The tensors by their names.

    Raises:
        pickle.UnpicklingError: the file is of another format, is damaged, or asks for something else than tensors.
    """
    with path.open("rb") as file:
        try:
            # The third pickle says how the writing machine stored numbers; that is checked by the sizes below.
            if [_Tensors(file).load(), _Tensors(file).load()] != [_MAGIC, _PROTOCOL]:
                raise pickle.UnpicklingError("it is not of PyTorch's format from before version 1.6")
            _Tensors(file).load()
            tensors = _Tensors(file)
            named = tensors.load()
            for key in _Tensors(file).load():
                _fill(tensors.storages[key], file)
        except (pickle.UnpicklingError, EOFError, KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise pickle.UnpicklingError(f"{path}: cannot be read as a state dict: {error}") from error
    return dict(named)


def _rebuild(storage: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> np.ndarray:
    """A view of a storage, which is filled later; strides count elements."""
    last = offset + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    if min(offset, *shape, *strides, 0) < 0 or last >= len(storage):
        raise pickle.UnpicklingError(f"a tensor of shape {list(shape)} reaches beyond its {len(storage)} numbers")
    steps = [stride * storage.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps)


class _Tensors(pickle.Unpickler):
    """Admits tensors in an OrderedDict and refuses all else."""

    admitted = {  # noqa: RUF012, a constant
        ("collections", "OrderedDict"): OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
        ("torch", "FloatStorage"): np.dtype("<f4"),
        ("torch", "LongStorage"): np.dtype("<i8"),
    }

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.storages: dict[str, np.ndarray] = {}

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.admitted[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of a state dict") from None

    def persistent_load(self, pid: tuple[Any, ...]) -> np.ndarray:
        """A storage, named by its key wherever a tensor lies in it."""
        _, dtype, key, _, count, _ = pid
        return self.storages.setdefault(key, np.zeros(count, dtype))


def _fill(storage: np.ndarray, file: BinaryIO) -> None:
    count = int.from_bytes(file.read(8), "little")
    if count != len(storage) or file.readinto(storage.data.cast("B")) != storage.nbytes:
        raise pickle.UnpicklingError(f"a storage of {len(storage)} numbers is cut short")
