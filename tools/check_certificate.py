"""Check certificates of `tvm-pipeline plan --certificate`: a plan is legal and has its value, and no plan is better.

    python tools/check_certificate.py plan.cert ...

This file needs Python 3.10 and nothing else; it computes with integers and exact fractions. A certificate is JSON that
states an instance in full, a plan, its value and a bound. Its decimals are the figures. The planner computed with
doubles, so values and bounds of seconds hold up to the relative `tolerance`.

The instance. Operators in a topological order read and write tensors of so many bytes. A pipeline cuts the operators
into stages: those of its first stages, however many, contain all operators that one of them reads from (a downset).
With `cuts` "order", every downset is a prefix of the listed order. With `together`, all operators that read from an
operator are in one stage. Each stage runs on one device. No two devices of a pipeline share cores, consecutive stages
run on different devices, and a device that is `once` runs one stage. `stages` is their number; null allows any.

Seconds. A stage on device d, behind a stage on device p, takes busy[n-1] times

    call_s + sum of seconds + max(s_per_mac * sum of macs, s_per_spilled_byte * max(0, parameter bytes - cached_bytes))
    + receive and link (p, d) of the bytes that cross the boundary in front + send of those that cross the one behind

The sums are over its operators, `receive`, `send` and links are [seconds, seconds for each byte], n is the number of
stages. A tensor crosses a boundary if it is there (an input, or written) and is an output or read behind the boundary.
`throughput` is 1 / the seconds of the slowest stage; every device is `once`. `latency` is the sum of the seconds.

Bytes. `memory` is the most parameter bytes of a stage, `dram` the sum of those beyond `cache_bytes`, `communication`
the bytes of tensors that an operator wrote and a later stage reads, at the widest boundary; in lexicographic order.

The checker finds the proof, so the file does not hold it. The checker lists the downsets from the empty one to the
whole graph, one operator at a time. At each it keeps every state of a pipeline (devices used, device of the last stage)
with the least loads of the open stage, and drops what reaches the bound. If something reaches the whole graph, a
pipeline is better than the bound. Devices that can be swapped without a change of the instance are used in their order.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

MOST_STEPS = 300_000_000  # of a proof; these take some ten minutes
BYTES = ("memory,communication", "memory,dram,communication", "dram,memory,communication")

# What a file contains: [x] is a list of x, (x, x) a list of two, {str: x} a table, {None, x} null or x.
COST = (Fraction, Fraction)
OF_BYTES = {"name": str, "cores": [int], "cache_bytes": {None, int}}
OF_SECONDS = {
    "name": str, "cores": [int], "once": bool, "seconds": [{None, Fraction}], "call_s": Fraction, "s_per_mac": Fraction,
    "s_per_spilled_byte": Fraction, "cached_bytes": {None, Fraction}, "receive": COST, "send": COST, "busy": [Fraction],
}  # fmt: skip
OPERATOR = {"name": str, "reads": [str], "writes": {str: int}, "param_bytes": int, "macs": int}
CERTIFICATE = {
    "certificate": int, "graph": str, "objective": str, "cuts": str, "together": bool, "stages": {None, int},
    "tolerance": Fraction, "inputs": {str: int}, "outputs": [str], "operators": [OPERATOR],
    "links": [{"source": str, "destination": str, "cost": COST}], "plan": [{"device": str, "operators": [str]}],
    "value": [Fraction], "bound": [Fraction],
}  # fmt: skip

State = tuple[int, int, int]  # devices used, as bits; device of the open stage; number of stages, 0 if any will do
Load = tuple[int, int]  # two figures of the open stage; less is better in each
Fronts = dict[State, list[Load]]
EMPTY: State = (0, -1, 0)


class Refused(Exception):  # noqa: N818
    """Say why a certificate cannot be checked, or what of it is false."""


def require(holds: bool, why: str) -> None:
    if not holds:
        raise Refused(why)


def fitted(value: Any, kind: Any, name: str = "the file") -> Any:
    """Return a value of a file if it is of the kind: no number is negative, and no field is missing or unknown."""
    if isinstance(kind, set):
        return None if value is None else fitted(value, next(iter(kind - {None})), name)
    if isinstance(kind, (list, tuple)):
        require(type(value) is list and (type(kind) is list or len(value) == len(kind)), f"{name}: no such list")
        return [fitted(each, kind[0], name) for each in value]
    if isinstance(kind, dict):
        require(type(value) is dict and (str in kind or value.keys() == kind.keys()), f"{name}: not the fields")
        return {key: fitted(each, kind.get(str) or kind[key], key) for key, each in value.items()}
    is_number = type(value) in (kind, int) and kind in (int, Fraction) and 0 <= value < 10**40
    require(is_number or (type(value) is kind and kind in (str, bool) and value != ""), f"{name}: {value!r:.60}")
    return kind(value)


def decimal(written: str) -> Fraction:
    require(bool(re.fullmatch(r"-?\d{1,40}(\.\d{1,40})?([eE][+-]?\d{1,2})?", written)), f"{written:.60} is no decimal")
    return Fraction(written)


def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    require(len(dict(pairs)) == len(pairs), f"a field stands twice among {[name for name, _ in pairs]!r:.60}")
    return dict(pairs)


def parsed(written: bytes) -> dict[str, Any]:
    """Return what stands in a file's bytes; every field has the type that it should have."""
    try:
        found = json.loads(written, parse_float=decimal, parse_constant=decimal, object_pairs_hook=table)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the file is no JSON: {error}") from error
    objective = found.get("objective") if type(found) is dict else None
    require(objective in ("throughput", "latency", *BYTES), f"there are no certificates of objective {objective!r:.60}")
    stated: dict[str, Any] = fitted(found, {**CERTIFICATE, "devices": [OF_BYTES if objective in BYTES else OF_SECONDS]})
    require(stated["certificate"] == 1 and stated["cuts"] in ("all", "order"), "another version, or unknown `cuts`")
    require(stated["tolerance"] <= Fraction(1, 10**6), "the tolerance is too large")
    require(len(stated["value"]) == len(stated["bound"]) == len(str(objective).split(",")), "figures are missing")
    require(all(stated[name] for name in ("operators", "devices", "plan")), "there are no operators, devices or stages")
    return stated


