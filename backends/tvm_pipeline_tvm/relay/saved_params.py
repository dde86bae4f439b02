"""The parameters of a library in files of its folder, mapped by whoever loads them (`weights_file.py`).

Kernels of Relay read their weights as they are in the file: layouts, Winograd's transforms and constants were folded
when they were compiled, so nothing is packed or copied when a library is loaded. A device with memory of its own gets
copies of the parameters that its stages use.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import tvm

from tvm_pipeline_tvm.devices.device_arrays import pointed_at
from tvm_pipeline_tvm.devices.tvm_arrays import address_of
from tvm_pipeline_tvm.kernels import tensor_bytes
from tvm_pipeline_tvm.weights_file import WEIGHTS, Weight, mapped, part_of, write_weights

PARAMS = "params.json"  # where each parameter lies in WEIGHTS, by its name
UNMAPPED = "params.bin"  # the parameters of a library that an earlier version wrote, in TVM's own format


def write_params(folder: Path, params: Mapping[str, Any]) -> None:
    """Write parameters, which are arrays of the host, one after the other: no second copy of all is made."""
    names = sorted(params)
    arrays = ((tuple(params[name].shape), str(params[name].dtype), _bytes_of(params[name])) for name in names)
    weights = write_weights(folder / WEIGHTS, arrays)
    (folder / PARAMS).write_bytes(msgspec.json.encode(dict(zip(names, weights, strict=True))))


def read_params(folder: Path) -> dict[str, Any]:
    """Return the parameters by name as TVM's arrays in the mapped file; those of an earlier version are copied.

    Raises:
        OSError, ValueError, TypeError, msgspec.DecodeError, tvm.TVMError: a file is missing or damaged.
    """
    if (folder / UNMAPPED).exists():
        return dict(tvm.runtime.load_param_dict((folder / UNMAPPED).read_bytes()))
    described = msgspec.json.decode((folder / PARAMS).read_bytes(), type=dict[str, Weight])
    raw = mapped(folder / WEIGHTS)
    return {
        name: pointed_at(part_of(raw, weight).ctypes.data, tvm.cpu(), weight.shape, weight.dtype, raw)
        for name, weight in described.items()
    }


def _bytes_of(array: Any) -> memoryview:
    size = tensor_bytes(array.shape, str(array.dtype))
    return memoryview((ctypes.c_char * size).from_address(address_of(array)) if size else b"")
