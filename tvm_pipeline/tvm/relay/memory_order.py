"""The order of kernels that needs the least memory: of a slice, and of a TVM script's module by the pass MemoryOrder.

What kernels write and read becomes a MemoryGraph (`tvm_pipeline/memory`), and the search there gives the order. A
kernel never overwrites its input: TVM gives every result a place of its own. `slicing.py` plans the arena of a slice by
the order; for a TVM script the graph executor's own planner does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import tvm
from tvm import relay

from tvm_pipeline.memory import Buffer, MemoryGraph, minimum_peak
from tvm_pipeline.memory.arena import ALIGNMENT
from tvm_pipeline.tvm.alignment import Entry
from tvm_pipeline.tvm.relay.kernels import Kernel, kernels_of_module, tensor_bytes

# Slices are cut while a pipeline runs, and it waits; nearly all orders are proven in a fraction of this.
TIME_LIMIT_S = 2.0


def kernel_order(
    kernels: Mapping[int, Kernel],
    is_view: Callable[[int], bool],
    held: Collection[Entry],
    elsewhere: Collection[Entry] = (),
) -> list[int]:
    """The kernels (keys of `kernels`, ascending in an order that can run) in the order that needs the least memory.

    Args:
        is_view: whether a kernel only shows its input under another shape: nothing runs, and the bytes are the same.
        held: entries that stay alive to the end.
        elsewhere: entries that are written into the caller's buffers, and so take no memory here.
    """
    shown: dict[Entry, Entry] = {}  # entry -> the entry whose bytes it has; what other kernels make is not in it
    for index in sorted(kernels):
        reads = kernels[index].reads
        for output in range(len(kernels[index].outputs)):
            if not is_view(index):
                shown[index, output] = index, output
            elif reads and reads[0] in shown:
                shown[index, output] = shown[reads[0]]
    running = [index for index in sorted(kernels) if not is_view(index)]
    readers: dict[Entry, list[int]] = {}
    for place, index in enumerate(running):
        for entry in dict.fromkeys(shown[read] for read in kernels[index].reads if read in shown):
            readers.setdefault(entry, []).append(place)
    kept = {shown[entry] for entry in held if entry in shown}
    buffers = [
        Buffer(
            f"{index}.{output}",
            0 if (index, output) in elsewhere else _aligned_bytes(kernels[index], output),
            (place,),
            tuple(readers.get((index, output), ())),
            (index, output) in kept,
        )
        for place, index in enumerate(running)
        for output in range(len(kernels[index].outputs))
    ]
    graph = MemoryGraph("kernels", tuple(map(str, running)), tuple(buffers))
    found = minimum_peak(graph, time_limit_s=TIME_LIMIT_S)
    return _with_views(kernels, [running[place] for place in found.order])


def _aligned_bytes(kernel: Kernel, output: int) -> int:
    size = tensor_bytes(kernel.outputs[output].shape, kernel.outputs[output].dtype)
    return -(-size // ALIGNMENT) * ALIGNMENT


def _with_views(kernels: Mapping[int, Kernel], order: list[int]) -> list[int]:
    """Puts each kernel that is not in `order` before the first that reads it; where none does, at the end."""
    when = {index: place for place, index in enumerate(order)}
    views = [index for index in kernels if index not in when]
    first = dict.fromkeys(views, len(order))
    for index in sorted(kernels, reverse=True):  # a view's readers come after it, views among them
        for read, _ in kernels[index].reads:
            if read in first:
                first[read] = min(first[read], when.get(index, first.get(index, len(order))))
    return sorted(kernels, key=lambda index: (when.get(index, first.get(index)), index in when, index))


def MemoryOrder(params: Collection[str] = ()) -> tvm.transform.Pass:  # noqa: N802
    """A pass that makes the graph executor run the kernels of `main` in the order that needs the least memory.

    It fuses operators, and binds each kernel with a `let` in that order: the graph executor's code generator and its
    memory planner follow it. A `let` stops fusion and every other rewriting, so have `relay.optimize` do those before:

        mod, params = relay.optimize(mod, target, params=params)
        library = relay.build(MemoryOrder(params)(mod), target, params=params)

        before: fn (%data) { %0 = wide_a(%data); %1 = wide_b(%data); add(narrow_a(%0), narrow_b(%1)) }
        after:  fn (%data) { let %k0 = wide_a(%data); let %k1 = narrow_a(%k0); let %k2 = wide_b(%data);
                             let %k3 = narrow_b(%k2); let %k4 = add(%k1, %k3); %k4 }

    The order needs the fewest bytes at once, and the graph executor's planner takes more than that, since it hands
    tensors on whole: where its plan does not get smaller, the module stays as it is (`planned_bytes` says what it
    takes). The arena of `tvm-pipeline compile --memory-order` has no such loss.

    Args:
        params: names of parameters of `main` that are weights; none where they are bound as constants.

    Raises:
        ModelError: `main` is no dataflow graph.
    """

    @tvm.transform.module_pass(opt_level=0, name="MemoryOrder", required=["InferType"])
    def order(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        fused = tvm.transform.Sequential([relay.transform.FuseOps(), relay.transform.InferType()])(mod)
        ordered = tvm.IRModule(fused.functions, fused.type_definitions, attrs=fused.attrs)
        ordered["main"] = _in_lets(fused, params)
        ordered = relay.transform.InferType()(ordered)
        return ordered if planned_bytes(ordered) < planned_bytes(fused) else mod

    return order


def planned_bytes(mod: tvm.IRModule) -> int:
    """What TVM's graph executor allocates for all that the kernels of a fused, typed module write, by its own plan."""
    # `relay.optimize` says of the parameters on which device they are, and the planner wants to know it of all or none.
    given = {var: relay.Var(var.name_hint, var.checked_type) for var in mod["main"].params}
    bare = relay.Function(list(given.values()), relay.bind(mod["main"].body, given))
    main = relay.transform.InferType()(tvm.IRModule.from_expr(bare))["main"]
    plan = tvm.get_global_func("relay.backend.GraphPlanMemory")(main)
    outside = set(main.params)  # inputs and weights have storages of their own
    sizes: dict[int, int] = {}
    for expr, told in plan.expr_to_storage_info.items():
        if expr in outside or isinstance(expr, relay.Constant):
            continue
        type_ = expr.checked_type
        fields = type_.fields if isinstance(type_, relay.TupleType) else [type_]
        # What the plan says of sizes is that of a storage's first tensor, which later ones may exceed.
        for storage, field in zip(told.storage_ids, fields, strict=True):
            sizes[storage] = max(sizes.get(storage, 0), tensor_bytes(field.shape, field.dtype))
    return sum(sizes.values())


