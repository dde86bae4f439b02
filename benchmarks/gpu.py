"""Measure GPUs as devices: whether results are right, how well times are predicted, what a GPU stage costs.

    python benchmarks/gpu.py                    # all parts, about two hours
    python benchmarks/gpu.py --only speed       # CPU, GPU and both side by side; only where a real GPU is
    python benchmarks/gpu.py --device pocl      # on this device alone
    python benchmarks/gpu.py --short            # a little of what is right, for CI

A real GPU is taken where there is one. Elsewhere software takes its place (`gpu_devices.py`): it proves function, not
speed. PoCL is OpenCL on a CPU core; its times are those of that core, so that prediction and overhead can be judged.

1. networks: each operator on the GPU and by LLVM from the same tensors. Required: within 1e-4 of the largest value.
2. cuts: random cuts in two to four stages. Required: stages on the GPU equal the unsplit GPU model bit for bit; stages
   on CPU and GPU in turn are within 1e-5 of the largest value of the unsplit CPU model, none silently beyond. Every
   tensor that crosses a cut is compared, and the outputs.
3. prediction: predicted against measured throughput. Required of plans with both devices: 8 % median error.
4. live: 200 changes of plan and 60 failures, and on the software CUDA device 20 failures of its kernels. Required: no
   frame lost, repeated or out of order.
5. overhead: of a GPU stage beyond its kernels and copies. Required: less than 150 us a frame.
6. parameters: bytes that k slices of a network copy to the device. Required: the parameters, once.
7. speed: of the networks on CPU, GPU, and both.
8. soak: memory of host and device while plans change for an hour. Required: within 1 %.
9. copies: how long a device takes to be given an array of the host and to give it back, in place and copied.

The exit status is 1 if a result is wrong, a frame is lost, parameters are copied twice, or memory grows.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from gpu_devices import (
    CONSOLE,
    SMALL,
    SOFTWARE,
    Gpu,
    apart,
    find,
    given,
    logical,
    model_of,
    show,
    told,
    two_stages,
)
from gpu_times import copies, overhead, prediction, speed
from live import AROUND, WATCHDOG_S, failures, failures_of, is_right, switches, wait_for
from rig import FRAMES, Breakable, Rig, kept_full, random_plan, same, unsplit
from soak import grown, resident_bytes

from tests.support.stages import Written, random_stages, run_from
from tvm_pipeline import Problem, profile_model
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import PipelineError
from tvm_pipeline.runtime import LivePipeline
from tvm_pipeline_tvm.devices.releasing import wait_until_released
from tvm_pipeline_tvm.devices.targets import compiler_target
from tvm_pipeline_tvm.relay.compiled import RelayModel

import tvm  # isort: skip

OPERATOR_LIMIT, CUT_LIMIT = 1e-4, 1e-5  # of the largest value of a tensor
LIVE_TOLERANCE = 1e-4
# Small pictures where the network takes them, since the software CUDA device is slow.
BUILT_IN = ("squeezenet@64", "mobilenet@64", "resnet-18@64", "resnet-50@64", "densenet-121@224", "inception_v3@299")
ALL = (*BUILT_IN, "light_inception_v1", "light_inception_v2", "light_shufflenet", "centerface", *SMALL)
CUT = ("squeezenet@64", "mobilenet@64", "resnet-18@64", *SMALL)
CUTS = 20
SOAK_FPS = 20


# 1. Networks


def networks(gpu: Gpu, options: argparse.Namespace) -> bool:
    rows, right = [], True
    for name in options.models or (("branching",) if options.short else ALL):
        try:
            _, model, platform = gpu.compiled(model_of(name))
            worst, kind = _worst_operator(model, *platform.devices)
        except PipelineError as error:
            rows.append((name, "", "", str(error)))
            continue
        right = right and worst <= OPERATOR_LIMIT
        rows.append((name, len(model.graph), f"{worst:.1e}", kind))
        told(rows[-1])
    show(gpu, "1. Each operator against LLVM's; at most 1e-4", ("network", "operators", "worst", "of"), rows)
    return right


def _worst_operator(model: RelayModel, cpu: Device, device: Device) -> tuple[float, str]:
    """Return the largest difference of an operator's outputs, computed from the same tensors, and its kind."""
    made = run_from(model, [([name], cpu) for name in model.graph.operator_names], given(model))
    worst, kind = 0.0, ""
    for operator in model.graph.operators:
        found = run_from(model, [([operator.name], device)], {name: made[name] for name in operator.inputs})
        for tensor in operator.outputs:
            difference = apart(logical(found, tensor.name), logical(made, tensor.name))
            if difference >= worst:
                worst, kind = difference, operator.kind
    return worst, kind