def indexed(names: Iterable[str], what: str) -> dict[str, int]:
    listed = [*names]
    require(len({*listed}) == len(listed), f"two {what} have one name")
    return {name: position for position, name in enumerate(listed)}


class Graph:
    """Operators as bits of integers; a downset is such an integer. `whole` is the downset of all operators."""

    def __init__(self, stated: dict[str, Any]) -> None:
        operators, inputs, outputs = stated["operators"], stated["inputs"], set(stated["outputs"])
        self.index = indexed((operator["name"] for operator in operators), "operators")
        indexed([*inputs, *(name for operator in operators for name in operator["writes"])], "tensors")
        self.param_bytes, self.macs = ([operator[x] for operator in operators] for x in ("param_bytes", "macs"))
        self.whole, self.in_order = (1 << len(operators)) - 1, stated["cuts"] == "order"
        size, writer, readers = dict(inputs), dict.fromkeys(inputs, 0), dict.fromkeys(inputs, 0)
        self.needs = [0] * len(operators)
        for index, operator in enumerate(operators):
            for name in operator["reads"]:
                require(name in size, f"operator {operator['name']} reads {name}, which nothing before it writes")
                self.needs[index] |= writer[name]
                readers[name] |= 1 << index
            for name, written in operator["writes"].items():
                size[name], writer[name], readers[name] = written, 1 << index, 0
        require(size.keys() >= outputs, "an output is no tensor")
        self.tensors = [(writer[name], readers[name], size[name], name in outputs) for name in size]
        after = [sum(1 << o for o, needs in enumerate(self.needs) if needs >> i & 1) for i in range(len(operators))]
        self.families = after if stated["together"] else []
        self.known: dict[int, tuple[list[int], int, int, bool]] = {}

    def at(self, done: int) -> tuple[list[int], int, int, bool]:
        """Return of a downset what may join it, which bytes cross or are handed on behind it, and if it is a cut."""
        if done not in self.known:
            free = [o for o, needs in enumerate(self.needs) if not done >> o & 1 and needs & ~done == 0]
            here = [t for t in self.tensors if t[0] & done == t[0]]
            crossing = sum(size for _, readers, size, is_output in here if is_output or readers & ~done)
            handed_on = sum(size for writer, readers, size, _ in here if writer and readers & ~done)
            is_cut = not any(readers & done and readers & ~done for readers in self.families)
            self.known[done] = free[:1] if self.in_order else free, crossing, handed_on, is_cut
        return self.known[done]


