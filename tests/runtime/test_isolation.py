"""Stages in processes of their own: the same results, whatever they die of, and nothing left of them.

What is left is looked at after every test: processes, descriptors and shared memory here, threads in `conftest.py`.
The bits of real kernels are compared by `benchmarks/isolation.py`.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.test_live_pipeline import failures, problem_of, whole
from tests.support.crashes import AddOne, EndsLoading, install
from tests.support.fake_backend import (
    FakeBackend,
    FakeModel,
    chain_model,
    fake_platform,
    make_plan,
    number,
    numbers,
    random_model,
    values,
)
from tests.support.waiting import until
from tvm_pipeline.backends.ports import noise
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.errors import PlanError, StageError
from tvm_pipeline.profiling.bound import in_bound_thread
from tvm_pipeline.runtime import LivePipeline, Pipeline
from tvm_pipeline.runtime.isolation import isolated

OTHERS: set[int] = set()  # processes that tests before left


def children() -> set[int]:
    """Return the processes that a test started and that are not gone."""
    files = Path("/proc/self/task").glob("*/children")
    return {int(child) for file in files for child in file.read_text().split()} - OTHERS


def left_over() -> list[set]:
    descriptors = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    return [
        children(),
        {d for d in descriptors if "memfd" in d or "socket" in d or "pipe" in d},
        {*os.listdir("/dev/shm")},
    ]


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    gc.collect()
    OTHERS.clear()
    OTHERS.update(children())
    before = left_over()
    yield
    gc.collect()
    for left, were in zip(left_over(), before, strict=True):
        assert left <= were  # what an earlier test left may end meanwhile


def chain(operators: int = 1, **functions: object) -> FakeModel:
    model = chain_model(operators)
    model.functions.update(functions)
    return model


def one_stage(model: FakeModel) -> Plan:
    return make_plan(model.graph, (["d0"], model.graph.operator_names))


def test_the_same_results_as_without(tmp_path: Path) -> None:
    """Integers through a DAG, with layouts that only the children know, and several inputs and outputs a stage."""
    random = np.random.default_rng(5)
    model = random_model(random, 6)
    square = {t.name: "AB2a2b" for o in model.graph.operators for t in o.outputs}
    model.layouts = {"d1": square}
    names = model.graph.operator_names
    plan = make_plan(model.graph, (["d0"], names[:3]), (["d1", "d2"], names[3:]))
    platform = fake_platform("d0", "d1", "d2")
    frames = [{t.name: random.integers(-9, 9, t.shape).astype(t.dtype) for t in model.graph.inputs} for _ in range(30)]
    with isolated(model, platform, plan.stages) as compiled, Pipeline(compiled, plan, platform) as pipeline:
        for frame, result in zip(frames, pipeline.map(frames), strict=True):
            for name, expected in model.unsplit(frame).items():
                np.testing.assert_array_equal(result.outputs[name], expected)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("segfault", "killed by SIGSEGV"),
        ("raises", "ValueError: no such kernel"),
    ],
)
def test_how_a_stage_died_is_told_after_the_results_before(
    way: str, told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Python prints the frames of the thread that crashed. Those of others change meanwhile: reading them may crash."""
    model, platform = chain(op0=AddOne(tmp_path, way, (5,))), fake_platform("d0")
    plan, taken = one_stage(model), []
    with isolated(model, platform, plan.stages) as compiled, Pipeline(compiled, plan, platform) as pipeline:
        with pytest.raises(StageError) as caught:
            taken.extend(pipeline.map(numbers(20)))
        assert values(taken) == [1, 2, 3, 4, 5]
        assert (caught.value.stage, caught.value.device, caught.value.frame) == (0, "d0", 5)
        assert told in str(caught.value)
        assert "op0 on d0" in str(caught.value)
    assert ("in __call__" in capfd.readouterr().err) == (way == "segfault")


@pytest.mark.thorough
def test_one_that_dies_while_idle_is_told_at_the_next_frame() -> None:
    model, platform = chain(2), fake_platform("d0")
    plan = one_stage(model)
    with isolated(model, platform, plan.stages) as compiled, Pipeline(compiled, plan, platform) as pipeline:
        pipeline.submit(number(1))
        assert values([pipeline.result(20)]) == [3]
        [child] = children()
        os.kill(child, signal.SIGTERM)  # is for the parent, which may want to drain
        pipeline.submit(number(2))
        assert pipeline.result(20).outputs["y"][0] == 4
        os.kill(child, signal.SIGKILL)
        pipeline.submit(number(3))
        with pytest.raises(StageError, match=r"frame 2: .* op0 to op1 on d0 was killed by SIGKILL"):
            pipeline.result(20)


@pytest.mark.thorough
def test_one_that_dies_while_it_loads_fails_the_pipeline_before_it_starts() -> None:
    model, platform = chain(op0=EndsLoading()), fake_platform("d0")
    plan = one_stage(model)
    with isolated(model, platform, plan.stages) as compiled:
        with pytest.raises(StageError, match="ended with status 3") as caught:
            Pipeline(compiled, plan, platform)
        assert caught.value.device == "d0"


@pytest.mark.thorough
def test_what_is_no_stage_is_told_as_without_isolation() -> None:
    model, platform = chain(3), fake_platform("d0")
    path = "a path leaves it and comes back at op2"
    with isolated(model, platform, ()) as compiled, pytest.raises(PlanError, match=path):
        _ = compiled.stage(["op0", "op2"], platform.devices[0]).inputs