# 2. Cuts


@dataclass
class Compared:
    """What random cuts of one network gave.

    Attributes:
        tensors: that crossed a cut on the GPU, or left it, and were compared with the unsplit model's.
        differ: those of them that differed in a bit.
        refused: cuts that raised an error.
        silent: cuts beyond the limit that raised none.
        worst: the largest difference of an output of a cut over both devices; `inside` is that of any tensor.
    """

    tensors: int = 0
    differ: int = 0
    refused: int = 0
    silent: int = 0
    worst: float = 0.0
    inside: float = 0.0


def cuts(gpu: Gpu, options: argparse.Namespace) -> bool:
    rows, right = [], True
    for name in options.models or (("branching",) if options.short else CUT):
        try:
            _, model, platform = gpu.compiled(model_of(name))
        except PipelineError as error:
            rows.append((name, *[""] * 6, str(error)))
            right = False
            continue
        found = _compared(model, *platform.devices, 3 if options.short else CUTS)
        right = right and not (found.differ or found.refused or found.silent)
        worst = f"{found.worst:.1e}", f"{found.inside:.1e}"
        rows.append((name, len(model.graph), found.tensors, found.differ, *worst, found.refused, found.silent))
        told(rows[-1])
    columns = ("network", "operators", "tensors, GPU alone", "differ in a bit", "mixed: worst output", "worst tensor")
    show(gpu, "2. Random cuts in 2 to 4 stages", (*columns, "refused", "silent beyond 1e-5"), rows)
    return right


def _compared(model: RelayModel, cpu: Device, gpu: Device, count: int) -> Compared:
    names, feed, found, draw = model.graph.operator_names, given(model), Compared(), random.Random(0)
    # Every operator as a stage gives the tensors that cross; the outputs are those of the unsplit model.
    alone, host = (
        run_from(model, [([name], device) for name in names], feed) | run_from(model, [(names, device)], feed)
        for device in (gpu, cpu)
    )
    for number in range(count):
        parts = random_stages(model.graph, draw, min(2 + number % 3, len(names)))
        turns = [(part, (cpu, gpu)[(index + number) % 2]) for index, part in enumerate(parts)]
        try:
            own, mixed = run_from(model, [(part, gpu) for part in parts], feed), run_from(model, turns, feed)
        except PipelineError:
            found.refused += 1
            continue
        crossing = own.keys() - feed.keys()
        found.tensors += len(crossing)
        found.differ += sum(not np.array_equal(logical(own, name), logical(alone, name)) for name in crossing)
        inside = _worst(mixed, host, mixed.keys())
        found.worst = max(found.worst, _worst(mixed, host, model.graph.outputs))
        found.inside, found.silent = max(found.inside, inside), found.silent + (inside > CUT_LIMIT)
    return found


def _worst(found: Written, expected: Written, names: Iterable[str]) -> float:
    return max(apart(logical(found, name), logical(expected, name)) for name in names)


# 4. Live


def make_rig(gpu: Gpu, name: str) -> Rig:
    """Return the rig of a network on two CPU cores and the GPU."""
    backend, model, platform = gpu.compiled(model_of(name), cpus=2, cores=False)
    draw, (tensor,) = np.random.default_rng(0), model.graph.inputs
    frames = [draw.standard_normal(tensor.shape).astype(tensor.dtype) for _ in range(FRAMES)]
    answers = unsplit(model, platform.devices[0], frames, LIVE_TOLERANCE)
    problem = Problem(model.graph, platform, profile_model(backend, model, platform, repeats=4))
    return Rig(Breakable(model), problem, frames, answers, LIVE_TOLERANCE)