class Machine:
    """Devices by index: which of them share cores, and what a link from one to another costs (row -1: from outside)."""

    def __init__(self, stated: dict[str, Any]) -> None:
        self.devices = stated["devices"]
        self.index = indexed((device["name"] for device in self.devices), "devices")
        cores = [set(device["cores"]) for device in self.devices]
        self.shares = [[d != e and not a.isdisjoint(b) for e, b in enumerate(cores)] for d, a in enumerate(cores)]
        links = {(each["source"], each["destination"]): each["cost"] for each in stated["links"]}
        require(len(links) == len(stated["links"]), "two links join the same devices")
        require(all(a != b and {a, b} <= self.index.keys() for a, b in links), "a link joins no two devices")
        self.link = [[links.get((a, b), [Fraction(0)] * 2) for b in self.index] for a in (*self.index, "")]

    def elder(self, d: int) -> int:
        """Return the last device before d that it can be swapped with, -1 if there is none; both run one stage."""
        figures = [{**device, "name": "", "cores": []} for device in self.devices]
        for e in reversed(range(d if figures[d]["once"] else 0)):
            swap = [*range(len(figures))]
            swap[d], swap[e] = e, d
            moved = [[[rows[a][b] for b in swap] for a in swap] for rows in (self.link, self.shares)]
            if figures[d] == figures[e] and moved == [self.link[:-1], self.shares]:
                return e
        return -1


def keep(front: list[Load], load: Load) -> None:
    """Add a load to those of which none is at least as large as another in both figures."""
    if not any(a <= load[0] and b <= load[1] for a, b in front):
        front[:] = [*((a, b) for a, b in front if a < load[0] or b < load[1]), load]


def unfolded(fronts: Fronts) -> list[tuple[State, Load]]:
    return [(state, load) for state, loads in fronts.items() for load in loads]


def some_pipeline_keeps(rules: Seconds | Sizes, graph: Graph) -> bool:
    """Return whether there is a pipeline that keeps the limits of the rules."""
    layer: dict[int, tuple[int, Fronts]] = {0: (sum(rules.weight), {EMPTY: [(0, 0)]})}
    steps = 0
    for _ in graph.needs:
        following: dict[int, tuple[int, Fronts]] = {}
        for done, (left, fronts) in layer.items():
            ready, crossing, handed_on, is_cut = graph.at(done)
            begun: Fronts = {}
            for state, load in unfolded(fronts) if is_cut else []:
                for new, first in rules.opened(state, load, crossing, handed_on):
                    keep(begun.setdefault(new, []), first)
            growing = unfolded(begun) + (unfolded(fronts) if done else [])
            steps += len(ready) * len(growing)
            require(steps <= MOST_STEPS, "the proof takes too many steps")
            for operator in ready:
                rest = left - rules.weight[operator]
                target = following.setdefault(done | 1 << operator, (rest, {}))[1]
                for state, load in growing:
                    larger = rules.added(state, load, operator, rest)
                    if larger is not None:
                        keep(target.setdefault(state, []), larger)
        layer = {done: found for done, found in following.items() if found[1]}
    complete = [found for _, fronts in layer.values() for found in unfolded(fronts)]
    return any(rules.ends(state, load, graph.at(graph.whole)[1]) for state, load in complete)


