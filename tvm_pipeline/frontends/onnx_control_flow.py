"""Control flow taken out of ONNX graphs. Next: `onnx_known.py`, which settles conditions.

    If    whose condition is known                    -> the nodes of the branch that is taken
    If    that depends on data, with small branches   -> the nodes of both, and Where
    Loop  whose number of turns is known              -> that many copies of its body
    Scan  over an axis of known extent                -> that many copies of its body

What these leave is found by `onnx_walk.py`, which says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from tvm_pipeline.core.deadline import Deadline
from tvm_pipeline.frontends.onnx_inlining import Names, all_nodes, copied, inlined, label, prune, replace_nodes
from tvm_pipeline.frontends.onnx_known import KnownTensors

CONTROL_FLOW = ("If", "Loop", "Scan")
MOST_COPIES = 256  # of a loop's body
MOST_NODES = 5000  # of all copies of subgraphs in a model; TVM takes minutes for more
MOST_BYTES = 64 << 20  # of the same
LONGEST_S = 15.0
MOST_COUNTED = 2000  # turns of a loop that are counted, where no copies are made
MOST_IN_BRANCHES = 200  # nodes of the two branches of an If that are both computed
# Computed twice, or where it would not be, these do something else.
_IMPURE = {
    *("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
    *("Optional", "OptionalGetElement", "SequenceAt", "SequenceErase", "SequenceInsert"),
}


def without_control_flow(model: Any, path: Any) -> list[str]:
    """Take the control flow out of a model where that is possible; return a line for each kind that was.

    An If whose branches differ in shape stays, and so does a Loop whose turns depend on data, and whatever would become
    more copies than the limits of a model allow.

    Args:
        path: the file, for messages.

    Raises:
        ModelError: it takes more than LONGEST_S seconds.
    """
    if not any(node.op_type in CONTROL_FLOW for node in model.graph.node):
        return []
    flattening = _Flattener(model, path)
    copies = flattening.flat(model.graph.node)
    known = {value.name: value for value in copies.types}
    for value in (*model.graph.output, *model.graph.value_info):
        if value.name in known:
            value.CopyFrom(known.pop(value.name))
    model.graph.value_info.extend(known.values())
    if copies.done:
        replace_nodes(model.graph, copies.nodes)
        model.graph.initializer.extend(copies.weights)
        prune(model.graph)
    return [*copies.notes(), *flattening.notes()]


class _FlatteningError(Exception):
    """Control flow stays: its copies are more than the limits of a model allow, or it has control flow that stays."""


@dataclass(slots=True)
class _Copies:
    """Nodes that take the place of others, with their weights, and how often what was done for that."""

    nodes: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    types: list[Any] = field(default_factory=list)  # of what loops that stay give
    done: Counter[str] = field(default_factory=Counter)

    def take(self, others: _Copies) -> None:
        self.nodes += others.nodes
        self.weights += others.weights
        self.types += others.types
        self.done += others.done

    def notes(self) -> list[str]:
        return [f"{text} ({count})" if count > 1 else text for text, count in self.done.items()]


class _Flattener:
    """Goes through the nodes of a model once, in their order: what is known of a node's inputs is known when it comes.

    Nodes of a subgraph that takes the place of an If or a Loop are gone through at that place.
    """

    def __init__(self, model: Any, path: Any) -> None:
        self._names = Names(model.graph)
        self._known = KnownTensors(model)
        self._opset = max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=1)
        remedy = "export the model without loops, or with fewer steps"
        self._deadline = Deadline(f"{path}: taking out its control flow", LONGEST_S, remedy)
        self._nodes_left = MOST_NODES + sum(1 for _ in all_nodes(model.graph))  # each is copied once where no loop is
        self._bytes_left = MOST_BYTES + model.ByteSize()
        self._differing: dict[str, list[str]] = {}  # Ifs that stay, by the shapes of their branches

    def flat(self, nodes: Iterable[Any]) -> _Copies:
        """Return the nodes, and in the place of control flow what computes the same."""
        made = _Copies()
        replace = {"If": self._if, "Loop": self._loop, "Scan": self._scan}
        for node in nodes:
            self._deadline.check(label(node))
            try:
                copies = replace[node.op_type](node) if node.op_type in replace and not node.domain else None
            except _FlatteningError:
                copies = None
            if copies is not None:
                made.take(copies)
                continue
            self._add(made, node)
            if node.op_type == "Loop" and not node.domain:
                made.types += self._types_of_loop(made, node)
        return made

    def notes(self) -> list[str]:
        """Return a line for the Ifs that stay because their branches differ in shape, of each kind."""
        lines = []
        for shapes, names in self._differing.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"If {names[0]}{more} stays, since its branches give {shapes}")
        return lines

    def _add(self, copies: _Copies, node: Any) -> None:
        self._known.learn(node)
        copies.nodes.append(node)

    def _constant(self, copies: _Copies, array: Any, name: str) -> str:
        """Add a weight; return its name."""
        weight = numpy_helper.from_array(np.asarray(array), self._names.free(name))
        self._add_weight(copies, weight)
        return str(weight.name)

    def _add_weight(self, copies: _Copies, weight: Any) -> None:
        self._known.add(weight)
        copies.weights.append(weight)

    def _inline(self, copies: _Copies, graph: Any, inputs: dict[str, str], outputs: Sequence[str]) -> list[str]:
        """Add a copy of a subgraph without its control flow; return the names of its outputs."""
        parts = (*graph.node, *(tensor for tensor in graph.initializer if tensor.name not in inputs))
        self._nodes_left -= 1 + len(graph.node)
        self._bytes_left -= sum(part.ByteSize() for part in parts)
        if min(self._nodes_left, self._bytes_left) < 0:
            raise _FlatteningError
        nodes, weights, found = inlined(graph, inputs, outputs, self._names)
        for weight in weights:
            self._add_weight(copies, weight)
        copies.take(self.flat(nodes))
        return found

    def _if(self, node: Any) -> _Copies | None:
        condition = self._known.values.get(node.input[0])
        if condition is None or condition.size != 1:
            return self._both(node)
        copies = _Copies()
        taken = "then_branch" if bool(condition.item()) else "else_branch"
        self._inline(copies, helper.get_node_attr_value(node, taken), {}, node.output)
        copies.done["If with a known condition replaced by its branch"] += 1
        return copies

    def _both(self, node: Any) -> _Copies | None:
        branches = {attribute.name: attribute.g for attribute in node.attribute}
        inside = [inner for branch in branches.values() for inner in all_nodes(branch)]
        tensors = all(output.type.HasField("tensor_type") for branch in branches.values() for output in branch.output)
        small = len(inside) <= MOST_IN_BRANCHES and not any(inner.op_type in _IMPURE for inner in inside)
        extents = self._known.extents(node.input[0])
        if not small or not tensors or self._opset < 9 or extents is None:
            return None
        copies = _Copies()
        condition = node.input[0]
        if extents:  # of one element, which must not give a scalar an axis
            condition = self._names.free(f"{node.input[0]}/scalar")
            self._add(copies, helper.make_node("Squeeze", [node.input[0]], [condition]))
        either = [
            self._inline(copies, branches[branch], {}, [""] * len(node.output))
            for branch in ("then_branch", "else_branch")
        ]
        for output, *pair in zip(node.output, *either, strict=True):
            if not output:
                continue
            shapes = [self._known.shape(name) for name in pair]
            if shapes[0] != shapes[1] or shapes[0] is None:  # Where would make both one shape without a word
                told = " and ".join("an open shape" if shape is None else str(list(shape)) for shape in shapes)
                self._differing.setdefault(told, []).append(_called(node))
                return None
            self._add(copies, helper.make_node("Where", [condition, *pair], [output]))
        copies.done["If that depends on data: both branches are computed"] += 1
        return copies

    def _loop(self, node: Any) -> _Copies | None:
        body = node.attribute[0].g
        trips, goes_on = (self._settled(node, index) for index in (0, 1))
        if trips is None or goes_on is None or (trips > MOST_COPIES and _goes_on(body)):
            return None
        copies = _Copies()
        states = list(node.input[2:])
        collected: list[list[str]] = [[] for _ in node.output[len(states) :]]
        true = self._constant(copies, np.array(True), "true")
        shared = self._shared(copies, body)
        turn = 0
        while bool(goes_on) and turn < trips:
            if turn >= MOST_COPIES:
                return None
            number = self._constant(copies, np.array(turn, "int64"), "turn")
            read = dict(zip((value.name for value in body.input), (number, true, *states), strict=True))
            found = self._turn(copies, body, shared | read)
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
        self._hand_on(copies, states, node.output)
        for names, output in zip(collected, node.output[len(states) :], strict=True):
            self._stack(copies, names, 0, output)
        copies.done[f"Loop unrolled into {turn} copies"] += 1
        return copies

    def _types_of_loop(self, copies: _Copies, node: Any) -> list[Any]:
        """Return the types of what a Loop that stays gives, where its number of turns is known."""
        trips, goes_on = (self._settled(node, index) for index in (0, 1))
        if not trips or not goes_on:
            return []
        for weight in node.attribute[0].g.initializer:
            self._known.add(weight)
        turns = trips if _goes_on(node.attribute[0].g) else self._turns(node, trips)
        if turns is None or turns == np.inf:
            return []
        copies.done[f"Loop stays, since up to {MOST_COPIES} turns and {MOST_NODES} nodes of a model are copied"] += 1
        return self._known.learn_loop(node, int(turns))

    def _turns(self, node: Any, trips: float) -> int | None:
        """Return after how many turns a Loop ends by what it counts itself; None where that depends on data."""
        body, known = node.attribute[0].g, self._known.values
        counting = _counting(body)
        values = [known.get(name) for name in node.input[2:]]
        changing = [value.name for value in body.input] + [name for inner in counting for name in inner.output]
        for turn in range(int(min(trips, MOST_COUNTED))):
            self._deadline.check(label(node))
            for name in changing:
                known.pop(name, None)
            given = zip((value.name for value in body.input), (np.array(turn), np.array(True), *values), strict=True)
            known.update((name, array) for name, array in given if array is not None)
            for inner in counting:
                self._known.learn(inner)
            goes_on, *values = (known.get(value.name) for value in body.output[: 1 + len(values)])
            if goes_on is None or not goes_on:
                break
        for name in changing:
            known.pop(name, None)
        return None if goes_on is None or goes_on else turn + 1

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
        if len(extents) > 1 or not 0 < turns <= MOST_COPIES:
            return None
        copies = _Copies()
        backwards = attributes.get("scan_input_directions") or [0] * count
        collected: list[list[str]] = [[] for _ in results]
        shared = self._shared(copies, body)
        for turn in range(turns):
            read = dict(zip((value.name for value in body.input), states, strict=False))
            for value, name, axis, back in zip(body.input[len(states) :], scanned, axes, backwards, strict=True):
                at = turns - 1 - turn if back else turn
                index = self._constant(copies, np.array(at, "int64"), "turn")
                read[value.name] = self._names.free("scanned")
                self._add(copies, helper.make_node("Gather", [name, index], [read[value.name]], axis=axis))
            found = self._turn(copies, body, shared | read)
            states = found[: len(states)]
            for names, name in zip(collected, found[len(states) :], strict=True):
                names.append(name)
        self._hand_on(copies, states, node.output)
        axes = attributes.get("scan_output_axes") or [0] * len(results)
        backwards = attributes.get("scan_output_directions") or [0] * len(results)
        for names, axis, back, output in zip(collected, axes, backwards, results, strict=True):
            self._stack(copies, names[::-1] if back else names, axis, output)
        copies.done[f"Scan unrolled into {turns} copies"] += 1
        return copies

    def _shared(self, copies: _Copies, body: Any) -> dict[str, str]:
        """Add the weights of a loop's body once for all copies of it; return their new names."""
        names = {tensor.name: self._names.free(tensor.name) for tensor in body.initializer}
        for tensor in body.initializer:
            self._add_weight(copies, copied(tensor, names[tensor.name]))
        return names

    def _turn(self, copies: _Copies, body: Any, inputs: dict[str, str]) -> list[str]:
        """Add a copy of a loop's body; return the names of its outputs. With control flow in it, the loop stays."""
        begin = len(copies.nodes)
        found = self._inline(copies, body, inputs, [""] * len(body.output))
        if any(node.op_type in CONTROL_FLOW for node in copies.nodes[begin:]):
            raise _FlatteningError
        return found

    def _hand_on(self, copies: _Copies, states: Sequence[str], outputs: Sequence[str]) -> None:
        """Give the last states of a loop the names of its outputs."""
        for state, output in zip(states, outputs, strict=False):
            if output:
                self._add(copies, helper.make_node("Identity", [state], [output]))

    def _stack(self, copies: _Copies, tensors: Sequence[str], axis: int, output: str) -> None:
        """Join tensors along a new axis."""
        if not output:
            return
        parts = []
        for name in tensors:
            parts.append(self._names.free("part"))
            if self._opset < 13:
                self._add(copies, helper.make_node("Unsqueeze", [name], [parts[-1]], axes=[axis]))
            else:
                axes = self._constant(copies, np.array([axis]), "axes")
                self._add(copies, helper.make_node("Unsqueeze", [name, axes], [parts[-1]]))
        self._add(copies, helper.make_node("Concat", parts, [output], axis=axis))


def _counting(body: Any) -> list[Any]:
    """Return the nodes of a Loop's body that its condition depends on, in this turn or by way of a state in a later."""
    handed_on = dict(zip((value.name for value in body.input[1:]), (value.name for value in body.output), strict=False))
    needed: set[str] = set()
    waiting = {body.output[0].name}
    while waiting:
        needed |= waiting
        read = {name for node in body.node if needed.intersection(node.output) for name in node.input}
        waiting = (read | {handed_on[name] for name in needed | read if name in handed_on}) - needed
    return [node for node in body.node if needed.intersection(node.output)]


def _goes_on(body: Any) -> bool:
    """Return whether a Loop's body hands on its condition as it is, so that all turns are run."""
    made = {output: node for node in body.node for output in node.output}
    name = body.output[0].name
    while name in made and made[name].op_type == "Identity":
        name = made[name].input[0]
    return bool(name == body.input[1].name)


def _called(node: Any) -> str:
    return str(node.name or node.output[0])