def live(gpu: Gpu, options: argparse.Namespace) -> bool:
    # The network on PoCL is a real one; the software CUDA device is too slow for one that changes so often.
    right = True
    for name in options.models or ("branching" if options.short or gpu.counter else "mobilenet@64",):
        rig = make_rig(gpu, name)
        devices = ", ".join(device.name for device in rig.problem.platform.devices)
        CONSOLE.print(
            f"4. Live: {name} on {devices}, where gpu is {gpu.label}; by the parts of live.py", highlight=False
        )
        few = options.short
        right = switches(rig, 10 if few else 200, random.Random(0)) and right
        right = failures(rig, 3 if few else 60, random.Random(1)) and right
        if gpu.counter:
            right = driver_failures(rig, gpu, 2 if few else 20, random.Random(2)) and right
    return right


def driver_failures(rig: Rig, gpu: Gpu, count: int, draw: random.Random) -> bool:
    """Let kernels fail and hang in turns; whatever fails loses the device until it is restored."""
    assert gpu.counter is not None
    met = frames = lost = mistakes = 0
    right = True
    for number in range(count):
        plan = random_plan(rig.problem, draw)
        while "gpu" not in plan.devices:
            plan = random_plan(rig.problem, draw)
        running = LivePipeline(rig.compiled, rig.problem, plan, watchdog_s=WATCHDOG_S, cool_down_s=0.05)
        with kept_full(running, rig) as run:
            time.sleep(draw.random() / 10)
            (gpu.counter.hang_launch if number % 2 else gpu.counter.fail_launch)(draw.randint(1, 5))
            met += wait_for(lambda: failures_of(running) > 0 or bool(run.failure), 10)  # noqa: B023
            run.wait(len(run.done_s) + AROUND)
            gpu.counter.release()
            gpu.counter.reset()
            run.wait(len(run.done_s) + AROUND)
        right = is_right(run) and right
        frames, lost, mistakes = frames + run.entered, lost + run.lost, mistakes + len(run.mistakes)
    columns = ("failures", "met", "frames", "lost", "repeated, out of order or wrong")
    show(gpu, "Kernels that fail or hang, at random moments", columns, [(count, met, frames, lost, mistakes)])
    return right


# 6. Parameters


def parameters(gpu: Gpu, options: argparse.Namespace) -> bool:
    if gpu.counter is None:
        CONSOLE.print(
            "6. Parameters was left out: only the software CUDA device counts what is copied", highlight=False
        )
        return True
    rows, right = [], True
    for name in options.models or (("branching",) if options.short else ("squeezenet@64", "resnet-18@64")):
        gpu.compiled(model_of(name))  # whatever is done once is done
        for count in (1, 2, 4, 8):
            _, model, platform = gpu.compiled(model_of(name))
            names = model.graph.operator_names
            ends = [round(index * len(names) / count) for index in range(count + 1)]
            params = model.libraries[compiler_target(gpu.target)].params.values()
            total = sum(array.numpy().nbytes for array in params)
            gc.collect()  # what the last round held
            wait_until_released(tvm.device("cuda", 0))
            held, copied = gpu.counter.allocated(), gpu.counter.copies("to device").n_bytes
            stages = [model.stage(names[a:b], platform.devices[-1]) for a, b in pairwise(ends)]
            held, copied = gpu.counter.allocated() - held, gpu.counter.copies("to device").n_bytes - copied
            right = right and copied == total
            rows.append((name, len(stages), f"{total:,}", f"{copied:,}", f"{copied / total:.3f}", f"{held:,}"))
            del stages, model
    columns = ("network", "slices", "parameters, bytes", "copied to the device", "of the parameters")
    show(gpu, "6. Parameters of k slices on the device; once", (*columns, "allocated, with activations"), rows)
    return right


# 8. Soak