class Seconds:
    """Pipelines whose slowest stage, or with `adds` the sum of whose stages, takes less than `limit` seconds.

    A load is the seconds of the open stage if its operators outlast the fetching of its parameters, and its seconds if
    they do not; the larger is right. With `adds` both include the stages before. One number scales all to integers.
    """

    def __init__(self, machine: Machine, graph: Graph, limit: Fraction, stages: int | None, busy: int, adds: bool):
        devices, size = machine.devices, range(len(machine.devices))
        rows: list[list[Fraction]] = []  # of each device: free, send, enter from each other, computing of each operator
        for d, device in enumerate(devices):
            spill = Fraction(0) if device["cached_bytes"] is None else device["s_per_spilled_byte"]
            row = [spill * (device["cached_bytes"] or 0), *device["send"]]
            for hops in machine.link:
                row += [device["call_s"] + device["receive"][0] + hops[d][0], device["receive"][1] + hops[d][1]]
            for s, macs, held in zip(device["seconds"], graph.macs, graph.param_bytes):
                alone = limit if s is None else s + macs * device["s_per_mac"]
                row += [alone, s + held * spill if spill and s is not None else alone]
            rows.append([device["busy"][busy - 1] * figure for figure in row])
        scale = math.lcm(limit.denominator, *(figure.denominator for row in rows for figure in row))
        whole = [[int(figure * scale) for figure in row] for row in rows]
        pairs = [[*zip(row[1::2], row[2::2])] for row in whole]
        self.limit, self.free, self.send = int(limit * scale), [row[0] for row in whole], [row[0] for row in pairs]
        self.enter, self.computing = [row[1 : 2 + len(size)] for row in pairs], [row[2 + len(size) :] for row in pairs]
        self.weight = [min(row[o][0] for row in self.computing) for o in range(len(graph.needs))]
        self.adds, self.stages, self.most = adds, stages, len(devices) if stages is None else stages
        self.elders = [machine.elder(d) for d in size]
        # The devices whose use bars the use of each, and those whose use a state must tell.
        barring = [[machine.shares[d][e] or (d == e and devices[d]["once"]) for e in size] for d in size]
        self.bars = [sum(1 << e for e in size if row[e]) for row in barring]
        self.told = [1 << d if any(row) else 0 for d, row in enumerate(barring)]

    def closed(self, device: int, load: Load, crossing: int) -> int:
        return max(load) + self.send[device][0] + self.send[device][1] * crossing

    def opened(self, state: State, load: Load, crossing: int, handed_on: int) -> Iterator[tuple[State, Load]]:
        """Yield the states in which the open stage has ended at a boundary, and the next one has no operator yet."""
        used, device, number = state
        closed = self.closed(device, load, crossing) if device >= 0 else 0
        if closed >= self.limit or number == self.stages:
            return
        for d, (bars, elder) in enumerate(zip(self.bars, self.elders)):
            if d != device and not used & bars and (elder < 0 or used >> elder & 1):
                fixed, of_byte = self.enter[d][device]
                begun = (closed if self.adds else 0) + fixed + of_byte * crossing
                following = used | self.told[d], d, 0 if self.stages is None else number + 1
                yield following, (begun, begun - self.free[d])

    def added(self, state: State, load: Load, operator: int, left: int) -> Load | None:
        """Return the open stage's load with one operator more, or None; `left` is the weight of those in no stage."""
        more = self.computing[state[1]][operator]
        larger = load[0] + more[0], load[1] + more[1]
        # The operators that are left run in this stage and in those to come, each of which keeps the limit.
        to_come = 0 if self.adds else self.most - state[0].bit_count()
        return larger if max(larger) < self.limit and larger[0] + left < self.limit * (1 + to_come) else None

    def ends(self, state: State, load: Load, crossing: int) -> bool:
        return state[2] == (self.stages or 0) and self.closed(state[1], load, crossing) < self.limit


