"""State that a model hands from each frame to the next: its graph, with each such loop as one ordered operator.

Models of sequences, such as voice activity detectors, have their state as an input and an output. Where the pipeline
carries it, the input is none of a frame, and every operator between the input and the output must have ended with a
frame before it begins with the next one. So these operators become one, which takes frames in order:

    frame -> encode -> cell(., state) -> head        frame -> encode -> loop/state -> head
                       cell -> next_state            loop/state carries next_state to state

What stands in front of the loop and behind it is planned as ever, on other devices or replicated. Loops that feed each
other within a frame become one. Read next: backends/carried.py, which compiles nothing anew for this, and
runtime/carried_state.py, which holds the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.topology import find_cycle, successors, topological_order
from tvm_pipeline.errors import OptionError

Carry = tuple[tuple[str, str], ...]


def with_loops(graph: OperatorGraph, carry: Carry) -> tuple[OperatorGraph, Mapping[str, tuple[str, ...]]]:
    """Return the graph with a loop for each state, and the operators that each of its operators stands for.

    Args:
        carry: pairs of an input, and the output that is this input for the next frame.

    Raises:
        OptionError: a pair names no input or output, or two that differ in shape or type, or an input has two outputs.

    Examples:
        >>> x, h, s, y = (Tensor(name, (1, 4)) for name in ("x", "h", "s", "y"))
        >>> add, head = Operator("add", "add", ("x", "h"), (s,)), Operator("head", "tanh", ("s",), (y,))
        >>> graph, members = with_loops(OperatorGraph("net", (x, h), (add, head), ("y", "s")), (("h", "s"),))
        >>> [tensor.name for tensor in graph.inputs], members
        (['x'], {'loop/h': ('add',), 'head': ('head',)})
    """
    group = list(range(len(graph)))  # of each operator: the least one that is joined with it

    def join(indices: Sequence[int]) -> None:
        joined = {group[index] for index in indices}
        group[:] = [min(joined) if number in joined else number for number in group]

    for state, output in _checked(graph, carry):
        join([graph.edges.writer[output], *graph.edges.readers[state]])
    while len(order := topological_order(before := _between(graph, group), successors(before))) < len(graph):
        join(find_cycle(before, order))  # what leaves a loop and comes back to it within a frame belongs to it
    members_of: dict[int, list[int]] = {}
    for index, number in enumerate(group):
        members_of.setdefault(number, []).append(index)
    operators, stands_for = [], {}
    for members in (members_of[number] for number in order if number in members_of):
        operator = _joined(graph, members, carry)
        operators.append(operator)
        stands_for[operator.name] = tuple(graph.operators[index].name for index in members)
    states = {state for state, _ in carry}
    inputs = tuple(tensor for tensor in graph.inputs if tensor.name not in states)
    return OperatorGraph(graph.name, inputs, tuple(operators), graph.outputs), stands_for


def carry_of(graph: OperatorGraph) -> Carry:
    """Return the pairs that the loops of a graph carry; none where it has no state."""
    return tuple((state.name, output) for operator in graph.operators for state, output in operator.carried)


def parse_carry(text: str) -> tuple[str, str]:
    """Read `INPUT:OUTPUT`; of several colons, the one with as many on both sides divides.

    Raises:
        OptionError: the text is something else.

    Examples:
        >>> parse_carry("state:stateN"), parse_carry("state:0:stateN:0")
        (('state', 'stateN'), ('state:0', 'stateN:0'))
    """
    parts = text.split(":")
    middle = len(parts) // 2
    state, output = ":".join(parts[:middle]), ":".join(parts[middle:])
    if len(parts) % 2 or not state or not output:
        raise OptionError(f"`carry` {text!r}: give it as INPUT:OUTPUT, such as state:stateN")
    return state, output


def _between(graph: OperatorGraph, group: Sequence[int]) -> list[set[int]]:
    """Return for each group the groups that it reads from; none for an operator that is joined with an earlier one."""
    before: list[set[int]] = [set() for _ in group]
    for index, sources in enumerate(graph.edges.before):
        before[group[index]].update(group[source] for source in sources if group[source] != group[index])
    return before


def _checked(graph: OperatorGraph, carry: Carry) -> Carry:
    inputs = {tensor.name: tensor for tensor in graph.inputs}
    for index, (state, output) in enumerate(carry):
        where = f"`carry` {state}:{output}"
        if state not in inputs:
            raise OptionError(f"{where}: {graph.name} has no input {state}; its inputs are {', '.join(inputs)}")
        if output not in graph.outputs:
            known = ", ".join(graph.outputs)
            raise OptionError(f"{where}: {graph.name} has no output {output}; its outputs are {known}")
        if output not in graph.edges.writer:
            raise OptionError(f"{where}: output {output} of {graph.name} is an input as it is; no operator writes it")
        if not graph.edges.readers[state]:
            raise OptionError(f"{where}: no operator of {graph.name} reads input {state}; leave this state out")
        if state in (other for other, _ in carry[:index]):
            raise OptionError(f"{where}: {state} is carried already; an input takes one output of the frame before")
        taken, given = inputs[state], graph.tensors[output]
        if (taken.shape, taken.dtype) != (given.shape, given.dtype):
            raise OptionError(f"{where}: {_shown(taken)} and {_shown(given)} differ; a state keeps its shape and type")
    return carry


def _shown(tensor: Tensor) -> str:
    return f"{tensor.name} ({tensor.dtype} {list(tensor.shape)})"


def _joined(graph: OperatorGraph, members: Sequence[int], carry: Carry) -> Operator:
    """Return the operator that stands for these: a loop where they carry anything, else the one that they are."""
    own = [graph.operators[index] for index in members]
    written = {tensor.name: tensor for operator in own for tensor in operator.outputs}
    carried = tuple((graph.tensors[state], output) for state, output in carry if output in written)
    if not carried:
        return own[0]
    states = {state.name for state, _ in carried}
    inside = set(members)
    read = dict.fromkeys(name for operator in own for name in operator.inputs)
    return Operator(
        f"loop/{carried[0][0].name}",
        f"loop of {len(own)} operators" if len(own) > 1 else own[0].kind,
        tuple(name for name in read if name not in written and name not in states),
        tuple(
            tensor
            for name, tensor in written.items()
            if name in graph.outputs or not inside.issuperset(graph.edges.readers[name])
        ),
        sum(operator.param_bytes for operator in own),
        sum(operator.macs for operator in own),
        ordered=True,
        carried=carried,
    )
