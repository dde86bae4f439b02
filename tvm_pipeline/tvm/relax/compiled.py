"""A model compiled by Relax for every target of its devices; what is no IR's is in `tvm/compiled_model.py`.

Next: `build.py`, which compiles, and `call_loop.py`, which runs slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tvm_pipeline.backends.contract import Order, Seconds
from tvm_pipeline.backends.ports import input_for_timing
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.tvm.compiled_model import Bind, TvmModel
from tvm_pipeline.tvm.devices.targets import compiler_target
from tvm_pipeline.tvm.relax.build import Library, build_library, load_library
from tvm_pipeline.tvm.relax.call_loop import Slice
from tvm_pipeline.tvm.slice_plan import SlicePlan


class RelaxModel(TvmModel[Library]):
    """A model compiled by Relax; see `TvmModel`."""

    ir = "relax"

    @staticmethod
    def read_library(folder: Path) -> Library:
        return load_library(folder)

    def runnable_plan(self, plan: SlicePlan, device: Device) -> Slice:
        library, _ = self._library(device)
        return Slice(library, plan)

    def time_stage(self, operators: Sequence[str], device: Device, repeats: int) -> Seconds:
        plan = self.plan_slice(operators, device)
        runner = self.runnable_plan(plan, device)
        inputs = [input_for_timing(self.graph, port) for port in plan.inputs]
        outputs = [port.buffer() for port in plan.outputs]
        column = {name: index for index, name in enumerate(operators)}
        columns = [column[call.operator] for call in plan.calls if not call.is_view]
        seconds = np.zeros((repeats, len(operators)))
        for row in seconds:
            np.add.at(row, columns, runner.timed(inputs, outputs))
        return np.maximum(seconds, 1e-9)

    @classmethod
    def compile(
        cls,
        model: Model,
        targets: Sequence[str],
        bind: Bind,
        progress: Callable[[str], None],
        order: Order = "listed",
    ) -> RelaxModel:
        """Compile once for each distinct target, in the sequence given; errors are those of `build_library`."""
        wanted = dict.fromkeys(map(compiler_target, targets))
        return cls(model.name, [build_library(model, target, progress) for target in wanted], bind, order)
