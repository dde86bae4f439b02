"""Host operators in a running pipeline: frames in order, once each, whatever is replicated, exchanged or fails."""

from __future__ import annotations

import itertools
import os
import threading
import time
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from tests.support.fake_backend import FakeModel, chain_model, fake_platform, raise_at
from tvm_pipeline import Pipeline, Plan, Problem
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Prediction, Stage
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.errors import PipelineClosedError, PlanError, StageError
from tvm_pipeline.runtime import LivePipeline
from tvm_pipeline.runtime.frame_stream import Tagged
from tvm_pipeline.runtime.host_work import EndOfStream, Entry, HostWork, stage_work

OPERATORS = 4
CORE = min(os.sched_getaffinity(0))


@dataclass
class Numbers:
    """An application that reads 0, 1, 2 ..., and writes what the model makes of each; it keeps all that it did."""

    model: FakeModel
    count: int | None = None
    read: list[int] = field(default_factory=list)
    written: list[tuple[int, int]] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    fails_at: tuple[str, int] = ("", -1)

    @property
    def host(self) -> HostWork:
        model = self.model.graph
        frame, done = Tensor("host/frame", (1,)), Tensor("host/done", (0,))
        before = (
            Operator("host/read", "read", (), (frame,), ordered=True),
            Operator("host/prepare", "prepare", (frame.name,), model.inputs, ordered=True),
        )
        after = (Operator("host/write", "write", model.outputs, (done,), ordered=True),)
        graph = OperatorGraph(model.name, (), (*before, *model.operators, *after), (done.name,), model.batch)
        functions = {"host/read": self._read, "host/prepare": self._prepare, "host/write": self._write}
        return HostWork(graph, functions)

    def _check(self, operator: str, number: int) -> None:
        self.threads.add(f"{operator} in {threading.current_thread().name}")
        if self.fails_at == (operator, number):
            raise ValueError(f"cannot {operator} {number}")

    def _read(self, tag, tensor):
        if tag:
            return None
        if len(self.read) == self.count:
            raise EndOfStream
        number = len(self.read)
        self._check("read", number)
        self.read.append(number)
        tag.append(number)
        return Entry(time.perf_counter())

    def _prepare(self, tag, tensor):
        tensor("x")[...] = tag[0]

    def _write(self, tag, tensor):
        if len(tag) == 1:
            self._check("write", tag[0])
            tag.append(int(tensor("y")[0]))
            self.written.append((tag[0], tag[1]))


def problem_of(app: Numbers, platform: Platform) -> Problem:
    graph = app.host.graph
    devices = {device.name: DeviceProfile.in_order(graph, (1e-4,) * len(graph)) for device in platform.devices}
    return Problem(graph, platform, Profile(graph.name, graph.fingerprint, devices))


def with_core(*names: str) -> Platform:
    """Return fake devices, the first of them on a core of this machine."""
    platform = fake_platform(*names)
    first, *others = platform.devices
    return replace(platform, devices=(replace(first, cores=(CORE,)), *others))


def plan_of(problem: Problem, *stages: tuple[str, str]) -> Plan:
    """Return a plan of stages, each given by its devices and its operators."""
    made = tuple(Stage(tuple(devices.split()), tuple(operators.split())) for devices, operators in stages)
    return judged(problem, Plan(problem.graph.name, "by hand", "throughput", made, Prediction()))


def run(pipeline) -> list[int]:
    """Run to the end of the source; return what came out, in order."""
    return [result.tag[1] for result in pipeline.map(Tagged({}, []) for _ in itertools.count())]


def dawdle(seconds: float, random: np.random.Generator):
    return lambda call: time.sleep(seconds * random.random())


WHOLE = "host/read host/prepare op0 op1 op2 op3 host/write"


def test_frames_stay_in_order_behind_replicas():
    random = np.random.default_rng(0)
    hooks = {("op1", device): dawdle(2e-3, random) for device in ("d1", "d2", "d3")}
    app = Numbers(chain_model(OPERATORS, hooks=hooks), count=200)
    problem = problem_of(app, platform := with_core("d0", "d1", "d2", "d3", "d4"))
    plan = plan_of(problem, ("d0", "host/read host/prepare"), ("d1 d2 d3", "op0 op1 op2"), ("d4", "op3 host/write"))
    with Pipeline(app.model, plan, platform, host=app.host) as pipeline:
        assert run(pipeline) == [n + OPERATORS for n in range(200)]
    assert app.read == list(range(200))
    assert app.written == [(n, n + OPERATORS) for n in range(200)]
    assert app.threads == {"read in stage 0 on d0", "write in stage 2 on d4"}


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_it_ends_where_the_source_ends(count):
    app = Numbers(chain_model(OPERATORS), count)
    problem = problem_of(app, platform := with_core("d0"))
    with Pipeline(app.model, plan_of(problem, ("d0", WHOLE)), platform, host=app.host) as pipeline:
        assert run(pipeline) == [n + OPERATORS for n in range(count)]
        assert pipeline.state == "stopped"
    assert len(app.written) == count


def test_it_ends_with_the_frames_inside_when_it_is_drained():
    app = Numbers(chain_model(OPERATORS))
    problem = problem_of(app, platform := with_core("d0"))
    with Pipeline(app.model, plan_of(problem, ("d0", WHOLE)), platform, host=app.host) as pipeline:
        for _ in range(2):
            pipeline.submit({}, tag=[])
        pipeline.drain()
        assert [result.tag[1] for result in pipeline.results()] == [4, 5]
        with pytest.raises(PipelineClosedError):
            pipeline.submit({}, tag=[])


