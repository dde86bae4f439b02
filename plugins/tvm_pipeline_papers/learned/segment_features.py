"""What a predictor is told of a segment: the features of PredPar, and an extended set of them.

A segment is the operators start..end-1 of a graph's order. Source of the paper's features: Zou et al., "A Performance
Prediction-based DNN Partitioner for Edge TPU Pipelining", MILCOM 2024: type, in-degree and output shape of each
operator; input, output and parameter bytes of the segment. They do not tell the work of a convolution, which depends on
its kernel and the channels that it reads. The extended set does.

Next: `segment_predictor.py`, the network that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tvm_pipeline import Operator, OperatorGraph, Tensor
from tvm_pipeline.errors import OptionError
from tvm_pipeline.planning import prefixes
from tvm_pipeline_papers.learned.weights import Floats32, Integers

Flags = npt.NDArray[np.bool_]

# The family of an operator is the first of these that has a part of its kind, as TFLite, Keras and Relay write kinds.
# So the order matters: `conv2d+add+relu` is a convolution, `ZeroPadding2D` no addition, `matmul` no multiplication.
FAMILIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("depthwise", ("depthwise",)),
    ("separable", ("sep",)),
    ("conv", ("conv",)),
    ("dense", ("dense", "fully", "matmul")),
    ("mean", ("mean", "global")),
    ("pool", ("pool",)),
    ("concat", ("concat", "stack")),
    ("pad", ("pad",)),
    ("resize", ("resize", "upsampl")),
    ("add", ("add", "sub")),
    ("multiply", ("mul", "scale", "norm", "div")),
    ("activation", ("activation", "relu", "clip", "softmax", "sigmoid", "logistic", "tanh", "swish", "elu")),
    ("copy", ("reshape", "flat", "squeeze", "expand", "slice", "split", "transpose", "cast", "quantize")),
)
KINDS = len(FAMILIES) + 1  # the last one is of all others
MOST_IN_DEGREE = 8
# Numbers enter as log2(1 + x) over this, so that they are about 1.
DOUBLINGS = 10.0

PAPER_NUMBERS = 3  # of a node: height, width, channels of its output
EXTENDED_NUMBERS = 7  # and its bytes, multiply-accumulates, parameter bytes, channels of its first input
PAPER_SEGMENT_NUMBERS = 3  # input, output and parameter bytes
EXTENDED_SEGMENT_NUMBERS = 6  # and parameter bytes beyond the cache, multiply-accumulates, operators


@dataclass(frozen=True, slots=True, eq=False)
class SegmentBatch:
    """B segments of at most L operators, as the predictor reads them; a shorter segment ends in padding of zeros.

    Attributes:
        kind: B x L; the family of each operator, below KINDS.
        in_degree: B x L; how many tensors it reads, at most MOST_IN_DEGREE.
        numbers: B x L x F; F is PAPER_NUMBERS or EXTENDED_NUMBERS.
        reads: B x L x L; whether operator i reads what operator j of the segment writes.
        present: B x L; False for padding.
        segment: B x G; the virtual node's; G is PAPER_SEGMENT_NUMBERS or EXTENDED_SEGMENT_NUMBERS.
    """

    kind: Integers
    in_degree: Integers
    numbers: Floats32
    reads: Flags
    present: Flags
    segment: Floats32


@dataclass(frozen=True, slots=True, eq=False)
class GraphFeatures:
    """The features of a graph of n operators, of which those of its segments are cut.

    Attributes:
        kind, in_degree: n.
        numbers: n x F.
        reads: n x n.
        bytes_across: n+1; bytes of the tensors that cross each position of the order.
        params_before, macs_before: n+1; sums over the operators before each position.
        kept_bytes: of parameters that the device keeps from frame to frame.
        extended: which set of features this is.
    """

    kind: Integers
    in_degree: Integers
    numbers: Floats32
    reads: Flags
    bytes_across: Integers
    params_before: Integers
    macs_before: Integers
    kept_bytes: int
    extended: bool

    def __len__(self) -> int:
        return len(self.kind)

    def batch(self, segments: Sequence[tuple[int, int]], length: int | None = None) -> SegmentBatch:
        """Return the features of segments (start, end).

        Args:
            length: L; None is that of the longest segment.

        Raises:
            OptionError: a segment is empty, not within the graph, or longer than `length`.
        """
        bounds = np.array(segments, np.int64).reshape(-1, 2)
        starts, ends = bounds[:, 0], bounds[:, 1]
        longest = int((ends - starts).max(initial=1)) if length is None else length
        if not ((starts >= 0) & (starts < ends) & (ends <= len(self)) & (ends - starts <= longest)).all():
            raise OptionError(
                f"segments are (start, end) with 0 <= start < end <= {len(self)}, of {longest} operators at most; "
                f"these are not: {list(map(tuple, bounds.tolist()))[:4]}"
            )
        at = starts[:, None] + np.arange(longest)
        present = at < ends[:, None]
        at = np.where(present, at, 0)
        both = present[:, :, None] & present[:, None, :]
        return SegmentBatch(
            kind=np.where(present, self.kind[at], 0),
            in_degree=np.where(present, self.in_degree[at], 0),
            numbers=np.where(present[..., None], self.numbers[at], np.float32(0)),
            reads=self.reads[at[:, :, None], at[:, None, :]] & both,
            present=present,
            segment=self._segment_numbers(starts, ends),
        )

    def _segment_numbers(self, starts: Integers, ends: Integers) -> Floats32:
        params = self.params_before[ends] - self.params_before[starts]
        told = [self.bytes_across[starts], self.bytes_across[ends], params]
        if self.extended:
            beyond = np.maximum(0, params - self.kept_bytes)
            told += [beyond, self.macs_before[ends] - self.macs_before[starts], ends - starts]
        return _scaled(np.stack(told, axis=1))


def graph_features(graph: OperatorGraph, cached_bytes: int, *, extended: bool) -> GraphFeatures:
    """Return the features of a graph.

    Args:
        cached_bytes: the parameters that the device keeps from frame to frame.
        extended: whether nodes and segments have the numbers that the paper does not have.

    Example:
        >>> image, features = Tensor("image", (1, 8, 8, 3), "int8"), Tensor("features", (1, 8, 8, 4), "int8")
        >>> conv = Operator("conv", "conv_2d", ("image",), (features,), param_bytes=108, macs=6912)
        >>> found = graph_features(OperatorGraph("net", (image,), (conv,), ("features",)), 6 << 20, extended=True)
        >>> FAMILIES[found.kind[0]][0], int(found.in_degree[0])
        ('conv', 1)
        >>> [round(float(2 ** (DOUBLINGS * number)), 1) for number in found.numbers[0]]
        [9.0, 9.0, 5.0, 257.0, 6913.0, 109.0, 4.0]
    """
    operators, tensors = graph.operators, graph.tensors
    reads = np.zeros((len(graph), len(graph)), np.bool_)
    for index, sources in enumerate(graph.edges.before):
        reads[index, list(sources)] = True
    told = [_numbers(operator, tensors.__getitem__, extended) for operator in operators]
    return GraphFeatures(
        kind=np.array([_family(operator.kind) for operator in operators], np.int64),
        in_degree=np.array([min(MOST_IN_DEGREE, len(set(operator.inputs))) for operator in operators], np.int64),
        numbers=_scaled(np.array(told, np.float64)),
        reads=reads,
        bytes_across=prefixes(graph).crossing_bytes,
        params_before=np.cumsum([0, *(operator.param_bytes for operator in operators)]),
        macs_before=np.cumsum([0, *(operator.macs for operator in operators)]),
        kept_bytes=cached_bytes,
        extended=extended,
    )


def _numbers(operator: Operator, tensor: Callable[[str], Tensor], extended: bool) -> list[int]:
    height, width, channels = _picture(operator.outputs[0]) if operator.outputs else (0, 0, 0)
    numbers = [height, width, channels]
    if extended:
        channels_read = _picture(tensor(operator.inputs[0]))[-1] if operator.inputs else 0
        numbers += [operator.output_bytes, operator.macs, operator.param_bytes, channels_read]
    return numbers


def _picture(tensor: Tensor) -> tuple[int, int, int]:
    """Return height, width and channels of a tensor whose channels are its last axis, as on Edge TPUs."""
    shape = tensor.shape
    height, width = (shape[-3], shape[-2]) if len(shape) > 2 else (1, 1)
    return height, width, shape[-1] if shape else 1


def _family(kind: str) -> int:
    kind = kind.lower()
    return next((i for i, (_, parts) in enumerate(FAMILIES) if any(part in kind for part in parts)), KINDS - 1)


def _scaled(numbers: npt.NDArray[np.float64] | Integers) -> Floats32:
    return (np.log2(1.0 + numbers) / DOUBLINGS).astype(np.float32)
