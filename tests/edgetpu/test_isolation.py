"""USB faults, on which libedgetpu ends its process: each stick has one, so that no frame and no other stage is lost.

What a stick is to processes, the fake of libedgetpu says (`fakes/libedgetpu.c`).
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.parts import needs

needs("ai_edge_litert")

from tests.edgetpu.networks import random_feeds, random_network, random_stages, run
from tests.edgetpu.test_backend import assert_as_the_whole, compiled, frames_of, plan_of, tpus
from tests.edgetpu.test_edge_tpu_command import PLATFORM, command, picture_network
from tests.runtime.test_live_pipeline import failures, problem_of
from tests.support.crashes import children_of
from tvm_pipeline.backends.bundle import Bundle
from tvm_pipeline.backends.stage_process import DeviceProcesses
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.errors import StageError
from tvm_pipeline.runtime import LivePipeline, Pipeline
from tvm_pipeline.runtime.isolation import isolated
from tvm_pipeline.workflow.compiled_pipeline import CompiledPipeline

NETWORK = random_network(4)
TWO = tpus("usb:0", "usb:1")

pytestmark = pytest.mark.usefixtures("nothing_installed")


@pytest.fixture
def usb(desk, install_compiler, tmp_path) -> Path:
    """Plug in two sticks, `left` and `right`, in this folder."""
    install_compiler()
    desk(left=False, right=False)
    return tmp_path / "usb"


def write(pipe: Path, text: bytes) -> bool:
    """Write into a named pipe; return whether a process reads it."""
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return False
        raise
    os.write(descriptor, text)
    os.close(descriptor)
    return True


def make_fault(stick: Path) -> bool:
    """Make a USB fault of a stick; return whether a process had it open."""
    return write(stick / "fault", b"!")


def holders(stick: Path) -> list[int]:
    """Return the processes that this one has started and that have a stick open."""
    return [
        child
        for child in sorted(children_of(os.getpid()))
        if any(str(stick / "lock") == os.readlink(file) for file in Path(f"/proc/{child}/fd").iterdir())
    ]


@pytest.mark.parametrize("faults", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_faults_in_the_middle_of_a_stream_cost_no_frame_and_no_other_stage(usb, faults):
    model, platform = compiled(TWO)
    problem, plan = problem_of(model, platform), plan_of(model.graph, random_stages(model.graph, 2, 0))
    frames = [random_feeds(model.graph, seed) for seed in range(20)]
    wanted = [run(NETWORK, frame, xnnpack=True) for frame in frames]
    seen = asked = 0
    with (
        isolated(model, platform, plan.stages, every=False) as apart,
        LivePipeline(apart, problem, plan, cool_down_s=0.05) as pipeline,
    ):
        others = holders(usb / "right")
        assert len(others) == 1
        for result in pipeline.map(
            itertools.takewhile(lambda _: len(failures(pipeline)) < faults, itertools.cycle(frames))
        ):
            assert result.frame == seen
            for name, value in wanted[seen % len(frames)].items():
                np.testing.assert_array_equal(result.outputs[name], value)
            seen += 1
            time.sleep(1e-3)  # the processes that start need the cores
            if asked == len(failures(pipeline)) and set(pipeline.plan.devices) == {"tpu0", "tpu1"}:
                asked += make_fault(usb / "left")
        assert holders(usb / "right") == others  # their process went on all the time
    assert seen == pipeline.frames
    assert len(failures(pipeline)) == faults
    assert all("on tpu0 was killed by SIGABRT" in reason for reason in failures(pipeline))


@pytest.mark.thorough
def test_a_stick_that_opens_slowly_holds_up_no_frame(usb):
    """It returns after a fault; frames go through the other stick until it is open."""
    model, platform = compiled(TWO)
    problem, plan = problem_of(model, platform), plan_of(model.graph, random_stages(model.graph, 2, 0))
    frames, while_opening, slow = frames_of(model.graph, 5), 0, usb / "left" / "slow"
    with (
        isolated(model, platform, plan.stages, every=False) as apart,
        LivePipeline(apart, problem, plan, cool_down_s=0.05) as pipeline,
    ):

        def inputs() -> Iterator[dict[str, np.ndarray]]:
            nonlocal while_opening
            yield frames[0]
            os.mkfifo(slow)
            assert make_fault(usb / "left")
            for frame in itertools.cycle(frames):
                yield frame
                if while_opening < 200:
                    while_opening += write(slow, b"")
                elif slow.exists():
                    if write(slow, b"!"):
                        slow.unlink()
                elif failures(pipeline) and set(pipeline.plan.devices) == {"tpu0", "tpu1"}:
                    return
                time.sleep(1e-3)  # the process that starts needs the cores

        results = sum(1 for _ in pipeline.map(inputs()))
    assert results == pipeline.frames > 200
    assert len(failures(pipeline)) == 1


@pytest.mark.thorough
def test_stages_on_a_stick_share_its_process_also_those_of_another_model(usb):
    """Another process could not open the stick."""
    model, platform = compiled(TWO)
    first, second, third = (stage.operators for stage in random_stages(model.graph, 3, 0))
    again = plan_of(model.graph, [Stage(("tpu0",), first), Stage(("tpu1",), second), Stage(("tpu0",), third)])
    processes, frames = DeviceProcesses(), frames_of(model.graph, 10)
    others = children_of(os.getpid())  # of backends that earlier tests used
    with (
        isolated(model, platform, again.stages, processes=processes, every=False) as one,
        isolated(model, platform, again.stages, processes=processes, every=False) as other,
        Pipeline(one, again, platform) as pipeline,
        Pipeline(other, again, platform) as beside,
    ):
        assert_as_the_whole(pipeline.map(frames), NETWORK, frames)
        assert_as_the_whole(beside.map(frames), NETWORK, frames)
        assert [len(holders(usb / name)) for name in ("left", "right")] == [1, 1]
        assert len(children_of(os.getpid()) - others) == 2
    assert len(children_of(os.getpid()) - others) == 2  # they keep the sticks open for the next plan
    processes.end()
    assert children_of(os.getpid()) <= others


@pytest.mark.thorough
def test_a_fault_of_a_compiled_pipeline_is_an_error_and_the_next_stream_opens_the_stick_again(usb):
    problem = problem_of(*compiled(TWO))
    plan = plan_of(problem.graph, random_stages(problem.graph, 2, 0))
    frames = frames_of(problem.graph, 5)
    bundle = Bundle(problem.graph, problem.platform, problem.profile, plan, compiled(TWO)[0])
    with CompiledPipeline(bundle) as pipe:
        stream = pipe.map(itertools.cycle(frames))
        next(stream)
        [process] = holders(usb / "right")
        assert make_fault(usb / "left")
        with pytest.raises(StageError, match="on tpu0 was killed by SIGABRT"):
            list(stream)
        assert len(list(pipe.map(frames))) == len(frames)
        assert holders(usb / "right") == [process]
    assert holders(usb / "right") == []


@pytest.mark.thorough
def test_only_sticks_have_processes(usb):
    model, platform = compiled(tpus("usb:0", "cpu", "usb:5"))  # two of them stand-ins
    plan = plan_of(model.graph, random_stages(model.graph, 3, 0))
    frames, others = frames_of(model.graph, 3), children_of(os.getpid())
    with isolated(model, platform, plan.stages, every=False) as apart, Pipeline(apart, plan, platform) as pipeline:
        assert len(children_of(os.getpid()) - others) == 1
        assert_as_the_whole(pipeline.map(frames), NETWORK, frames)


@pytest.mark.thorough
def test_a_run_survives_a_fault(usb, tmp_path):
    """Where its stages have no separate processes, the fault ends the run."""
    needs("av")
    needs("tvm_pipeline_video")
    (tmp_path / "net.tflite").write_bytes(picture_network())
    compiling = ("compile", tmp_path / "net.tflite", "--platform", PLATFORM, "--stages", 2, "--verify", 0)
    assert command(*compiling, "-o", tmp_path / "net.tar").wait(300) == 0
    lines = tmp_path / "out.jsonl"
    options = ("--source", "synthetic:32x32@200:300", "--policy", "block", "--results", lines)
    for option, status in (((), 0), (("--no-isolate",), -6)):
        lines.unlink(missing_ok=True)
        running = command("run", tmp_path / "net.tar", *options, *option)
        while not (lines.exists() and lines.stat().st_size):
            assert running.poll() is None, running.communicate()
            time.sleep(0.01)
        assert make_fault(usb / "left")
        _, errors = running.communicate(timeout=120)
        assert running.returncode == status, errors
        if status == 0:
            assert [json.loads(line)["frame"] for line in lines.read_text().splitlines()] == list(range(300))
            assert "was killed by SIGABRT" in errors


@pytest.mark.thorough
def test_a_fault_while_plans_are_compared_ends_no_run(usb, tmp_path):
    """Where a CPU is on the platform, plans run side by side before the first frame; the first two opens only look."""
    needs("av")
    needs("tvm_pipeline_video")
    (tmp_path / "net.tflite").write_bytes(picture_network())
    cpu = '[[device]]\nname = "cpu0"\nbackend = "edgetpu"\ntarget = "tflite"\ncores = [0]\n'
    tpus = "".join(f'[[device]]\nname = "tpu{i}"\nbackend = "edgetpu"\ntarget = "usb:{i}"\n' for i in range(2))
    (tmp_path / "desk.toml").write_text(f'name = "desk"\n{tpus}{cpu}')
    compiling = ("compile", tmp_path / "net.tflite", "--platform", tmp_path / "desk.toml", "--verify", 0)
    assert command(*compiling, "-o", tmp_path / "net.tar").wait(300) == 0
    lines, opened = tmp_path / "out.jsonl", usb / "opened"
    opened.unlink()
    running = command("run", tmp_path / "net.tar", "--source", "synthetic:32x32@200:20", "--results", lines)
    while not (opened.exists() and opened.read_text().split().count("left") > 2 and make_fault(usb / "left")):
        assert running.poll() is None, running.communicate()
        time.sleep(0.001)
    _, said = running.communicate(timeout=120)
    assert running.returncode == 0, said
    assert len(lines.read_text().splitlines()) == 20


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("opens", "arguments"),
    [
        (2, ("bench", "net.tflite", "--platform", PLATFORM, "--seconds", 0.2, "--rounds", 9)),
        (6, ("calibrate", "net.tflite", "--platform", PLATFORM, "-o", "out.toml")),
        (3, ("run", "net.tflite", "--platform", PLATFORM, "--inputs", "frames.npy")),
    ],
    ids=["bench", "calibrate", "run"],
)
def test_a_fault_while_something_is_measured_is_one_line(usb, tmp_path, monkeypatch, opens, arguments):
    """The first `opens` only look at the stick, and have a second try themselves."""
    monkeypatch.chdir(tmp_path)
    Path("net.tflite").write_bytes(picture_network())
    np.save("frames.npy", np.zeros((20000, 1, 16, 16, 3), np.int8))
    measuring, opened = command(*arguments), usb / "opened"
    while not (opened.exists() and opened.read_text().split().count("left") > opens and make_fault(usb / "left")):
        assert measuring.poll() is None, measuring.communicate()
        time.sleep(0.001)
    _, said = measuring.communicate(timeout=120)
    assert measuring.returncode == 1, said
    [error] = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "on tpu0 was killed by SIGABRT" in error
