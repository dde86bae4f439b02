"""A 3x3 convolution in blocked layout by Winograd's algorithm (`winograd.py`), where its error is within the tolerance.

    for bands: some rows of tiles of the image                                        in parallel
      for input blocks, rows of tiles: pad what they read
        for tiles: transform m + 2 columns, then m + 2 rows                           unrolled, in vectors
      for points (m + 2)^2: multiply tiles by weights, in register tiles as in `conv2d.py`
      for output blocks, tiles: transform back; what follows: bias, addition, activation; store

A band that is the whole image has three loops in parallel instead: over rows of tiles, points, and rows of tiles again.
Weights are transformed when the model is compiled: while Relay changes layouts, `alter` puts Relay's operator for
transformed weights in the place of the convolution. Tuning does the same to a fused function (`by_winograd`). What
tuning chose stands before the static rule; the error of either is estimated with the weights of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm
from tvm import relay, te
from tvm.relay.op.strategy import x86 as stock_strategies
from tvm.relay.op.strategy.generic import conv2d_winograd_without_weight_transform_strategy
from tvm.topi.generic.injective import schedule_injective_from_existing
from tvm.topi.utils import get_const_tuple, traverse_inline

from tvm_pipeline_kernels.choices import (
    CONV2D,
    Choice,
    is_for_winograd,
    is_winograd,
    winograd_by_rule,
    winograd_choices,
)
from tvm_pipeline_kernels.relay.schedules.choice_context import (
    active_choice,
    active_tolerance,
    current_cores,
    winograd_workload,
)
from tvm_pipeline_kernels.relay.schedules.conv2d import applies
from tvm_pipeline_kernels.tiles import channel_block
from tvm_pipeline_kernels.winograd import (
    KERNEL,
    Winograd,
    first_within,
    input_transform,
    output_transform,
    packed,
)
from tvm_pipeline_tvm.relay.fold import FoldConstantFast

WINOGRAD = "nn.contrib_conv2d_winograd_without_weight_transform"
_TAG = "own_winograd"


def alter(attrs: Any, inputs: Sequence[relay.Expr], types: Sequence[Any]) -> relay.Expr | None:
    """Return a convolution by Winograd's algorithm in blocked layout; None where it stays direct.

    Args:
        attrs: of nn.conv2d, as are inputs (data in NCHW, weights in OIHW) and their types.
    """
    tolerance = active_tolerance()
    if not tolerance or str(attrs.data_layout) != "NCHW" or str(attrs.kernel_layout) != "OIHW" or attrs.groups != 1:
        return None
    data, kernel = ((get_const_tuple(type_.shape), str(type_.dtype)) for type_ in types)
    window = (attrs.get_int_tuple(name) for name in ("strides", "padding", "dilation"))
    tensors = (("TENSOR", *tensor) for tensor in (data, kernel))
    workload = (CONV2D, *tensors, *window, "NCHW", "NCHW", data[1])
    if kernel[1] != "float32" or not is_for_winograd(workload):
        return None
    cores, chosen = current_cores(), active_choice(workload)
    forms = winograd_by_rule(workload, cores) if chosen is None else [chosen]
    # A library aligns with others only if the weights are transformed now.
    weights = _constant(inputs[1]) if any(map(is_winograd, forms)) else None
    form = None if weights is None else first_within([Winograd(*one) for one in forms], weights, tolerance)
    if weights is None or form is None:
        return None
    in_block, block = (channel_block(weights.shape[axis], cores.lanes) for axis in (1, 0))
    transformed = relay.const(packed(weights, form.winograd, in_block, block))
    return _operator(inputs[0], transformed, (in_block, block), attrs, kernel[0][0], form)


def _constant(weights: relay.Expr) -> npt.NDArray[np.float32] | None:
    """Return the value of weights, which may be an expression still; None where they are known at run time."""
    if relay.analysis.free_vars(weights):
        return None
    folded = FoldConstantFast()(tvm.IRModule.from_expr(relay.Function([], weights)))["main"].body
    return folded.data.numpy() if isinstance(folded, relay.Constant) else None


def by_winograd(function: relay.Function, choice: Choice) -> relay.Function:
    """Return a fused function with its convolution by Winograd's algorithm; its weights become transformed ones."""
    replaced: dict[relay.Var, relay.Var] = {}

    class Rewriter(relay.ExprMutator):
        def visit_call(self, call: relay.Call) -> relay.Expr:
            if getattr(call.op, "name", "") != "nn.contrib_conv2d_NCHWc":
                return super().visit_call(call)
            outputs, inputs, _, _, *block = get_const_tuple(call.args[1].checked_type.shape)
            points = (choice[0] + KERNEL - 1) ** 2
            weights = relay.var("weights", shape=(points, outputs, inputs, *block))
            replaced[call.args[1]] = weights
            return _operator(self.visit(call.args[0]), weights, block, call.attrs, outputs * block[1], choice)

    body = Rewriter().visit(function.body)
    params = [replaced.get(parameter, parameter) for parameter in function.params]
    rewritten = relay.Function(params, body, attrs=function.attrs)
    return relay.transform.InferType()(tvm.IRModule.from_expr(rewritten))["main"]


