"""PartitionPipeline: a pass that turns a Relay module and a plan into a module of stage functions.

Next: `extraction.py`, which makes the operator graph that a plan is made for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import tvm
from tvm import relay

from tvm_pipeline.core.partition import check_partition
from tvm_pipeline.core.plan import Plan, Stage
from tvm_pipeline.errors import PlanError
from tvm_pipeline_tvm.relay.extraction import Analysis, analyse

# One tensor of `main`: a call, and which field of its result (0 where it is no tuple).
Value = tuple[relay.Expr, int]


def PartitionPipeline(plan: Plan, params: Collection[str] = ()) -> tvm.transform.Pass:  # noqa: N802
    """Return a pass that makes one global function of each stage of `plan`, and a `main` that calls them in order.

    Each function has the attributes `device` and `pipeline_stage`, and `Inline`, so that a plain `relay.build` accepts
    the module and computes the same. Any legal cut is possible: several tensors may cross, and may skip stages.

        before: fn main(%data) { %0 = conv(%data); %1 = pool(%0); add(%0, %1) }
        after:  fn stage_0(%data) { conv(%data) }                        device="cpu0"
                fn stage_1(%x0) { %1 = pool(%x0); add(%x0, %1) }         device="cpu1"
                fn main(%data) { @stage_1(@stage_0(%data)) }

    Args:
        plan: names operators as ExtractOperatorGraph does on the same module.
        params: names of parameters of `main` that are weights; none where they are bound as constants.

    Raises:
        PlanError: the plan does not fit the module.
    """

    @tvm.transform.module_pass(opt_level=0, name="PartitionPipeline", required=["InferType"])
    def partition(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        return _partition(mod, plan, analyse(mod, plan.graph, params))

    return partition


_SEQUENCE = (
    "a plan of tvm_pipeline.compile(mod, params) names the operators of ExtractOperatorGraph behind "
    "relay.optimize(mod, target, params=params), as in examples/relay_passes.py"
)


@dataclass(slots=True)
class _Stage:
    """A stage function in the making."""

    stage: Stage
    own: set[int]
    kernels: set[int]
    imports: dict[Value, relay.Var] = field(default_factory=dict)
    exports: dict[Value, None] = field(default_factory=dict)


def _partition(mod: tvm.IRModule, plan: Plan, analysis: Analysis) -> tvm.IRModule:
    try:
        check_partition(analysis.graph, [stage.operators for stage in plan.stages])
    except PlanError as error:
        raise PlanError(f"{error}; {_SEQUENCE}") from error
    index_of = {call: index for index, call in enumerate(analysis.calls)}
    stages = []
    for stage in plan.stages:
        own = {kernel for name in stage.operators for kernel in analysis.alignment.kernels[name]}
        stages.append(_Stage(stage, own, set(own)))
    owner = {kernel: part for part in stages for kernel in part.own}

    results = [(value, _root_owner(value, index_of, analysis, owner)) for value in _fields(mod["main"].body)]
    for value, part in results:
        _take(value[0], part, index_of, analysis)
        part.exports[value] = None
    names = iter(range(1_000_000))
    for part in stages:
        for kernel in sorted(part.own):
            for argument in analysis.calls[kernel].args:
                for value in _fields(argument):
                    _take(value[0], part, index_of, analysis)
        for kernel in sorted(part.kernels):
            for argument in analysis.calls[kernel].args:
                for value in _fields(argument):
                    if _outside(value, part, index_of) and value not in part.imports:
                        part.imports[value] = relay.Var(f"x{next(names)}", _type(value))
                        if isinstance(value[0], relay.Call):
                            owner[index_of[value[0]]].exports[value] = None

    main = mod["main"]
    made = tvm.IRModule({}, mod.type_definitions, attrs=mod.attrs)
    known: dict[Value, relay.Expr] = {(var, 0): var for var in main.params}
    for number, part in enumerate(stages):
        function = _function(part, number, index_of, analysis)
        symbol = relay.GlobalVar(f"stage_{number}")
        made[symbol] = function
        call = relay.Call(symbol, [known[value] for value in part.imports])
        for position, value in enumerate(part.exports):
            known[value] = call if len(part.exports) == 1 else relay.TupleGetItem(call, position)
    values = [known[value] for value, _ in results]
    body = values[0] if not isinstance(main.checked_type.ret_type, relay.TupleType) else relay.Tuple(values)
    made["main"] = relay.Function(main.params, body, main.ret_type, main.type_params, main.attrs)
    return relay.transform.InferType()(made)


def _fields(expr: relay.Expr) -> list[Value]:
    """Return the tensors of an expression, each as the call (or variable) that gives it."""
    if isinstance(expr, relay.Tuple):
        return [value for part in expr.fields for value in _fields(part)]
    if isinstance(expr, relay.TupleGetItem):
        return [_fields(expr.tuple_value)[expr.index]]
    if isinstance(expr.checked_type, relay.TupleType):
        return [(expr, index) for index in range(len(expr.checked_type.fields))]
    return [(expr, 0)]


def _type(value: Value) -> relay.Type:
    type_ = value[0].checked_type
    return type_.fields[value[1]] if isinstance(type_, relay.TupleType) else type_


def _root_owner(value: Value, index_of: dict[relay.Call, int], analysis: Analysis, owner: dict[int, _Stage]) -> _Stage:
    """Return the stage that computes a result of `main`, whatever glue follows the computation."""
    expr, field_ = value
    alignment, edges = analysis.alignment, analysis.graph.edges
    tensor = alignment.names[alignment.values[index_of[expr]][field_]] if isinstance(expr, relay.Call) else ""
    if tensor not in edges.writer:
        raise PlanError("a result of main is one of its inputs; nothing of it can be put on a device")
    operator = analysis.graph.operators[edges.writer[tensor]]
    return owner[alignment.kernels[operator.name][0]]


def _take(expr: relay.Expr, part: _Stage, index_of: dict[relay.Call, int], analysis: Analysis) -> None:
    """Take glue into the stage that needs it, back to all calls that are not glue."""
    waiting = [expr]
    while waiting:
        expr = waiting.pop()
        if isinstance(expr, relay.Call):
            kernel = index_of[expr]
            if kernel not in part.kernels and analysis.kernels[kernel].is_glue:
                part.kernels.add(kernel)
                waiting.extend(behind for argument in expr.args for behind, _ in _fields(argument))


def _outside(value: Value, part: _Stage, index_of: dict[relay.Call, int]) -> bool:
    expr = value[0]
    if isinstance(expr, relay.Call):
        return index_of[expr] not in part.kernels
    return isinstance(expr, relay.Var)


def _function(part: _Stage, number: int, index_of: dict[relay.Call, int], analysis: Analysis) -> relay.Function:
    """Return the stage as a Relay function of its imports."""
    rebuilt: dict[relay.Expr, relay.Expr] = {}

    def tensor(value: Value) -> relay.Expr:
        expr, index = value
        if value in part.imports:
            return part.imports[value]
        if isinstance(expr, relay.Constant):
            return expr
        call = rebuilt[expr]
        return relay.TupleGetItem(call, index) if isinstance(expr.checked_type, relay.TupleType) else call

    def argument(expr: relay.Expr) -> relay.Expr:
        values = [tensor(value) for value in _fields(expr)]
        return relay.Tuple(values) if isinstance(expr.checked_type, relay.TupleType) else values[0]

    for kernel in sorted(part.kernels):
        call = analysis.calls[kernel]
        op = _copy(call.op) if analysis.kernels[kernel].is_glue else call.op
        rebuilt[call] = relay.Call(op, [argument(a) for a in call.args], call.attrs, call.type_args, call.span)
    outputs = [tensor(value) for value in part.exports]
    types = [_type(value) for value in part.exports]
    function = relay.Function(
        list(part.imports.values()),
        outputs[0] if len(outputs) == 1 else relay.Tuple(outputs),
        types[0] if len(types) == 1 else relay.TupleType(types),
    )
    return (
        function.with_attr("Inline", tvm.tir.IntImm("int32", 1))
        .with_attr("device", " ".join(part.stage.devices))
        .with_attr("pipeline_stage", tvm.tir.IntImm("int32", number))
    )


def _copy(op: relay.Expr) -> relay.Expr:
    """Return a copy with fresh variables: two stages may need the same glue, and no variable may be bound twice."""
    if not isinstance(op, relay.Function):
        return op
    fresh = {parameter: relay.Var(parameter.name_hint, parameter.checked_type) for parameter in op.params}
    return relay.Function(list(fresh.values()), relay.bind(op.body, fresh), op.ret_type, op.type_params, op.attrs)