class Sizes:
    """Pipelines of `stages` stages that keep limits of memory, dram and communication; see `Seconds` for the methods.

    A load is the parameter bytes of the open stage and, if dram is limited, those beyond the caches of earlier stages.
    """

    def __init__(self, graph: Graph, stages: int, cache: int, limits: dict[str, int]) -> None:
        self.weight, self.stages, self.cache, self.dram = graph.param_bytes, stages, cache, limits.get("dram")
        self.memory = limits.get("memory", sum(graph.param_bytes))
        self.communication = limits.get("communication", math.inf)

    def opened(self, state: State, load: Load, crossing: int, handed_on: int) -> Iterator[tuple[State, Load]]:
        if state[2] < self.stages and (state == EMPTY or handed_on <= self.communication):
            yield (0, 0, state[2] + 1), (0, 0 if self.dram is None else load[1] + max(0, load[0] - self.cache))

    def added(self, state: State, load: Load, operator: int, left: int) -> Load | None:
        held, stages = load[0] + self.weight[operator], 1 + self.stages - state[2]
        beyond = max(held - self.cache, held + left - stages * self.cache, 0)
        within = held <= self.memory and held + left <= stages * self.memory
        return (held, load[1]) if within and (self.dram is None or load[1] + beyond <= self.dram) else None

    def ends(self, state: State, load: Load, crossing: int) -> bool:
        return state[2] == self.stages


def stages_of(stated: dict[str, Any], graph: Graph, machine: Machine) -> list[tuple[int, int, int]]:
    """Return of each stage of the plan the device and the downsets before and behind it, if the plan is legal."""
    found: list[tuple[int, int, int]] = []
    done = 0
    for stage in stated["plan"]:
        members = indexed(stage["operators"], "operators of a stage").keys()
        is_known = members <= graph.index.keys() and stage["device"] in machine.index
        require(bool(members) and is_known, "a stage is empty, or has an unknown operator or device")
        held, d = sum(1 << graph.index[name] for name in members), machine.index[stage["device"]]
        require(done & held == 0, "an operator stands in two stages")
        before, devices = done, [d for d, _, _ in found]
        done |= held
        is_downset = all(not held >> o & 1 or needs & ~done == 0 for o, needs in enumerate(graph.needs))
        is_cut = graph.at(done)[3] and (not graph.in_order or done & (done + 1) == 0)
        require(is_downset and is_cut, "a stage ends where it may not, or reads what a later one writes")
        require(not any(machine.shares[d][e] for e in devices), "two devices of the plan share cores")
        is_once = machine.devices[d].get("once", True)
        require(d not in (devices if is_once else devices[-1:]), "a device of the plan runs too many stages")
        found.append((d, before, done))
    require(done == graph.whole and stated["stages"] in (None, len(found)), "operators or stages are missing")
    return found


def stage_seconds(graph: Graph, device: dict[str, Any], hop: list[Fraction], start: int, end: int) -> Fraction:
    """Return the seconds of the stage between two downsets on a device that is not busy, by the published formula."""
    members = [o for o in range(len(graph.needs)) if (end & ~start) >> o & 1]
    require(all(device["seconds"][o] is not None for o in members), f"{device['name']} cannot run an operator")
    size, cached = sum(graph.param_bytes[o] for o in members), device["cached_bytes"]
    fetching = 0 if cached is None else device["s_per_spilled_byte"] * max(0, size - cached)
    computing = max(device["s_per_mac"] * sum(graph.macs[o] for o in members), fetching)
    moves = zip((device["receive"], hop, device["send"]), (graph.at(start)[1], graph.at(start)[1], graph.at(end)[1]))
    moving = sum(fixed + of_byte * moved for (fixed, of_byte), moved in moves)
    return Fraction(device["call_s"] + sum(device["seconds"][o] for o in members) + computing + moving)


