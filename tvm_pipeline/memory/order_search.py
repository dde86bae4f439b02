"""The compiled loops of the exact search for orders.

A state is a downset of the graph: the set of operators that have run. A step runs one operator more. No step may need
more bytes than a bound, so that a state is either reached or not, and is kept once. `advance` takes the first open
state and makes its successors. `exact_order.py` says what is proven when no state is left, and why a safe commit is
safe; `order_arrays.py` says what the arrays mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tvm_pipeline.memory.order_arrays import BITS, Limits, Region, Store
from tvm_pipeline.solvers.hot import hot

# The reason why a call of `advance` ended: the last state is the goal; none is open; enough expansions; a full array.
FOUND, NONE, PAUSED, FULL = range(4)


@hot
def cost(links: Any, operators: Any, buffers: Any, now: Any, op: int) -> Any:
    """Return the bytes alive while `op` runs next."""
    total = now[0]["alive"] + operators[op]["workspace"]
    for k in range(operators[op]["begin"], operators[op + 1]["begin"]):
        if buffers[links[k]]["begun"] == 0:
            total += buffers[links[k]]["size"]
    rules = operators[op]["dying"] - operators[op]["fresh"]
    for k in range(operators[op]["fresh"], operators[op + 1]["fresh"]):
        if buffers[links[k]]["begun"] == 0 and buffers[links[k + rules]]["left"] == 1:
            return total - operators[op]["saved"]
    return total


@hot
def change(links: Any, operators: Any, buffers: Any, now: Any, op: int) -> Any:
    """Return the bytes alive after `op` has run next, less those before."""
    total = 0
    for k in range(operators[op]["begin"], operators[op + 1]["begin"]):
        if buffers[links[k]]["begun"] == 0:
            total += buffers[links[k]]["size"]
    for k in range(operators[op]["end"], operators[op + 1]["end"]):
        if buffers[links[k]]["left"] == 1:
            total -= buffers[links[k]]["size"]
    return total


@hot
def run(links: Any, operators: Any, buffers: Any, now: Any, op: int) -> None:
    """Run `op`."""
    operators[op]["done"] = 1
    operators[now[0]["trail_count"]]["trail"] = op
    now[0]["trail_count"] += 1
    now[0]["alive"] += change(links, operators, buffers, now, op)
    for k in range(operators[op]["begin"], operators[op + 1]["begin"]):
        buffers[links[k]]["begun"] += 1
    for k in range(operators[op]["end"], operators[op + 1]["end"]):
        buffers[links[k]]["left"] -= 1
    for k in range(operators[op]["after"], operators[op + 1]["after"]):
        operators[links[k]]["missing"] -= 1
        if operators[links[k]]["missing"] == 0:
            operators[now[0]["ready_count"]]["ready"] = links[k]
            now[0]["ready_count"] += 1


@hot
def back(links: Any, operators: Any, buffers: Any, now: Any, length: int) -> None:
    """Take back the operators that ran last, until `length` of them are left."""
    while now[0]["trail_count"] > length:
        now[0]["trail_count"] -= 1
        op = operators[now[0]["trail_count"]]["trail"]
        operators[op]["done"] = 0
        for k in range(operators[op]["after"], operators[op + 1]["after"]):
            if operators[links[k]]["missing"] == 0:
                now[0]["ready_count"] -= 1
            operators[links[k]]["missing"] += 1
        for k in range(operators[op]["end"], operators[op + 1]["end"]):
            buffers[links[k]]["left"] += 1
        for k in range(operators[op]["begin"], operators[op + 1]["begin"]):
            buffers[links[k]]["begun"] -= 1
        now[0]["alive"] -= change(links, operators, buffers, now, op)


@hot
def only_waits_for(links: Any, operators: Any, buffers: Any, now: Any, op: int) -> Any:
    """Return an operator that only waits for `op`; -1 where there is none."""
    for k in range(operators[op]["after"], operators[op + 1]["after"]):
        if operators[links[k]]["missing"] == 1:
            return links[k]
    return -1


@hot
def first_of_chain(links: Any, operators: Any, buffers: Any, now: Any, op: int) -> Any:
    """Return the ready operator of the chain that `op` ends, each waiting for the one before; -1 if there is none.

    An operator that waits for several others breaks the chain.
    """
    while operators[op]["missing"] == 1:
        for k in range(operators[op]["before"], operators[op + 1]["before"]):
            if operators[links[k]]["done"] == 0:
                op = links[k]
                break
    return op if operators[op]["missing"] == 0 and operators[op]["done"] == 0 else -1


@hot
def add_candidate(links: Any, operators: Any, buffers: Any, now: Any, listed: int, op: int) -> Any:
    """Add an operator to the candidates unless it is one; return their number."""
    if operators[op]["is_candidate"] == 1:
        return listed
    operators[op]["is_candidate"] = 1
    operators[listed]["candidates"] = op
    return listed + 1


@hot
def run_if_safe(links: Any, operators: Any, buffers: Any, now: Any, op: int, bound: int) -> Any:
    """Run a chain from `op` that ends with no more bytes alive, within the bound; return whether there is one.

    The chain goes on with an operator that only waits for the one before. It ends as soon as it is safe.
    """
    length, alive = now[0]["trail_count"], now[0]["alive"]
    while op >= 0:
        if cost(links, operators, buffers, now, op) > bound:
            break
        safe = now[0]["alive"] + change(links, operators, buffers, now, op) <= alive
        following = -1 if safe else only_waits_for(links, operators, buffers, now, op)
        if not safe and following < 0:
            break
        run(links, operators, buffers, now, op)
        if safe:
            return True
        op = following
    back(links, operators, buffers, now, length)
    return False


@hot
def commit(links: Any, operators: Any, buffers: Any, now: Any, bound: int, depth: int, least: int, near: bool) -> None:
    """Run all chains that are safe to run now.

    Before the operators `trail[depth:]` ran, no chain was safe, and `least` bytes were alive. So only chains near to
    these operators may be safe now, unless fewer bytes are alive; without `near` all are tried.
    """
    listed, seen = 0, depth
    safe = True
    while safe:
        if depth == 0 or not near or now[0]["alive"] < least:
            for k in range(now[0]["ready_count"]):
                if operators[operators[k]["ready"]]["done"] == 0:
                    listed = add_candidate(links, operators, buffers, now, listed, operators[k]["ready"])
        else:
            for index in range(seen, now[0]["trail_count"]):
                ran = operators[index]["trail"]
                for k in range(operators[ran]["near"], operators[ran + 1]["near"]):
                    op = first_of_chain(links, operators, buffers, now, links[k])
                    if op >= 0:
                        listed = add_candidate(links, operators, buffers, now, listed, op)
        seen = now[0]["trail_count"]
        safe = False
        for k in range(listed):
            op = operators[k]["candidates"]
            if operators[op]["done"] == 0 and run_if_safe(links, operators, buffers, now, op, bound):
                safe = True
                break
    for k in range(listed):
        operators[operators[k]["candidates"]]["is_candidate"] = 0


@hot
def load(region: Region, words: Any) -> None:
    """Move the position to the state with these words."""
    links, operators, buffers, now = region.links, region.operators, region.buffers, region.now
    now[0]["ready_count"], now[0]["trail_count"], now[0]["alive"] = 0, 0, now[0]["base"]
    for buffer in range(len(buffers)):
        buffers[buffer]["begun"] = buffers[buffer]["begun_at_start"]
        buffers[buffer]["left"] = buffers[buffer]["left_at_start"]
    for op in range(len(operators) - 1):
        operators[op]["done"], operators[op]["missing"] = 0, operators[op]["needs"]
        if operators[op]["missing"] == 0:
            operators[now[0]["ready_count"]]["ready"] = op
            now[0]["ready_count"] += 1
    for op in range(len(operators) - 1):
        if words[op // BITS] >> (op % BITS) & 1:
            run(links, operators, buffers, now, op)


@hot
def is_first(store: Store, a: int, first: int, second: int) -> Any:
    """Return whether entry `a` of the heap comes before these keys."""
    return store.heap[a]["first"] < first or (store.heap[a]["first"] == first and store.heap[a]["second"] < second)


@hot
def is_later(store: Store, a: int, first: int, second: int) -> Any:
    """Return whether entry `a` of the heap comes after these keys."""
    return store.heap[a]["first"] > first or (store.heap[a]["first"] == first and store.heap[a]["second"] > second)


@hot
def put(store: Store, at: int, first: int, second: int, state: int) -> None:
    """Write an entry of the heap."""
    store.heap[at]["first"], store.heap[at]["second"], store.heap[at]["state"] = first, second, state


@hot
def push(store: Store, first: int, second: int, state: int) -> None:
    """Add a state to the heap."""
    at = store.tally[0]["open_count"]
    store.tally[0]["open_count"] += 1
    while at > 0:
        above = (at - 1) // 2
        if not is_later(store, above, first, second):
            break
        put(store, at, store.heap[above]["first"], store.heap[above]["second"], store.heap[above]["state"])
        at = above
    put(store, at, first, second, state)


@hot
def pop(store: Store) -> None:
    """Take the first state off the heap."""
    store.tally[0]["open_count"] -= 1
    last = store.tally[0]["open_count"]
    first, second, state = store.heap[last]["first"], store.heap[last]["second"], store.heap[last]["state"]
    at = 0
    while 2 * at + 1 < last:
        below = 2 * at + 1
        other = below + 1
        if other < last and is_first(store, other, store.heap[below]["first"], store.heap[below]["second"]):
            below = other
        if not is_first(store, below, first, second):
            break
        put(store, at, store.heap[below]["first"], store.heap[below]["second"], store.heap[below]["state"])
        at = below
    put(store, at, first, second, state)


@hot
def find(store: Store, words: Any, code: int) -> Any:
    """Return the slot of the table that holds the state with these words, or is free for it."""
    table = store.table
    slot = code & (len(table) - 1)
    while table[slot] >= 0:
        known = table[slot]
        equal = store.states[known]["code"] == code
        for k in range(len(words)):
            equal = equal and store.words[known, k] == words[k]
        if equal:
            return slot
        slot = (slot + 1) & (len(table) - 1)
    return slot


@hot
def refill(store: Store) -> None:
    """Fill a new, larger table with the states."""
    table = store.table
    table[:] = -1
    for state in range(store.tally[0]["state_count"]):
        slot = store.states[state]["code"] & (len(table) - 1)
        while table[slot] >= 0:
            slot = (slot + 1) & (len(table) - 1)
        table[slot] = state


@hot
def go_to(region: Region, store: Store, state: int, here: int) -> None:
    """Move the position from state `here` (-1 for none) to another, and drop from `ready` what has run."""
    links, operators, buffers, now = region.links, region.operators, region.buffers, region.now
    if here >= 0 and store.states[state]["parent"] == here:
        for k in range(store.states[state]["path_start"], store.states[state]["path_end"]):
            run(links, operators, buffers, now, store.path[k])
    else:
        load(region, store.words[state])
    kept = 0
    for k in range(now[0]["ready_count"]):
        if operators[operators[k]["ready"]]["done"] == 0:
            operators[kept]["ready"] = operators[k]["ready"]
            kept += 1
    now[0]["ready_count"] = kept


@hot
def has_space(store: Store, choices: int, longest: int) -> Any:
    """Return whether the arrays have space for so many more states, with paths of at most `longest` operators."""
    return (
        store.tally[0]["state_count"] + choices <= len(store.words)
        and store.tally[0]["open_count"] + choices <= len(store.heap)
        and store.tally[0]["written"] + choices * longest <= len(store.path)
    )


@hot
def keep(region: Region, store: Store, words: Any, parent: int, merge: bool) -> Any:
    """Store the state at the position, whose parent is given; return its index, or -1 where it is known already.

    Args:
        words: space for the words of a state.
    """
    operators, now = region.operators, region.now
    depth, reached = store.states[parent]["depth"], now[0]["trail_count"]
    for k in range(len(words)):
        words[k] = store.words[parent, k]
    code = store.states[parent]["code"]
    for k in range(depth, reached):
        op = operators[k]["trail"]
        words[op // BITS] |= 1 << (op % BITS)
        code ^= operators[op]["code"]
    slot = find(store, words, code)
    if merge and store.table[slot] >= 0:
        return -1
    new = store.tally[0]["state_count"]
    store.tally[0]["state_count"] += 1
    store.table[slot] = new
    for k in range(len(words)):
        store.words[new, k] = words[k]
    start = store.tally[0]["written"]
    store.tally[0]["written"] += reached - depth
    for k in range(depth, reached):
        store.path[start + k - depth] = operators[k]["trail"]
    store.states[new]["code"], store.states[new]["depth"], store.states[new]["parent"] = code, reached, parent
    store.states[new]["path_start"], store.states[new]["path_end"] = start, store.tally[0]["written"]
    return new


@hot
def expand(region: Region, store: Store, limits: Limits, words: Any, state: int) -> Any:
    """Store the successors of the state at the position; return whether the goal is one of them, the last stored."""
    links, operators, buffers, now = region.links, region.operators, region.buffers, region.now
    depth, alive = store.states[state]["depth"], now[0]["alive"]
    # Beyond `choices` stand the operators that get ready on the way to a successor.
    choices = now[0]["ready_count"]
    for choice in range(choices):
        op = operators[choice]["ready"]
        needed = cost(links, operators, buffers, now, op)
        if needed > limits.bound:
            store.tally[0]["cut"] = min(store.tally[0]["cut"], needed)
            continue
        run(links, operators, buffers, now, op)
        if limits.commit:
            commit(links, operators, buffers, now, limits.bound, depth, alive, limits.near)
        new = keep(region, store, words, state, limits.merge)
        if new >= 0:
            reached = now[0]["trail_count"]
            if reached == len(operators) - 1:
                return True
            push(store, reached if limits.beam > 0 else -reached, now[0]["alive"], new)
        back(links, operators, buffers, now, depth)
    return False


@hot
def advance(region: Region, store: Store, limits: Limits, expansions: int) -> int:
    """Expand open states until the goal is reached, none is left, `expansions` are made, or an array is full.

    The deepest state comes first, of equally deep ones the one with least bytes alive; with a beam, the least deep, and
    of each depth only the first `limits.beam`.
    """
    operators, now = region.operators, region.now
    words = np.zeros(store.words.shape[1], np.int64)
    here = -1  # the state at the position
    while store.tally[0]["open_count"] > 0:
        state = store.heap[0]["state"]
        depth = store.states[state]["depth"]
        if expansions <= 0:
            return PAUSED
        if limits.beam > 0 and operators[depth]["taken"] >= limits.beam:
            pop(store)
            continue
        go_to(region, store, state, here)
        here = state
        if not has_space(store, now[0]["ready_count"], len(operators) - 1):
            return FULL
        pop(store)
        operators[depth]["taken"] += 1
        expansions -= 1
        store.tally[0]["expanded"] += 1
        if expand(region, store, limits, words, state):
            return FOUND
    return NONE
