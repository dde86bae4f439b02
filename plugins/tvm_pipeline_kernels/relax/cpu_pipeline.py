"""cpu_pipeline: TVM's default way from a Relax module to an executable, with our kernels in the place of plain loops.

    tvm.compile(mod, target, relax_pipeline=cpu_pipeline(target))

Each function that is a graph of operators with fixed shapes goes our way by itself; all others, and what our way
cannot take, are left as they are. Then TVM's default pipeline takes the whole module, so that what it can compile is
compiled. The log says what was left and why. Next: `kernel_passes.py`, the passes of our way.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any

import tvm
from tvm import relax, tirx

from tvm_pipeline.errors import OptionError
from tvm_pipeline_tvm.relax import kernel_passes
from tvm_pipeline_tvm.relax.dataflow import fields, has_fixed_shape, name_of
from tvm_pipeline_tvm.tvm_errors import reason as reason_of

_log = logging.getLogger(__name__)

# Calls of functions that are there already, and views: a function of nothing else is not legalised and fused again.
_LOWERED = frozenset(
    f"relax.{name}" for name in ("call_tir", "call_dps_packed", "call_pure_packed", "call_tir_inplace", "reshape")
)
# Calls that may be there for their effects: where nothing reads their results, passes of ours would remove them.
_PERHAPS_EFFECTS = frozenset(("relax.call_pure_packed", "relax.invoke_pure_closure", "relax.call_inplace_packed"))
SLOW_ELEMENTS = 10_000  # of a tensor: plain loops over fewer are done before one would notice
# Operators whose second argument is a matrix or a kernel of weights.
_WEIGHTED = frozenset(f"relax.{name}" for name in ("nn.conv1d", "nn.conv2d", "nn.conv2d_transpose", "nn.conv3d"))


def cpu_pipeline(target: tvm.target.Target | str | dict[str, Any]) -> tvm.transform.Pass:
    """Return the pipeline of passes for `tvm.compile` that gives a module our kernels for CPU cores.

        mod = from_onnx(onnx.load("net.onnx"))
        target = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v4"})
        vm = relax.VirtualMachine(tvm.compile(mod, target, relax_pipeline=cpu_pipeline(target)), tvm.cpu())

        before: main(x) { lv = conv2d(x, w); lv1 = add(lv, b); gv = relu(lv1) }
        after:  main(x) { alloc .. ; fused_conv2d_add_relu(x, w', b', alloc) }      scheduled for the cores of `target`

    Weights must be constants to be laid out: where a function has them as parameters, as PyTorch's exported programs
    do, convolutions and matrix products stay plain, and a warning names `relax.transform.BindParams`. Functions with
    control flow, shapes known at run time or effects are left to TVM's default pipeline. Loops are parallel; TVM's
    pool of threads runs them, whose size `TVM_NUM_THREADS` sets.

    Args:
        target: what `tvm.compile` is given: the cores that are compiled for.

    Raises:
        OptionError: the target is no CPU.
    """
    target = target if isinstance(target, tvm.target.Target) else tvm.target.Target(target)
    if target.kind.name != "llvm":
        raise OptionError(
            f"cpu_pipeline makes kernels for CPU cores, of targets of the kind llvm, not for {target.kind.name}; leave "
            "relax_pipeline to TVM there"
        )
    return tvm.transform.Sequential([FastKernels(target), relax.get_pipeline("default")], name="cpu_pipeline")


@tvm.transform.module_pass(opt_level=0, name="FastKernels")
class FastKernels:
    """The pass: each function that is a graph of operators with fixed shapes -> calls of scheduled kernels."""

    def __init__(self, target: tvm.target.Target) -> None:
        self._target = target

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        for symbol, function in mod.functions.items():
            if not isinstance(function, relax.Function):
                continue
            try:
                mod = self._with_kernels(mod, symbol, function)
            except Exception as error:  # whatever it is, TVM's default pipeline compiles the function
                self._leave(symbol, f"our passes fail ({reason_of(error)})")
        return mod

    def _with_kernels(self, mod: tvm.IRModule, symbol: Any, function: Any) -> tvm.IRModule:
        """Return the module with a function that calls scheduled kernels; as it is, where nothing can be done."""
        if _is_part(function) or not _has_kernels(mod, function):
            return mod
        reason = _obstacle(mod, function)
        if reason:
            self._leave(symbol, reason)
            return mod
        weights = _weights_given(function)
        if weights:
            _log.warning(
                "%s is given its weights as parameters (%s, %d in all), so what reads them stays slow: bind them as "
                "constants by relax.transform.BindParams(%r, params) before",
                *(symbol.name_hint, weights[0], len(weights), symbol.name_hint),
            )
        return _merged(mod, symbol, self._lowered(_alone(mod, symbol)))

    @staticmethod
    def _leave(symbol: Any, reason: str) -> None:
        _log.warning("%s is left to TVM's default pipeline, which is slow: %s", symbol.name_hint, reason)

    def _lowered(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return a module whose `main` calls scheduled kernels, or shows tensors under other shapes."""
        transform, rules = relax.transform, dict[str, str]()
        fuse: Any = kernel_passes.FuseKernels(self._target)
        schedule: Any = kernel_passes.ScheduleKernels(self._target, rules)
        if any(name not in _LOWERED for name in _operators(mod["main"])):
            mod = fuse(mod)
        passes = [transform.FuseTIR(), transform.RewriteDataflowReshape(), transform.DeadCodeElimination(["main"])]
        with self._target:
            mod = tvm.transform.Sequential([*passes, schedule])(mod)
        large = {symbol.name_hint for symbol, function in mod.functions.items() if _is_large(function)}
        for name in sorted(large & {name for name, rule in rules.items() if rule.startswith("default")}):
            _log.warning("kernel %s stays as TVM made it, which is slow: %s", name, rules[name])
        return mod


