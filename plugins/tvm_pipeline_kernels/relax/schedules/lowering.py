"""What no schedule can say of a convolution's loops: marks in scheduled functions, and a pipeline that heeds them.

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

`mark` leaves a mark in the innermost loop of the reduction, which TVM's own pipeline ignores; buffers of scope `local`
are what goes onto the stack. No value depends on either. Compile with

    tvm.compile(module, target, tir_pipeline=lowering.PIPELINE)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.pipeline import default_s_tir_pipeline
from tvm.s_tir.schedule import LoopRV
from tvm_ffi import structural_map

from tvm_pipeline_kernels import elementary

PIPELINE = "tvm_pipeline"
LEAST_BYTES = 1 << 18  # of weights: fewer stay in a cache near the core
MOST_STACK_BYTES = 4096  # of a tile
_MARK = "tvm_pipeline.prefetch"
_READ_TO_L2 = 0, 2, 1  # LLVM's: for reading, to the second cache, data


def mark(
    s: s_tir.Schedule, task: LoopRV, reduction: Sequence[LoopRV], kernel: tirx.Var, chunks: int, row_tiles: int
) -> None:
    """Mark the reduction of a convolution, as the last step of its schedule.

    Args:
        task: the parallel loop, over images, chunks of blocks and tiles of rows.
        reduction: the loops over input blocks, kernel rows, kernel columns, channels of a block.
        kernel: (blocks, input blocks, kernel rows, kernel columns, input channels of a block, channels of a block).
        chunks: the blocks of a tile.
        row_tiles: of the image.
    """
    blocks, *rest = (int(extent) for extent in kernel.shape)
    if blocks == chunks or 4 * blocks * math.prod(rest) < LEAST_BYTES:
        return
    number = s.get(task).loop_var
    chunk = tirx.floormod(tirx.floordiv(number, row_tiles), blocks // chunks)
    loops = [s.get(loop) for loop in reduction]
    term = loops[-1]
    body = term.body
    each = math.ceil(chunks / row_tiles)
    for index in range(each):
        block = tirx.floormod(number, row_tiles) * each + index
        # A tile that has nothing to fetch asks for the first line of all, which is near; behind the last chunk a
        # prefetch is without effect.
        yes, no = (tirx.const(value, number.ty.dtype) for value in (1, 0))
        is_new = tirx.Select(block < chunks, yes, no)
        place = (chunk * chunks + block + chunks, *(loop.loop_var for loop in loops))
        line = tirx.BufferLoad(kernel, [*(is_new * index for index in place), 0])
        body = tirx.AttrStmt(0, _MARK, tirx.address_of(line), body)
    s.state.replace(
        s.get_sref(reduction[-1]), tirx.For(term.loop_var, term.min, term.extent, term.kind, body, None, {})
    )


@tirx.transform.prim_func_pass(opt_level=0, name="MarkedLoops")
def marked_loops(function: tirx.PrimFunc, _module: tvm.IRModule, _context: Any) -> tirx.PrimFunc:
    """Heed the marks of a function that is lowered but for TVM's built-in operators."""
    mapped = structural_map(function.body, [(tirx.AttrStmt, _prefetched), (tirx.AllocBuffer, _on_stack)])
    return function.with_body(mapped)


def _prefetched(marked: tirx.AttrStmt) -> tirx.Stmt:
    if marked.attr_key != _MARK:
        return marked
    fetched = tirx.call_intrin("void", "tirx.prefetch", marked.value, *_READ_TO_L2)
    return tirx.SeqStmt([tirx.Evaluate(fetched), marked.body])


def _on_stack(allocate: tirx.AllocBuffer) -> tirx.Stmt:
    buffer = allocate.buffer
    if not all(isinstance(extent, tirx.IntImm) for extent in buffer.shape):
        return allocate
    data_type = tvm.DataType(buffer.dtype)
    extent = math.prod(int(extent) for extent in buffer.shape)
    if buffer.scope() != "local" or extent * data_type.lanes * data_type.bits // 8 > MOST_STACK_BYTES:
        return allocate
    return tirx.AllocBuffer(buffer, {**allocate.annotations, "disable_lower_builtin": tirx.IntImm("bool", 1)})


@tirx.transform.prim_func_pass(opt_level=0, name="ElementaryFunctions")
def elementary_functions(function: tirx.PrimFunc, _module: tvm.IRModule, _context: Any) -> tirx.PrimFunc:
    """Write elementary functions of float32 as expressions, before loops become vectors."""
    return function.with_body(structural_map(function.body, (tvm.ir.Call, _as_expression)))


def _as_expression(call: tvm.ir.Call) -> Any:
    function = elementary.FUNCTIONS.get(call.op.name) if isinstance(call.op, tvm.ir.Op) else None
    if function is None or str(call.ty.dtype) != "float32":
        return call
    return function(call.args[0])


def _pipeline() -> tuple[tvm.transform.Pass, Callable[[], Any], Callable[[], Any]]:
    """Return TVM's pipeline of scheduled functions, and what finishes those of the host and of a device."""
    lower, finish_host, finish_device = default_s_tir_pipeline()

    def finish() -> tvm.transform.Pass:
        return tvm.transform.Sequential([marked_loops, finish_host()])

    return tvm.transform.Sequential([elementary_functions, lower]), finish, finish_device


tvm.ir.register_op_attr("tirx.nearbyint", "TVectorizable", True)  # as of `round`: LLVM rounds vectors at once
tirx.register_tir_pipeline(PIPELINE, _pipeline)
