"""All that a device computes of a model, as one runnable stage: what is timed to know how fast the device is.

Where a device computes every operator, this is the whole model. Where it leaves some to other devices, it is the
longest stages without these, one after another. Next: `device_bench.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing

from tvm_pipeline.backends.contract import Array, CompiledModel, StageRunner
from tvm_pipeline.core.partition import longest_stages
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import ProfileError


def computed_stages(compiled: CompiledModel, device: Device) -> list[list[str]]:
    """Return the operators that a device computes, in the longest legal stages.

    Raises:
        ProfileError: there are none.
    """
    stages = longest_stages(compiled.graph, compiled.computes(device))
    if not stages:
        raise ProfileError(
            f"device {device.name} computes no operator of {compiled.graph.name}; leave it out of the platform"
        )
    return stages


def computed_runner(compiled: CompiledModel, device: Device) -> StageRunner:
    """Return a runner of all that a device computes; its ports are those of each stage in turn.

    Raises:
        ProfileError: there is nothing that the device computes.
    """
    stages = computed_stages(compiled, device)
    with ExitStack() as opened:
        runners = [opened.enter_context(closing(compiled.stage(names, device))) for names in stages]
        opened.pop_all()
    return runners[0] if len(runners) == 1 else _StageSequence(runners)


class _StageSequence(StageRunner):
    """Stages of one device that run one after another, each on inputs of its own."""

    def __init__(self, runners: Sequence[StageRunner]) -> None:
        self._runners = runners
        self.inputs = tuple(port for runner in runners for port in runner.inputs)
        self.outputs = tuple(port for runner in runners for port in runner.outputs)

    def bind(self) -> None:
        for runner in self._runners:
            runner.bind()

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        taken = given = 0
        for runner in self._runners:
            taken_end, given_end = taken + len(runner.inputs), given + len(runner.outputs)
            runner.run(inputs[taken:taken_end], outputs[given:given_end])
            taken, given = taken_end, given_end

    def close(self) -> None:
        for runner in self._runners:
            runner.close()
