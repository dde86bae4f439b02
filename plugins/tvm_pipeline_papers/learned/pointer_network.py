"""A pointer network in numpy: it reads the rows of a graph's operators and picks them one after another.

Two LSTMs, a glimpse and a pointing attention: Vinyals et al., "Pointer Networks", NeurIPS 2015; Bello et al., "Neural
Combinatorial Optimization with Reinforcement Learning", 2016; RESPECT's algorithm 1 (DAC 2023). With d hidden cells and
rows of w numbers, the weights are, by name:

    start                                            w       the decoder's first input
    encoder/input, encoder/hidden, encoder/bias      w x 4d, d x 4d, 4d
    decoder/input, decoder/hidden, decoder/bias      w x 4d, d x 4d, 4d
    glimpse/key, glimpse/query                       d x d, d x d
    glimpse/query_bias, glimpse/vector               d, d
    pointer/key, pointer/query                       d x d, d x d
    pointer/query_bias, pointer/vector               d, d

A vector is multiplied from the left: `x @ weights`. The four gates of an LSTM stand in the order i, f, g, o:

    i, f, g, o = split(x @ input + hidden @ hidden_weights + bias)
    cell = sigmoid(f) * cell + sigmoid(i) * tanh(g);  hidden = sigmoid(o) * tanh(cell)

The encoder begins with zeros; C is its n x d outputs, and its last state is the decoder's first. A step of the decoder:

    h, state = decoder(row of the operator picked last, or `start`; state)
    h = glimpse's keys, C @ glimpse/key, weighted with the softmax of scores(glimpse, h)
    the pick is by the softmax of scores(pointer, h)
    scores(a, h) = tanh(C @ a/key + h @ a/query + a/query_bias) @ a/vector

Both attentions see only operators that may be picked: those that are not yet (the paper's mask), or those of them whose
parents all are (the ready mask).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tvm_pipeline.errors import ModelError
from tvm_pipeline_papers.learned.weights import Floats32, Integers, Weights

PURPOSE = "respect"
VERSION = 1

_State = tuple[Floats32, Floats32]  # the hidden vector and the cell


def weight_shapes(columns: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array of weights, by name, for rows of so many columns and so many hidden cells."""
    shapes: dict[str, tuple[int, ...]] = {"start": (columns,)}
    for lstm in ("encoder", "decoder"):
        shapes |= {
            f"{lstm}/input": (columns, 4 * hidden),
            f"{lstm}/hidden": (hidden, 4 * hidden),
            f"{lstm}/bias": (4 * hidden,),
        }
    for attention in ("glimpse", "pointer"):
        shapes |= {
            f"{attention}/key": (hidden, hidden),
            f"{attention}/query": (hidden, hidden),
            f"{attention}/query_bias": (hidden,),
            f"{attention}/vector": (hidden,),
        }
    return shapes


def untrained(columns: int, hidden: int, seed: int) -> dict[str, Floats32]:
    """Return weights as training begins with them: uniform between -1/sqrt(hidden) and 1/sqrt(hidden)."""
    rng = np.random.default_rng(seed)
    most = hidden**-0.5
    return {
        name: rng.uniform(-most, most, shape).astype(np.float32)
        for name, shape in sorted(weight_shapes(columns, hidden).items())
    }


def check_shapes(weights: Weights, columns: int, where: str) -> None:
    """Raise ModelError, which begins with `where`, unless these are all weights of one network for such rows."""
    found = {name: array.shape for name, array in weights.items()}
    vector = found.get("pointer/vector", ())
    expected = weight_shapes(columns, vector[0] if vector else 1)
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            raise ModelError(
                f"{where}: the pointer network has weights {name} of shape {found.get(name)}, but "
                f"{expected.get(name)} is needed; train them again, or install the package anew"
            )


