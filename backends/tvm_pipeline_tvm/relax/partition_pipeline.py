"""PartitionPipeline: a pass that turns a Relax module and a plan into a module of stage functions.

Next: `extraction.py`, which makes the operator graph that a plan is made for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax

from tvm_pipeline.core.partition import check_partition
from tvm_pipeline.core.plan import Plan, Stage
from tvm_pipeline.errors import PlanError
from tvm_pipeline_tvm.kernels import Entry
from tvm_pipeline_tvm.relax.dataflow import Constant, fields, name_of, plain_main
from tvm_pipeline_tvm.relax.extraction import Analysis, analyse_as_attached, main_of


@tvm.transform.module_pass(opt_level=0, name="PartitionPipeline")
class PartitionPipeline:
    """The pass that makes one function of each stage of a plan, and a `main` that calls them in order.

    `main` calls the stages, and does not repeat their kernels beside them, so that each is compiled once and
    `vm["main"]` shows how `vm["stage_0"]`, `vm["stage_1"]` .. are chained; all compute the bits that `main` did.
    Any legal cut is possible: several tensors may cross, and may skip stages. Kernels and weights are shared.

        before: main(x) { lv = fused_conv2d(x, w); lv1 = fused_max_pool2d(lv); gv = fused_add(lv, lv1) }
        after:  stage_0(x) { fused_conv2d(x, w) }                                 device="cpu0"
                stage_1(t) { lv = fused_max_pool2d(t); fused_add(t, lv) }         device="cpu1"
                main(x) { lv = stage_0(x); gv = stage_1(lv) }

    A stage that gives several tensors returns a tuple. Its attributes:

        pipeline_stage      its number
        device              its devices, with blanks between replicas
        operators           its operators, by the names of the graph
        inputs, outputs     the tensors that it reads and gives, by the names of the graph

    It works on a module behind `relax.transform.FuseOps` and on one behind `relax.transform.FuseTIR`, scheduled or
    not; `tvm.compile` takes what it makes. Functions besides `main` stay.

    Args:
        plan: names operators as ExtractOperatorGraph does on the same module, or did before FuseTIR.

    Raises:
        PlanError: the plan does not fit the module.
        ModelError: `main` is no dataflow graph with fixed shapes.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return _Partitioning(mod, self._plan).finished()


_SEQUENCE = (
    "a plan of tvm_pipeline.compile(mod) names the operators of FuseKernels, MemoryOrder and ExtractOperatorGraph, in "
    "this order, as in examples/relax_passes.py"
)


@dataclass(slots=True)
class _Stage:
    """A stage function in the making: its own kernels, those with the glue that it needs, and what crosses."""

    stage: Stage
    own: set[int]
    kernels: set[int]
    imports: dict[Entry, None] = field(default_factory=dict)
    exports: dict[Entry, None] = field(default_factory=dict)


