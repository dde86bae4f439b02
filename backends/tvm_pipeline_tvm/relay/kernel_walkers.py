"""Two walkers that read kernels off Relay: `kernels_of_library` after compilation, `kernels_of_module` before it.

This is the bridge from Relay to the operator graph; `kernels.py` says what a kernel is, and `alignment.py`
makes the graph. Both walkers visit each fused function operator by operator and follow its values and their layouts.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tvm
from tvm import relay

from tvm_pipeline.core.tensor_layout import is_blocked, primal
from tvm_pipeline.errors import ModelError
from tvm_pipeline_tvm.kernels import Entry, Kernel, Output, Source, tensor_bytes
from tvm_pipeline_tvm.relay.macs import elements, macs, short_name

_RESHAPES = {
    "reshape",
    "contrib_reverse_reshape",
    "nn.batch_flatten",
    "squeeze",
    "expand_dims",
    "on_device",
    "annotation.stop_fusion",
}

_WEIGHT = Source(None, -1)
_WEIGHT_ENTRY: Entry = (-2, 0)


@dataclass(slots=True)
class _Walk:
    """One visit to each operator of a function, in order: values and layouts are followed on the way."""

    operators: list[tuple[str, int]] = field(default_factory=list)
    arguments: list[tuple[Source, ...]] = field(default_factory=list)
    macs: int = 0
    values: dict[relay.Expr, list[tuple[Source, str]]] = field(default_factory=dict)

    def visit(self, expr: relay.Expr) -> None:
        if expr in self.values:
            return
        if isinstance(expr, relay.Call):
            self.values[expr] = self._call(expr)
        elif isinstance(expr, relay.Tuple):
            self.values[expr] = [value for part in expr.fields for value in self.values[part]]
        elif isinstance(expr, relay.TupleGetItem):
            self.values[expr] = [self.values[expr.tuple_value][expr.index]]
        elif isinstance(expr, relay.Constant):
            self.values[expr] = [(_WEIGHT, "")]

    def _call(self, call: relay.Call) -> list[tuple[Source, str]]:
        if not isinstance(call.op, tvm.ir.Op):
            raise ModelError(f"a fused function calls {type(call.op).__name__}; only operators can stand there")
        name = call.op.name
        arguments = [value for argument in call.args for value in self.values[argument]]
        if only_moves(call):
            layout = ""
            if name == "squeeze":
                layout = _layout(call, call.checked_type, arguments)
            elif name == "layout_transform" and is_blocked(str(call.attrs.dst_layout)):
                layout = str(call.attrs.dst_layout)
            return [(arguments[0][0], layout)]
        self.macs += macs(call)
        self.operators.append((short_name(name), elements(call.checked_type)))
        self.arguments.append(tuple(source for source, _ in arguments))
        ordinal = len(self.operators) - 1
        types = _fields(call.checked_type)
        return [(Source(ordinal, index), _layout(call, type_, arguments)) for index, type_ in enumerate(types)]


def only_moves(call: relay.Call) -> bool:
    """Whether a call shows its first argument under another shape or blocked layout, and computes nothing."""
    name = call.op.name if isinstance(call.op, tvm.ir.Op) else ""
    if name == "layout_transform":
        return bool(primal(str(call.attrs.src_layout)) == primal(str(call.attrs.dst_layout)))
    return name in _RESHAPES


def _fields(type_: Any) -> Sequence[Any]:
    return type_.fields if isinstance(type_, relay.TupleType) else [type_]


def _layout(call: relay.Call, type_: Any, arguments: list[tuple[Source, str]]) -> str:
    """Return the blocked layout of a result: the one its operator declares, else that of an input of equal rank."""
    attributes = call.attrs
    # Some operators (fixed_point_multiply_per_axis) have attributes that list no keys.
    names = attributes.keys() if hasattr(attributes, "keys") else ()
    for key in ("out_layout", "dst_layout", "layout", "data_layout"):
        if key in names and str(attributes[key]):
            layout = str(attributes[key])
            return layout if is_blocked(layout) else ""
    inherited = [layout for _, layout in arguments if is_blocked(layout)]
    if inherited and ("keepdims" in names or call.op.name == "squeeze"):
        inherited = [_without_dropped(inherited[0], call)]
    return next((layout for layout in inherited if sum(map(str.isalpha, layout)) == len(type_.shape)), "")


def _without_dropped(layout: str, call: relay.Call) -> str:
    """Return the layout that a reduction or squeeze leaves of its blocked input: NCH8c for a mean over W of NCHW8c."""
    axes, attributes = re.findall(r"\d*[A-Za-z]", layout), call.attrs
    if "keepdims" in attributes.keys() and attributes.keepdims:  # noqa: SIM118 - no mapping
        return layout
    named = attributes.axis if isinstance(attributes.axis, (tvm.ir.Array, type(None))) else [attributes.axis]
    if named is None:
        extents = [int(extent) for extent in call.args[0].checked_type.shape]
        dropped = {i for i, extent in enumerate(extents) if call.op.name != "squeeze" or extent == 1}
    else:
        dropped = {int(axis) % len(axes) for axis in named}
    if "exclude" in attributes.keys() and attributes.exclude:  # noqa: SIM118
        dropped = set(range(len(axes))) - dropped
    left = "".join(axis for index, axis in enumerate(axes) if index not in dropped)
    return left if is_blocked(left) else ""


def _analyse(function: relay.Function, arguments: Sequence[tuple[Source, str]]) -> _Walk:
    """Walk a fused function; each argument is a tensor's source and layout, the fields of a tuple one by one."""
    walk = _Walk()
    rest = iter(arguments)
    for parameter in function.params:
        walk.values[parameter] = list(itertools.islice(rest, len(_fields(parameter.checked_type))))
    relay.analysis.post_order_visit(function.body, walk.visit)
    return walk


