"""The names of a module's outputs: those of the file, which decoders and results go by.

An attribute of `main` has them, as TVM's importer of TFLite writes it; passes hand it on. Next: `importer.py`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import tvm
from tvm import relay

from tvm_pipeline.core.model import Model

_FILE = "outputs.json"  # of a library
ATTRIBUTE = "output_tensor_names"


def output_names(mod: tvm.IRModule) -> tuple[str, ...]:
    """Return the names of the outputs of `main`; none where the module does not tell."""
    attrs = mod["main"].attrs
    if attrs is None or ATTRIBUTE not in attrs.keys():  # noqa: SIM118  DictAttrs has no __iter__
        return ()
    return tuple(str(name) for name in attrs[ATTRIBUTE])


def with_output_names(mod: tvm.IRModule, model: Model) -> tvm.IRModule:
    """Return the module of a model with the names of its outputs.

    before: fn main(%x) { (%0, %1) }  ->  after: fn main(%x, output_tensor_names=["boxes", "scores"]) { (%0, %1) }
    """
    mod = tvm.IRModule(mod.functions, mod.type_definitions, attrs=mod.attrs)
    mod["main"] = mod["main"].with_attr(ATTRIBUTE, list(model.outputs))
    return relay.transform.InferType()(mod)


def save_output_names(mod: tvm.IRModule, folder: Path) -> None:
    """Write the names beside a library, where the module tells them."""
    if names := output_names(mod):
        (folder / _FILE).write_bytes(msgspec.json.encode(names))


def load_output_names(folder: Path) -> tuple[str, ...]:
    """Read the names of a library's outputs; libraries of earlier versions do not tell.

    Raises msgspec.DecodeError where the file is damaged.
    """
    file = folder / _FILE
    return msgspec.json.decode(file.read_bytes(), type=tuple[str, ...]) if file.exists() else ()
