"""Control flow taken out of ONNX graphs. Next: `onnx_known.py`, which settles conditions.

    If    whose condition is known                    -> the nodes of the branch that is taken
    If    that depends on data, with small branches   -> the nodes of both, and Where
    Loop  whose number of turns is known              -> that many copies of its body
    Scan  over an axis of known extent                -> that many copies of its body

What these leave is found by `onnx_walk.py`, which says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tvm_pipeline.frontends.onnx_inlining import Names, all_nodes, inlined, prune, replace_nodes
from tvm_pipeline.frontends.onnx_known import Known

CONTROL_FLOW = ("If", "Loop", "Scan")
MOST_COPIES = 256  # of a loop's body
MOST_NODES = 20_000  # of all copies of a loop's body
MOST_IN_BRANCHES = 200  # nodes of the two branches of an If that are both computed
_PASSES = 100  # each settles what the last one has uncovered
# Computed twice, or where it would not be, these do something else.
_IMPURE = {
    *("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
    *("Optional", "OptionalGetElement", "SequenceAt", "SequenceErase", "SequenceInsert"),
}


def without_control_flow(model: Any) -> list[str]:
    """Take the control flow out of a model where that is possible; return a line for each kind that was.

    An If whose branches differ in shape stays, and so does a Loop whose turns depend on data.
    """
    if not any(node.op_type in CONTROL_FLOW for node in model.graph.node):
        return []
    differing: dict[str, str] = {}
    while True:
        trial = onnx.ModelProto()
        trial.CopyFrom(model)
        flattening = _Flattening(trial, differing)
        for _ in range(_PASSES):
            if not flattening.one_pass() and not flattening.one_pass(both_branches=True):
                break
        found = flattening.differing_branches()
        if not found:
            break
        differing |= found
    notes = flattening.notes()
    if notes:
        prune(trial.graph)
        model.CopyFrom(trial)
    return [*notes, *(f"If {name} stays, since its branches give {shapes}" for name, shapes in differing.items())]


@dataclass(slots=True)
class _Copies:
    """The nodes that take the place of one node, with their weights."""

    nodes: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)

    def constant(self, array: Any, name: str, names: Names) -> str:
        """Add a weight; return its name."""
        free = names.free(name)
        self.weights.append(numpy_helper.from_array(np.asarray(array), free))
        return free

    def inline(self, graph: Any, inputs: dict[str, str], outputs: Sequence[str], names: Names) -> list[str]:
        """Add a copy of a subgraph; return the names of its outputs."""
        nodes, weights, found = inlined(graph, inputs, outputs, names)
        self.nodes += nodes
        self.weights += weights
        return found

    def identity(self, source: str, output: str) -> None:
        if output:
            self.nodes.append(helper.make_node("Identity", [source], [output]))


class _Flattening:
    def __init__(self, model: Any, kept: Collection[str]) -> None:
        self._model, self._graph, self._kept = model, model.graph, kept
        self._names = Names(model.graph)
        self._opset = max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=1)
        self._done: Counter[str] = Counter()
        self._pairs: list[tuple[str, str, str]] = []  # of each If whose branches are both computed: it, then, else
        self._known = Known(model)

    def one_pass(self, both_branches: bool = False) -> bool:
        """Replace what can be settled by what is known now; return whether anything was.

        Only where nothing else can be settled, an If may become both of its branches: its condition may be uncovered.
        """
        nodes: list[Any] = []
        changed = False
        replace = {"If": self._both if both_branches else self._if, "Loop": self._loop, "Scan": self._scan}
        for node in list(self._graph.node):
            copies = replace[node.op_type](node) if node.op_type in replace and not node.domain else None
            if copies is None:
                nodes.append(node)
                continue
            changed = True
            nodes += copies.nodes
            self._graph.initializer.extend(copies.weights)
        replace_nodes(self._graph, nodes)
        if changed:
            self._known = Known(self._model)
        return changed

    def notes(self) -> list[str]:
        return [f"{text} ({count})" if count > 1 else text for text, count in self._done.items()]

    def differing_branches(self) -> dict[str, str]:
        """Return the Ifs whose branches differ in shape: Where would make both one shape without a word."""
        found = {}
        for where, *pair in self._pairs:
            shapes = [self._known.shape(name) for name in pair]
            if shapes[0] != shapes[1] or shapes[0] is None:
                found[where] = " and ".join("an open shape" if shape is None else str(list(shape)) for shape in shapes)
        return found

    def _if(self, node: Any) -> _Copies | None:
        condition = self._known.values.get(node.input[0])
        if condition is None or condition.size != 1:
            return None
        copies = _Copies()
        taken = "then_branch" if bool(condition.item()) else "else_branch"
        copies.inline(helper.get_node_attr_value(node, taken), {}, node.output, self._names)
        self._done["If with a known condition replaced by its branch"] += 1
        return copies

    def _both(self, node: Any) -> _Copies | None:
        branches = {attribute.name: attribute.g for attribute in node.attribute}
        copies = _Copies()
        inside = [inner for branch in branches.values() for inner in all_nodes(branch)]
        tensors = all(output.type.HasField("tensor_type") for branch in branches.values() for output in branch.output)
        small = len(inside) <= MOST_IN_BRANCHES and not any(inner.op_type in _IMPURE for inner in inside)
        rank = self._known.shapes.get(node.input[0])
        if not small or not tensors or self._opset < 9 or rank is None or _called(node) in self._kept:
            return None
        condition_name = node.input[0]
        if rank:  # of one element, which must not give a scalar an axis
            condition_name = self._names.free(f"{node.input[0]}/scalar")
            copies.nodes.append(helper.make_node("Squeeze", [node.input[0]], [condition_name]))
        either = [
            copies.inline(branches[branch], {}, [""] * len(node.output), self._names)
            for branch in ("then_branch", "else_branch")
        ]
        for output, *pair in zip(node.output, *either, strict=True):
            if output:
                copies.nodes.append(helper.make_node("Where", [condition_name, *pair], [output]))
                self._pairs.append((_called(node), *pair))
        self._done["If that depends on data: both branches are computed"] += 1
        return copies

    def _loop(self, node: Any) -> _Copies | None:
        body = node.attribute[0].g
        trips, goes_on = (self._settled(node, index) for index in (0, 1))
        if trips is None or goes_on is None or (trips > MOST_COPIES and _goes_on(body)):
            return None
        copies = _Copies()
        states = list(node.input[2:])
        collected: list[list[str]] = [[] for _ in node.output[len(states) :]]
        true = copies.constant(np.array(True), f"{node.output[0]}/true", self._names)
        turn = 0
        while bool(goes_on) and turn < trips:
            if turn >= MOST_COPIES or len(copies.nodes) > MOST_NODES:
                return None
            number = copies.constant(np.array(turn, "int64"), f"{node.output[0]}/turn", self._names)
            self._known.values[number] = np.array(turn, "int64")
            begin = len(copies.nodes)
            read = dict(zip((value.name for value in body.input), (number, true, *states), strict=True))
            found = copies.inline(body, read, [""] * len(body.output), self._names)
            for weight in copies.weights:
                self._known.values.setdefault(weight.name, numpy_helper.to_array(weight))
            for inner in copies.nodes[begin:]:
                self._known.learn(inner)
            if found[0] != true:
                goes_on = self._known.values.get(found[0])
                if goes_on is None:
                    return None
            states = found[1 : 1 + len(states)]
            for names, name in zip(collected, found[1 + len(states) :], strict=True):
                names.append(name)
            turn += 1
        if collected and not turn:
            return None
        for state, output in zip(states, node.output, strict=False):
            copies.identity(state, output)
        for names, output in zip(collected, node.output[len(states) :], strict=True):
            self._stack(copies, names, 0, output)
        self._done[f"Loop unrolled into {turn} copies"] += 1
        return copies

    def _settled(self, node: Any, index: int) -> Any | None:
        """Return the known value of a Loop's number of turns, or of its condition; None where it depends on data."""
        if len(node.input) <= index or not node.input[index]:
            return np.inf if index == 0 else True
        value = self._known.values.get(node.input[index])
        return None if value is None or value.size != 1 else value.item()

    def _scan(self, node: Any) -> _Copies | None:
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        body, count = attributes["body"], attributes["num_scan_inputs"]
        if self._opset < 9:
            return None
        states, scanned = list(node.input[: len(node.input) - count]), node.input[len(node.input) - count :]
        results = node.output[len(states) :]
        shapes = [self._known.shape(name) for name in scanned]
        axes = attributes.get("scan_input_axes") or [0] * count
        if None in shapes:
            return None
        extents = {shape[axis] for shape, axis in zip(shapes, axes, strict=True) if shape is not None}
        turns = max(extents)
        if len(extents) > 1 or not 0 < turns <= MOST_COPIES or turns * len(body.node) > MOST_NODES:
            return None
        copies = _Copies()
        backwards = attributes.get("scan_input_directions") or [0] * count
        collected: list[list[str]] = [[] for _ in results]
        for turn in range(turns):
            read = dict(zip((value.name for value in body.input), states, strict=False))
            for value, name, axis, back in zip(body.input[len(states) :], scanned, axes, backwards, strict=True):
                at = turns - 1 - turn if back else turn
                index = copies.constant(np.array(at, "int64"), f"{name}/index", self._names)
                read[value.name] = self._names.free(f"{name}/{at}")
                copies.nodes.append(helper.make_node("Gather", [name, index], [read[value.name]], axis=axis))
            found = copies.inline(body, read, [""] * len(body.output), self._names)
            states = found[: len(states)]
            for names, name in zip(collected, found[len(states) :], strict=True):
                names.append(name)
        for state, output in zip(states, node.output, strict=False):
            copies.identity(state, output)
        axes = attributes.get("scan_output_axes") or [0] * len(results)
        backwards = attributes.get("scan_output_directions") or [0] * len(results)
        for names, axis, back, output in zip(collected, axes, backwards, results, strict=True):
            self._stack(copies, names[::-1] if back else names, axis, output)
        self._done[f"Scan unrolled into {turns} copies"] += 1
        return copies

    def _stack(self, copies: _Copies, tensors: Sequence[str], axis: int, output: str) -> None:
        """Join tensors along a new axis."""
        if not output:
            return
        parts = []
        for name in tensors:
            parts.append(self._names.free(f"{name}/part"))
            if self._opset < 13:
                copies.nodes.append(helper.make_node("Unsqueeze", [name], [parts[-1]], axes=[axis]))
            else:
                axes = copies.constant(np.array([axis]), f"{name}/axes", self._names)
                copies.nodes.append(helper.make_node("Unsqueeze", [name, axes], [parts[-1]]))
        copies.nodes.append(helper.make_node("Concat", parts, [output], axis=axis))


def _goes_on(body: Any) -> bool:
    """Return whether a Loop's body hands on its condition as it is, so that all turns are run."""
    made = {output: node for node in body.node for output in node.output}
    name = body.output[0].name
    while name in made and made[name].op_type == "Identity":
        name = made[name].input[0]
    return bool(name == body.input[1].name)


def _called(node: Any) -> str:
    return str(node.name or node.output[0])