def soak(gpu: Gpu, options: argparse.Namespace) -> bool:
    rig, seconds = make_rig(gpu, "branching"), 2.0 if options.short else 60 * options.minutes
    names = rig.problem.graph.operator_names
    usual = two_stages(rig.problem, rig.problem.platform.devices[0].name, "gpu", names, len(names) // 2)
    running = LivePipeline(rig.compiled, rig.problem, usual)
    samples: list[tuple[float, int, int]] = []
    over = threading.Event()
    ends_s = time.monotonic() + seconds

    def frames() -> Iterator[Array]:
        count = 0
        while time.monotonic() < ends_s:
            yield rig.frames[count % FRAMES]
            count += 1
            time.sleep(1 / SOAK_FPS)

    def disturb() -> None:
        draw, sampled_s = random.Random(0), time.monotonic()
        while not over.wait(draw.uniform(0.1, 0.5)):
            running.switch(random_plan(rig.problem, draw), "for the benchmark")
            if time.monotonic() >= sampled_s:
                sampled_s = time.monotonic() + seconds / 60
                running.switch(usual, "for a sample")
                over.wait(0.3)  # until the plan before it has ended
                gc.collect()
                ctypes.CDLL(None).malloc_trim(0)
                samples.append((time.monotonic(), resident_bytes(), gpu.counter.allocated() if gpu.counter else 0))

    count = wrong = 0
    with running:
        disturber = threading.Thread(target=disturb)
        disturber.start()
        try:
            for result in running.map(frames()):
                is_due = result.frame == count
                wrong += not (is_due and same(result.outputs, rig.answers[count % FRAMES], LIVE_TOLERANCE))
                count += 1
        finally:
            over.set()
            disturber.join()
    settled = samples[len(samples) // 6 :]
    growth, device_growth = grown(settled)
    held = f"{settled[-1][2]:,} ({device_growth:+,})" if gpu.counter else "not counted"
    cells = (f"{seconds / 60:g}", count, running.version, wrong, f"{settled[-1][1] / 1e6:.1f}", f"{growth:+.2%}", held)
    columns = ("minutes", "frames", "changes of plan", "wrong", "resident, MB", "its growth", "device, bytes")
    show(gpu, "8. Soak, after the first sixth; growth below 1 %", columns, [cells])
    steady = growth < 0.01 and device_growth <= 0.01 * settled[0][2]
    return not wrong and (steady or seconds < 600)


# What runs where, when there is no real GPU
PARTS: dict[str, tuple[Callable[[Gpu, argparse.Namespace], bool], tuple[str, ...]]] = {
    "prediction": (prediction, ("pocl",)),  # first, while nothing has warmed or filled the machine
    "overhead": (overhead, ("pocl",)),
    "networks": (networks, ("pocl",)),
    "cuts": (cuts, SOFTWARE),
    "live": (live, ("pocl", "software-cuda")),
    "parameters": (parameters, ("software-cuda",)),
    "speed": (speed, ("pocl",)),
    "soak": (soak, ("software-cuda",)),
    "copies": (copies, ("pocl",)),
}
SHORT = {  # PoCL takes long to compile kernels, and tests run on it
    "networks": ("software-cuda",),
    "cuts": ("software-cuda",),
    "live": ("software-cuda",),
    "parameters": ("software-cuda",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(PARTS), help="one part")
    parser.add_argument(
        "--device", choices=("gpu", *SOFTWARE), help="instead of a real one, or of those usual for a part"
    )
    parser.add_argument("--models", nargs="+", metavar="NAME", help="instead of those usual for a part; NAME@SIDE")
    parser.add_argument("--minutes", type=float, default=60.0, help="of the soak")
    parser.add_argument("--short", action="store_true", help="a little of what is right, for CI")
    options = parser.parse_args()
    real, right = find("gpu"), True
    for part in [options.only] if options.only else SHORT if options.short else PARTS:
        run, usual = PARTS[part]
        usual = SHORT.get(part, usual) if options.short else usual
        wanted = [options.device] if options.device else ["gpu"] if isinstance(real, Gpu) else usual
        for name in wanted:
            gpu = find(name)
            if isinstance(gpu, str):
                CONSOLE.print(f"{part} on {name} was left out: {gpu}", highlight=False)
            else:
                right = run(gpu, options) and right
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
