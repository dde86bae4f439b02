"""The simulator: it runs a plan as discrete events, with queues, buses, replicas, arrivals and jitter.

    found = simulate(problem, plan.stages, frames=1000, arrivals=poisson(30.0, seed=1), jitter=0.05)
    print(found.statistics.latency_p99_s, len(found.dropped))

`evaluate.py` predicts a plan in steady state. The simulator also shows how the pipeline fills, how long each frame
waits where, and how a source that is not saturated is served. It takes the costs of stages from `evaluate`, and follows
the rules of the running pipeline (`runtime/pipeline.py`):

- A frame takes one of `in_flight` slots when it enters and gives it back when it leaves, in order; queues between
  stages have no other limit. A frame that finds no slot waits outside, or is dropped where the source is live.
- A call of a graph with a batch takes the frames that have come when its first stage begins, as many as the batch at
  most. Where that stage reads the frames itself, it waits for all of them. With a batch, the
  rules below hold for calls in place of frames.
- A stage takes frames in the order in which they left the stage before, and one with an ordered operator in the order
  in which they entered. A device does one thing at a time; where it serves several stages the earlier frame goes first.
  But a replica that serves other stages alone does these first, because no other device can. Of idle replicas, the one
  that waited longest takes the frame.
- A bus serves one request at a time, first come first served. Requests are transfers over links that name the bus, and
  fetches of parameters that a modelled device's cache does not hold. A device is busy while it waits for the bus, and
  the wait counts as transfer or as compute.
- A device with concurrent copies has two workers, each with a frame. Its computing and its copies are two buses. A
  worker takes a frame once the other one computes.
- The lock of the Python interpreter is a bus. A stage holds it at the start of its computing, for the seconds of all
  its operators together; in truth these are spread over the stage.
- A device is as slow as if the number of working devices were the number of frames inside, at most all devices of the
  plan. So a full pipeline is as slow as `evaluate` says, and a single frame meets idle devices.

Without buses, jitter or replicas, a saturated run is as fast as `evaluate` predicts, if there are slots enough. With
buses it may be slower, because turns may fall badly. With uneven replicas, and with devices that serve several stages,
it is slower where the slots are too few for the frames that wait. Replicas that wait for slots need not share the
frames by their rates, as `evaluate` supposes: where the links behind them differ, a run may be faster or slower.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise, repeat

from tvm_pipeline.core.plan import Stage, calls_inside
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.statistics import Bar, RunRecord, RunStatistics, StageRecord
from tvm_pipeline.cost.batches import of_calls
from tvm_pipeline.cost.device_costs import INTERPRETER, busy_factor, cost_of, lock_s
from tvm_pipeline.cost.evaluate import check_stages, evaluate
from tvm_pipeline.cost.stage_costs import StageCost
from tvm_pipeline.errors import OptionError, ProfileError

MOST_JITTER = 100.0
MOST_FRAMES = 10_000_000  # which take a minute, and some GB
# When each frame arrives, in seconds: all of them at once, so that the source is never empty.
SATURATED: Iterable[float] = repeat(0.0)
STRETCH = 32  # measured frames that are replayed one after the other
GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples spread evenly over 0 to 1, so that all frames are replayed as often

# How many times longer a stage, on a device, takes for a frame than in the mean.
Noise = Callable[[int, str, int], float]


def fixed_rate(rate_fps: float) -> Iterator[float]:
    """Return the arrivals of a camera: a frame every `1 / rate_fps` seconds. Raise OptionError for no such rate."""
    check_rate(rate_fps)
    return (frame / rate_fps for frame in itertools.count())


def cameras(count: int, rate_fps: float, seed: int = 0) -> Iterator[float]:
    """Return the arrivals of several cameras of one rate, which began at random moments. Raise OptionError as above."""
    check_rate(rate_fps)
    rng = random.Random(seed)
    phases = sorted(rng.random() for _ in range(count))
    return ((frame + phase) / rate_fps for frame in itertools.count() for phase in phases)


def poisson(rate_fps: float, seed: int = 0) -> Iterator[float]:
    """Return Poisson arrivals: exponential gaps of `1 / rate_fps` seconds in the mean. Raise OptionError as above."""
    check_rate(rate_fps)
    rng = random.Random(seed)
    return accumulate(rng.expovariate(rate_fps) for _ in itertools.count())


def check_rate(rate_fps: float | None) -> None:
    """Raise OptionError where frames cannot arrive at this rate; None is as many as are taken."""
    if rate_fps is not None and not 0 < rate_fps < math.inf:
        raise OptionError(f"frames cannot arrive at {rate_fps:g} a second; give a rate above 0")


@dataclass(frozen=True, slots=True)
class FrameTimes:
    """The times of a frame: it arrived, got a slot, was done in the last stage, and left after all earlier frames."""

    frame: int
    arrived_s: float
    entered_s: float
    done_s: float
    left_s: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """The report of a simulated run.

    Attributes:
        statistics: as `Pipeline.statistics()` gives them. As there, latency counts from a frame's slot, or from when
            the first stage reads the frame, to the end of its last stage, without the wait for earlier frames.
        events: every stage of every frame, in the order of their starts.
        passages: the frames that came out, in that order.
        dropped: the frames that a live source lost, because the pipeline was full.
    """

    statistics: RunStatistics
    events: tuple[Bar, ...]
    passages: tuple[FrameTimes, ...]
    dropped: tuple[int, ...]


def simulate(
    problem: Problem,
    stages: tuple[Stage, ...],
    frames: int,
    arrivals: Iterable[float] = SATURATED,
    *,
    in_flight: int | None = None,
    drop: bool = False,
    jitter: float = 0.0,
    times_s: Sequence[Sequence[float]] = (),
    seed: int = 0,
) -> Simulation:
    """Run `frames` frames through the stages. The same arguments give the same run.

    Args:
        arrivals: the second at which each frame arrives, in ascending order: SATURATED, `fixed_rate`, `poisson`, or
            recorded times. The run ends where they end.
        in_flight: the most frames inside at the same time; the default is that of `Pipeline`.
        drop: whether a frame that finds the pipeline full is lost, as a camera loses it; else it waits.
        jitter: standard deviation over mean of a stage's seconds, which are then log-normal.
        times_s: for each stage on each of its devices, in the plan's order, the seconds that frames were measured to
            take in a full pipeline, in place of `jitter`. Stretches of them are replayed, the first one drawn by the
            seed: in all stages at once, since what disturbs a machine lasts for some frames and meets several devices.

    Raises:
        OptionError: an argument is out of its range.
        PlanError: the stages do not fit the problem, see `evaluate`.
        ProfileError: nothing says how fast a device of the plan is.
    """
    if not 1 <= frames <= MOST_FRAMES:
        raise OptionError(f"{frames} frames: simulate at least one, and up to {MOST_FRAMES}")
    times = list(islice(arrivals, frames))
    if any(not early <= late for early, late in pairwise((0.0, *times, sys.float_info.max))):
        raise OptionError("frames arrive at seconds from 0 on, in ascending order")
    if in_flight is not None and in_flight < 1:
        raise OptionError(f"in_flight is {in_flight}; a pipeline holds at least one frame")
    if not 0 <= jitter <= MOST_JITTER:
        raise OptionError(
            f"jitter is {jitter:g}; it is a standard deviation relative to the mean, up to {MOST_JITTER:g}, such as "
            "0.05"
        )
    if seed < 0:
        raise OptionError(f"seed is {seed}; it is a whole number, 0 or more")
    work = _Work(problem, stages)
    noise = _replayed(work.costs, times_s, frames, seed) if times_s else _noise(jitter, seed)
    return _Run(work, in_flight, drop=drop, noise=noise).through(times)


def _noise(jitter: float, seed: int) -> Noise:
    """Return a function that draws from a log-normal distribution of mean 1 and standard deviation `jitter`."""
    if not jitter:
        return lambda *_: 1.0
    rng, sigma = random.Random(seed), math.sqrt(math.log1p(jitter**2))
    return lambda *_: rng.lognormvariate(-(sigma**2) / 2, sigma)


def _replayed(costs: Sequence[StageCost], times_s: Sequence[Sequence[float]], frames: int, seed: int) -> Noise:
    """Return a function that replays measured seconds, relative to those that `evaluate` counts."""
    if len(times_s) != len(costs) or not all(times_s):
        raise OptionError(f"times_s has {len(times_s)} lists for {len(costs)} devices of stages; each needs some")
    first = random.Random(seed).random()
    begins = [(first + GOLDEN * stretch) % 1 for stretch in range(frames // STRETCH + 1)]
    ratios = {
        (cost.stage, cost.device): [one / max(cost.seconds, 1e-12) for one in seconds]
        for cost, seconds in zip(costs, times_s, strict=True)
    }

    def replayed(stage: int, device: str, frame: int) -> float:
        own = ratios[stage, device]
        return own[(int(begins[frame // STRETCH] * len(own)) + frame % STRETCH) % len(own)]

    return replayed


@dataclass(frozen=True, slots=True)
class _Step:
    """A part of a device's work for a frame. It begins when the bus is free, and occupies the bus for `bus_s`."""

    seconds: float
    bus: str = ""
    bus_s: float = 0.0