def _outputs(function: relay.Function, walk: _Walk) -> list[Output]:
    types = _fields(function.body.checked_type)
    return [
        Output(tuple(int(extent) for extent in type_.shape), str(type_.dtype), layout, source)
        for type_, (source, layout) in zip(types, walk.values[function.body], strict=True)
    ]


def kernels_of_library(graph_json: str, functions: Mapping[str, relay.Function], inputs: Sequence[str]) -> list[Kernel]:
    """Return the kernels of a compiled library in the order of its graph JSON, `__nop` reshapes among them as glue.

    Args:
        graph_json: as `lib.get_graph_json()` gives it.
        functions: the fused function of each kernel by name.
        inputs: names of the model's inputs; every other input node is a parameter.
    """
    graph = json.loads(graph_json)
    rows, shapes = graph["node_row_ptr"], graph["attrs"]["shape"][1]
    dtypes = graph["attrs"]["dltype"][1]
    kernels: list[Kernel] = []
    kernel_of_node: dict[int, int] = {}
    for position, node in enumerate(graph["nodes"]):
        if node["op"] == "null":
            continue
        reads, layouts, param_bytes = [], [], 0
        for producer, index, _ in node["inputs"]:
            name = graph["nodes"][producer]["name"]
            entry = rows[producer] + index
            if producer in kernel_of_node:
                reads.append((kernel_of_node[producer], index))
                layouts.append(kernels[kernel_of_node[producer]].outputs[index].layout)
            else:
                layouts.append("")
                if name in inputs:
                    reads.append((-1, list(inputs).index(name)))
                else:
                    reads.append(_WEIGHT_ENTRY)
                    param_bytes += tensor_bytes(shapes[entry], dtypes[entry])
        called = node["attrs"]["func_name"]
        if called == "__nop":
            entry = rows[position]
            output = Output(tuple(shapes[entry]), dtypes[entry], "", Source(None, 0))
            kernel = Kernel((), (), _activations(reads), (output,), 0, 0, position)
        else:
            kernel = _kernel(functions[called], reads, layouts, param_bytes, position)
        kernel_of_node[position] = len(kernels)
        kernels.append(kernel)
    return kernels


