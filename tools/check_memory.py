"""Check certificates of `tvm-pipeline memory --certificate`: an order of operators, its layout, and their lower bounds.

    python tools/check_memory.py memory.cert ...

This file needs Python 3.10 and nothing else. A certificate is JSON that states an instance in full, an order with its
peak, and a layout with its arena; and a bound of each.

The instance. A buffer of so many bytes is alive from the first of its writers on (without writers, from the start),
until all that write or read it have run, or to the end if it is `kept`. An operator runs after the writers of what it
reads. While it runs, the buffers alive are those before it and those that it writes. The peak of an order is the most
bytes alive while an operator runs. In the layout each buffer lies at its offset, a multiple of `alignment`, and no two
that are alive while the same operator runs overlap. The arena ends where the last of them ends, rounded up to it.

What is proven: no order has a peak below `bound`, and no layout of this order an arena below `arena_bound`. The second
is the most bytes alive, each buffer rounded up. For the first, the checker finds no order that needs less.

The search. Operators before or behind all others (cuts) divide each order into the same parts, and one part without an
order is enough. The bytes alive depend on the set of operators that have run, and the function of the set is
submodular. So if a chain of operators, each made ready by the one before, runs within the limit and ends with no more
bytes alive than before it, for the first time at its end, then moving the chain to the front of any order that is left
makes no step larger. Such a chain runs at once, without an alternative. All else is tried. The search goes from the
start of the part and, in turns, from its end. For the second, writers and users of each buffer change places.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

MOST_STEPS = 10_000_000  # of a search; these take some minutes

# What a file contains: [x] is a list of x, {str: x} a table.
BUFFER = {"name": str, "bytes": int, "writers": [str], "readers": [str], "kept": bool}
CERTIFICATE = {
    "certificate": int, "graph": str, "operators": [str], "buffers": [BUFFER], "order": [str], "peak": int,
    "bound": int, "alignment": int, "offsets": {str: int}, "arena": int, "arena_bound": int,
}  # fmt: skip


class Refused(Exception):  # noqa: N818
    """Say why a certificate cannot be checked, or what of it is false."""


def require(holds: bool, why: str) -> None:
    if not holds:
        raise Refused(why)


def check_kind(value: Any, kind: Any, name: str) -> None:
    """Refuse a value of another kind: no number is negative, no name empty, and no field is missing or unknown."""
    if isinstance(kind, dict) and str not in kind:
        require(type(value) is dict and value.keys() == kind.keys(), f"{name}: not the fields")
        for key in kind:
            check_kind(value[key], kind[key], key)
    elif isinstance(kind, (dict, list)):
        require(type(value) is type(kind), f"{name}: no such list or table")
        for each in value.values() if isinstance(value, dict) else value:
            check_kind(each, kind[str] if isinstance(kind, dict) else kind[0], name)
    else:
        require(type(value) is kind and value != "", f"{name}: {value!r:.60}")
        require(kind is not int or value >= 0, f"{name}: {value!r:.60} is negative")


def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    require(len(dict(pairs)) == len(pairs), f"a field stands twice among {[name for name, _ in pairs]!r:.60}")
    return dict(pairs)


def parsed(written: bytes) -> dict[str, Any]:
    try:
        stated: dict[str, Any] = json.loads(written, object_pairs_hook=table)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the file is no JSON: {error}") from error
    check_kind(stated, CERTIFICATE, "the file")
    require(stated["certificate"] == 1 and stated["alignment"] > 0, "another version, or an alignment of 0")
    require(bool(stated["operators"]), "there are no operators")
    return stated


class Instance(NamedTuple):
    """Operators as bits of integers. A buffer is alive once one of `begins` runs, until all of `ends` have run.

    Attributes:
        needs, after: of each operator, the writers of what it reads, and the readers of what it writes.
        touched: of each operator, the buffers that it writes or reads: bytes, begins, ends. No `begins` means from the
            start, no `ends` to the end.
        always: the bytes of the buffers that begin without an operator.
    """

    needs: list[int]
    after: list[int]
    touched: list[list[tuple[int, int, int]]]
    always: int

    def alive(self, done: int) -> int:
        """Return the bytes alive when the operators of a set have run."""
        buffers = {id(buffer): buffer for row in self.touched for buffer in row}.values()
        begun = sum(size for size, begins, ends in buffers if begins & done and (not ends or ends & ~done))
        ended = sum(size for size, begins, ends in buffers if not begins and ends and not ends & ~done)
        return self.always + begun - ended

    def step(self, done: int, operator: int) -> tuple[int, int]:
        """Return the bytes that begin as an operator runs behind a set, and those that end with it."""
        begin = end = 0
        for size, begins, ends in self.touched[operator]:
            if begins >> operator & 1 and not begins & done:
                begin += size
            if ends >> operator & 1 and ends & ~done == 1 << operator:
                end += size
        return begin, end


def instance_of(buffers: list[tuple[int, int, int]], needs: list[int]) -> Instance:
    touched = [[b for b in buffers if (b[1] | b[2]) >> operator & 1] for operator in range(len(needs))]
    after = [sum(1 << o for o, before in enumerate(needs) if before >> i & 1) for i in range(len(needs))]
    return Instance(needs, after, touched, sum(size for size, begins, _ in buffers if not begins))


def bits(members: int) -> Iterator[int]:
    while members:
        yield (members & -members).bit_length() - 1
        members &= members - 1


def has_order(instance: Instance, start: int, part: int, limit: int, budget: int) -> bool | None:
    """Return whether operators of a part can run behind a set within a limit; None after `budget` steps."""

    def is_ready(done: int, operator: int) -> bool:
        return not done >> operator & 1 and instance.needs[operator] & ~done == 0

    def safe(done: int, alive: int) -> tuple[int, int]:
        """Run safe chains behind a set, as long as there is one."""
        again = True
        while again:
            again = False
            for first in bits(part & ~done):
                ahead, held, chain = done, alive, [first] if is_ready(done, first) else []
                while chain and len(chain) == 1:
                    begin, end = instance.step(ahead, chain[0])
                    if held + begin > limit:
                        break
                    ahead, held = ahead | 1 << chain[0], held + begin - end
                    if held <= alive:
                        done, alive, again = ahead, held, True
                        break
                    chain = [o for o in bits(part & instance.after[chain[0]]) if is_ready(ahead, o)]
        return done, alive

    first = safe(start, instance.alive(start))
    stack, seen = [first], {first[0]}
    while stack:
        done, alive = stack.pop()
        if not part & ~done:
            return True
        for operator in bits(part & ~done):
            if is_ready(done, operator):
                begin, end = instance.step(done, operator)
                if alive + begin <= limit:
                    following = safe(done | 1 << operator, alive + begin - end)
                    if following[0] not in seen:
                        seen.add(following[0])
                        stack.append(following)
        budget -= (part & ~done).bit_count()
        if budget < 0:
            return None
    return False


def closure(needs: list[int], order: list[int]) -> list[int]:
    """Return of each operator all that must run before it."""
    before = [0] * len(needs)
    for operator in order:
        before[operator] = needs[operator]
        for other in bits(needs[operator]):
            before[operator] |= before[other]
    return before


def parts_of(needs: list[int], order: list[int]) -> list[tuple[int, int]]:
    """Return sets of operators that run one after the other in every order, each with all that run before it."""
    count, before = len(needs), closure(needs, order)
    behind = [sum(1 << o for o in range(count) if before[o] >> operator & 1) for operator in range(count)]
    found, done = [], 0
    for operator in order:
        if before[operator].bit_count() + behind[operator].bit_count() == count - 1:  # a cut
            found += [(done, before[operator] & ~done), (before[operator], 1 << operator)]
            done = before[operator] | 1 << operator
    return [(start, part) for start, part in [*found, (done, (1 << count) - 1 & ~done)] if part]


def check_bound(buffers: list[tuple[int, int, int]], needs: list[int], order: list[int], limit: int) -> None:
    """Refuse if some order keeps the limit, or if the proof takes too long."""
    whole, forward = (1 << len(needs)) - 1, instance_of(buffers, needs)
    backward = instance_of([(size, ends, begins) for size, begins, ends in buffers], forward.after)
    kept = sum(size for size, begins, ends in buffers if not begins and not ends)
    if any(kept + sum(size for size, begins, ends in row if begins or ends) > limit for row in forward.touched):
        return  # an operator alone needs more
    most = {}
    for start, part in parts_of(needs, order):
        done, alive, most[start, part] = start, forward.alive(start), 0
        for operator in order:
            if part >> operator & 1:
                begin, end = forward.step(done, operator)
                most[start, part] = max(most[start, part], alive + begin)
                done, alive = done | 1 << operator, alive + begin - end
    for (start, part), peak in sorted(most.items(), key=lambda item: -item[1]):
        budget, answer = 1000, None if peak > limit else True
        while answer is None:
            answer = has_order(forward, start, part, limit, budget)
            if answer is None:
                answer = has_order(backward, whole & ~start & ~part, part, limit, budget)
            require(answer is not None or budget < MOST_STEPS, "the proof takes too many steps")
            budget *= 4
        if not answer:
            return
    raise Refused(f"an order needs no more than {limit} bytes")


def check(written: bytes) -> str:
    """Return what a certificate proves. Raise Refused if it proves nothing."""
    stated = parsed(written)
    index = {name: position for position, name in enumerate(stated["operators"])}
    require(len(index) == len(stated["operators"]), "two operators have one name")
    require(sorted(stated["order"]) == sorted(index), "the order is not one of these operators")
    order, needs = [index[name] for name in stated["order"]], [0] * len(index)
    used: dict[str, tuple[int, int, int]] = {}
    for buffer in stated["buffers"]:
        writers, readers = buffer["writers"], buffer["readers"]
        require({*writers, *readers} <= index.keys() and buffer["name"] not in used, f"{buffer['name']} is not known")
        begins, reading = (sum({1 << index[name] for name in names}) for names in (writers, readers))
        require(begins & reading == 0, f"an operator reads {buffer['name']}, which it writes")
        for operator in bits(reading):
            needs[operator] |= begins
        if begins | reading or buffer["kept"]:
            used[buffer["name"]] = buffer["bytes"], begins, 0 if buffer["kept"] else begins | reading
    instance = instance_of([*used.values()], needs)
    done, alive, peak, step = 0, instance.always, 0, {}
    for position, operator in enumerate(order):
        require(needs[operator] & ~done == 0, f"{stated['operators'][operator]} runs before what it reads is written")
        begin, end = instance.step(done, operator)
        peak, done, alive, step[operator] = (
            max(peak, alive + begin),
            done | 1 << operator,
            alive + begin - end,
            position,
        )
    require(peak == stated["peak"], f"the order has a peak of {peak} bytes")
    unit, offsets = stated["alignment"], stated["offsets"]
    require(offsets.keys() == used.keys(), "the offsets are not those of the buffers that are used")
    require(all(offset % unit == 0 for offset in offsets.values()), "an offset is not aligned")
    spans, change = {}, [0] * (len(order) + 1)
    for name, (size, begins, ends) in used.items():
        if not size:
            continue  # no bytes overlap nothing
        first = min((step[operator] for operator in bits(begins)), default=0)
        last = max((step[operator] for operator in bits(ends)), default=len(order) - 1)
        spans[name] = first, last, offsets[name], offsets[name] + -(-size // unit) * unit
        change[first] += -(-size // unit) * unit
        change[last + 1] -= -(-size // unit) * unit
    require(max((span[3] for span in spans.values()), default=0) == stated["arena"], "the arena has other bytes")
    listed = sorted(spans.items(), key=lambda item: item[1])
    for place, (name, (_, last, begin, end)) in enumerate(listed):
        for other, (first, _, lower, upper) in listed[place + 1 :]:
            if first > last:
                break
            require(begin >= upper or lower >= end, f"{name} and {other} overlap, and both are alive")
    most = max(sum(change[: position + 1]) for position in range(len(order)))
    require(stated["arena_bound"] <= most, f"no more than {most} bytes are alive at once in the layout")
    if stated["bound"]:
        check_bound([*used.values()], needs, order, stated["bound"] - 1)
    return (
        f"{stated['graph']}: an order of {peak} bytes, and none has less than {stated['bound']}; "
        f"an arena of {stated['arena']}, and none of this order has less than {stated['arena_bound']}"
    )


if __name__ == "__main__":
    status = 0
    for path in sys.argv[1:]:
        try:
            print(f"{path}: checked: {check(Path(path).read_bytes())}")
        except (Refused, OSError) as error:
            print(f"{path}: refused: {error}")
            status = 1
    sys.exit(status)