def _operator(
    data: relay.Expr, weights: relay.Expr, blocks: Sequence[int], attrs: Any, channels: int, choice: Choice
) -> relay.Expr:
    return relay.nn.contrib_conv2d_winograd_without_weight_transform(
        data,
        weights,
        tile_size=choice[0],
        padding=attrs.get_int_tuple("padding"),
        channels=channels,
        kernel_size=(KERNEL, KERNEL),
        data_layout=f"NCHW{blocks[0]}c",
        out_layout=f"NCHW{blocks[1]}c",
        out_dtype="float32",
    )


@dataclass(frozen=True, slots=True)
class _Steps:
    """The tensors between data and output, in order.

    Attributes:
        across: tiles in a row of the image.
    """

    padded: te.Tensor
    half_input: te.Tensor
    tiles: te.Tensor
    products: te.Tensor
    half_output: te.Tensor
    squares: te.Tensor
    across: int


@conv2d_winograd_without_weight_transform_strategy.register("cpu", override=True)
def _strategy(attrs: Any, inputs: Any, out_type: Any, target: Any) -> Any:
    """Serve blocked layouts, which TVM's own strategy refuses; leave others to it."""
    if len(inputs[0].shape) != 5:
        return stock_strategies.conv2d_winograd_without_weight_transform_strategy_cpu(attrs, inputs, out_type, target)
    strategy = relay.op.OpStrategy()
    strategy.add_implementation(_compute, lambda _, outs, __: schedule(outs), name="winograd_NCHWc.own")
    return strategy


def _compute(attrs: Any, inputs: Sequence[te.Tensor], _: Any) -> list[te.Tensor]:
    data, weights = inputs
    window = (attrs.get_int_tuple(name) for name in ("strides", "padding", "dilation"))
    shapes = (get_const_tuple(tensor.shape) for tensor in (data, weights))
    workload = winograd_workload(*shapes, *window)
    chosen = active_choice(workload)
    if not is_winograd(chosen) or chosen[0] != attrs.tile_size:
        chosen = next(form for form in winograd_choices(workload, current_cores()) if form[0] == attrs.tile_size)
    return [compute(data, weights, attrs.get_int_tuple("padding"), Winograd(*chosen))]


