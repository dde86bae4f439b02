"""The predictor of PredPar: a Graphormer that reads a segment and says how many seconds it takes on a device.

Source: Zou et al., MILCOM 2024, whose network is a Graphormer (Ying et al., "Do Transformers Really Perform Badly for
Graph Representation?", NeurIPS 2021) with a virtual node for the segment. The paper states no sizes; these are ours.
The network is computed with numpy. It is trained by `benchmarks/train_predpar.py`.

With S = L + 1 nodes, the virtual node first, W the width and H the heads, of W / H numbers each:

    h = kind[its kind] + in_degree[its in-degree] + numbers @ node + node_bias          of an operator
    h = segment @ virtual + virtual_bias                                                of the virtual node
    in each layer:
        q, k, v = split(norm(h) @ qkv + qkv_bias, 3)          each in H heads, one behind the other
        score   = q . k / sqrt(W / H) + pair_bias[...]        of every two nodes, and the softmax over k's nodes
        h      += concat(softmax(score) @ v) @ mixed + mixed_bias
        h      += gelu(norm(h) @ up + up_bias) @ down + down_bias
    seconds = UNIT_S * sum over nodes of exp(min(gelu(norm(h) @ read + read_bias) @ units + units_bias, LARGEST))

So a longer segment takes more by construction, up to what nodes tell each other. `norm` is layer normalisation with
EPSILON, then times gain, plus shift; gelu is its tanh form. A pair of nodes (i, j), where i asks and j is asked, has
the sum of these of `pair_bias`: READS where i reads what j writes, READ where j reads what i writes, AFTER where i
comes next after j in the order, BEFORE where j does, VIRTUAL where exactly one of them is the virtual node.

Arrays, for D layers; F and G are those of `segment_features.SegmentBatch`:

    kind (KINDS, W)                     in_degree (MOST_IN_DEGREE + 1, W)
    node (F, W)                         node_bias (W)
    virtual (G, W)                      virtual_bias (W)
    attention_norm (D, 2, W)            gain, shift
    qkv (D, W, 3 W)                     qkv_bias (D, 3 W)
    pair_bias (D, PAIRS, H)
    mixed (D, W, W)                     mixed_bias (D, W)
    mlp_norm (D, 2, W)
    up (D, W, 2 W)                      up_bias (D, 2 W)
    down (D, 2 W, W)                    down_bias (D, W)
    last_norm (2, W)
    read (W, W)                         read_bias (W)
    units (W)                           units_bias (1)

Next: `predpar.py`, which asks it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tvm_pipeline import OperatorGraph
from tvm_pipeline.errors import ModelError
from tvm_pipeline_papers.learned.segment_features import (
    EXTENDED_NUMBERS,
    EXTENDED_SEGMENT_NUMBERS,
    KINDS,
    MOST_IN_DEGREE,
    PAPER_NUMBERS,
    PAPER_SEGMENT_NUMBERS,
    GraphFeatures,
    SegmentBatch,
    graph_features,
)
from tvm_pipeline_papers.learned.weights import Floats, Floats32, Weights, WeightsNote, read_weights

PURPOSE, VERSION = "predpar", 1  # of the weights; a change of the features or of the layers is another version

LAYERS, WIDTH, HEADS = 3, 64, 4  # as trained; the code reads any
PAIRS = 5
READS, READ, AFTER, BEFORE, VIRTUAL = range(PAIRS)
UNIT_S = 1e-4
EPSILON = 1e-5
LARGEST = 14.0  # logarithm of a node's units: two minutes, so that nothing overflows

# Scores of one call: what is computed at once fits the caches of a processor, and never takes much memory.
_MOST_SCORES = 1 << 20
_BLOCK = 16  # lengths that `table` asks together


def shapes(
    *, extended: bool, layers: int = LAYERS, width: int = WIDTH, heads: int = HEADS
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array of the weights."""
    numbers = EXTENDED_NUMBERS if extended else PAPER_NUMBERS
    segment_numbers = EXTENDED_SEGMENT_NUMBERS if extended else PAPER_SEGMENT_NUMBERS
    return {
        "kind": (KINDS, width),
        "in_degree": (MOST_IN_DEGREE + 1, width),
        "node": (numbers, width),
        "node_bias": (width,),
        "virtual": (segment_numbers, width),
        "virtual_bias": (width,),
        "attention_norm": (layers, 2, width),
        "qkv": (layers, width, 3 * width),
        "qkv_bias": (layers, 3 * width),
        "pair_bias": (layers, PAIRS, heads),
        "mixed": (layers, width, width),
        "mixed_bias": (layers, width),
        "mlp_norm": (layers, 2, width),
        "up": (layers, width, 2 * width),
        "up_bias": (layers, 2 * width),
        "down": (layers, 2 * width, width),
        "down_bias": (layers, width),
        "last_norm": (2, width),
        "read": (width, width),
        "read_bias": (width,),
        "units": (width,),
        "units_bias": (1,),
    }


