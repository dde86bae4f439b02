"""What a schedule of TE cannot say of a convolution's loops, said when they are lowered.

*Registers.* TVM keeps a tile of 1 KiB or more in memory that it allocates, and LLVM then stores sums at each step where
it cannot prove that nothing else reads them: at the edge of an image, or beside a prefetch. On the stack nothing can.

*Weights.* Those of a deep layer are megabytes, which no cache keeps from one frame to the next. A convolution passes
over the weights of its blocks once for each tile of the image: the first pass waits for memory, and the others leave
memory idle. So each term of the reduction also asks for a vector of the weights of the next blocks:

    for chunks of blocks, tiles of rows:
      for the reduction:
        prefetch a vector of the weights of the next chunk         the first tiles of rows, a block or more each
        for rows, columns, blocks of the tile: a multiply-add

*Functions.* LLVM has no exponential function of a vector: it calls the library for each number. Behind a 1x1
convolution that took three times as long as the convolution itself. `../../elementary.py` has them as expressions.

`mark` leaves a mark at the innermost loop of the reduction, and `marked_loops` is a pass of TIR that heeds it. No value
depends on either.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import te, tir

from tvm_pipeline_kernels import elementary

LEAST_BYTES = 1 << 18  # of weights: fewer stay in a cache near the core
MOST_STACK_BYTES = 4096  # of a tile
_MARK = "own_reduction"
_READ_TO_L2 = 0, 2, 1  # LLVM's: for reading, to the second cache, data


def mark(s: te.Schedule, sums: te.Tensor, term: Any, kernel: te.Tensor, chunks: int, row_tiles: int) -> None:
    """Mark the reduction of a convolution.

    Args:
        sums: the stage that adds up.
        term: its innermost reduction axis.
        kernel: (blocks, ...), as in `conv2d.schedule`.
        chunks: the blocks of a tile.
        row_tiles: of the image; the innermost of what is fused into the parallel loop.
    """
    blocks, *rest = (int(extent) for extent in kernel.shape)
    gains = blocks > chunks and rest[-1] > 1 and 4 * blocks * math.prod(rest) >= LEAST_BYTES
    s[sums].pragma(term, _MARK, f"{chunks} {row_tiles} {math.prod(rest)}" if gains else "")


@tir.transform.prim_func_pass(opt_level=0, name="MarkedLoops")
def marked_loops(function: tir.PrimFunc, _module: tvm.IRModule, _context: Any) -> tir.PrimFunc:
    """Heed the marks of a function that is flattened, vectorized and unrolled."""
    task: list[tir.Var] = []  # the variable of the parallel loop around
    is_marked = False

    def enter(loop: tir.Stmt) -> None:
        if isinstance(loop, tir.For) and loop.kind == tir.ForKind.PARALLEL:
            task[:] = [loop.loop_var]

    def leave(marked: tir.Stmt) -> tir.Stmt | None:
        nonlocal is_marked
        if not isinstance(marked, tir.AttrStmt) or marked.attr_key != f"pragma_{_MARK}":
            return None
        is_marked = True
        layout = [int(number) for number in marked.value.value.split()]
        return _with_prefetches(marked.body, function, task[0], *layout) if layout else marked.body

    body = tir.stmt_functor.ir_transform(function.body, enter, leave, ["tir.For", "tir.AttrStmt"])
    if is_marked:
        function = function.with_body(body).with_attr(_MARK, True)  # tuning has `tvm.build` lower it once more
    if not function.attrs or _MARK not in function.attrs.keys():  # noqa: SIM118 - no mapping
        return function
    return function.with_body(tir.stmt_functor.ir_transform(function.body, None, _onto_stack, ["tir.Allocate"]))


@tir.transform.prim_func_pass(opt_level=0, name="ElementaryFunctions")
def elementary_functions(function: tir.PrimFunc, _module: tvm.IRModule, _context: Any) -> tir.PrimFunc:
    """Write elementary functions of float32 as expressions, before loops become vectors; GPUs have their own."""
    target = tvm.target.Target.current()
    if target is None or target.kind.name != "llvm":
        return function
    return function.with_body(tir.stmt_functor.ir_transform(function.body, None, _as_expression, ["tir.Call"]))


def _as_expression(call: tir.Call) -> Any:
    made = elementary.FUNCTIONS.get(call.op.name) if isinstance(call.op, tvm.ir.Op) else None
    return made(call.args[0]) if made and call.dtype == "float32" else None


def _with_prefetches(
    loop: tir.For, function: tir.PrimFunc, task: tir.Var, chunks: int, row_tiles: int, block_elements: int
) -> tir.For:
    """Return the loop over terms with prefetches of the next chunk: one block of it for each tile of rows, or more."""
    weights = _first_vector(loop.body, function)
    each = math.ceil(chunks / row_tiles)
    fetched = []
    for number in range(each):
        block = tir.floormod(task, row_tiles) * each + number
        place = weights.indices[0].base + (block + chunks) * block_elements
        # behind the last block nothing is left to fetch, and the first line of all is near
        line = tir.BufferLoad(weights.buffer, [tir.Select(block < chunks, place, 0)])
        fetched.append(tir.Evaluate(tir.call_intrin("int32", "tir.prefetch", tir.address_of(line), *_READ_TO_L2)))
    return tir.For(loop.loop_var, loop.min, loop.extent, loop.kind, tir.SeqStmt([*fetched, loop.body]))


def _first_vector(body: tir.Stmt, function: tir.PrimFunc) -> tir.BufferLoad:
    """Return the first vector that is loaded from an argument: weights of the first block, as inputs are numbers."""
    arguments = {buffer.data for buffer in function.buffer_map.values()}
    found: list[tir.BufferLoad] = []

    def visit(node: Any) -> None:
        if isinstance(node, tir.BufferLoad) and node.buffer.data in arguments and isinstance(node.indices[0], tir.Ramp):
            found.append(node)

    tir.stmt_functor.post_order_visit(body, visit)
    return found[0]


def _onto_stack(allocate: tir.Allocate) -> tir.Stmt | None:
    data_type = tvm.DataType(allocate.dtype)
    extent = math.prod(int(extent) for extent in allocate.extents)
    if extent * data_type.lanes * data_type.bits // 8 > MOST_STACK_BYTES:
        return None
    kept = {"disable_lower_builtin": tir.IntImm("bool", 1)}
    return tir.Allocate(allocate.buffer_var, allocate.dtype, allocate.extents, allocate.condition, allocate.body, kept)
