"""The arrays of the exact search for orders: a part of a graph, a position in it, and the states that were reached.

Numba takes them as NamedTuples. What belongs to one operator, buffer or state is one record of a structured array: it
has names, and calls between the loops stay cheap, since every array of a NamedTuple costs a few nanoseconds a call.
Shapes use these letters:

    n  operators of the region, 0..n-1 in a topological order
    b  buffers that they touch
    N  states that the store has space for

Next: `order_search.py`, the loops; `regions.py`, which makes a Region of a graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

BITS = 62  # of a word of a state; fewer than 64, so that plain Python and compiled code never meet a sign


def _record(*names: str) -> np.dtype[Any]:
    return np.dtype([(name, np.int64) for name in names], align=True)


# The lists of an operator, in the order in which they stand in `Region.links`.
LISTS = ("after", "begin", "end", "fresh", "dying", "before", "near")
OPERATOR = _record(
    *LISTS,
    *("needs", "workspace", "saved", "code"),
    *("done", "missing", "ready", "trail", "candidates", "is_candidate", "taken"),
)
BUFFER = _record("size", "begun_at_start", "left_at_start", "begun", "left")
NOW = _record("base", "ready_count", "trail_count", "alive")
STATE = _record("code", "depth", "parent", "path_start", "path_end")
ENTRY = _record("first", "second", "state")
TALLY = _record("state_count", "open_count", "written", "expanded", "cut")


class Region(NamedTuple):
    """The operators of a part of a graph, the buffers that they begin and end, and a position: what has run.

    A buffer is alive once one of the operators that begin it has run, until all operators that end it have run.

    Attributes:
        links: the entries of all lists. The list `after` of an operator is
            `links[operators[op]["after"] : operators[op + 1]["after"]]`, and so for the other lists.
        operators: n + 1 records, of which the last only ends the lists. These fields do not change:
            after, before: the operators that must wait for this one, and those that it waits for.
            begin, end: the buffers that it begins, and those that it ends.
            fresh, dying: its rules of running in place. A rule is a pair of buffers, one in each list: the operator
                runs in place if nothing has begun the fresh one, and only this operator has still to end the dying one.
            near: the operators with which it shares a buffer or a reader.
            needs: how many operators must run before it.
            workspace, saved: bytes of workspace, and bytes that it saves when it runs in place.
            code: a random number. The codes of the operators of a state, xored, are its hash.
            And these describe the position; `ready`, `trail` and `candidates` are columns that hold a list each:
            done, missing: whether the operator has run, and how many others must still run before it.
            ready: the operators that miss no other. Some of them may have run since they were listed.
            trail: the operators that have run, in their order.
            candidates, is_candidate: operators that may be safe to commit; whether an operator is in that list.
            taken: how many states of each depth a beam has expanded. It stays from call to call.
        buffers: b records.
            size: bytes.
            begun_at_start, left_at_start: how many operators have begun the buffer, and how many have to end it.
            begun, left: the same at the position.
        now: 1 record.
            base: bytes alive before the first operator.
            ready_count, trail_count: the lengths of the two lists.
            alive: bytes alive at the position.
    """

    links: Any
    operators: Any
    buffers: Any
    now: Any


class Store(NamedTuple):
    """The states that were reached; in state 0 nothing has run.

    Attributes:
        words: N x words; the operators that have run, as bits.
        states: N records.
            code: the hash of a state.
            depth: how many operators have run.
            parent: the state it was reached from, by the operators `path[path_start : path_end]`.
        path: the operators of all these paths.
        table: a hash table of the states, a power of two long; -1 where it is free.
        heap: N records; a heap of the open states, ordered by `first` and then by `second`.
        tally: 1 record.
            state_count, open_count: how many states there are, and how many of them are open.
            written: how much of `path` is written.
            expanded: how many states were expanded.
            cut: the least bytes of a step that was above the bound.
    """

    words: Any
    states: Any
    path: Any
    table: Any
    heap: Any
    tally: Any


class Limits(NamedTuple):
    """The limits of a search, and its ideas that can be switched off.

    Attributes:
        bound: bytes that no step may exceed.
        beam: how many states of each depth are expanded, the least deep first; 0 for all, the deepest first.
        commit, near, merge: see `exact_order.Pruning`.
    """

    bound: int
    beam: int
    commit: bool
    near: bool
    merge: bool
