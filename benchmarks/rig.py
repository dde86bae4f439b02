"""The parts that benchmarks of the running pipeline share: a real network with known answers, random plans, faults.

squeezenet is compiled for this machine's devices. Frames of noise follow each other in a circle, and the output of the
unsplit network is known for each. So a frame that is lost, repeated or out of order shows in the results, whatever
numbers the pipeline gives them. Faults are put on a device from outside, as hardware would have them.

Next: live.py (switches, failures, what watching costs), soak.py (an hour of both), cameras.py (many sources), gpu.py
(the same with GPU stages).
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import numpy as np
from networks import load_lively
from peers import network_file

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support.onnx_models import write_picture_net
from tvm_pipeline import Device, Problem
from tvm_pipeline.backends.closeness import CUT_FACTOR, TOLERANCE
from tvm_pipeline.backends.contract import Array, CompiledModel, Delegating, StageRunner
from tvm_pipeline.core.plan import Plan, Prediction, Stage
from tvm_pipeline.core.platform import disjoint_sets
from tvm_pipeline.core.tensor_layout import to_logical
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.errors import PipelineError
from tvm_pipeline.runtime import LivePipeline, Result
from tvm_pipeline.workflow.steps import REPEATS, Compiled, compile_source, measured_profile

FRAMES = 7  # a prime, so that no pattern of plans or slots is in step with them
USUAL_SIDE = 224
ENGINES_TOLERANCE = CUT_FACTOR * TOLERANCE  # what the outputs of two engines may differ by, see docs/engines.md

Answer = Mapping[str, Array]


@dataclass(eq=False)
class Fault:
    """The fault of a device at its next frame.

    Attributes:
        kind: `raises` once; `vanishes`, and cannot be bound either, for `seconds`; `hangs` for `seconds`.
        met: set once it has.
    """

    kind: str
    seconds: float
    met: threading.Event = field(default_factory=threading.Event)
    until_s: float = 0.0


class Breakable(Delegating):
    """A compiled model whose devices have the faults that are put into `faults`."""

    def __init__(self, compiled: CompiledModel) -> None:
        super().__init__(compiled)
        self.faults: dict[str, Fault] = {}

    def stage(self, operators: Sequence[str], device: Device) -> StageRunner:
        return BreakableStage(super().stage(operators, device), device.name, self.faults)


class BreakableStage(StageRunner):
    def __init__(self, runner: StageRunner, device: str, faults: dict[str, Fault]) -> None:
        self.inputs, self.outputs = runner.inputs, runner.outputs
        self._runner, self._device, self._faults = runner, device, faults

    def close(self) -> None:
        self._runner.close()

    def bind(self) -> None:
        fault = self._faults.get(self._device)
        if fault and time.perf_counter() < fault.until_s:
            raise OSError(f"{self._device} is gone")
        self._runner.bind()

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        if self._device in self._faults:
            self._meet(self._faults[self._device])
        self._runner.run(inputs, outputs)

    def _meet(self, fault: Fault) -> None:
        now_s = time.perf_counter()
        if not fault.met.is_set():
            fault.until_s = now_s + fault.seconds if fault.kind == "vanishes" else 0.0
            fault.met.set()
            if fault.kind == "raises":
                raise RuntimeError("a kernel failed")
            if fault.kind == "hangs":
                time.sleep(fault.seconds)
        if now_s < fault.until_s:
            raise OSError(f"{self._device} is gone")


@dataclass(frozen=True)
class Rig:
    """The network, what to plan for, and frames with what the unsplit network makes of them.

    Attributes:
        tolerance: how far an output may be from the answer, as a part of its largest value: devices of several kinds
            add the same products in another order.
    """

    compiled: Breakable
    problem: Problem
    frames: list[Array]
    answers: list[Answer]
    tolerance: float = 0.0


def make_rig(side: int) -> Rig:
    """Return the rig of squeezenet on square pictures of `side` pixels."""
    shapes = None if side == USUAL_SIDE else {"data": (1, 3, side, side)}
    return rig_of(compile_source("squeezenet", shapes), REPEATS)


def make_rig_of_engines(side: int, engines: str) -> Rig:
    """Return the same rig with devices of several engines on each core, which round differently."""
    with tempfile.TemporaryDirectory() as folder:
        path = network_file(load_lively(f"squeezenet@{side}"), Path(folder))
        return rig_of(compile_source(path, engines=engines), 8, ENGINES_TOLERANCE)


def make_tiny_rig() -> Rig:
    """Return the rig of a network of three convolutions, which two lanes of CI hardly slow, measured in few passes."""
    with tempfile.TemporaryDirectory() as folder:
        return rig_of(compile_source(write_picture_net(Path(folder) / "net.onnx")), 4)


def rig_of(made: Compiled, repeats: int, tolerance: float = 0.0) -> Rig:
    compiled, platform = made.compiled, made.platform
    (tensor,) = compiled.graph.inputs
    draw = np.random.default_rng(0)
    frames = [draw.standard_normal(tensor.shape).astype(tensor.dtype) for _ in range(FRAMES)]
    problem = Problem(compiled.graph, platform, measured_profile(made, repeats=repeats))
    answers = unsplit(compiled, platform.devices[0], frames, tolerance)
    return Rig(Breakable(compiled), problem, frames, answers, tolerance)


def unsplit(compiled: CompiledModel, device: Device, frames: Sequence[Array], tolerance: float = 0.0) -> list[Answer]:
    """Return the outputs of the whole model for each frame, on one device and outside of any pipeline."""

    def run() -> list[Answer]:
        runner = compiled.stage(compiled.graph.operator_names, device)
        runner.bind()
        (port,) = runner.inputs
        inputs, outputs = port.buffer(), [port.buffer() for port in runner.outputs]
        answers = []
        for frame in frames:
            inputs[...] = frame
            runner.run([inputs], outputs)
            made = zip(runner.outputs, outputs, strict=True)
            answers.append({port.name: to_logical(array, port.layout).copy() for port, array in made})
        return answers

    with ThreadPoolExecutor(1) as thread:  # binding is for good
        answers = thread.submit(run).result()
    if any(same(one, other, 2 * tolerance) for one, other in combinations(answers, 2)):
        raise SystemExit("two frames have the same answer, so a mix-up would not show; choose other frames")
    return answers


def same(outputs: Answer, answer: Answer, tolerance: float = 0.0) -> bool:
    """Return whether the two are equal: bit for bit, or within a part of the largest value of each output."""
    return outputs.keys() == answer.keys() and all(
        np.array_equal(outputs[name], wanted)
        or (tolerance > 0 and bool(np.abs(outputs[name] - wanted).max() <= tolerance * np.abs(wanted).max()))
        for name, wanted in answer.items()
    )


def random_plan(problem: Problem, draw: random.Random) -> Plan:
    """Return one device, the whole network on each single core and GPU, or two stages of these cut anywhere."""
    names = problem.graph.operator_names
    devices = [device.name for device in problem.platform.devices]
    groups = list(disjoint_sets([device for device in problem.platform.devices if len(device.cores) <= 1]))
    cores = [device.name for device in draw.choice(groups)] if groups else []
    kind = draw.randrange(3) if len(cores) > 1 else 0
    if kind == 0:
        stages = [Stage((draw.choice(devices),), tuple(names))]
    elif kind == 1:
        stages = [Stage(tuple(cores), tuple(names))]
    else:
        first, second = draw.sample(cores, 2)
        cut = draw.randrange(1, len(names))
        stages = [Stage((first,), tuple(names[:cut])), Stage((second,), tuple(names[cut:]))]
    return judged(problem, Plan(problem.graph.name, "random", "throughput", tuple(stages), Prediction()))


@dataclass
class Run:
    """The results of a pipeline that is kept full.

    Attributes:
        tolerance: that of the rig.
        entered: how many frames went in.
        done_s: when each result came.
        mistakes: results that are not those of the frame that was due.
        failure: why it ended early.
    """

    tolerance: float = 0.0
    entered: int = 0
    done_s: list[float] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)
    failure: PipelineError | None = None

    @property
    def lost(self) -> int:
        return self.entered - len(self.done_s)

    def check(self, result: Result, answers: Sequence[Answer]) -> None:
        due = len(self.done_s)
        if result.frame != due:
            self.mistakes.append(f"frame {result.frame} came where {due} was due")
        elif not same(result.outputs, answers[due % len(answers)], self.tolerance):
            self.mistakes.append(f"frame {due} has the outputs of another, or wrong ones")
        self.done_s.append(time.perf_counter())

    def wait(self, results: int, limit_s: float = 60.0) -> None:
        """Wait until there are so many results, or the run has ended."""
        end_s = time.perf_counter() + limit_s
        while len(self.done_s) < results and not self.failure and time.perf_counter() < end_s:
            time.sleep(1e-3)


@contextmanager
def kept_full(pipeline: LivePipeline, rig: Rig) -> Iterator[Run]:
    """Feed the pipeline and check its results, in other threads, until the block ends and it has drained."""
    run, over = Run(rig.tolerance), threading.Event()

    def frames() -> Iterator[Array]:
        while not over.is_set():
            run.entered += 1
            yield rig.frames[(run.entered - 1) % FRAMES]

    def consume() -> None:
        try:
            for result in pipeline.map(frames()):
                run.check(result, rig.answers)
        except PipelineError as error:
            run.failure = error

    with pipeline:
        consumer = threading.Thread(target=consume)
        consumer.start()
        try:
            yield run
        finally:
            over.set()
            consumer.join()