@pytest.mark.thorough
def test_a_process_goes_when_its_stage_is_closed() -> None:
    model, platform = chain(2), fake_platform("d0")
    with isolated(model, platform, ()) as compiled:
        runner = compiled.stage(["op0", "op1"], platform.devices[0])
        inputs, outputs = [noise(port) for port in runner.inputs], [port.buffer() for port in runner.outputs]
        in_bound_thread(runner, lambda: runner.run(inputs, outputs))
        assert outputs[0] == inputs[0] + 2
        in_bound_thread(runner, lambda: runner.run(outputs, inputs))  # another thread is tied to the same process
        assert inputs[0] == outputs[0] + 2
        assert len(children()) == 1
        runner.close()
        assert not children()
        runner.close()


@pytest.mark.thorough
def test_processes_that_die_again_cost_no_frame(tmp_path: Path) -> None:
    """A segmentation fault in the middle of a frame, and then a kill from outside."""
    model, platform = chain(2, op0=AddOne(tmp_path, at=(40,))), fake_platform("d0", "d1")
    problem = problem_of(model, platform)
    plan, seen, victim = whole(problem, "d0", "d1"), 0, 0
    with (
        isolated(model, platform, plan.stages) as compiled,
        LivePipeline(compiled, problem, plan, cool_down_s=0.05) as pipeline,
    ):
        frames = itertools.takewhile(lambda _: len(failures(pipeline)) < 2, numbers(1_000_000))
        for result in pipeline.map(frames):
            assert (result.frame, int(result.outputs["y"][0])) == (seen, seen + 2)
            seen += 1
            time.sleep(1e-3)  # the processes that start need the cores
            living = children()
            if len(failures(pipeline)) == 1 and len(pipeline.plan.devices) == len(living) == 2 and victim not in living:
                victim = min(living)  # if it belonged to the plan before, which was ending, there is another one
                os.kill(victim, signal.SIGKILL)
    assert seen == pipeline.frames > 40
    assert [("SIGSEGV" in reason, "SIGKILL" in reason) for reason in failures(pipeline)] == [
        (True, False),
        (False, True),
    ]
    assert "return" in {event.kind for event in pipeline.events}


def test_one_that_hangs_is_left_out_and_killed(tmp_path: Path) -> None:
    model, platform = chain(op0=AddOne(tmp_path, "hangs", (3,))), fake_platform("d0", "d1")
    problem = problem_of(model, platform)
    plan = whole(problem, "d0")
    with (
        isolated(model, platform, plan.stages) as compiled,
        LivePipeline(compiled, problem, plan, watchdog_s=0.3) as pipeline,
    ):
        [child] = children()
        assert values(list(pipeline.map(numbers(50)))) == list(range(1, 51))
        assert "did not end within 0.3 s" in failures(pipeline)[0]
        assert until(lambda: child not in children())


@pytest.mark.thorough
def test_a_device_whose_stage_failed_has_a_new_process_when_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stages shared the old one, which ended with the last of them; until then the device was theirs."""
    monkeypatch.setattr(FakeBackend, "own_process", lambda self, device: device.name == "d0")
    model, platform = chain(2, op0=AddOne(tmp_path, "raises", (5,))), fake_platform("d0", "d1")
    problem = problem_of(model, platform)
    plan, seen = whole(problem, "d0"), 0
    with (
        isolated(model, platform, plan.stages, every=False) as compiled,
        LivePipeline(compiled, problem, plan, cool_down_s=0.5) as pipeline,
    ):
        [before] = children()

        def serves_again() -> bool:
            kinds = [event.kind for event in pipeline.events]
            return "return" in kinds and any("d0" in stage.devices for stage in pipeline.plan.stages)

        for result in pipeline.map(itertools.takewhile(lambda _: not serves_again(), numbers(10**6))):
            assert (result.frame, int(result.outputs["y"][0])) == (seen, seen + 2)
            seen += 1
            time.sleep(1e-3)
        assert len(failures(pipeline)) == 1
        assert "ValueError: no such kernel" in failures(pipeline)[0]
        [after] = children()
        assert after != before


PARENT = """
import os, sys
from pathlib import Path
from tests.support.crashes import AddOne
from tests.support.fake_backend import chain_model, fake_platform, make_plan, number
from tvm_pipeline.runtime import Pipeline
from tvm_pipeline.runtime.isolation import isolated

model, platform = chain_model(1), fake_platform("d0")
model.functions["op0"] = AddOne(Path(sys.argv[1]), "hangs", (0,))
plan = make_plan(model.graph, (["d0"], ["op0"]))
with isolated(model, platform, plan.stages) as compiled, Pipeline(compiled, plan, platform) as pipeline:
    print(*[int(c) for f in Path("/proc/self/task").glob("*/children") for c in f.read_text().split()], flush=True)
    pipeline.submit(number(0))
    pipeline.result()
"""


def test_a_child_ends_with_its_parent_even_in_a_kernel_that_hangs(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
        assert until((tmp_path / "hangs-0").exists)
        parent.kill()
    assert until(lambda: not running(child))


def running(process: int) -> bool:
    """Whether it is there, and more than a process that waits to be collected."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
