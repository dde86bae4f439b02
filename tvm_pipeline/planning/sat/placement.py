"""Which device runs which stage, and the seconds or joules that this costs: what CP-SAT is told of a platform.

`at[d][b]` says that device d runs stage b, `on[d][v]` that it runs operator v. What adds up over operators is then
linear in `on`; what depends on neighbouring stages (links, inputs and outputs) is stated under the condition that
these devices stand there. The costs are those of `evaluate.py`, which judges what comes out.

Next: `least_seconds.py` (one model on a platform) and `deployment.py` (several).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, pairwise, permutations
from typing import TYPE_CHECKING

from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Link
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import DeviceCosts, cost_of, known_cost_of
from tvm_pipeline.planning.sat.staging import Staging, weighted

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

    from tvm_pipeline.planning.sat.staging import Expression, Terms


class Placement:
    """The booleans of devices for one staging, and the rules between them.

    Args:
        optional: whether stages may be left empty from some stage on; else every one has operators.
        again: whether a device may serve several stages, not consecutive ones, unless it serves once by its costs.
    """

    def __init__(self, staging: Staging, problem: Problem, *, optional: bool, again: bool) -> None:
        self.staging, self.problem = staging, problem
        self.model = model = staging.model
        self.devices = problem.platform.devices
        self.costs = [cost_of(problem, device) for device in self.devices]
        stages, operators = range(staging.stages), range(len(staging.dag))
        self.at = [[model.new_bool_var("") for _ in stages] for _ in self.devices]
        self.used = [model.new_bool_var("") for _ in self.devices]
        self.on = [[self._may_run(costs, index) for index in operators] for costs in self.costs]
        self._fill_stages(optional)
        for costs, row, used in zip(self.costs, self.at, self.used, strict=True):
            model.add_bool_or(*row, ~used)
            for literal in row:
                model.add_implication(literal, used)
            if costs.serves_once or not again:
                model.add_at_most_one(row)
            for here, following in pairwise(row):
                model.add_bool_or(~here, ~following)
        for (d, one), (e, two) in combinations(enumerate(self.devices), 2):
            if one.overlaps(two):
                model.add_bool_or(~self.used[d], ~self.used[e])
        self._join()
        self.crossing = [staging.crossing(boundary, staging.dag.flows) for boundary in range(staging.stages + 1)]
        for d, device in enumerate(self.devices):
            if device.memory_bytes is not None:
                model.add(weighted(self.weights(d, staging.dag.param_bytes)) <= device.memory_bytes)

    def _may_run(self, costs: DeviceCosts, index: int) -> cp_model.IntVar:
        if costs.can_run(self.problem.graph.operators[index]):
            return self.model.new_bool_var("")
        return self.staging.false

    def _fill_stages(self, optional: bool) -> None:
        staging, model = self.staging, self.model
        columns = [[row[stage] for row in self.at] for stage in range(staging.stages)]
        for stage, column in enumerate(columns):
            if optional and stage:
                is_open = model.new_bool_var("")
                model.add(sum(column) == is_open)
                # A stage that is left empty comes behind all operators, and so do the stages after it.
                for row in staging.before:
                    model.add_bool_or(is_open, row[stage])
                for later in columns[stage + 1] if stage + 1 < len(columns) else ():
                    model.add_implication(later, is_open)
                staging.fill(stage, [is_open])
            else:
                model.add_exactly_one(column)
                staging.fill(stage)

    def _join(self) -> None:
        """An operator is on the device that its stage is at."""
        for place, row in enumerate(self.staging.before):
            self.model.add_exactly_one([on[place] for on in self.on])
            for on, at, used in zip(self.on, self.at, self.used, strict=True):
                self.model.add_implication(on[place], used)
                for stage, literal in enumerate(at):
                    self.model.add_bool_or(~row[stage + 1], row[stage], ~literal, on[place])

    def weights(self, device: int, weights: Sequence[int]) -> Terms:
        """The operators that the device runs, with their weights."""
        return [(literal, w) for literal, w in zip(self.on[device], weights, strict=True) if w]

    def hint(self, stages: Sequence[Stage], stage_of: Sequence[int]) -> None:
        """Begins the search at this plan."""
        self.staging.hint(stage_of)
        for device, at, on in zip(self.devices, self.at, self.on, strict=True):
            here = [index < len(stages) and stages[index].devices[0] == device.name for index in range(len(at))]
            for literal, value in zip(at, here, strict=True):
                self.model.add_hint(literal, value)
            for place, literal in enumerate(on):
                if literal is not self.staging.false:
                    self.model.add_hint(literal, here[stage_of[place]])

    def stages(self, solver: cp_model.CpSolver) -> tuple[Stage, ...]:
        """The plan of a solution."""
        found = []
        for index, group in enumerate(self.staging.groups(solver)):
            names = [d.name for d, row in zip(self.devices, self.at, strict=True) if solver.boolean_value(row[index])]
            if names:
                found.append(Stage((names[0],), group))
        return tuple(found)


class Loads:
    """What a frame costs each device and each bus, as integer expressions in multiples of `unit`.

    Every expression may be more than the true cost, never less: they are there to be minimized or limited.

    Args:
        factors: what the seconds of a device are multiplied by: its busy factor, its watts, a rate.
        bus_factor: the same for all buses.
        figures: measured joules of a device's operators in the graph's order; they replace its seconds of computing
            and are not multiplied.

    Attributes:
        device: in the platform's order.
        bus: by name.
        spilled: for modelled devices with a cache, by place: what a frame waits for parameters beyond it.
    """

    def __init__(
        self,
        placement: Placement,
        unit: float,
        factors: Mapping[str, float],
        *,
        bus_factor: float = 1.0,
        figures: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        self.placement, self.unit, self.factors = placement, unit, factors
        self.model, self.staging, self.problem = placement.model, placement.staging, placement.problem
        self._sent: dict[tuple[int, float], Expression] = {}
        self.spilled: dict[int, Expression] = {}
        self.device: list[Expression] = []
        for d, device in enumerate(placement.devices):
            factor = factors[device.name]
            measured = (figures or {}).get(device.name)
            compute = self._compute(d, factor) if measured is None else self._sum(d, measured, 1.0)
            self.device.append(compute + self._transfers(d, factor))
        self.bus = self._buses(bus_factor)

    def _units(self, figure: float) -> int:
        return round(figure / self.unit)

    def _sum(self, d: int, figures: Sequence[float | None], factor: float) -> Expression:
        return weighted(self.placement.weights(d, [self._units((figure or 0.0) * factor) for figure in figures]))

    def _at_least(self, *floors: tuple[Expression, Sequence[cp_model.IntVar], int]) -> Expression:
        """A variable that is no less than each expression whose literals all hold; the third figure is its most."""
        most = max((most for _, _, most in floors), default=0)
        if most <= 0:
            return 0
        value = self.model.new_int_var(0, most, "")
        for floor, literals, own in floors:
            # As one sum: constraints with two enforcement literals are where ortools 9.15 went wrong most.
            self.model.add(value + own * len(literals) - own * sum(literals) >= floor)
        return value

    def _compute(self, d: int, factor: float) -> Expression:
        """Return `DeviceCosts.operators_s` of all stages of a device together."""
        costs, operators = self.placement.costs[d], self.problem.graph.operators
        added = self._sum(d, [costs.added_s(operator) for operator in operators], factor)
        call = sum(self.placement.at[d]) * self._units(costs.call_s * factor)
        work_s = [costs.work_s(operator) for operator in operators]
        work = self._sum(d, work_s, factor)
        if costs.spill_s_per_byte:
            most = self._units(sum(work_s) * factor) + len(operators)
            spilled, most_spilled = self._spill(d, factor)
            self.spilled[d] = spilled
            work = self._at_least((work, (), most), (spilled, (), most_spilled))
        return call + added + work

    def fetch(self, d: int, factor: float) -> tuple[Terms, int]:
        """Return what a device's operators take to fetch their parameters, and how much of that its cache saves."""
        costs = self.placement.costs[d]
        price = costs.spill_s_per_byte * factor
        sizes = [operator.param_bytes for operator in self.problem.graph.operators]
        terms = self.placement.weights(d, [self._units(size * price) for size in sizes])
        return terms, self._units(costs.cached_bytes * price) if price else 0

    def _spill(self, d: int, factor: float) -> tuple[Expression, int]:
        """Return a variable no less than the seconds for parameters beyond the cache of a device, and its most."""
        terms, saved = self.fetch(d, factor)
        most = sum(weight for _, weight in terms)
        # The device serves once, so that all it runs is one stage.
        return self._at_least((weighted(terms) - saved, (), most)), most

    def _transfers(self, d: int, factor: float) -> Expression:
        """Return what all stages of a device receive over links, receive into the device and send from it."""
        costs, stages = self.placement.costs[d], self.staging.stages
        fixed_s = costs.receive.latency_s + costs.send.latency_s
        links = self._incoming(d)
        total: Expression = 0
        for stage in range(stages):
            given, most_given = self._sends(stage + 1, costs.send.s_per_byte * factor)
            floors = []
            for link, literals in links(stage):
                sent, most = self._sends(stage, (link.transfer.s_per_byte + costs.receive.s_per_byte) * factor)
                latency = self._units((link.latency_s + fixed_s) * factor)
                floors.append((sent + given + latency, literals, most + most_given + latency))
            total = total + self._at_least(*floors)
        return total

    def _incoming(self, d: int) -> Callable[[int], list[tuple[Link, list[cp_model.IntVar]]]]:
        """For each stage, what device d may be sent over if it runs it, with the literals under which it is."""
        at, name = self.placement.at, self.placement.devices[d].name
        links = {p: self.problem.link(o.name, name) for p, o in enumerate(self.placement.devices) if p != d}
        costs = {(link.latency_s, link.bandwidth_bytes_per_s) for link in links.values()}

        def of(stage: int) -> list[tuple[Link, list[cp_model.IntVar]]]:
            if stage == 0 or not links:
                return [(Link(name, name), [at[d][stage]])]
            if len(costs) == 1:
                return [(next(iter(links.values())), [at[d][stage]])]
            return [(link, [at[p][stage - 1], at[d][stage]]) for p, link in links.items()]

        return of

    def _sends(self, boundary: int, seconds_per_byte: float) -> tuple[Expression, int]:
        """What the tensors that cross a boundary take at this price, and its most."""
        weights = [
            (literal, self._units(size * seconds_per_byte)) for literal, size in self.placement.crossing[boundary]
        ]
        most = sum(weight for _, weight in weights)
        key = boundary, seconds_per_byte
        if key not in self._sent:
            self._sent[key] = self._at_least((weighted(weights), (), most))
        return self._sent[key], most

    def _buses(self, factor: float) -> dict[str, Expression]:
        """`evaluate._bus_seconds`: links that name a bus, and what devices that do fetch again and again."""
        needs: dict[str, Expression] = defaultdict(int)
        for d, device in enumerate(self.placement.devices):
            bus = self.placement.costs[d].shared_bus
            if bus:
                counted = d in self.spilled and self.factors[device.name] == factor
                needs[bus] = needs[bus] + (self.spilled[d] if counted else self._spill(d, factor)[0])
        pairs = permutations(enumerate(self.placement.devices), 2)
        links = [(p, d, self.problem.link(source.name, device.name)) for (p, source), (d, device) in pairs]
        for bus in dict.fromkeys(link.bus for _, _, link in links if link.bus):
            for stage in range(1, self.staging.stages):
                floors = []
                for p, d, link in links:
                    if link.bus == bus:
                        sent, most = self._sends(stage, link.transfer.s_per_byte * factor)
                        latency = self._units(link.latency_s * factor)
                        literals = self.placement.at[p][stage - 1], self.placement.at[d][stage]
                        floors.append((sent + latency, literals, most + latency))
                needs[bus] = needs[bus] + self._at_least(*floors)
        return dict(needs)


