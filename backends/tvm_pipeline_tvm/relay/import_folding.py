"""TVM's importer of ONNX made several times faster: constants folded in numpy, types inferred once.

The importer folds what it makes of every node, infers types to know shapes, and goes through all nodes before it each
time. Relay compiles each constant expression through LLVM for that, which also fails where LLVM 22 refuses TVM's debug
information (a vector `floor_divide`, as exporters write for strides and paddings). `fold_table.py` gives the same
numbers at once. `benchmarks/import_time.py` measures it. Next: `fold.py`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tvm
from tvm import relay
from tvm.relay.frontend import common, onnx

from tvm_pipeline.errors import ModelError
from tvm_pipeline_tvm.numpy_rules import Array
from tvm_pipeline_tvm.relay.fold import Folder
from tvm_pipeline_tvm.relay.fold_table import ResultType
from tvm_pipeline_tvm.relay.onnx_repairs import repaired
from tvm_pipeline_tvm.tvm_errors import RefusedOperator

_ONE_AT_A_TIME = threading.RLock()  # the importers' modules are shared by all threads


@contextmanager
def faster_importer(converting: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """Let TVM's importer of ONNX fold constants in numpy while the block lasts; one thread at a time.

    before: fold_constant(floor_divide(const, const)) compiles a function and runs it;
            infer_type(node) infers the types of all nodes before it
    after:  it computes `const // const`; types that are known are not inferred again

    `converting` hears of each node of the file; a ModelError that it raises ends the import. An operator that the
    importer refuses raises RefusedOperator, whose cause is the importer's own error.
    """
    with _ONE_AT_A_TIME:
        fold_stock, infer_stock, convert_map = common.fold_constant, common.infer_type, onnx._get_convert_map
        convert_stock = onnx.GraphProto._convert_operator
        folder = _ImportFolder(fold_stock)

        def fold_constant(node: relay.Expr, mod: tvm.IRModule | None = None) -> relay.Expr:
            return folder.folded(node) if mod is None else fold_stock(node, mod)

        def infer_type(node: relay.Expr, mod: tvm.IRModule | None = None) -> relay.Expr:
            if mod is not None or isinstance(node, relay.Function):
                return infer_stock(node, mod)
            relay.transform.InferTypeLocal(node)  # it writes the type into the node
            return node

        def convert(self: Any, kind: str, inputs: Any, attrs: Any, opset: int) -> Any:
            operator = f"operator {kind} (node {attrs['tvm_custom']['name']})"
            converting(operator)
            try:
                return convert_stock(self, *repaired(kind, inputs, attrs, opset))
            except (RefusedOperator, ModelError):  # of a graph inside this node
                raise
            except Exception as error:  # the importer raises any type
                raise RefusedOperator(operator) from error

        common.fold_constant = onnx.fold_constant = fold_constant
        common.infer_type = onnx.infer_type = infer_type
        onnx._get_convert_map = functools.cache(convert_map)  # it is made anew for every node
        onnx.GraphProto._convert_operator = convert
        try:
            yield
        finally:
            common.fold_constant = onnx.fold_constant = fold_stock
            common.infer_type = onnx.infer_type = infer_stock
            onnx._get_convert_map = convert_map
            onnx.GraphProto._convert_operator = convert_stock


class _ImportFolder(Folder):
    """Folds expressions that grow node by node and have no types yet: what was folded is not visited again."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self._stock = stock

    def folded(self, node: relay.Expr) -> relay.Expr:
        self.left_to_relay = False
        new = self.fold(node)
        if self.left_to_relay:  # control flow
            new = self._stock(new)
        self._new[new] = new
        return new

    def _type_of(self, call: relay.Call) -> Any:
        return relay.transform.InferTypeLocal(self._rebuild_call(call))

    def _by_relay(self, call: relay.Call) -> relay.Expr:
        return self._stock(self._rebuild_call(call))

    def _by_type(self, call: relay.Call) -> Array | None:
        if call.op.name == "on_device":
            return None
        try:
            type_ = ResultType.of(relay.transform.InferTypeLocal(self._expr(call.args[0])))
        except tvm.TVMError:  # a subgraph whose variables have no type yet
            return None
        if type_ is None:
            return None
        dtype = str(call.attrs.dtype)
        return np.array(np.prod(type_.shape, dtype="int64") if call.op.name == "ndarray_size" else type_.shape, dtype)