class _Work:
    """The steps of each device for a frame in each stage, on idle devices, with the seconds that `evaluate` counts."""

    def __init__(self, problem: Problem, stages: tuple[Stage, ...]) -> None:
        self.batch, self.reads = problem.graph.batch, problem.graph.operators[0].is_host
        problem = of_calls(problem)
        evaluation = evaluate(problem, stages)
        costs = evaluation.costs
        if not costs:
            raise ProfileError(
                "nothing says how fast the devices of this plan are; give a profile, or a platform with [device.model]"
            )
        self.costs, self.stages, self.calls_inside = costs, stages, calls_inside(stages, evaluation.predicted)
        ordered = {operator.name for operator in problem.graph.operators if operator.ordered}
        self.in_order = {index for index, stage in enumerate(stages) if not ordered.isdisjoint(stage.operators)}
        self.devices = tuple(dict.fromkeys(cost.device for cost in costs))
        concurrent = {cost.device for cost in costs if cost.copies_s is not None}
        self.workers = [(name, n) for name in self.devices for n in range(2 if name in concurrent else 1)]
        self.factors = {
            name: [busy_factor(problem, name, n + 1) for n in range(len(self.devices))] for name in self.devices
        }
        crossing = [sum(t.bytes for t in row) for row in check_stages(problem.graph, problem.platform, stages)]
        by_name = {operator.name: operator for operator in problem.graph.operators}
        self._compute: dict[tuple[int, str], tuple[_Step, ...]] = {}
        self._receive: dict[tuple[int, str, str], _Step] = {}
        for cost in costs:
            index, name = cost.stage, cost.device
            device, names = cost_of(problem, name), stages[index].operators
            compute_s, copies_s, send_s = cost.compute_s / self.factors[name][-1], 0.0, 0.0
            self._compute[index, name] = (_Step(compute_s),)
            if device.whole_s(names) is None:
                copies_s, send_s = device.receive.seconds(crossing[index]), device.send.seconds(crossing[index + 1])
            if cost.copies_s is not None:
                work = _Step(compute_s, f"computing on {name}", cost.compute_s)
                self._compute[index, name] = work, _Step(send_s, device.copies_bus, send_s)
            else:
                copies_s += send_s
                if device.spill_s_per_byte and device.whole_s(names) is None:
                    # Parameters are fetched beside the work, once the calls are made.
                    operators = [by_name[name] for name in names]
                    calls_s = device.fixed_s(operators)
                    spill_s = device.spill_s(sum(operator.param_bytes for operator in operators))
                    work = _Step(max(compute_s - calls_s, 0.0), device.shared_bus, spill_s)
                    self._compute[index, name] = (_Step(calls_s), work)
            self._compute[index, name] = _locked(self._compute[index, name], lock_s(problem, names))
            # A frame that enters comes from no other device; only the device's own copies cost time.
            for source in stages[index - 1].devices if index else (name,):
                link = problem.link(source, name)
                link_s = link.seconds(crossing[index])
                bus_s = link_s if link.bus else link_s + copies_s
                self._receive[index, name, source] = _Step(link_s + copies_s, link.bus or device.copies_bus, bus_s)

    def steps(self, stage: int, device: str, source: str | None) -> tuple[_Step, ...]:
        """Return the step of receiving a frame from `source` (None: it enters), then the steps of computing it."""
        return self._receive[stage, device, source or device], *self._compute[stage, device]


