"""Random networks of what is hard to cut: LSTMs that TVM unrolls, splits, joins, moves of axes, choices by value.

Their outputs are read inside, given out twice or under two shapes, or are inputs as they came. Random sizes are small:
such a network compiles in a second or two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np

from tests.support.networks import Weights, module_of

import tvm  # isort: skip
from tvm import relay  # isort: skip
from tvm.relay.frontend.common import lstm_cell, unbind  # isort: skip

Made = Sequence[relay.Expr]
MOST_ELEMENTS = 2000


def shape_of(x: relay.Expr) -> tuple[int, ...]:
    return tuple(int(extent) for extent in relay.transform.InferTypeLocal(x).shape)


class Tangle:
    """Adds random operators to a network; `pool` holds its float tensors so far."""

    def __init__(self, draw: Random) -> None:
        self.draw, self.weights = draw, Weights()
        self.inputs = [relay.var("steps", shape=(4, 1, 8)), relay.var("picture", shape=(1, 12, 6, 6))]
        self.pool: list[relay.Expr] = [*self.inputs]

    def pick(self, shape: tuple[int, ...] | None = None) -> relay.Expr:
        """Return a tensor, of this shape where one is given; rather a late one."""
        fitting = [x for x in self.pool if shape is None or shape_of(x) == shape]
        return self.draw.choice(fitting[-8:])

    def lstm(self, x: relay.Expr) -> Made:
        steps = x if x is self.inputs[0] else relay.reshape(self.rows(x), (4, 1, -1))
        zeros, units = relay.zeros((1, 4), "float32"), 4
        weights = self.weights(4 * units, shape_of(steps)[2]), self.weights(4 * units, units)
        outputs, hidden, cell = lstm_cell(unbind(steps, 0), zeros, zeros, *weights)
        return relay.stack(outputs, self.draw.randrange(2)), hidden, cell, *outputs[:1]

    def rows(self, x: relay.Expr) -> relay.Expr:
        """Return the tensor as four rows, padded where they would not be full."""
        flat = relay.reshape(x, (-1,))
        extent = shape_of(flat)[0]
        return relay.reshape(relay.nn.pad(flat, [[0, -extent % 4]]), (4, -1))

    def split(self, x: relay.Expr) -> Made:
        """Return the fields of a split, with the axis dropped where it is of extent 1."""
        shape = shape_of(x)
        axis = max(range(len(shape)), key=lambda each: (shape[each] > 1, self.draw.random()))
        places = sorted(self.draw.sample(range(1, shape[axis]), min(shape[axis] - 1, 3)))
        fields = list(relay.split(x, places, axis)) if places else [x]
        return [
            relay.squeeze(each, [axis]) if shape_of(each)[axis] == 1 and len(shape) > 1 else each for each in fields
        ]

    def unbound(self, x: relay.Expr) -> Made:
        return unbind(self.rows(x), 0)

    def join(self, x: relay.Expr) -> Made:
        others = [self.pick(shape_of(x)) for _ in range(self.draw.randint(1, 2))]
        return [relay.concatenate([x, *others], self.draw.randrange(len(shape_of(x))))]

    def stack(self, x: relay.Expr) -> Made:
        return [relay.stack([x, self.pick(shape_of(x))], self.draw.randint(0, len(shape_of(x))))]

    def transpose(self, x: relay.Expr) -> Made:
        axes = list(range(len(shape_of(x))))
        self.draw.shuffle(axes)
        return [relay.transpose(x, axes)]

    def reshape(self, x: relay.Expr) -> Made:
        return [relay.reshape(x, self.draw.choice([(-1,), (1, -1), (1, 1, -1)]))]

    def unary(self, x: relay.Expr) -> Made:
        return [self.draw.choice([relay.tanh, relay.sigmoid, relay.nn.relu, relay.negative])(x)]

    def binary(self, x: relay.Expr) -> Made:
        return [self.draw.choice([relay.add, relay.maximum])(x, self.pick(shape_of(x)))]

    def where(self, x: relay.Expr) -> Made:
        return [relay.where(relay.greater(x, relay.const(0.1)), x, self.pick(shape_of(x)))]

    def gather(self, x: relay.Expr) -> Made:
        axis = self.draw.randrange(len(shape_of(x)))
        return [relay.gather(x, axis, relay.argsort(x, axis, dtype="int32"))]

    def topk(self, x: relay.Expr) -> Made:
        flat = relay.reshape(x, (-1,))
        found = relay.topk(flat, k=min(shape_of(flat)[0], 4), ret_type="both", dtype="int32")
        rows = relay.take(self.rows(x), relay.const(np.array([2, 0], "int32")), axis=0)
        return found[0], relay.cast(found[1], "float32"), rows

    def boxes(self, x: relay.Expr) -> Made:
        """Return the boxes that non-maximum suppression leaves of a tensor read as such."""
        flat = relay.reshape(x, (-1,))
        boxes = relay.reshape(relay.nn.pad(flat, [[0, -shape_of(flat)[0] % 6]]), (1, -1, 6))
        count, data, indices = relay.vision.get_valid_counts(boxes, 0.1)
        return [relay.vision.non_max_suppression(data, count, indices, -1, 0.5, return_indices=False)]

    def convolution(self, _: relay.Expr) -> Made:
        pictures = [x for x in self.pool if len(shape_of(x)) == 4 and shape_of(x)[0] == 1 and min(shape_of(x)) > 0]
        return [self.weights.conv(self.draw.choice(pictures), self.draw.choice([6, 12, 24]), self.draw.choice([1, 3]))]

    def outputs(self) -> Made:
        """Return outputs some of which are one tensor, are read inside, or are an input."""
        found = [self.pool[-1], self.pool[2], *self.draw.sample(self.pool[3:], 3)]
        again = self.draw.choice(found)
        return [*found, again, relay.reshape(again, (-1,)), relay.reshape(self.inputs[0], (4, 8)), self.inputs[1]]


KINDS: dict[str, Callable[[Tangle, relay.Expr], Made]] = {
    name: getattr(Tangle, name)
    for name in (
        *("lstm", "split", "unbound", "join", "stack", "transpose", "reshape", "unary", "binary"),
        *("where", "gather", "topk", "boxes", "convolution"),
    )
}


def tangled_module(seed: int) -> tuple[tvm.IRModule, dict[str, Any]]:
    """Return a network in which every kind of operator stands once, in random order, and its parameters."""
    tangle = Tangle(Random(seed))
    kinds = list(KINDS.values())
    tangle.draw.shuffle(kinds)
    tangle.pool.extend(tangle.lstm(tangle.inputs[0]))
    for kind in kinds:
        x = tangle.pick()
        if shape_of(x):
            made = kind(tangle, x)
            tangle.pool.extend(each for each in made if 0 < np.prod(shape_of(each)) <= MOST_ELEMENTS)
    body = relay.Tuple(list(tangle.outputs()))
    return module_of(body), tangle.weights.params
