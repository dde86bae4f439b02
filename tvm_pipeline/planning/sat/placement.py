"""The device of every stage, as booleans for CP-SAT, and the seconds or joules that follow from them.

`at[d][b]` says that device d runs stage b, and `on[d][v]` that it runs operator v. Costs that add up over operators are
linear in `on`. Costs that depend on neighbouring stages (links, inputs and outputs) are stated under the condition that
certain devices run these stages. The costs are those of `cost/evaluate.py`, which judges the plans.

Next: `least_seconds.py` (one model on a platform) and `planning/deployment.py` (several models).
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
        optional: whether all stages from some stage on may be empty; else every stage has operators.
        again: whether a device may serve several stages that are not consecutive, unless its costs say `serves_once`.
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
            elif costs.device.most_stages is not None:
                model.add(sum(row) <= costs.device.most_stages)
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
        """Return a literal that says whether the device runs the operator; false if it cannot."""
        if costs.can_run(self.problem.graph.operators[index]):
            return self.model.new_bool_var("")
        return self.staging.false

    def _fill_stages(self, optional: bool) -> None:
        """Give every stage one device and some operators; an optional stage may have neither."""
        staging, model = self.staging, self.model
        columns = [[row[stage] for row in self.at] for stage in range(staging.stages)]
        for stage, column in enumerate(columns):
            if optional and stage:
                is_open = model.new_bool_var("")
                model.add(sum(column) == is_open)
                # All operators are in front of an empty stage, and the stages behind it are empty, too.
                for row in staging.before:
                    model.add_bool_or(is_open, row[stage])
                for later in columns[stage + 1] if stage + 1 < len(columns) else ():
                    model.add_implication(later, is_open)
                staging.fill(stage, [is_open])
            else:
                model.add_exactly_one(column)
                staging.fill(stage)

    def _join(self) -> None:
        """Demand that every operator is on the device of its stage."""
        for index, row in enumerate(self.staging.before):
            self.model.add_exactly_one([on[index] for on in self.on])
            for on, at, used in zip(self.on, self.at, self.used, strict=True):
                self.model.add_implication(on[index], used)
                for stage, literal in enumerate(at):
                    self.model.add_bool_or(~row[stage + 1], row[stage], ~literal, on[index])

    def weights(self, device: int, weights: Sequence[int]) -> Terms:
        """Return the literals of the operators on the device, with their weights."""
        return [(literal, w) for literal, w in zip(self.on[device], weights, strict=True) if w]

    def hint(self, stages: Sequence[Stage], stage_of: Sequence[int]) -> None:
        """Start the search at this plan."""
        self.staging.hint(stage_of)
        for device, at, on in zip(self.devices, self.at, self.on, strict=True):
            here = [index < len(stages) and stages[index].devices[0] == device.name for index in range(len(at))]
            for literal, value in zip(at, here, strict=True):
                self.model.add_hint(literal, value)
            for index, literal in enumerate(on):
                if literal is not self.staging.false:
                    self.model.add_hint(literal, here[stage_of[index]])

    def stages(self, solver: cp_model.CpSolver) -> tuple[Stage, ...]:
        """Return the stages of a solution."""
        found = []
        for index, group in enumerate(self.staging.groups(solver)):
            names = [d.name for d, row in zip(self.devices, self.at, strict=True) if solver.boolean_value(row[index])]
            if names:
                found.append(Stage((names[0],), group))
        return tuple(found)


class Loads:
    """The cost of a frame on each device and each bus, as integer expressions in multiples of `unit`.

    A value of an expression may exceed the true cost but is never less: the expressions are minimised or limited.

    Args:
        factors: by device, the factor of its seconds: its busy factor, its watts, or a rate.
        bus_factor: the factor of the seconds of all buses.
        occupied: whether a bus carries the concurrent copies of a device, which then do not occupy it.
        figures: by device, measured joules of its operators in the graph's order; they replace its seconds of computing
            and are not multiplied.

    Attributes:
        device: the loads of the devices, in the platform's order.
        bus: the loads of the buses, by name.
        spilled: by index, for modelled devices with a cache: the cost of fetching parameters beyond the cache.
    """

    def __init__(
        self,
        placement: Placement,
        unit: float,
        factors: Mapping[str, float],
        *,
        bus_factor: float = 1.0,
        occupied: bool = False,
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
            copied = occupied and placement.costs[d].copies_bus
            self.device.append(compute if copied else compute + self._transfers(d, factor))
        self.bus = self._buses(bus_factor, occupied)

    def _units(self, figure: float) -> int:
        return round(figure / self.unit)

    def _sum(self, d: int, figures: Sequence[float | None], factor: float) -> Expression:
        return weighted(self.placement.weights(d, [self._units((figure or 0.0) * factor) for figure in figures]))

    def _at_least(self, *floors: tuple[Expression, Sequence[cp_model.IntVar], int]) -> Expression:
        """Return a variable that is no less than each expression whose literals all hold.

        Args:
            floors: expressions, their literals, and an upper bound of each expression.
        """
        most = max((most for _, _, most in floors), default=0)
        if most <= 0:
            return 0
        value = self.model.new_int_var(0, most, "")
        for floor, literals, own in floors:
            # This is one sum, since ortools 9.15 had most of its errors in constraints with two enforcement literals.
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
        """Return the costs of fetching the parameters of a device's operators, and the cost that its cache saves."""
        costs = self.placement.costs[d]
        price = costs.spill_s_per_byte * factor
        sizes = [operator.param_bytes for operator in self.problem.graph.operators]
        terms = self.placement.weights(d, [self._units(size * price) for size in sizes])
        return terms, self._units(costs.cached_bytes * price) if price else 0

    def _spill(self, d: int, factor: float) -> tuple[Expression, int]:
        """Return a variable no less than the cost of parameters beyond the cache of a device, and its upper bound."""
        terms, saved = self.fetch(d, factor)
        most = sum(weight for _, weight in terms)
        # The device serves once, so its operators are one stage.
        return self._at_least((weighted(terms) - saved, (), most)), most

    def _transfers(self, d: int, factor: float, *, by_bus: bool = True) -> Expression:
        """Return the cost of all transfers of a device: over links, into the device and out of it.

        Args:
            by_bus: whether links count that have a bus of their own.
        """
        costs, stages = self.placement.costs[d], self.staging.stages
        fixed_s = costs.receive.latency_s + costs.send.latency_s
        links = self._incoming(d, by_bus)
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

    def _incoming(self, d: int, by_bus: bool) -> Callable[[int], list[tuple[Link, list[cp_model.IntVar]]]]:
        """Return a function of a stage: the links over which device d may receive it, each with its literals."""
        at, name = self.placement.at, self.placement.devices[d].name
        links = {p: self.problem.link(o.name, name) for p, o in enumerate(self.placement.devices) if p != d}
        links = {p: link if by_bus or not link.bus else Link(name, name) for p, link in links.items()}
        costs = {(link.latency_s, link.bandwidth_bytes_per_s) for link in links.values()}

        def of(stage: int) -> list[tuple[Link, list[cp_model.IntVar]]]:
            if stage == 0 or not links:
                return [(Link(name, name), [at[d][stage]])]
            if len(costs) == 1:
                return [(next(iter(links.values())), [at[d][stage]])]
            return [(link, [at[p][stage - 1], at[d][stage]]) for p, link in links.items()]

        return of

    def _sends(self, boundary: int, seconds_per_byte: float) -> tuple[Expression, int]:
        """Return the cost of the tensors that cross a boundary at this price, and its upper bound."""
        weights = [
            (literal, self._units(size * seconds_per_byte)) for literal, size in self.placement.crossing[boundary]
        ]
        most = sum(weight for _, weight in weights)
        key = boundary, seconds_per_byte
        if key not in self._sent:
            self._sent[key] = self._at_least((weighted(weights), (), most))
        return self._sent[key], most

    def _buses(self, factor: float, occupied: bool) -> dict[str, Expression]:
        """Return the load of each bus, as `evaluate` counts it: links over it, and parameters fetched each frame."""
        needs: dict[str, Expression] = defaultdict(int)
        for d, device in enumerate(self.placement.devices):
            bus = self.placement.costs[d].shared_bus
            if bus:
                counted = d in self.spilled and self.factors[device.name] == factor
                needs[bus] = needs[bus] + (self.spilled[d] if counted else self._spill(d, factor)[0])
            if occupied and (bus := self.placement.costs[d].copies_bus):
                needs[bus] = self._transfers(d, factor, by_bus=False)
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
    """Return a power of ten as the unit of integer costs, such that a frame costs a number of about ten digits.

    Measured figures are often round decimals, which such a unit represents exactly.

    Args:
        rows: for each device the cost of each operator.
        other: an upper bound of all other costs; it counts if the operators cost nothing, and limits the digits.
    """
    columns = [[figure for figure in column if figure is not None] for column in zip(*rows, strict=True)]
    typical = sum(min(column, default=0.0) for column in columns) or other or 1.0
    worst = sum(max(column, default=0.0) for column in columns) + other
    # CP-SAT needs every sum to stay far below 2^63. Well below that it becomes slow, and even exceeds its time limit.
    return 10.0 ** max(math.floor(math.log10(typical)) - 10, math.ceil(math.log10(max(worst, typical))) - 13)


def second_rows(problem: Problem) -> tuple[list[list[float | None]], float]:
    """Return seconds of each operator on each idle device, and an upper bound of transfers, calls and spills."""
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
    """Demand that of interchangeable devices the first one serves before the others, over all models in turn."""
    devices = placements[0].devices
    groups: list[list[int]] = []
    for d, device in enumerate(devices):
        for group in groups:
            if all(alike(placement.problem, devices[group[0]], device) for placement in placements):
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


def alike(problem: Problem, one: Device, two: Device) -> bool:
    """Return whether an exchange of the two devices changes the cost of no plan."""

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