# ---------------------------------------------------------------------------------------------- what goes our way


def _is_large(function: Any) -> bool:
    """Return whether a function takes a tensor whose computation one would notice."""
    tensors = [param.shape for param in function.params if hasattr(param, "shape")]
    return any(
        math.prod(int(extent) for extent in shape if isinstance(extent, tirx.IntImm)) >= SLOW_ELEMENTS
        for shape in tensors
    )


def _is_part(function: Any) -> bool:
    """Return whether a function is a part of others, as FuseOps or a partition for a library makes it."""
    return any(function.attrs.get(name) for name in ("Primitive", "Composite", "Codegen"))


def _calls(function: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the variables that are bound to calls, and the calls; nothing of branches."""
    for block in function.body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, tvm.ir.Call):
                yield binding.var, binding.value


def _operators(function: Any) -> list[str]:
    """Return the names of what a function calls, but for functions of its module."""
    return [name for name in (name_of(call) for _, call in _calls(function)) if name]


def _has_kernels(mod: tvm.IRModule, function: Any) -> bool:
    """Return whether a function computes anything itself; one that only calls others is as fast as they are."""
    return any(
        not isinstance(call.op, tvm.ir.GlobalVar) or _is_part(mod[call.op]) for _, call in _calls(function)
    ) or any(isinstance(block, relax.BindingBlock) and _has_branch(block) for block in function.body.blocks)


def _has_branch(block: Any) -> bool:
    return any(isinstance(binding.value, relax.If) for binding in block.bindings)


def _obstacle(mod: tvm.IRModule, function: Any) -> str:
    """Return why a function cannot go our way; empty where nothing stands against it."""
    if not function.is_pure:
        return "it has effects"
    for param in function.params:
        if not all(map(has_fixed_shape, fields(param.ty))):
            return f"parameter {param.name} is {param.ty}, not a tensor of a fixed shape"
    bindings = [binding for block in function.body.blocks for binding in block.bindings]
    read = {var for binding in bindings for var in relax.analysis.free_vars(binding.value)}
    read |= set(relax.analysis.free_vars(function.body.body))
    for binding in bindings:
        var, value = binding.var, binding.value
        if isinstance(value, (relax.If, relax.Function)):
            return f"{var.name} is computed by control flow"
        if isinstance(binding, relax.MatchCast) or not all(map(has_fixed_shape, fields(var.ty))):
            return f"{var.name} is {var.ty}, not a tensor of a fixed shape"
        if not isinstance(value, tvm.ir.Call):
            continue
        if name_of(value) in _PERHAPS_EFFECTS and var not in read:
            return f"nothing reads {var.name}, so it is there for effects of {value.args[0]}"
        if isinstance(value.op, tvm.ir.GlobalVar) and not _is_part(mod[value.op]):
            return f"it calls the function {value.op.name_hint} beside operators of its own"
        if not isinstance(value.op, (tvm.ir.Op, tvm.ir.GlobalVar)):
            return f"{var.name} is a call of a function that is known at run time"
    return ""


def _weights_given(function: Any) -> list[str]:
    """Return the names of parameters that are weights of a function's operators, perhaps transposed."""
    params, calls = set(function.params), [call for _, call in _calls(function)]
    origin = {var: call.args[0] for var, call in _calls(function) if name_of(call) == "relax.permute_dims"}
    matrices = [call.args[1] for call in calls if name_of(call) == "relax.matmul" and call.args[1].ty.ndim == 2]
    kernels = [call.args[1] for call in calls if name_of(call) in _WEIGHTED]
    weights = (origin.get(weight, weight) for weight in (*kernels, *matrices))
    return [weight.name for weight in dict.fromkeys(weights) if weight in params]


# ---------------------------------------------------------------------------------------------- one function at a time


def _alone(mod: tvm.IRModule, symbol: Any) -> tvm.IRModule:
    """Return a module of a function, as `main`, and the functions that it calls."""
    function = mod[symbol]
    functions = {each: mod[each] for each in _reached(mod, [symbol]) if not each.same_as(symbol)}
    return tvm.IRModule({**functions, tvm.ir.GlobalVar("main"): function.with_attr("global_symbol", "main")})


def _merged(mod: tvm.IRModule, symbol: Any, made: tvm.IRModule) -> tvm.IRModule:
    """Return a module with a function as it was made alone, and without what only the old one called."""
    own = _reached(mod, [symbol])
    others = [each for each, function in mod.functions.items() if each not in own or _is_public(function)]
    same = {each for each in own if each in made.functions and made[each].same_as(mod[each])}
    kept = _reached(mod, others, but=symbol) | same | {symbol}
    builder = relax.BlockBuilder(tvm.IRModule({each: mod[each] for each in kept}))
    symbols = {
        each: builder.add_func(function.without_attr("global_symbol"), each.name_hint)
        for each, function in made.functions.items()
        if each.name_hint != "main" and each not in same
    }
    function, public_name = _Renamer(symbols).visit_expr(made["main"]), mod[symbol].attrs.get("global_symbol")
    function = function.without_attr("global_symbol")
    builder.update_func(symbol, function.with_attr("global_symbol", public_name) if public_name else function)
    return tvm.IRModule(dict(builder.get().functions.items()), attrs=mod.attrs, global_infos=mod.global_infos)


def _is_public(function: Any) -> bool:
    return bool(function.attrs and function.attrs.get("global_symbol"))


def _reached(mod: tvm.IRModule, symbols: Iterable[Any], but: Any = None) -> set[Any]:
    """Return symbols of a module, and all that their functions call; nothing that only the function `but` calls."""
    waiting, found = list(symbols), set()
    while waiting:
        symbol = waiting.pop()
        if symbol not in found and symbol != but:
            found.add(symbol)
            if isinstance(mod[symbol], relax.Function):
                relax.analysis.post_order_visit(
                    mod[symbol], lambda expr: waiting.append(expr) if isinstance(expr, tvm.ir.GlobalVar) else None
                )
    return found


@relax.expr_functor.mutator
class _Renamer(relax.PyExprMutator):
    """Writes calls of functions under other symbols."""

    def __init__(self, symbols: dict[Any, Any]) -> None:
        super().__init__()
        self._symbols = symbols

    def visit_global_var_(self, op: Any) -> Any:
        return self._symbols.get(op, op)
