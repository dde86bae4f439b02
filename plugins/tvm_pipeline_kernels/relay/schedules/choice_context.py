"""The choices of tuning where TOPI asks for the config of a convolution.

Schedules find a choice in the config that TOPI hands them, under names of ours beside TOPI's; without one, the static
rule of `tiles.py` stands. Where the choice is a `Winograd`, `conv2d_winograd.py` puts another operator in the place of
the convolution. GPUs have TOPI's own schedules: `device_choices.py`. Next: `choices.py` of the package.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import starmap
from typing import Any, TypeAlias

from tvm import autotvm
from tvm.autotvm.task.space import FallbackConfigEntity, OtherOptionEntity
from tvm.target.codegen import target_has_features
from tvm.target.x86 import get_simd_32bit_lanes

from tvm_pipeline_kernels.choices import CONV2D, KNOBS, Choice, Choices, Workload, is_winograd, workload_of
from tvm_pipeline_kernels.relay.schedules.device_choices import (
    DeviceChoice,
    DeviceWorkload,
    config_of,
    workload_of_text,
)
from tvm_pipeline_kernels.tiles import ARM_REGISTERS, Cores
from tvm_pipeline_kernels.winograd import KERNEL

# Of a library, whose target is one of CPU cores, or of GPUs.
AnyWorkload: TypeAlias = Workload | DeviceWorkload
AnyChoice: TypeAlias = Choice | DeviceChoice
AnyChoices: TypeAlias = Mapping[Any, AnyChoice]


def current_cores() -> Cores:
    """Return the cores of the current target."""
    lanes = get_simd_32bit_lanes()
    return Cores(lanes, 32 if lanes == 16 else ARM_REGISTERS if target_has_features("fp-armv8") else 16)


def chosen(config: Any, template: str) -> Choice | None:
    """Return the choice in a config of TOPI; None where it has none."""
    names = KNOBS[template]
    return tuple(config[name].val for name in names) if all(name in config for name in names) else None


class _ChoiceContext(autotvm.task.DispatchContext):
    """Answers TOPI's question for the config of a workload: the default with the choice beside it.

    TOPI asks one object for all threads, so this one knows which thread has which choices.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._builds = 0
        self._of_thread = threading.local()

    @contextmanager
    def active(self, choices: AnyChoices, tolerance: float = 0.0) -> Iterator[None]:
        """Have what this thread builds follow the choices, within the tolerance, until the block ends."""
        before, self._of_thread.tolerance = self.tolerance, tolerance
        try:
            with self._asked(choices) if choices else nullcontext():
                yield
        finally:
            self._of_thread.tolerance = before

    @contextmanager
    def _asked(self, choices: AnyChoices) -> Iterator[None]:
        """Have TOPI ask this object until the block ends."""
        with self._lock:
            self._builds += 1
            if self._builds == 1:
                self.__enter__()
        tiles_chosen = ((workload, choice) for workload, choice in choices.items() if not is_winograd(choice))
        self._of_thread.configs = dict(starmap(_config, tiles_chosen))
        self._of_thread.choices = choices
        try:
            yield
        finally:
            self._of_thread.configs = self._of_thread.choices = {}
            with self._lock:
                self._builds -= 1
                if self._builds == 0:
                    self.__exit__(None, None, None)

    def choice(self, workload: Workload) -> Choice | None:
        """Return the choice of a workload for what this thread builds; None where there is none."""
        choices: Choices = getattr(self._of_thread, "choices", {})
        return choices.get(workload)

    @property
    def tolerance(self) -> float:
        """The error that a layer may have in what this thread builds, over its largest output; 0 for direct sums."""
        return float(getattr(self._of_thread, "tolerance", 0.0))

    def _query_inside(self, target: Any, workload: Any) -> Any:
        return getattr(self._of_thread, "configs", {}).get(_unpacked(workload))

    def update(self, target: Any, workload: Any, config: Any) -> None:
        """Note the config of a workload in blocked layout, where it is none of ours."""
        if self._query_inside(target, workload) is None:
            self._old_ctx.update(target, workload, config)


def _config(workload: AnyWorkload, choice: AnyChoice) -> tuple[Any, Any]:
    """Return the workload as TOPI asks for it, and the config that it is to have."""
    if isinstance(workload, str):
        return workload_of_text(workload), config_of(workload, str(choice))
    config = FallbackConfigEntity()  # TOPI fills in its own entities by its rules, as without a choice
    for name, value in zip(KNOBS[workload[0]], choice, strict=True):
        config[name] = OtherOptionEntity(value)
    return workload, config


def _unpacked(workload: Any) -> Any:
    """Return the workload of a convolution before its tensors were blocked; others as they are."""
    template, *arguments = workload
    if template not in KNOBS or len(arguments[0][1]) != 5:
        return workload
    data, kernel, strides, padding, dilation, _, _, dtype = arguments
    return plain_workload((template, data[1], kernel[1], strides, padding, dilation, dtype))


def plain_workload(blocked: Any) -> Any:
    """Return the workload of a convolution in blocked layout.

    Args:
        blocked: template, shape of the data (NCHWc), shape of the kernel (OIHWio), strides, padding, dilation, dtype.
    """
    template, data, kernel, strides, padding, dilation, dtype = blocked
    n, inputs, height, width, input_block = data
    outputs, kernel_inputs, rows, columns, kernel_block, output_block = kernel
    shapes = (
        (n, inputs * input_block, height, width),
        (outputs * output_block, kernel_inputs * kernel_block, rows, columns),
    )
    return workload_of(template, *shapes, strides, padding, dilation, dtype)


def winograd_workload(data: Any, weights: Any, strides: Any, padding: Any, dilation: Any) -> Workload:
    """Return the workload of a convolution by Winograd's algorithm, from shapes of blocked data and its weights."""
    _, outputs, inputs, *block = weights
    kernel = (outputs, inputs, KERNEL, KERNEL, *block)
    workload: Workload = plain_workload((CONV2D, data, kernel, strides, padding, dilation, "float32"))
    return workload


_chosen = _ChoiceContext()
following = _chosen.active
active_choice = _chosen.choice


def active_tolerance() -> float:
    """Return the tolerance that what this thread builds is to keep; see `_ChoiceContext.tolerance`."""
    return _chosen.tolerance