@dataclass(frozen=True, slots=True, eq=False)
class PointerNetwork:
    """A network and the graph that it has read.

    Attributes:
        weights: by name, see above.
        rows: n x w; the embedding of the operators.
        glimpse_keys, pointer_keys: n x d.
        state: of the encoder behind the last row.
    """

    weights: Weights
    rows: Floats32
    glimpse_keys: Floats32
    pointer_keys: Floats32
    state: _State

    @classmethod
    def read(cls, weights: Weights, rows: Floats32) -> PointerNetwork:
        """Return the network with the rows read, so that sequences of them can be decoded."""
        inputs = rows @ weights["encoder/input"] + weights["encoder/bias"]
        hidden = np.zeros(len(weights["pointer/vector"]), np.float32)
        state = hidden, hidden
        contexts = np.empty((len(rows), len(hidden)), np.float32)
        for index, gates in enumerate(inputs):
            state = _lstm(gates + state[0] @ weights["encoder/hidden"], state[1])
            contexts[index] = state[0]
        return cls(weights, rows, contexts @ weights["glimpse/key"], contexts @ weights["pointer/key"], state)

    def sequence(
        self, parents: Sequence[Sequence[int]] | None = None, rng: np.random.Generator | None = None
    ) -> Integers:
        """Return the rows' indices as the network picks them, each once.

        Args:
            parents: of each row, for the ready mask; without them an operator may be picked before its parents.
            rng: picks by the network's probabilities; without it the most probable is picked, of equals the first.
        """
        weights, count = self.weights, len(self.rows)
        waits = np.array([len(found) for found in parents] if parents is not None else [0] * count, np.int64)
        children: list[list[int]] = [[] for _ in range(count)]
        for row, found in enumerate(parents or ()):
            for parent in found:
                children[parent].append(row)
        # The gates' part that the input has, for each row that may be picked.
        inputs = self.rows @ weights["decoder/input"] + weights["decoder/bias"]
        gates = weights["start"] @ weights["decoder/input"] + weights["decoder/bias"]
        hidden, cell = self.state
        picked = np.empty(count, np.int64)
        open_rows = np.flatnonzero(waits == 0)
        for step in range(count):
            hidden, cell = _lstm(gates + hidden @ weights["decoder/hidden"], cell)
            keys = self.glimpse_keys[open_rows]
            glimpse = _softmax(_scores(weights, "glimpse", keys, hidden)) @ keys
            scores = _scores(weights, "pointer", self.pointer_keys[open_rows], glimpse)
            place = int(scores.argmax()) if rng is None else _drawn(rng, _softmax(scores))
            pick = picked[step] = open_rows[place]
            gates = inputs[pick]
            waits[children[pick]] -= 1
            ready = [child for child in children[pick] if waits[child] == 0]
            # It stays sorted: of equal scores the first row wins.
            open_rows = np.sort(np.concatenate([np.delete(open_rows, place), np.array(ready, np.int64)]))
        return picked


def _lstm(gates: Floats32, cell: Floats32) -> _State:
    i, f, g, o = np.split(gates, 4)
    cell = _sigmoid(f) * cell + _sigmoid(i) * np.tanh(g)
    return _sigmoid(o) * np.tanh(cell), cell


def _sigmoid(x: Floats32) -> Floats32:
    # In this form nothing overflows.
    half: Floats32 = np.tanh(x * np.float32(0.5)) * np.float32(0.5) + np.float32(0.5)
    return half


def _scores(weights: Weights, attention: str, keys: Floats32, hidden: Floats32) -> Floats32:
    query = hidden @ weights[f"{attention}/query"] + weights[f"{attention}/query_bias"]
    scores: Floats32 = np.tanh(keys + query) @ weights[f"{attention}/vector"]
    return scores


def _softmax(scores: Floats32) -> Floats32:
    powers = np.exp(scores - scores.max())
    shares: Floats32 = powers / powers.sum()
    return shares


def _drawn(rng: np.random.Generator, probabilities: Floats32) -> int:
    sums = np.cumsum(probabilities, dtype=np.float64)
    # The sum of all is 1 only up to rounding.
    return int(np.searchsorted(sums, rng.random() * sums[-1], side="right").clip(max=len(sums) - 1))
