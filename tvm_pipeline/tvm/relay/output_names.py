"""The names of a module's outputs: those of the file, which decoders and results go by.

An attribute of `main` has them, as TVM's importer of TFLite writes it; passes hand it on. Next: `importer.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import tvm
from tvm import relay

from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import ModelError

_FILE = "outputs.json"  # of a library
ATTRIBUTE = "output_tensor_names"
# These show the elements of a tensor under another shape.
_SHOWING = {"reshape", "squeeze", "expand_dims", "nn.batch_flatten"}


def output_names(mod: tvm.IRModule) -> tuple[str, ...]:
    """Return the names of the outputs of `main`; none where the module does not tell."""
    attrs = mod["main"].attrs
    if attrs is None or ATTRIBUTE not in attrs.keys():  # noqa: SIM118  DictAttrs has no __iter__
        return ()
    return tuple(str(name) for name in attrs[ATTRIBUTE])


def with_output_names(mod: tvm.IRModule, model: Model) -> tvm.IRModule:
    """Return the type-checked module of a model with names for its outputs, each of which is a tensor of its own.

        before: fn main(%x) { %0 = relu(%x); (%0, relu(%x), reshape(%0), %x) }
        after:  fn main(%x, output_tensor_names=["a", "b", "c", "d"]) {
                    %0 = relu(%x); (%0, copy(%0), copy(reshape(%0)), copy(%x)) }

    Raises:
        ModelError: an output does not depend on the inputs.
    """
    names = model.outputs
    if len(names) > 1:
        mod = relay.transform.EliminateCommonSubexpr()(mod)  # as `relay.build` does, which would join two outputs
    main = mod["main"]
    fields = list(main.body.fields) if isinstance(main.body, relay.Tuple) else [main.body]
    if len(fields) == len(names):  # else it is one operator that gives several
        fields = _distinct(model, fields)
    body = relay.Tuple(fields) if isinstance(main.body, relay.Tuple) else fields[0]
    mod = tvm.IRModule(mod.functions, mod.type_definitions, attrs=mod.attrs)
    mod["main"] = relay.function.FunctionWithFields(main, body=body).with_attr(ATTRIBUTE, list(names))
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


def _distinct(model: Model, fields: Sequence[relay.Expr]) -> list[relay.Expr]:
    """Return the fields with a copy of each that shows an input, or the tensor of another field."""
    first: dict[relay.Expr, relay.Expr] = {}
    times: Counter[relay.Expr] = Counter()
    found = []
    for field, name in zip(fields, model.outputs, strict=True):
        origin = field
        while isinstance(origin, relay.Call) and getattr(origin.op, "name", "") in _SHOWING:
            origin = origin.args[0]
        if isinstance(origin, relay.Constant):
            raise ModelError(
                f"{model.name}: output {name} does not depend on the inputs; leave it out of the exported model"
            )
        is_input = isinstance(origin, relay.Var) and not (origin is field and field.name_hint == name)
        # TVM makes one of equal copies, so the third of three is a copy of a copy.
        copies = times[field] + (is_input or first.setdefault(origin, field) is not field)
        times[field] += 1
        for _ in range(copies):
            field = relay.copy(field)
        found.append(field)
    return found