class _Partitioning:
    def __init__(self, mod: tvm.IRModule, plan: Plan) -> None:
        self._mod, self._main = mod, main_of(mod)
        taken = {symbol.name_hint for symbol in mod.get_global_vars()} & set(map(_symbol, range(len(plan.stages))))
        if taken:
            raise PlanError(f"the module has a function {min(taken)} already; partition the module that it was made of")
        self._analysis: Analysis = analyse_as_attached(mod, plan.graph)
        bindings, self._result = plain_main(self._main)
        # What a variable of main is: the entries of a kernel's results, or an expression over other variables.
        self._calls: list[Any] = []
        self._known: dict[Any, list[Entry | Any]] = {
            param: [(-1, index)] for index, param in enumerate(self._main.params)
        }
        for binding in bindings:
            if isinstance(binding.value, tvm.ir.Call):
                number = len(self._calls)
                self._calls.append(binding.value)
                self._known[binding.var] = [(number, index) for index in range(len(fields(binding.value.ty)))]
            else:
                self._known[binding.var] = self._fields(binding.value)
        self._stages = self._made_stages(plan)
        self._names = self._names_of_tensors()

    def _fields(self, expr: Any) -> list[Entry | Any]:
        """Return the tensors of an expression, each as an entry or as a constant."""
        if isinstance(expr, relax.Tuple):
            return [each for part in expr.fields for each in self._fields(part)]
        if isinstance(expr, relax.TupleGetItem):
            return [self._fields(expr.tuple_value)[expr.index]]
        return [expr] if isinstance(expr, Constant) else self._known[expr]

    def _reads(self, kernel: int) -> list[Entry]:
        call = self._calls[kernel]
        arguments = call.args[1].fields if name_of(call) == "relax.call_tir" else call.args
        found = [each for argument in arguments for each in self._fields(argument)]
        return [each for each in found if isinstance(each, tuple)]

    # ------------------------------------------------------------------------------------------ what crosses

    def _made_stages(self, plan: Plan) -> list[_Stage]:
        analysis = self._analysis
        try:
            check_partition(analysis.graph, [stage.operators for stage in plan.stages])
        except PlanError as error:
            raise PlanError(f"{error}; {_SEQUENCE}") from error
        stages = []
        for stage in plan.stages:
            own = {kernel for name in stage.operators for kernel in analysis.alignment.kernels[name]}
            stages.append(_Stage(stage, own, set(own)))
        owner = {kernel: part for part in stages for kernel in part.own}
        results: dict[Entry, _Stage] = {}
        for head in self._fields(self._result):
            part = self._owner_of_result(head, owner)
            self._take(head, part, {})
            part.exports[head] = None
            results[head] = part
        for part in stages:
            for kernel in sorted(part.own):
                for entry in self._reads(kernel):
                    self._take(entry, part, results)
            for kernel in sorted(part.kernels):
                for entry in self._reads(kernel):
                    if entry[0] not in part.kernels:
                        part.imports[entry] = None
                        if entry[0] >= 0:
                            (results.get(entry) or owner[entry[0]]).exports[entry] = None
        return stages

    def _owner_of_result(self, head: Entry | Any, owner: dict[int, _Stage]) -> _Stage:
        """Return the stage that computes a result of `main`, whatever glue follows the computation."""
        analysis = self._analysis
        alignment, edges = analysis.alignment, analysis.graph.edges
        value = alignment.values[head[0]][head[1]] if isinstance(head, tuple) and head[0] >= 0 else None
        tensor = alignment.names.get(value, "") if value is not None else ""
        if tensor not in edges.writer:
            raise PlanError("a result of main is one of its inputs or a constant; nothing of it can be put on a device")
        operator = analysis.graph.operators[edges.writer[tensor]]
        return owner[alignment.kernels[operator.name][0]]

    def _take(self, entry: Entry, part: _Stage, results: Mapping[Entry, _Stage]) -> None:
        """Take glue into the stage that needs it, back to kernels that are not glue and to results of `main`."""
        kernels, waiting = self._analysis.flat.kernels, [entry]
        while waiting:
            entry = waiting.pop()
            kernel, _ = entry
            if kernel >= 0 and kernel not in part.kernels and entry not in results and kernels[kernel].is_glue:
                part.kernels.add(kernel)
                waiting.extend(self._reads(kernel))

    def _names_of_tensors(self) -> dict[Entry, str]:
        """Return the graph's names of the tensors that stages read and give.

        A tensor may cross as a kernel wrote it and, as a result of `main`, in another layout. The result has the
        graph's name then, and the other a dash behind it.
        """
        alignment = self._analysis.alignment
        results = [head for head in self._fields(self._result) if isinstance(head, tuple)]
        crossing = [entry for part in self._stages for entry in (*part.imports, *part.exports)]
        names: dict[Entry, str] = {}
        taken: set[str] = set()
        for kernel, index in dict.fromkeys([*results, *crossing]):
            name = alignment.names[alignment.values[kernel][index] if kernel >= 0 else (kernel, index)]
            while name in taken:
                name += "'"
            names[kernel, index] = name
            taken.add(name)
        return names

    # ------------------------------------------------------------------------------------------ what is written

    def finished(self) -> tvm.IRModule:
        mod, main = self._mod, self._main
        others = {symbol: function for symbol, function in mod.functions.items() if not function.same_as(main)}
        builder = relax.BlockBuilder(tvm.IRModule(others, attrs=mod.attrs))
        symbols = [self._write_stage(builder, number) for number in range(len(self._stages))]
        params = [relax.Var(param.name, param.ty) for param in main.params]
        known: dict[Entry, Any] = {(-1, index): param for index, param in enumerate(params)}
        with builder.function("main", params, attrs=_own_attributes(main)):
            with builder.dataflow():
                for symbol, part in zip(symbols, self._stages, strict=True):
                    call = builder.emit(relax.Call(symbol, [known[entry] for entry in part.imports]))
                    for index, entry in enumerate(part.exports):
                        known[entry] = call if len(part.exports) == 1 else builder.emit(relax.TupleGetItem(call, index))
                heads = [known[head] for head in self._fields(self._result)]
                output = builder.emit_output(_like(self._result.ty, heads))
            builder.emit_func_output(output)
        return builder.get()

    def _write_stage(self, builder: relax.BlockBuilder, number: int) -> Any:
        """Write a stage as a function of its imports; return its symbol."""
        part, names = self._stages[number], self._names
        params = [relax.Var(_identifier(names[entry]), self._type(entry)) for entry in part.imports]
        known: dict[Entry, Any] = dict(zip(part.imports, params, strict=True))
        attributes = {
            "pipeline_stage": number,
            "device": " ".join(part.stage.devices),
            "operators": list(part.stage.operators),
            "inputs": [names[entry] for entry in part.imports],
            "outputs": [names[entry] for entry in part.exports],
        }

        def rebuilt(expr: Any) -> Any:
            if isinstance(expr, Constant):
                return expr
            return _like(expr.ty, [known[each] if isinstance(each, tuple) else each for each in self._fields(expr)])

        with builder.function(_symbol(number), params, attrs=attributes):
            with builder.dataflow():
                for kernel in sorted(part.kernels):
                    call = self._calls[kernel]
                    if name_of(call) == "relax.call_tir":
                        arguments = [call.args[0], relax.Tuple([rebuilt(each) for each in call.args[1].fields])]
                    else:
                        arguments = [rebuilt(each) for each in call.args]
                    made = builder.emit(relax.Call(call.op, arguments, call.attrs, call.ty_args))
                    is_tuple = isinstance(call.ty, relax.TupleType)
                    for index in range(len(fields(call.ty))):
                        known[kernel, index] = builder.emit(relax.TupleGetItem(made, index)) if is_tuple else made
                outputs = [known[entry] for entry in part.exports]
                output = builder.emit_output(outputs[0] if len(outputs) == 1 else relax.Tuple(outputs))
            return builder.emit_func_output(output)

    def _type(self, entry: Entry) -> Any:
        kernel, index = entry
        return self._main.params[index].ty if kernel < 0 else fields(self._calls[kernel].ty)[index]


def _symbol(number: int) -> str:
    return f"stage_{number}"


def _like(type_: Any, tensors: Sequence[Any]) -> Any:
    """Return tensors as a value of a type: a tuple of them, or the only one."""
    return relax.Tuple(list(tensors)) if isinstance(type_, relax.TupleType) else tensors[0]


def _identifier(name: str) -> str:
    return "".join(character if character.isalnum() else "_" for character in name)


def _own_attributes(function: Any) -> dict[str, Any]:
    """Return the attributes of a function but its symbol, which the builder writes."""
    return {key: value for key, value in function.attrs.items() if key != "global_symbol"}