def unit_of(rows: Sequence[Sequence[float | None]], other: float) -> float:
    """A power of ten that makes whole numbers of figures: about ten digits for a frame.

    Measured figures are often round decimals, which then stay exact.

    Args:
        rows: for each device what each operator costs.
        other: the most that anything else may cost; it counts where operators cost nothing, and limits the digits.
    """
    each = [[figure for figure in column if figure is not None] for column in zip(*rows, strict=True)]
    typical = sum(min(column, default=0.0) for column in each) or other or 1.0
    worst = sum(max(column, default=0.0) for column in each) + other
    # CP-SAT needs every sum to stay far below 2^63, and slows down, past its time limit even, well before that.
    return 10.0 ** max(math.floor(math.log10(typical)) - 10, math.ceil(math.log10(max(worst, typical))) - 13)


def second_rows(problem: Problem) -> tuple[list[list[float | None]], float]:
    """Return seconds of each operator on each idle device, and the most that transfers, calls and spills may add."""
    operators, platform = problem.graph.operators, problem.platform
    tensor_bytes = sum(tensor.bytes for tensor in problem.graph.tensors.values())
    param_bytes = sum(operator.param_bytes for operator in operators)
    rows: list[list[float | None]] = []
    hop_s = max(
        (problem.link(a.name, b.name).seconds(tensor_bytes) for a, b in permutations(platform.devices, 2)), default=0
    )
    call_s = spill_s = move_s = 0.0
    for device in platform.devices:
        costs = known_cost_of(problem, device)
        rows.append([costs.alone_s(operator) if costs.can_run(operator) else None for operator in operators])
        call_s, spill_s = max(call_s, costs.call_s), max(spill_s, costs.spill_s(param_bytes))
        move_s = max(move_s, costs.receive.seconds(tensor_bytes) + costs.send.seconds(tensor_bytes))
    return rows, 2 * len(platform.devices) * (hop_s + call_s + move_s) + spill_s