def compute(data: te.Tensor, weights: te.Tensor, padding: Sequence[int], choice: Winograd) -> te.Tensor:
    """Return the convolution: (n, blocks, height, width, channels of a block).

    Args:
        data: (n, input blocks, height, width, channels of a block).
        weights: as `winograd.packed` has them.
        padding: top, left, bottom, right.
    """
    m, edge = choice.winograd, choice.winograd + KERNEL - 1
    n, inputs, height, width, input_block = get_const_tuple(data.shape)
    _, outputs, _, _, output_block = get_const_tuple(weights.shape)
    top, left, bottom, right = padding
    out_height, out_width = height + top + bottom - KERNEL + 1, width + left + right - KERNEL + 1
    across = -(-out_width // m)
    down = -(-out_height // m)
    down += -down % choice.rows  # bands are whole
    count = down * across

    def is_inside(y: Any, x: Any) -> Any:
        return tvm.tir.all(y >= top, y < height + top, x >= left, x < width + left)

    padded = te.compute(
        (n, inputs, down * m + KERNEL - 1, across * m + KERNEL - 1, input_block),
        lambda b, i, y, x, c: tvm.tir.if_then_else(is_inside(y, x), data[b, i, y - top, x - left, c], 0.0),
        name="winograd_padded",
    )

    def columns_of_input(b: Any, i: Any, t: Any, row: Any, x: Any, c: Any) -> Any:
        column = [padded[b, i, t // across * m + y, t % across * m + x, c] for y in range(edge)]
        return _select(row, input_transform(column, m))

    half_input = te.compute((n, inputs, count, edge, edge, input_block), columns_of_input, name="winograd_half_input")
    tiles = te.compute(
        (n, edge * edge, inputs, count, input_block),
        lambda b, p, i, t, c: _select(
            p % edge, input_transform([half_input[b, i, t, p // edge, x, c] for x in range(edge)], m)
        ),
        name="winograd_tiles",
    )
    term = te.reduce_axis((0, inputs * input_block), "term")
    products = te.compute(
        (n, edge * edge, outputs, count, output_block),
        lambda b, p, o, t, c: te.sum(
            tiles[b, p, term // input_block, t, term % input_block]
            * weights[p, o, term // input_block, term % input_block, c],
            axis=term,
        ),
        name="winograd_products",
    )
    half_output = te.compute(
        (n, outputs, count, m, edge, output_block),
        lambda b, o, t, row, x, c: _select(
            row, output_transform([products[b, y * edge + x, o, t, c] for y in range(edge)], m)
        ),
        name="winograd_half_output",
    )
    squares = te.compute(
        (n, outputs, count, m, m, output_block),
        lambda b, o, t, y, x, c: _select(x, output_transform([half_output[b, o, t, y, k, c] for k in range(edge)], m)),
        name="winograd_squares",
    )
    return te.compute(
        (n, outputs, out_height, out_width, output_block),
        lambda b, o, y, x, c: squares[b, o, y // m * across + x // m, y % m, x % m, c],
        name="winograd_convolution",
        tag=_TAG,
        attrs={name: np.int32(value).item() for name, value in choice._asdict().items()},
    )


def _select(index: Any, values: Sequence[Any]) -> Any:
    """Return the value of this index, which loops that are unrolled know."""
    made = values[-1]
    for position, value in reversed(list(enumerate(values[:-1]))):
        made = tvm.tir.if_then_else(index == position, value, made)
    return made


def schedule(outs: Sequence[te.Tensor]) -> te.Schedule:
    """Schedule what `compute` returned and what is fused to it."""
    s = te.create_schedule([tensor.op for tensor in outs])
    found: list[te.Tensor] = []
    traverse_inline(s, outs[0].op, lambda op: found.append(op.output(0)) if op.tag == _TAG else None)
    (convolution,), output = found, outs[0]
    if not applies(convolution, output):  # what follows changes the layout
        schedule_injective_from_existing(s, output)
        output = convolution
    elif convolution.op != output.op:
        s[convolution].compute_inline()
    choice = Winograd(*(int(convolution.op.attrs[name]) for name in Winograd._fields))
    _schedule(s, _steps(convolution, choice), output, choice)
    return s


def _steps(convolution: te.Tensor, choice: Winograd) -> _Steps:
    chain: list[te.Tensor] = [convolution]
    while len(chain) < len(fields(_Steps)):
        chain.append(chain[-1].op.input_tensors[0])
    squares, half_output, products, tiles, half_input, padded = chain[1:]
    across = -(-int(convolution.shape[3]) // choice.winograd)
    return _Steps(padded, half_input, tiles, products, half_output, squares, across)


def _schedule(s: te.Schedule, steps: _Steps, output: te.Tensor, choice: Winograd) -> None:
    m = choice.winograd
    is_whole = int(steps.tiles.shape[3]) == choice.rows * steps.across
    sums = s.cache_write(steps.products, "global")

    n, block, row, column, channel = s[output].op.axis
    row, inner_row = s[output].split(row, factor=m)
    column, inner_column = s[output].split(column, factor=m)
    s[output].vectorize(channel)
    s[output].unroll(inner_row)
    s[output].unroll(inner_column)
    if is_whole:
        s[output].reorder(n, block, row, column, inner_row, inner_column, channel)
        s[output].parallel(s[output].fuse(n, block, row))
    else:
        band, row = s[output].split(row, factor=choice.rows)
        s[output].reorder(n, band, block, row, column, inner_row, inner_column, channel)
        bands = s[output].fuse(n, band)
        s[output].parallel(bands)
    for step in (steps.squares, steps.half_output):
        s[step].compute_at(s[output], column)
        _unroll_squares(s, step)

    n, point, block, tile, channel = s[steps.products].op.axis
    block, inner_block = s[steps.products].split(block, factor=choice.chunks)
    tile, inner_tile = s[steps.products].split(tile, factor=choice.columns)
    s[steps.products].reorder(n, point, block, tile, inner_block, inner_tile, channel)
    s[steps.products].vectorize(channel)
    s[steps.products].unroll(inner_block)
    s[steps.products].unroll(inner_tile)
    s[sums].compute_at(s[steps.products], tile)
    if is_whole:
        s[steps.products].parallel(s[steps.products].fuse(n, point, block))
    else:
        s[steps.products].compute_at(s[output], bands)

    _, _, block, tile, channel = s[sums].op.axis
    (term,) = s[sums].op.reduce_axis
    term, inner_term = s[sums].split(term, factor=int(steps.tiles.shape[4]))
    s[sums].reorder(term, inner_term, tile, block, channel)
    s[sums].vectorize(channel)
    s[sums].unroll(tile)
    s[sums].unroll(block)

    n, point, block, tile, channel = s[steps.tiles].op.axis
    row, tile = s[steps.tiles].split(tile, factor=steps.across)
    point, inner_point = s[steps.tiles].split(point, factor=m + KERNEL - 1)
    s[steps.tiles].reorder(n, block, row, tile, point, inner_point, channel)
    s[steps.tiles].vectorize(channel)
    s[steps.tiles].unroll(point)
    s[steps.tiles].unroll(inner_point)
    if is_whole:
        row = s[steps.tiles].fuse(n, block, row)
        s[steps.tiles].parallel(row)
    else:
        s[steps.tiles].compute_at(s[output], bands)
    s[steps.half_input].compute_at(s[steps.tiles], tile)
    _unroll_squares(s, steps.half_input)
    s[steps.padded].compute_at(s[steps.tiles], row)
    s[steps.padded].vectorize(s[steps.padded].op.axis[-1])


def _unroll_squares(s: te.Schedule, step: te.Tensor) -> None:
    *_, row, column, channel = s[step].op.axis
    s[step].unroll(row)
    s[step].unroll(column)
    s[step].vectorize(channel)