def kernels_of_module(
    mod: tvm.IRModule, inputs: Sequence[relay.Var]
) -> tuple[list[Kernel], list[relay.Call], list[Entry]]:
    """Return the kernels of a module's `main`, the call of each kernel, and the entries of its results.

    The module must be type-checked and in the dataflow form that the graph executor takes: calls of operators
    and of primitive functions, tuples, constants and parameters. A call of a bare operator counts as a kernel.

    Args:
        inputs: the parameters of `main` that are inputs; the others are weights.

    Raises:
        ModelError: `main` is no dataflow graph.
    """
    main = mod["main"]
    kernels: list[Kernel] = []
    calls: list[relay.Call] = []
    known: dict[relay.Expr, list[Entry]] = {parameter: [_WEIGHT_ENTRY] for parameter in main.params}
    known.update({parameter: [(-1, index)] for index, parameter in enumerate(inputs)})

    def visit(expr: relay.Expr) -> None:
        if expr in known or isinstance(expr, (relay.Function, tvm.ir.Op)):
            return
        if isinstance(expr, relay.Constant):
            known[expr] = [_WEIGHT_ENTRY]
        elif isinstance(expr, relay.Tuple):
            known[expr] = [entry for part in expr.fields for entry in known[part]]
        elif isinstance(expr, relay.TupleGetItem):
            known[expr] = [known[expr.tuple_value][expr.index]]
        elif isinstance(expr, relay.Call):
            reads = [entry for argument in expr.args for entry in known[argument]]
            layouts = [kernels[k].outputs[i].layout if k >= 0 else "" for k, i in reads]
            types = [type_ for argument in expr.args for type_ in _fields(argument.checked_type)]
            weights = [type_ for type_, (kernel, _) in zip(types, reads, strict=True) if kernel == _WEIGHT_ENTRY[0]]
            param_bytes = sum(tensor_bytes(type_.shape, type_.dtype) for type_ in weights)
            kernels.append(_kernel(_as_function(expr), reads, layouts, param_bytes, None))
            calls.append(expr)
            known[expr] = [(len(kernels) - 1, index) for index in range(len(_fields(expr.checked_type)))]
        elif not isinstance(expr, relay.Var):
            raise ModelError(f"main holds a {type(expr).__name__}; only a pure dataflow graph can be cut")

    for expr in outer_expressions(main.body):
        visit(expr)
    return kernels, calls, known[main.body]


def rebuilt(expr: relay.Expr, new: Mapping[relay.Expr, relay.Expr]) -> relay.Expr:
    """Return an expression with its arguments as `new` has them; the expression itself where none is another."""
    read = read_by(expr)
    arguments = [new[argument] for argument in read]
    if all(map(relay.Expr.same_as, arguments, read)):
        return expr
    if isinstance(expr, relay.Tuple):
        return relay.Tuple(arguments, expr.span)
    if isinstance(expr, relay.TupleGetItem):
        return relay.TupleGetItem(arguments[0], expr.index, expr.span)
    return relay.Call(expr.op, arguments, expr.attrs, expr.type_args, expr.span)


def read_by(expr: relay.Expr) -> list[relay.Expr]:
    """Return the expressions that an expression reads."""
    if isinstance(expr, relay.Call):
        return list(expr.args)
    if isinstance(expr, relay.Tuple):
        return list(expr.fields)
    return [expr.tuple_value] if isinstance(expr, relay.TupleGetItem) else []


def outer_expressions(body: relay.Expr) -> list[relay.Expr]:
    """Return the expressions of a dataflow graph, inputs before users, without entering functions; no recursion."""
    done: set[relay.Expr] = set()
    order: list[relay.Expr] = []
    stack: list[tuple[relay.Expr, bool]] = [(body, False)]
    while stack:
        expr, ready = stack.pop()
        if expr in done:
            continue
        if ready:
            done.add(expr)
            order.append(expr)
            continue
        stack.append((expr, True))
        stack.extend((child, False) for child in reversed(read_by(expr)))
    return order


def _as_function(call: relay.Call) -> relay.Function:
    if isinstance(call.op, relay.Function):
        return call.op
    if not isinstance(call.op, tvm.ir.Op):
        raise ModelError(f"main calls {call.op}; inline global functions first (relay.transform.Inline)")
    parameters = [relay.Var(f"a{i}", argument.checked_type) for i, argument in enumerate(call.args)]
    body = relay.Call(call.op, parameters, call.attrs, call.type_args)
    return relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function(parameters, body)))["main"]


def _kernel(
    function: relay.Function,
    reads: list[Entry],
    layouts: list[str],
    param_bytes: int,
    node: int | None,
) -> Kernel:
    count = itertools.count()
    sources = [_WEIGHT if kernel == _WEIGHT_ENTRY[0] else Source(None, next(count)) for kernel, _ in reads]
    walk = _analyse(function, list(zip(sources, layouts, strict=True)))
    activations, outputs = _activations(reads), tuple(_outputs(function, walk))
    if not walk.operators and not activations:  # a weight that was not folded is a value of its own here
        walk.operators.append((short_name(function.body.op.name), elements(function.body.checked_type)))
        walk.arguments.append(())
        outputs = tuple(replace(output, source=Source(0, index)) for index, output in enumerate(outputs))
    return Kernel(tuple(walk.operators), tuple(walk.arguments), activations, outputs, param_bytes, walk.macs, node)


def _activations(reads: list[Entry]) -> tuple[Entry, ...]:
    return tuple(read for read in reads if read != _WEIGHT_ENTRY)