def break_symmetry(placements: Sequence[Placement]) -> None:
    """Of devices that can be exchanged for one another, the first comes first in the stages of all models in turn."""
    devices = placements[0].devices
    groups: list[list[int]] = []
    for d, device in enumerate(devices):
        for group in groups:
            if all(_alike(placement.problem, devices[group[0]], device) for placement in placements):
                group.append(d)
                break
        else:
            groups.append([d])
    for group in groups:
        for first, second in pairwise(group):
            earlier: list[cp_model.IntVar] = []
            for placement in placements:
                for at_first, at_second in zip(placement.at[first], placement.at[second], strict=True):
                    placement.model.add_bool_or(~at_second, *earlier)
                    earlier.append(at_first)


def _alike(problem: Problem, one: Device, two: Device) -> bool:
    """Whether exchanging the two devices changes no plan's cost."""

    def cost(source: Device, destination: Device) -> tuple[object, ...]:
        link = problem.link(source.name, destination.name)
        return link.transfer, link.bus

    others = [device for device in problem.platform.devices if device not in (one, two)]
    return (
        cost_of(problem, one).alike(cost_of(problem, two))
        and cost(one, two) == cost(two, one)
        and all(one.overlaps(other) == two.overlaps(other) for other in others)
        and all(cost(one, o) == cost(two, o) and cost(o, one) == cost(o, two) for o in others)
    )