def _in_lets(mod: tvm.IRModule, params: Collection[str]) -> relay.Function:
    main = mod["main"]
    inputs = [var for var in main.params if var.name_hint not in params]
    kernels, calls, heads = kernels_of_module(mod, inputs)
    order = kernel_order(dict(enumerate(kernels)), lambda index: _is_view(calls[index]), heads)
    names = {calls[index]: relay.Var(f"k{place}", calls[index].checked_type) for place, index in enumerate(order)}

    def named(expr: relay.Expr) -> relay.Expr:
        if isinstance(expr, relay.Tuple):
            return relay.Tuple([named(part) for part in expr.fields], expr.span)
        if isinstance(expr, relay.TupleGetItem):
            return relay.TupleGetItem(named(expr.tuple_value), expr.index, expr.span)
        return names.get(expr, expr)

    body = named(main.body)
    for index in reversed(order):
        call = calls[index]
        made = relay.Call(call.op, [named(argument) for argument in call.args], call.attrs, call.type_args, call.span)
        body = relay.Let(names[call], made, body)
    return relay.Function(main.params, body, main.ret_type, main.type_params, main.attrs)


def _is_view(call: relay.Call) -> bool:
    """Whether the graph executor runs nothing for the call; FuseOps marks such functions."""
    attributes = call.op.attrs if isinstance(call.op, relay.Function) else None
    return attributes is not None and "relay.reshape_only" in attributes.keys()  # noqa: SIM118 - no mapping
