"""The loops of the exact search: states are downsets (what has run), a step runs one operator more.

No step may need more than a bound, so that a state is reached or it is not, and is kept once. `advance` takes the first
open state and makes its successors; `exact.py` says what is proven when none is left, and why a safe commit is safe;
`regions.py` makes the arrays. The loops take arrays one by one: to hand tuples of them on costs more than the work.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tvm_pipeline.solvers.hot import hot

BITS = 62  # of a word of a state; fewer than 64, so that plain Python and compiled code never meet a sign

# Rows of Region.starts: for each operator what must wait for it, the buffers that it begins and those that it ends; and
# its rules of running in place, each a buffer that must not have begun, and one that no other has still to end. Then
# what must run before it, and the operators that share a buffer or a reader with it.
AFTER, BEGIN, END, FRESH, DYING, BEFORE, NEAR = range(7)
# Rows of Region.traits: bytes of workspace, bytes saved in place, and a random number: those of a state, xored, are
# its hash. Row MISSING, of Position.operators, too: how many others must run before it.
MISSING, WORKSPACE, SAVED, CODE = range(4)
# Rows of Region.buffers: how many operators have begun it (at least one: it is alive) and have still to end it (none:
# it is dead). Position.buffers has them, too.
BEGUN, LEFT, SIZE = range(3)
# Rows of Position.operators: besides MISSING whether it has run; and, as lists, what is ready (it may have run by now),
# and what has run, in its order. Then a list of some, with a mark of those that are in it; and how many states of each
# depth a beam has taken, which stays from call to call.
DONE, READY, TRAIL, LIST, LISTED, TAKEN = range(1, 7)
# Position.count: the lengths of these two lists, and the bytes alive.
ALL_READY, ALL_RUN, ALIVE = range(3)
# Rows of Store.states; the operators that led to a state from its parent are Store.path[PATH_START:PATH_END].
CODED, DEPTH, PARENT, PATH_START, PATH_END = range(5)
# Columns of Store.heap: two that order it, the smaller first, and the state.
FIRST, SECOND, OPENED = range(3)
# Store.tally: how many states there are, how many are open, what is written of Store.path, the expansions, and the
# least bytes of a step that was above the bound.
STATES, OPEN, WRITTEN, EXPANDED, CUT = range(5)
# What ended a call of `advance`: the last state is the goal; none is open; enough expansions; an array is full.
FOUND, NONE, PAUSED, FULL = range(4)


class Region(NamedTuple):
    """Operators 0..n-1 in a topological order, and the buffers that they begin and end.

    A buffer is alive once one of the operators that begin it has run, until all that end it have.

    Attributes:
        starts: (7, n + 1); list `k` of operator `i` is `links[starts[k, i]:starts[k, i + 1]]`.
        traits: (4, n).
        buffers: (3, buffers).
        base: bytes alive before the first operator.
    """

    starts: Any
    links: Any
    traits: Any
    buffers: Any
    base: int


class Position(NamedTuple):
    """A region after some operators have run."""

    operators: Any
    buffers: Any
    count: Any


class Store(NamedTuple):
    """The states reached, of which nothing has run in state 0; a hash table of them; and a heap of those still open."""

    words: Any
    states: Any
    path: Any
    table: Any
    heap: Any
    tally: Any


@hot
def cost(starts: Any, links: Any, traits: Any, size: Any, live: Any, alive: int, op: int) -> Any:
    """Bytes alive while `op` runs next."""
    total = alive + traits[WORKSPACE, op]
    for k in range(starts[BEGIN, op], starts[BEGIN, op + 1]):
        if live[BEGUN, links[k]] == 0:
            total += size[links[k]]
    rules = starts[DYING, op] - starts[FRESH, op]
    for k in range(starts[FRESH, op], starts[FRESH, op + 1]):
        if live[BEGUN, links[k]] == 0 and live[LEFT, links[k + rules]] == 1:
            return total - traits[SAVED, op]
    return total


@hot
def change(starts: Any, links: Any, size: Any, live: Any, op: int) -> Any:
    """Bytes alive after `op` has run next, less those before."""
    total = 0
    for k in range(starts[BEGIN, op], starts[BEGIN, op + 1]):
        if live[BEGUN, links[k]] == 0:
            total += size[links[k]]
    for k in range(starts[END, op], starts[END, op + 1]):
        if live[LEFT, links[k]] == 1:
            total -= size[links[k]]
    return total


@hot
def run(starts: Any, links: Any, size: Any, ops: Any, live: Any, count: Any, op: int) -> None:
    """Runs `op`."""
    ops[DONE, op] = 1
    ops[TRAIL, count[ALL_RUN]] = op
    count[ALL_RUN] += 1
    count[ALIVE] += change(starts, links, size, live, op)
    for k in range(starts[BEGIN, op], starts[BEGIN, op + 1]):
        live[BEGUN, links[k]] += 1
    for k in range(starts[END, op], starts[END, op + 1]):
        live[LEFT, links[k]] -= 1
    for k in range(starts[AFTER, op], starts[AFTER, op + 1]):
        ops[MISSING, links[k]] -= 1
        if ops[MISSING, links[k]] == 0:
            ops[READY, count[ALL_READY]] = links[k]
            count[ALL_READY] += 1


@hot
def back(starts: Any, links: Any, size: Any, ops: Any, live: Any, count: Any, length: int) -> None:
    """Takes back what ran last, until `length` operators are left."""
    while count[ALL_RUN] > length:
        count[ALL_RUN] -= 1
        op = ops[TRAIL, count[ALL_RUN]]
        ops[DONE, op] = 0
        for k in range(starts[AFTER, op], starts[AFTER, op + 1]):
            if ops[MISSING, links[k]] == 0:
                count[ALL_READY] -= 1
            ops[MISSING, links[k]] += 1
        for k in range(starts[END, op], starts[END, op + 1]):
            live[LEFT, links[k]] += 1
        for k in range(starts[BEGIN, op], starts[BEGIN, op + 1]):
            live[BEGUN, links[k]] -= 1
        count[ALIVE] -= change(starts, links, size, live, op)


@hot
def heir(starts: Any, links: Any, ops: Any, op: int) -> Any:
    """An operator that only waits for `op`; -1 where there is none."""
    for k in range(starts[AFTER, op], starts[AFTER, op + 1]):
        if ops[MISSING, links[k]] == 1:
            return links[k]
    return -1


@hot
def waits_for(starts: Any, links: Any, ops: Any, op: int) -> Any:
    """The operator that `op` waits for in the end, where each waits for one alone; -1 where one waits for several."""
    while ops[MISSING, op] == 1:
        for k in range(starts[BEFORE, op], starts[BEFORE, op + 1]):
            if ops[DONE, links[k]] == 0:
                op = links[k]
                break
    return op if ops[MISSING, op] == 0 and ops[DONE, op] == 0 else -1


@hot
def commit(
    starts: Any, links: Any, traits: Any, size: Any, ops: Any, live: Any, count: Any, bound: int, depth: int, least: int
) -> None:
    """Runs what is safe to run at once: chains that end with no more bytes alive and do not pass the bound.

    Before `trail[depth:]` ran nothing was safe, at `least` bytes alive. So only what is near to those may be safe now,
    unless fewer bytes are alive.
    """
    listed, seen = 0, depth
    safe = True
    while safe:
        if depth == 0 or count[ALIVE] < least:
            for k in range(count[ALL_READY]):
                op = ops[READY, k]
                if ops[LISTED, op] == 0 and ops[DONE, op] == 0:
                    ops[LISTED, op] = 1
                    ops[LIST, listed] = op
                    listed += 1
        else:
            for place in range(seen, count[ALL_RUN]):
                ran = ops[TRAIL, place]
                for k in range(starts[NEAR, ran], starts[NEAR, ran + 1]):
                    op = waits_for(starts, links, ops, links[k])
                    if op >= 0 and ops[LISTED, op] == 0:
                        ops[LISTED, op] = 1
                        ops[LIST, listed] = op
                        listed += 1
        seen = count[ALL_RUN]
        safe = False
        for k in range(listed):
            op = ops[LIST, k]
            if ops[DONE, op] == 1:
                continue
            length, alive = count[ALL_RUN], count[ALIVE]
            while op >= 0:
                safe = count[ALIVE] + change(starts, links, size, live, op) <= alive
                then = -1 if safe else heir(starts, links, ops, op)
                if (not safe and then < 0) or cost(starts, links, traits, size, live, count[ALIVE], op) > bound:
                    safe = False
                    break
                run(starts, links, size, ops, live, count, op)
                op = then
            if safe:
                break
            back(starts, links, size, ops, live, count, length)
    for k in range(listed):
        ops[LISTED, ops[LIST, k]] = 0


@hot
def load(starts: Any, links: Any, traits: Any, buffers: Any, ops: Any, live: Any, count: Any, words: Any) -> None:
    """From the region's start to where the operators of a state have run."""
    for buffer in range(buffers.shape[1]):
        live[BEGUN, buffer], live[LEFT, buffer] = buffers[BEGUN, buffer], buffers[LEFT, buffer]
    for op in range(ops.shape[1]):
        ops[DONE, op], ops[MISSING, op] = 0, traits[MISSING, op]
        if ops[MISSING, op] == 0:
            ops[READY, count[ALL_READY]] = op
            count[ALL_READY] += 1
    for op in range(ops.shape[1]):
        if words[op // BITS] >> (op % BITS) & 1:
            run(starts, links, buffers[SIZE], ops, live, count, op)


@hot
def push(heap: Any, at: int, first: int, second: int, state: int) -> None:
    """Adds a state to a heap of `at`."""
    while at > 0:
        above = (at - 1) // 2
        if heap[above, FIRST] < first or (heap[above, FIRST] == first and heap[above, SECOND] <= second):
            break
        for k in range(3):
            heap[at, k] = heap[above, k]
        at = above
    heap[at, FIRST], heap[at, SECOND], heap[at, OPENED] = first, second, state


@hot
def pop(heap: Any, last: int) -> None:
    """Takes the first state off a heap of `last + 1`."""
    first, second, state = heap[last, FIRST], heap[last, SECOND], heap[last, OPENED]
    at = 0
    while 2 * at + 1 < last:
        below = 2 * at + 1
        other = below + 1
        if other < last and (
            heap[other, FIRST] < heap[below, FIRST]
            or (heap[other, FIRST] == heap[below, FIRST] and heap[other, SECOND] < heap[below, SECOND])
        ):
            below = other
        if first < heap[below, FIRST] or (first == heap[below, FIRST] and second <= heap[below, SECOND]):
            break
        for k in range(3):
            heap[at, k] = heap[below, k]
        at = below
    heap[at, FIRST], heap[at, SECOND], heap[at, OPENED] = first, second, state


@hot
def find(table: Any, all_words: Any, codes: Any, words: Any, code: int) -> Any:
    """The slot of the table that holds the state, or is free for it."""
    slot = code & (len(table) - 1)
    while table[slot] >= 0:
        known = table[slot]
        equal = codes[known] == code
        for k in range(len(words)):
            equal = equal and all_words[known, k] == words[k]
        if equal:
            return slot
        slot = (slot + 1) & (len(table) - 1)
    return slot


@hot
def refill(table: Any, codes: Any, count: int) -> None:
    """Fills a new, larger table."""
    table[:] = -1
    for state in range(count):
        slot = codes[state] & (len(table) - 1)
        while table[slot] >= 0:
            slot = (slot + 1) & (len(table) - 1)
        table[slot] = state


@hot
def advance(
    starts: Any, links: Any, traits: Any, buffers: Any, base: int, ops: Any, live: Any, count: Any,
    all_words: Any, states: Any, path: Any, table: Any, heap: Any, tally: Any, bound: int, beam: int, expansions: int,
) -> int:  # fmt: skip
    """Expands open states until the goal is reached, none is left, `expansions` are made, or an array is full.

    The deepest state comes first, of equally deep ones that with least bytes alive; with a beam, the least deep, and of
    each depth only the first `beam`.
    """
    size, trail, taken = buffers[SIZE], ops[TRAIL], ops[TAKEN]
    words = np.zeros(all_words.shape[1], np.int64)
    here = -1  # the state whose position it is
    while tally[OPEN] > 0:
        state = heap[0, OPENED]
        depth = states[DEPTH, state]
        if expansions <= 0:
            return PAUSED
        if beam > 0 and taken[depth] >= beam:
            tally[OPEN] -= 1
            pop(heap, tally[OPEN])
            continue
        if here >= 0 and states[PARENT, state] == here:
            for k in range(states[PATH_START, state], states[PATH_END, state]):
                run(starts, links, size, ops, live, count, path[k])
        else:
            count[ALL_READY], count[ALL_RUN], count[ALIVE] = 0, 0, base
            load(starts, links, traits, buffers, ops, live, count, all_words[state])
        here = state
        kept = 0
        for k in range(count[ALL_READY]):
            if ops[DONE, ops[READY, k]] == 0:
                ops[READY, kept] = ops[READY, k]
                kept += 1
        count[ALL_READY] = kept
        choices = count[ALL_READY]
        if (
            tally[STATES] + choices > len(all_words)
            or tally[OPEN] + choices > len(heap)
            or tally[WRITTEN] + choices * len(trail) > len(path)
        ):
            return FULL
        tally[OPEN] -= 1
        pop(heap, tally[OPEN])
        taken[depth] += 1
        expansions -= 1
        tally[EXPANDED] += 1
        alive = count[ALIVE]
        for choice in range(choices):
            op = ops[READY, choice]
            needed = cost(starts, links, traits, size, live, count[ALIVE], op)
            if needed > bound:
                tally[CUT] = min(tally[CUT], needed)
                continue
            run(starts, links, size, ops, live, count, op)
            commit(starts, links, traits, size, ops, live, count, bound, depth, alive)
            reached = count[ALL_RUN]
            for k in range(len(words)):
                words[k] = all_words[state, k]
            code = states[CODED, state]
            for k in range(depth, reached):
                words[trail[k] // BITS] |= 1 << (trail[k] % BITS)
                code ^= traits[CODE, trail[k]]
            slot = find(table, all_words, states[CODED], words, code)
            if table[slot] < 0:
                new = tally[STATES]
                tally[STATES] += 1
                table[slot] = new
                for k in range(len(words)):
                    all_words[new, k] = words[k]
                start = tally[WRITTEN]
                tally[WRITTEN] += reached - depth
                for k in range(depth, reached):
                    path[start + k - depth] = trail[k]
                states[CODED, new], states[DEPTH, new], states[PARENT, new] = code, reached, state
                states[PATH_START, new], states[PATH_END, new] = start, tally[WRITTEN]
                if reached == len(trail):
                    return FOUND
                push(heap, tally[OPEN], reached if beam > 0 else -reached, count[ALIVE], new)
                tally[OPEN] += 1
            back(starts, links, size, ops, live, count, depth)
    return NONE