def check_seconds(stated: dict[str, Any], graph: Graph, machine: Machine) -> None:
    stages, (value,), (bound,), tolerance = (stated[name] for name in ("stages", "value", "bound", "tolerance"))
    adds = stated["objective"] == "latency"
    for device in machine.devices:
        sizes = len(device["seconds"]), len(device["busy"])
        require(sizes == (len(graph.needs), len(machine.devices)), f"{device['name']} has other figures")
        require(device["once"] or (adds and device["cached_bytes"] is None), f"{device['name']} must run one stage")
        require(not adds or set(device["busy"]) == {1}, "latency is that of devices that are not busy")
    taken, plan = [], stages_of(stated, graph, machine)
    for (p, _, _), (d, start, end) in zip([(-1, 0, 0), *plan], plan):
        busy = 1 if adds else machine.devices[d]["busy"][len(plan) - 1]
        taken.append(busy * stage_seconds(graph, machine.devices[d], machine.link[p][d], start, end))
    reached = sum(taken) if adds else max(taken)
    require(adds or (value > 0 and bound > 0), "a throughput is positive")
    claimed, least = (value, bound) if adds else (1 / value, 1 / bound)
    require(abs(claimed - reached) <= tolerance * reached, f"the plan takes {float(reached)} s")
    limit = least * (1 - tolerance)
    is_steady = all(len(set(device["busy"])) == 1 for device in machine.devices)
    # If devices are slower beside others, pipelines of each number of stages have their own figures.
    for exact in [stages] if is_steady or stages else range(1, len(machine.devices) + 1):
        rules = Seconds(machine, graph, limit, exact, 1 if is_steady else exact, adds)
        require(not some_pipeline_keeps(rules, graph), f"a pipeline takes less than {float(limit)} s")


def check_bytes(stated: dict[str, Any], graph: Graph, machine: Machine) -> None:
    parts, stages, bounds = stated["objective"].split(","), stated["stages"], stated["bound"]
    caches = {device["cache_bytes"] for device in machine.devices} if "dram" in parts else {0}
    require(len(caches) == 1 and None not in caches, "the devices have unequal caches")
    require(stages is not None and all(bound.denominator == 1 for bound in bounds), "stages or bytes are no integers")
    cache, plan = max(caches), stages_of(stated, graph, machine)
    held = [sum(size for o, size in enumerate(graph.param_bytes) if (end & ~start) >> o & 1) for _, start, end in plan]
    widest = max((graph.at(start)[2] for _, start, _ in plan[1:]), default=0)
    figures = {"memory": max(held), "dram": sum(max(0, size - cache) for size in held), "communication": widest}
    require([figures[part] for part in parts] == stated["value"], f"the plan has {figures}")
    limits: dict[str, int] = {}
    for part, bound in zip(parts, map(int, bounds)):
        rules = Sizes(graph, stages, cache, {**limits, part: bound - 1})
        require(bound == 0 or not some_pipeline_keeps(rules, graph), f"a pipeline has less {part} than {bound} bytes")
        limits[part] = bound


def check(written: bytes) -> str:
    """Return what a certificate proves. Raise Refused if it proves nothing."""
    stated = parsed(written)
    (check_bytes if stated["objective"] in BYTES else check_seconds)(stated, Graph(stated), Machine(stated))
    bound = " ".join(f"{float(figure):.12g}" for figure in stated["bound"])
    return f"{stated['graph']}: no pipeline is better than {stated['objective']} {bound}"


if __name__ == "__main__":
    status = 0
    for path in sys.argv[1:]:
        try:
            print(f"{path}: checked: {check(Path(path).read_bytes())}")
        except (Refused, OSError) as error:
            print(f"{path}: refused: {error}")
            status = 1
    sys.exit(status)
