"""Write a block of dataflow anew, operator by operator, in rounds until no rule applies.

A rule sees one call whose arguments are already written anew, and may look behind them: which call made an argument,
and whether anything else reads it. What nothing reads any more is left out after each round. Next: `simplify.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax

MOST_ROUNDS = 20  # a chain of operators that merge shortens in each

Rule = Callable[["Rewriter", Any], Any]


def rewritten(mod: tvm.IRModule, rules: Callable[[str], tuple[Rule, ...]]) -> tvm.IRModule:
    """Return a module whose functions of Relax are written anew; others, and those with control flow, stay.

    Args:
        rules: gives the rules of an operator by its name, such as "relax.add". A rule takes the Rewriter and a call,
            and returns an expression for it, or None.
    """
    functions = dict(mod.functions.items())
    for symbol, function in functions.items():
        if isinstance(function, relax.Function) and is_plain(function):
            functions[symbol] = _function(str(symbol.name_hint), function, rules)
    if all(function.same_as(mod[symbol]) for symbol, function in functions.items()):
        return mod
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def is_plain(function: relax.Function) -> bool:
    """Return whether a function is one block of dataflow, of values that have a name and no other function inside."""
    blocks: Any = function.body.blocks if isinstance(function.body, relax.SeqExpr) else ()
    if len(blocks) != 1 or not isinstance(blocks[0], relax.DataflowBlock):
        return False
    return all(
        isinstance(binding, relax.VarBinding) and not isinstance(binding.value, relax.Function)
        for binding in blocks[0].bindings
    )


def _function(name: str, function: relax.Function, rules: Callable[[str], tuple[Rule, ...]]) -> relax.Function:
    for _ in range(MOST_ROUNDS):
        rewriter = Rewriter(function, rules)
        changed = rewriter.run(name)
        if changed is None:
            break
        function = changed
    return function


class Rewriter:
    """One round over one function."""

    def __init__(self, function: relax.Function, rules: Callable[[str], tuple[Rule, ...]]) -> None:
        self._old, self._rules = function, rules
        self._builder = relax.BlockBuilder()
        self._new: dict[Any, Any] = {}
        self._readers = _readers(function)
        self._changed = False

    def run(self, name: str) -> relax.Function | None:
        """Return the function written anew; None where no rule applied."""
        new = self.written(name, self._old.body.body)
        return new if self._changed else None

    def written(self, name: str, result: Any) -> relax.Function:
        """Return the function written anew, with another result, which is an expression of the old one."""
        old = self._old
        with self._builder.function(name, list(old.params)):
            with self._builder.dataflow():
                for binding in old.body.blocks[0].bindings:
                    self._bind(binding.var, binding.value)
                output = self._builder.emit_output(self.replaced(result))
            self._builder.emit_func_output(output)
        new = relax.analysis.remove_all_unused(self._builder.get()[name])
        return new.with_attrs({key: old.attrs[key] for key in old.attrs.keys()}) if old.attrs else new  # noqa: SIM118

    def _bind(self, var: Any, value: Any) -> None:
        new = self.replaced(value)
        new = self._by_rules(new)
        if isinstance(new, (tvm.ir.Call, relax.TupleGetItem)):
            new = self._builder.emit(new)
        self._new[var] = new
        # A new tensor may stand for several old ones.
        if isinstance(new, relax.Var):
            self._readers[new] = self._readers.get(new, 0) + self._readers.get(var, 0)

    def _by_rules(self, expr: Any) -> Any:
        """Apply rules to an operator until none applies to what has become of it."""
        for _ in range(MOST_ROUNDS):
            if isinstance(expr, relax.TupleGetItem):
                name = "tuple"
            elif isinstance(expr, tvm.ir.Call) and isinstance(expr.op, tvm.ir.Op):
                name = expr.op.name
            else:
                break
            found = next((found for rule in self._rules(name) if (found := rule(self, expr)) is not None), None)
            if found is None:
                break
            self._changed, expr = True, found
        return expr

    def replaced(self, expr: Any) -> Any:
        """Return an expression of the old function as the new one has it."""
        if isinstance(expr, relax.Var):
            return self._new.get(expr, expr)
        if isinstance(expr, relax.Tuple):
            fields = [self.replaced(field) for field in expr.fields]
            return expr if _same(fields, expr.fields) else relax.Tuple(fields)
        if isinstance(expr, relax.TupleGetItem):
            source = self.replaced(expr.tuple_value)
            return expr if source.same_as(expr.tuple_value) else relax.TupleGetItem(source, expr.index)
        if isinstance(expr, tvm.ir.Call):
            arguments = [self.replaced(argument) for argument in expr.args]
            if _same(arguments, expr.args):
                return expr
            return relax.Call(expr.op, arguments, expr.attrs, expr.ty_args)
        return expr

    def emit(self, expr: Any) -> Any:
        """Add an operator that one other reads, as rules leave it, and return its tensor."""
        new = self._by_rules(expr)
        if isinstance(new, tvm.ir.Call):
            new = self._builder.emit(new)
            self._readers[new] = 1
        return new

    def typed(self, call: Any) -> Any:
        """Return the call with the type of its result."""
        return self._builder.normalize(call)

    def made_by(self, expr: Any, *names: str) -> Any:
        """Return the call of one of these operators that made a tensor; None where another made it."""
        value = self.source(expr)
        is_call = isinstance(value, tvm.ir.Call) and isinstance(value.op, tvm.ir.Op)
        return value if is_call and value.op.name in names else None

    def source(self, expr: Any) -> Any:
        """Return the value of a tensor; None of an input, and of what is none."""
        return self._builder.lookup_binding(expr) if isinstance(expr, relax.Var) else None

    def is_read_once(self, expr: Any) -> bool:
        return self._readers.get(expr, 0) == 1


def _same(new: Any, old: Any) -> bool:
    return all(a.same_as(b) for a, b in zip(new, old, strict=True))


def _readers(function: relax.Function) -> dict[Any, int]:
    """Return how often each tensor is read."""
    counts: Counter[Any] = Counter()
    stack = [function.body.body, *(binding.value for binding in function.body.blocks[0].bindings)]
    while stack:
        expr = stack.pop()
        if isinstance(expr, relax.Var):
            counts[expr] += 1
        elif isinstance(expr, relax.Tuple):
            stack.extend(expr.fields)
        elif isinstance(expr, relax.TupleGetItem):
            stack.append(expr.tuple_value)
        elif isinstance(expr, tvm.ir.Call):
            stack.extend(expr.args)
    return counts