def predicted_seconds(weights: Weights, batch: SegmentBatch) -> Floats:
    """Return the predicted seconds of the B segments of a batch."""
    heads = weights["pair_bias"].shape[-1]
    h = weights["kind"][batch.kind] + weights["in_degree"][batch.in_degree]
    h += batch.numbers @ weights["node"] + weights["node_bias"]
    virtual = batch.segment @ weights["virtual"] + weights["virtual_bias"]
    h = np.concatenate([virtual[:, None], h], axis=1)
    present = np.pad(batch.present, ((0, 0), (1, 0)), constant_values=True)
    pairs = _pairs(batch)
    # Nobody asks padding.
    hidden = np.where(present, np.float32(0), np.float32(-np.inf))[:, None, None, :]
    for layer in range(len(weights["qkv"])):
        asked = _normal(h, weights["attention_norm"][layer]) @ weights["qkv"][layer] + weights["qkv_bias"][layer]
        q, k, v = (_in_heads(part, heads) for part in np.split(asked, 3, axis=-1))
        score = q @ k.swapaxes(-1, -2) / np.float32(np.sqrt(q.shape[-1])) + hidden
        score += np.moveaxis(pairs @ weights["pair_bias"][layer], -1, 1)
        told = (_softmax(score) @ v).swapaxes(1, 2).reshape(h.shape)
        h = h + told @ weights["mixed"][layer] + weights["mixed_bias"][layer]
        wide = _gelu(_normal(h, weights["mlp_norm"][layer]) @ weights["up"][layer] + weights["up_bias"][layer])
        h = h + wide @ weights["down"][layer] + weights["down_bias"][layer]
    read = _gelu(_normal(h, weights["last_norm"]) @ weights["read"] + weights["read_bias"])
    units = np.exp(np.minimum(read @ weights["units"] + weights["units_bias"], np.float32(LARGEST)))
    seconds: Floats = UNIT_S * np.where(present, units, 0).astype(np.float64).sum(axis=1)
    return seconds