def test_a_host_operator_that_raises_ends_the_run_after_the_frames_before():
    for operator, stage in (("read", 0), ("write", 1)):
        app = Numbers(chain_model(OPERATORS), fails_at=(operator, 5))
        problem = problem_of(app, with_core("d0", "d1"))
        plan = plan_of(problem, ("d0", "host/read host/prepare op0"), ("d1", "op1 op2 op3 host/write"))
        live = LivePipeline(app.model, problem, plan, host=app.host)
        out: list[int] = []
        where = f"host/{operator} in stage {stage} on d{stage} failed at frame 5"
        with live, pytest.raises(StageError, match=where) as caught:
            out.extend(result.tag[1] for result in live.map(Tagged({}, []) for _ in itertools.count()))
        assert caught.value.operator == f"host/{operator}"
        assert isinstance(caught.value.__cause__, ValueError)
        assert out == [n + OPERATORS for n in range(5)]
        assert [event.kind for event in live.events] == ["start"]  # no device is left out for it


def test_a_host_operator_that_hangs_is_named():
    never = threading.Event()
    app = Numbers(chain_model(OPERATORS))
    host = app.host

    def hang(tag, tensor):
        if tag[0] == 3:
            never.wait(60)

    host = replace(host, functions={**host.functions, "host/write": hang})
    problem = problem_of(app, with_core("d0"))
    live = LivePipeline(app.model, problem, plan_of(problem, ("d0", WHOLE)), host=host, watchdog_s=0.2)
    with live, pytest.raises(StageError, match=r"host/write in stage 0 on d0 failed at frame 3.*not end within 0\.2 s"):
        list(live.map(Tagged({}, []) for _ in itertools.count()))
    never.set()


@pytest.mark.thorough
def test_waiting_for_a_frame_is_no_hang_and_does_not_hold_up_the_end():
    app, came = Numbers(chain_model(OPERATORS)), threading.Event()
    host = app.host

    def wait(tag, tensor):
        came.wait(60)
        return app._read(tag, tensor)

    host = replace(host, functions={**host.functions, "host/read": wait})
    problem = problem_of(app, with_core("d0"))
    live = LivePipeline(app.model, problem, plan_of(problem, ("d0", WHOLE)), host=host, watchdog_s=0.05)
    with live:
        live.submit({}, tag=[])
        time.sleep(0.5)
        assert live.state == "running"
        began = time.monotonic()
    assert time.monotonic() - began < 30  # not until a frame comes
    came.set()


def test_plans_are_exchanged_without_a_frame_lost_or_out_of_order():
    random = np.random.default_rng(2)
    hooks = {(f"op{o}", f"d{d}"): dawdle(3e-4, random) for o in range(OPERATORS) for d in range(4)}
    app = Numbers(chain_model(OPERATORS, hooks=hooks))
    problem = problem_of(app, with_core("d0", "d1", "d2", "d3"))
    plans = [
        plan_of(problem, ("d0", WHOLE)),
        plan_of(problem, ("d3", WHOLE)),
        plan_of(problem, ("d0", "host/read host/prepare"), ("d1 d2", "op0 op1"), ("d3", "op2 op3 host/write")),
        plan_of(problem, ("d1", "host/read host/prepare op0 op1"), ("d0", "op2 op3 host/write")),
        plan_of(problem, ("d2", "host/read host/prepare op0"), ("d1 d3", "op1 op2"), ("d0", "op3 host/write")),
    ]
    out = []
    live = LivePipeline(app.model, problem, plans[0], host=app.host)
    with live:
        results = live.map(Tagged({}, []) for _ in itertools.count())
        for _ in range(150):
            live.switch(plans[int(random.integers(len(plans)))], "a test")
            out += [next(results).tag[1] for _ in range(int(random.integers(1, 12)))]
        app.count = len(app.read)
        out += [result.tag[1] for result in results]
    assert out == [n + OPERATORS for n in range(len(out))]
    assert app.written == [(n, n + OPERATORS) for n in range(len(out))]
    assert len(out) == app.count


def test_a_device_that_fails_costs_no_frame_and_no_frame_is_read_or_written_twice():
    model = chain_model(
        OPERATORS,
        hooks={("op1", "d1"): raise_at(20, RuntimeError("gone")), ("op2", "d2"): raise_at(33, RuntimeError("gone"))},
    )
    app = Numbers(model, count=100)
    problem = problem_of(app, with_core("d0", "d1", "d2"))
    plan = plan_of(problem, ("d0", "host/read host/prepare op0"), ("d1", "op1"), ("d2", "op2 op3 host/write"))
    live = LivePipeline(model, problem, plan, host=app.host)
    with live:
        assert run(live) == [n + OPERATORS for n in range(100)]
    assert "failure" in [event.kind for event in live.events]
    assert app.read == list(range(100))
    assert app.written == [(n, n + OPERATORS) for n in range(100)]


def test_host_operators_are_parted_from_the_models():
    app = Numbers(chain_model(OPERATORS))
    work = stage_work(WHOLE.split()[::-1], app.host)
    assert (work.before, work.after) == (("host/read", "host/prepare"), ("host/write",))
    assert set(work.model) == {"op0", "op1", "op2", "op3"}


def test_host_work_needs_a_device_with_cores():
    app = Numbers(chain_model(OPERATORS))
    problem = problem_of(app, platform := fake_platform("d0", "d1"))
    plan = plan_of(problem, ("d0", "host/read host/prepare"), ("d1", "op0 op1 op2 op3 host/write"))
    with pytest.raises(PlanError, match="host/read cannot run on device d0, which has no cores"):
        Pipeline(app.model, plan, platform, host=app.host)
