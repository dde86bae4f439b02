"""LSTM, GRU and RNN of ONNX step by step, since a model is cut as a plain graph and TVM's importer has none.

    LSTM(X: (T, N, I))  ->  X @ W + b for all steps at once, then for each step
                            i, o, f, c = split(x[t] + h @ R);  C = f * C + i * c;  h = o * tanh(C)

Gates have the order of ONNX's specification. Weights must be constants. Next: `onnx_nodes.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import helper

from tvm_pipeline_tvm.numpy_rules import Array
from tvm_pipeline_tvm.relax.onnx_site import NodeSite, Rewrite

MOST_STEPS = 512  # of all directions of a node; each is about ten operators
_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_ACTIVATIONS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}


class _Unrolled:
    """The nodes that stand for one recurrent node."""

    def __init__(self, site: NodeSite) -> None:
        self.site, self.kind = site, site.node.op_type
        self.nodes: list[Any] = []
        self._count = 0
        attributes = site.attributes
        shape = site.look(site.node.input[0]).shape
        self._batch_first = bool(attributes.get("layout"))
        self.steps, self.batch = (shape[1], shape[0]) if self._batch_first else shape[:2]
        direction = str(attributes.get("direction", "forward"))
        self.reversed = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
        weights, recurrent, bias = (site.value(index) for index in (1, 2, 3))
        if weights is None or recurrent is None or (site.input(3) and bias is None):
            raise ValueError("its weights are no constants, and TVM takes no others; fold them into the file")
        self.hidden = recurrent.shape[2]
        self.weights, self.recurrent = weights, recurrent
        size = 2 * _GATES[self.kind] * self.hidden
        self.bias = np.zeros((len(self.reversed), size), weights.dtype) if bias is None else bias
        self.linear_before_reset = bool(attributes.get("linear_before_reset"))
        self._check(attributes)

    def _check(self, attributes: dict[str, Any]) -> None:
        wanted = _ACTIVATIONS[self.kind] * len(self.reversed)
        given = [each.decode() if isinstance(each, bytes) else each for each in attributes.get("activations", wanted)]
        lengths = self.site.value(4)
        if self.steps * len(self.reversed) > MOST_STEPS:
            raise ValueError(f"it has {self.steps} steps, over {MOST_STEPS}, and no graph is run in loops")
        if given != wanted or attributes.get("clip") or attributes.get("input_forget") or self.site.input(7):
            raise ValueError("TVM has it with the activations of the specification alone, without clip and peepholes")
        if self.site.input(4) and (lengths is None or np.any(lengths != self.steps)):
            raise ValueError("its sequences have lengths of their own; export the model without `sequence_lens`")

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node, and return its output."""
        self._count += 1
        name = self.site.name(f"{kind}/{self._count}")
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def constant(self, value: Array) -> str:
        self._count += 1
        self.nodes.append(self.site.constant(f"constant/{self._count}", value))
        return str(self.nodes[-1].output[0])

    def reshaped(self, name: str, *shape: int) -> str:
        return self.add("Reshape", name, self.constant(np.array(shape, "int64")))

    def split(self, name: str, parts: int, axis: int) -> list[str]:
        """Return equal parts of a tensor along an axis."""
        if parts == 1:
            return [name]
        self._count += 1
        names = [self.site.name(f"part/{self._count}/{part}") for part in range(parts)]
        size = self.steps if axis == 0 else _GATES[self.kind] * self.hidden
        if axis and parts == 2:
            size = 2 * self.hidden
        sizes = [size // parts] * parts
        inputs, attributes = [name], {"axis": axis}
        if self.site.opset < 13:
            attributes["split"] = sizes  # type: ignore[assignment]
        else:
            inputs.append(self.constant(np.array(sizes, "int64")))
        self.nodes.append(helper.make_node("Split", inputs, names, **attributes))
        return names

    def initial(self, index: int, direction: int) -> str:
        """Return the state before the first step, (N, H)."""
        shape = (self.batch, self.hidden)
        if not self.site.input(index):
            return self.constant(np.zeros(shape, self.weights.dtype))
        state = self.site.input(index)
        if len(self.reversed) > 1:
            axis = 1 if self._batch_first else 0
            state = self.add("Gather", state, self.constant(np.array(direction, "int64")), axis=axis)
        return self.reshaped(state, *shape)

    def product(self, name: str, matrix: Array) -> str:
        """Return a tensor times a matrix of (outputs, inputs)."""
        return self.add("MatMul", name, self.constant(np.ascontiguousarray(matrix.T)))

    def run(self) -> list[Any]:
        data = self.site.node.input[0]
        if self._batch_first:
            data = self.add("Transpose", data, perm=[1, 0, 2])
        sequences, lasts = [], []
        for direction, is_reversed in enumerate(self.reversed):
            outputs, states = self._direction(data, direction, is_reversed)
            each = [self.reshaped(name, 1, 1, self.batch, self.hidden) for name in outputs]
            sequences.append(self.add("Concat", *each, axis=0) if len(each) > 1 else each[0])
            lasts.append([self.reshaped(state, 1, self.batch, self.hidden) for state in states])
        self._give(0, sequences, 1, [2, 0, 1, 3])
        for index, last in enumerate(zip(*lasts, strict=True), 1):
            self._give(index, list(last), 0, [1, 0, 2])
        return self.nodes

    def _give(self, index: int, parts: list[str], axis: int, batch_first: Sequence[int]) -> None:
        """Give an output of the node its value, where it is read."""
        outputs = self.site.node.output
        if index >= len(outputs) or not outputs[index]:
            return
        whole = self.add("Concat", *parts, axis=axis) if len(parts) > 1 else parts[0]
        if self._batch_first:
            whole = self.add("Transpose", whole, perm=list(batch_first))
        self.nodes.append(helper.make_node("Identity", [whole], [outputs[index]]))

    def _direction(self, data: str, direction: int, is_reversed: bool) -> tuple[list[str], list[str]]:
        """Return the outputs of all steps, in their order in time, and the states behind the last."""
        half = _GATES[self.kind] * self.hidden
        bias, recurrent_bias = self.bias[direction, :half].copy(), self.bias[direction, half:].copy()
        if self.kind == "GRU" and self.linear_before_reset:  # that of the last gate is reset, too
            bias[: 2 * self.hidden] += recurrent_bias[: 2 * self.hidden]
        else:
            bias += recurrent_bias
        moved = self.add("Add", self.product(data, self.weights[direction]), self.constant(bias))
        steps = [self.reshaped(part, self.batch, half) for part in self.split(moved, self.steps, 0)]
        states = [self.initial(5, direction)]
        if self.kind == "LSTM":
            states.append(self.initial(6, direction))
        step = {"LSTM": self._lstm, "GRU": self._gru, "RNN": self._rnn}[self.kind]
        outputs: list[str] = [""] * self.steps
        for position in reversed(range(self.steps)) if is_reversed else range(self.steps):
            states = step(steps[position], states, self.recurrent[direction], recurrent_bias)
            outputs[position] = states[0]
        return outputs, states

    def _rnn(self, x: str, states: list[str], recurrent: Array, bias: Array) -> list[str]:
        return [self.add("Tanh", self.add("Add", x, self.product(states[0], recurrent)))]

    def _lstm(self, x: str, states: list[str], recurrent: Array, bias: Array) -> list[str]:
        h, c = states
        gates = self.split(self.add("Add", x, self.product(h, recurrent)), 4, 1)
        i, o, f = (self.add("Sigmoid", gate) for gate in gates[:3])
        new = self.add("Tanh", gates[3])
        c = self.add("Add", self.add("Mul", f, c), self.add("Mul", i, new))
        return [self.add("Mul", o, self.add("Tanh", c)), c]

    def _gru(self, x: str, states: list[str], recurrent: Array, bias: Array) -> list[str]:
        h, size = states[0], self.hidden
        xz, xr, xn = self.split(x, 3, 1)
        both = self.split(self.product(h, recurrent[: 2 * size]), 2, 1)
        z, r = (self.add("Sigmoid", self.add("Add", *pair)) for pair in zip((xz, xr), both, strict=True))
        if self.linear_before_reset:
            moved = self.add("Add", self.product(h, recurrent[2 * size :]), self.constant(bias[2 * size :]))
            before = self.add("Mul", r, moved)
        else:
            before = self.product(self.add("Mul", r, h), recurrent[2 * size :])
        new = self.add("Tanh", self.add("Add", xn, before))
        return [self.add("Add", new, self.add("Mul", z, self.add("Sub", h, new)))]


def _unrolled(site: NodeSite) -> list[Any]:
    return _Unrolled(site).run()


RECURRENT: dict[str, Rewrite] = dict.fromkeys(_GATES, _unrolled)
