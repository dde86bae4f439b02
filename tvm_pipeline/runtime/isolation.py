"""Stages in processes of their own, for backends that crash: one that dies or hangs takes no other with it.

    with open_bundle(path) as bundle, isolated(bundle.compiled, bundle.platform, bundle.plan.stages) as compiled:
        with LivePipeline(compiled, problem, bundle.plan, watchdog_s=5.0) as pipeline:
            ...

Each stage is a child process that loads the saved model, makes the stage and runs a frame for each message
(`backends/stage_process.py`). Stages on a device that one process at a time may open share a process
(`Backend.own_process`). The saved model's file of weights is the one that the parent's own model has, under a second
name: where a backend maps it, the weights are in memory once. docs/service.md names the backends that do not.

Every child has a time limit for all that is waited for but a frame: how long it is at one is for the pipeline's
watchdog. What has failed costs its device and no frame, as other failures do.

Next: `worker.py`, whose thread waits for the children.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from tvm_pipeline.backends.carried import with_carry, without_carry
from tvm_pipeline.backends.contract import CompiledModel, Delegating, StageRunner
from tvm_pipeline.backends.registry import own_process
from tvm_pipeline.backends.stage_process import DeviceProcesses as DeviceProcesses
from tvm_pipeline.backends.stage_process import IsolatedStage, StageRequest, own_child
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.state_loops import carry_of
from tvm_pipeline.files import temporary_folder
from tvm_pipeline.processes import Child

MAKING_S = 60.0  # for a child to make its stage, beside the weights; also to tie it to the device
READ_BYTES_PER_S = 10e6  # at which a slow card reads weights


@contextmanager
def isolated(
    compiled: CompiledModel,
    platform: Platform,
    stages: Sequence[Stage],
    making_s: float | None = None,
    *,
    processes: DeviceProcesses | None = None,
    every: bool = True,
) -> Iterator[CompiledModel]:
    """Yield the model with every stage in a process of its own; pipelines of it must end before the block does.

    Args:
        compiled: the model; it is saved into a temporary folder, for the children to load.
        platform: the devices, settled on this machine.
        stages: those of the first plan, so that they are saved ready to run; host operators in them are left out.
        making_s: seconds that a process has for making its stage, and again for tying it to the device; by default
            what `making_limit_s` gives for the model.
        processes: those of devices that one process at a time may open, for several models on the same devices. They
            end after the block.
        every: False leaves the stages on all other devices in this process.

    Yields:
        A model whose `stage` starts a process. To read the stage's ports raises what the process could not make.
        Timing operators and saving stay in this process. When the block ends, so does every process.
    """
    with ExitStack() as stack:
        if processes is None:
            stack.callback((processes := DeviceProcesses()).end)
        starts: dict[str, Callable[[StageRequest], Child]] = {}
        for device in platform.devices:
            if own_process(device):
                starts[device.name] = processes.seat
            elif every:
                starts[device.name] = own_child
        if not starts:
            yield compiled
            return
        folder = stack.enter_context(temporary_folder())
        parts = [replace(s, operators=tuple(o for o in s.operators if o in compiled.graph.edges.index)) for s in stages]
        compiled.save(folder, [stage for stage in parts if stage.operators], platform)
        carry, (own, _) = carry_of(compiled.graph), without_carry(compiled, ())
        backends = tuple(sorted({device.backend for device in platform.devices}))
        limit_s = making_limit_s(compiled.graph) if making_s is None else making_s
        model = IsolatedModel(own, backends, str(folder), limit_s, starts)
        stack.callback(model.end)
        yield with_carry(model, carry)


def making_limit_s(graph: OperatorGraph, watchdog_s: float = 0.0) -> float:
    """Return the seconds after which a device has failed on which a stage of the model is not made.

    Args:
        watchdog_s: seconds that a stage may be at one frame; a device that needs longer for that may need it here, too.
    """
    weights_bytes = sum(operator.param_bytes for operator in graph.operators)
    return max(MAKING_S + weights_bytes / READ_BYTES_PER_S, watchdog_s)


class IsolatedModel(Delegating):
    """The model that it was given, but for its stages.

    Args:
        starts: by the device's name, what gives the process of a stage; stages on other devices are in this process.
    """

    def __init__(
        self,
        compiled: CompiledModel,
        backends: tuple[str, ...],
        folder: str,
        making_s: float,
        starts: Mapping[str, Callable[[StageRequest], Child]],
    ) -> None:
        super().__init__(compiled)
        self._backends, self._folder, self._making_s, self._starts = backends, folder, making_s, starts
        self._stages: weakref.WeakSet[IsolatedStage] = weakref.WeakSet()
        self._over = False

    def stage(self, operators: Sequence[str], device: Device) -> StageRunner:
        if device.name not in self._starts:
            return super().stage(operators, device)
        order = StageRequest(self._backends, self._folder, tuple(operators), device)
        stage = IsolatedStage(order, self._making_s, self._starts[device.name])
        self._stages.add(stage)
        if self._over:  # `end` came meanwhile, and may not have seen it
            stage.close()
        return stage

    def end(self) -> None:
        """End the processes of all stages, also of those that another thread still makes."""
        self._over = True
        stages = list(self._stages)
        with ThreadPoolExecutor(max(len(stages), 1)) as pool:  # several that hang take no longer than one
            list(pool.map(IsolatedStage.close, stages))