def _locked(steps: tuple[_Step, ...], held_s: float) -> tuple[_Step, ...]:
    """Return the steps of computing, of which the first `held_s` seconds need the lock of the interpreter."""
    if not held_s:
        return steps
    first, *rest = steps
    locked = _Step(min(held_s, first.seconds), INTERPRETER, held_s)
    return locked, replace(first, seconds=first.seconds - locked.seconds), *rest


class _Run:
    """The state of a run, and the events that change it."""

    def __init__(self, work: _Work, in_flight: int | None, *, drop: bool, noise: Noise) -> None:
        self.work, self.drop, self.noise = work, drop, noise
        self.records = {(i, d): StageRecord(i, d) for i, stage in enumerate(work.stages) for d in stage.devices}
        self.slots = in_flight or work.calls_inside
        self.serves = {d: [i for i, stage in enumerate(work.stages) if d in stage.devices] for d in work.devices}
        self.now = 0.0
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.ticket = itertools.count()  # of events at the same time, the one that was planned first comes first
        self.door: deque[int] = deque()
        # (frame, the device that has it)
        self.queues: list[deque[tuple[int, str | None]]] = [deque() for _ in work.stages]
        self.begun = [0] * len(work.stages)  # how many frames each stage took
        self.inside: deque[int] = deque()  # in order
        # By its first frame, the frames of each call that is inside; frames join the one that has not begun.
        self.members: dict[int, list[int]] = {}
        self.joinable: list[int] = []
        self.idle_since = dict.fromkeys(work.workers, 0.0)  # the longest idle first
        self.receiving: set[str] = set()  # the devices of which a worker has a frame that it does not compute yet
        self.bus_waiters: dict[str, deque[Callable[[], None]]] = defaultdict(deque)
        self.busy_buses: set[str] = set()
        self.arrived: Sequence[float] = ()
        self.coming = 0  # frames that have not arrived
        self.entered: dict[int, float] = {}
        self.order: list[int] = []  # the frames that entered
        self.done: dict[int, float] = {}
        self.events: list[Bar] = []
        self.passages: list[FrameTimes] = []
        self.dropped: list[int] = []

    def through(self, arrived: Sequence[float]) -> Simulation:
        self.arrived, self.coming = arrived, len(arrived)
        for frame, at_s in enumerate(arrived):
            self.at(at_s, self.arrive(frame))
        while self.agenda:
            self.now = self.agenda[0][0]
            while self.agenda and self.agenda[0][0] == self.now:
                heapq.heappop(self.agenda)[2]()
            self.dispatch()
        record = RunRecord()
        for passage in self.passages:
            record.add(passage.entered_s, passage.done_s)
        stages = tuple(stage.summary(self.slots) for stage in self.records.values())
        statistics = record.summary(self.slots * self.work.batch, max(self.entered.values(), default=0.0), stages)
        self.events.sort(key=lambda bar: (bar.start_s, bar.frame, bar.stage))
        return Simulation(statistics, tuple(self.events), tuple(self.passages), tuple(self.dropped))

    def at(self, second: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (second, next(self.ticket), action))

    def arrive(self, frame: int) -> Callable[[], None]:
        def action() -> None:
            self.coming -= 1
            if self.drop and len(self.inside) == self.slots and not 0 < len(self.joinable) < self.work.batch:
                self.dropped.append(frame)
            else:
                self.door.append(frame)
                self.admit()

        return action

    def admit(self) -> None:
        while self.door:
            joins = 0 < len(self.joinable) < self.work.batch
            if not joins and len(self.inside) == self.slots:
                return
            frame = self.door.popleft()
            self.entered[frame] = self.now
            if joins:
                self.joinable.append(frame)
                continue
            self.joinable = self.members[frame] = [frame]
            self.order.append(frame)
            self.inside.append(frame)
            self.queues[0].append((frame, None))

    def dispatch(self) -> None:
        """Give every idle worker a frame: the earliest for the stages that it serves alone, else for its other one."""
        for worker in list(self.idle_since):
            heads = [
                (len(self.work.stages[stage].devices) > 1, *head, stage)
                for stage in self.serves[worker[0]]
                for head in self.head(stage)
                if worker[0] not in self.receiving
            ]
            if heads:
                _, frame, source, stage = min(heads, key=lambda head: (head[0], head[1]))
                self.queues[stage].remove((frame, source))
                self.begun[stage] += 1
                if not stage and self.work.reads:
                    self.entered.update(dict.fromkeys(self.members[frame], self.now))
                if self.members[frame] is self.joinable:
                    self.joinable = []
                self.serve(stage, worker, frame, source)

    def head(self, stage: int) -> list[tuple[int, str | None]]:
        """Return the frame that a stage takes next, where it is there, and the device that has it."""
        waiting = self.queues[stage]
        if not stage and self.work.reads and 0 < len(self.joinable) < self.work.batch and self.coming:
            waiting = deque(head for head in waiting if self.members[head[0]] is not self.joinable)
        if stage in self.work.in_order and waiting:
            due = self.order[self.begun[stage]]
            return [head for head in waiting if head[0] == due]
        return list(islice(waiting, 1))

    def serve(self, stage: int, worker: tuple[str, int], frame: int, source: str | None) -> None:
        device, _ = worker
        steps = deque(self.work.steps(stage, device, source))
        waited_s, noise = self.now - self.idle_since.pop(worker), self.noise(stage, device, frame)
        slowed = noise * self.work.factors[device][min(len(self.inside), len(self.work.devices)) - 1]
        times: list[float] = []  # when each step began, and when the last one ended
        self.receiving.add(device)

        def begin() -> None:
            if len(times) == 2:  # it computes
                self.receiving.discard(device)

        def proceed() -> None:
            times.append(self.now)
            if steps:
                step = steps.popleft()
                self.take(step.bus, step.bus_s * noise, step.seconds * slowed, begin, proceed)
                return
            began_s, received_s, *_, ended_s = times
            bar = Bar(stage, device, frame, began_s, received_s - began_s, ended_s - received_s)
            self.records[stage, device].add(waited_s, bar.transfer_s, bar.compute_s, frame, self.now)
            self.finish(bar, worker)

        proceed()

    def take(self, bus: str, bus_s: float, seconds: float, begin: Callable[[], None], then: Callable[[], None]) -> None:
        """Begin a step of so many seconds: now or, where it needs the bus for `bus_s`, when the bus is free."""
        if not bus or not bus_s:
            begin()
            self.at(self.now + seconds, then)
            return

        def go() -> None:
            begin()
            self.busy_buses.add(bus)
            self.at(self.now + bus_s, release)
            self.at(self.now + seconds, then)

        def release() -> None:
            self.busy_buses.discard(bus)
            if self.bus_waiters[bus]:
                self.bus_waiters[bus].popleft()()

        if bus in self.busy_buses:
            self.bus_waiters[bus].append(go)
        else:
            go()

    def finish(self, bar: Bar, worker: tuple[str, int]) -> None:
        """Free the worker and hand the frame on; after the last stage, let the frames leave that are next in order."""
        self.events.append(bar)
        self.idle_since[worker] = self.now
        if bar.stage + 1 < len(self.queues):
            self.queues[bar.stage + 1].append((bar.frame, bar.device))
            return
        self.done[bar.frame] = self.now
        while self.inside and self.inside[0] in self.done:
            call = self.inside.popleft()
            self.passages += [
                FrameTimes(frame, self.arrived[frame], self.entered[frame], self.done[call], left_s=self.now)
                for frame in self.members.pop(call)
            ]
        self.admit()