@dataclass(slots=True, eq=False)
class SegmentPredictor:
    """The predicted seconds of a graph's segments, each computed once.

    Attributes:
        features: of the graph.
        weights: of the network, see this file's docstring.
        known: the segments asked so far.
    """

    features: GraphFeatures
    weights: Weights
    known: dict[tuple[int, int], float] = field(default_factory=dict)

    def seconds(self, start: int, end: int) -> float:
        """Return the predicted seconds of operators start..end-1.

        Raises:
            OptionError: there are none.
        """
        if (start, end) not in self.known:
            self.ask([(start, end)])
        return self.known[start, end]

    def predicted(self, segments: Sequence[tuple[int, int]]) -> list[float]:
        """Return the predicted seconds of segments (start, end), which takes less time than one by one."""
        self.ask(segments)
        return [self.known[segment] for segment in segments]

    def ask(self, segments: Iterable[tuple[int, int]]) -> None:
        """Predict segments (start, end) together, which takes less time than one by one.

        Raises:
            OptionError: a segment is not one of the graph.
        """
        waiting = sorted({*segments} - self.known.keys(), key=lambda segment: segment[1] - segment[0])
        heads = self.weights["pair_bias"].shape[-1]
        while waiting:
            # The longest ones first: those that are computed together are about as long as each other.
            longest = max(1, waiting[-1][1] - waiting[-1][0])
            together = max(1, _MOST_SCORES // (heads * (longest + 1) ** 2))
            some = waiting[-together:]
            del waiting[-together:]
            found = predicted_seconds(self.weights, self.features.batch(some))
            self.known.update(zip(some, found.tolist(), strict=True))

    def table(self, limit_s: float = math.inf) -> Floats:
        """Return the predicted seconds of all segments [start, end], as n+1 x n+1, infinite where they are empty.

        This takes a while: a graph of 100 operators has 5050 segments. With a limit, a segment is not asked, and
        infinite, where a block of shorter ones from the same start all take more than that.
        """
        count = len(self.features)
        table_s = np.full((count + 1, count + 1), math.inf)
        starts = list(range(count))
        for length in range(1, count + 1, _BLOCK):
            ends = [range(start + length, min(start + length + _BLOCK, count + 1)) for start in starts]
            self.ask((start, end) for start, block in zip(starts, ends, strict=True) for end in block)
            for start, block in zip(starts, ends, strict=True):
                table_s[start, block.start : block.stop] = [self.known[start, end] for end in block]
            starts = [
                start
                for start, block in zip(starts, ends, strict=True)
                if block and table_s[start, block.start : block.stop].min() <= limit_s
            ]
        return table_s


def segment_predictor(graph: OperatorGraph, cached_bytes: int, weights: Weights) -> SegmentPredictor:
    """Return the predictor of a graph's segments; which set of features it reads is seen from the weights.

    Args:
        cached_bytes: the parameters that the device keeps from frame to frame.
        weights: as `read_predictor` returns them.
    """
    extended = len(weights["node"]) == EXTENDED_NUMBERS
    return SegmentPredictor(graph_features(graph, cached_bytes, extended=extended), weights)


def read_predictor(path: Path | str) -> tuple[Weights, WeightsNote]:
    """Return the weights of a predictor, and their note.

    Raises:
        ModelError: the file is damaged, or its arrays are not those of this network.
    """
    weights, note = read_weights(path, PURPOSE, VERSION)
    found = {name: array.shape for name, array in weights.items()}
    layers, _, heads = (*found.get("pair_bias", ()), 0, 0, 0)[:3]
    width = found.get("units", (0,))[-1]
    fitting = [shapes(extended=extended, layers=layers, width=width, heads=heads) for extended in (False, True)]
    if found not in fitting or not layers or not heads or not width or width % heads:
        wanted = fitting[len(weights["node"]) == EXTENDED_NUMBERS if "node" in weights else 0]
        wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        raise ModelError(
            f"{path}: the weights are not those of a predictor of {layers} layers, {heads} heads and width {width}: "
            f"look at {', '.join(wrong) or 'the width'}; train them again"
        )
    return weights, note


def _pairs(batch: SegmentBatch) -> Floats32:
    """Return B x S x S x PAIRS; which biases each pair of nodes has, as zeros and ones."""
    size, length = batch.present.shape
    pairs = np.zeros((size, length + 1, length + 1, PAIRS), np.float32)
    pairs[:, 1:, 1:, READS] = batch.reads
    pairs[:, 1:, 1:, READ] = batch.reads.swapaxes(1, 2)
    pairs[:, 1:, 1:, AFTER] = np.eye(length, k=-1)
    pairs[:, 1:, 1:, BEFORE] = np.eye(length, k=1)
    pairs[:, 0, 1:, VIRTUAL] = pairs[:, 1:, 0, VIRTUAL] = 1
    return pairs


def _in_heads(numbers: Floats32, heads: int) -> Floats32:
    size, nodes, width = numbers.shape
    split: Floats32 = numbers.reshape(size, nodes, heads, width // heads).swapaxes(1, 2)
    return split


def _normal(h: Floats32, gain_and_shift: Floats32) -> Floats32:
    centred = h - h.mean(axis=-1, keepdims=True)
    variance = np.square(centred).mean(axis=-1, keepdims=True)
    normal: Floats32 = centred / np.sqrt(variance + np.float32(EPSILON)) * gain_and_shift[0] + gain_and_shift[1]
    return normal


def _gelu(x: Floats32) -> Floats32:
    bent: Floats32 = (
        x * np.float32(0.5) * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)))
    )
    return bent


def _softmax(score: Floats32) -> Floats32:
    score = np.exp(score - score.max(axis=-1, keepdims=True))
    share: Floats32 = score / score.sum(axis=-1, keepdims=True)
    return share
