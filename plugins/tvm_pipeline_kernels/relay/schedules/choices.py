"""What tuning may choose of a schedule of ours: its tile, and an algorithm of other values where the user allows it.

A convolution is known by its *workload*, AutoTVM's tuple of what TOPI is asked to compute. Its *choice* is the numbers
of a `Tile`, or of a `Band` where it is depthwise. Schedules find the choice in the config that TOPI hands them, under
names of ours beside TOPI's; without one, the static rule of `tiles.py` stands. GPUs have TOPI's own schedules:
`device_choices.py`. Next: `tuning/tuning_records.py`.

The choice may also be the numbers of a `Winograd`, another algorithm, whose rounding errors are others: then
`conv2d_winograd.py` puts another operator in the place of the convolution. Only a model with `Model.tolerance` is tuned
and built so; there the static rule chooses it, too.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import starmap
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeGuard

import msgspec
from tvm import autotvm
from tvm.autotvm.task.space import FallbackConfigEntity, OtherOptionEntity

from tvm_pipeline_kernels.relay.schedules.device_choices import (
    DeviceChoice,
    DeviceWorkload,
    config_of,
    workload_of_text,
)
from tvm_pipeline_kernels.tiles import Band, Tile, band_rule, bands, channel_block, tiles
from tvm_pipeline_kernels.winograd import KERNEL, Winograd, winograd_forms, winograd_rule

GENERATION = 2  # raise it when a schedule of this room changes: what was measured before is void

CONV2D, DEPTHWISE = "conv2d_NCHWc.x86", "depthwise_conv2d_NCHWc.x86"
KNOBS = {
    CONV2D: tuple(f"own_{name}" for name in Tile._fields),
    DEPTHWISE: tuple(f"own_{name}" for name in Band._fields),
}
WINOGRAD_KNOBS = tuple(f"own_{name}" for name in Winograd._fields)
REGISTERS = {16: 32, 8: 16, 4: 16}  # of a core, by the lanes of float32 in one

_Extent = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Offset = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
_Tensor: TypeAlias = tuple[Literal["TENSOR"], tuple[_Extent, _Extent, _Extent, _Extent], str]
# The template; data (NCHW) and kernel (OIHW); strides, padding (top, left, bottom, right), dilation; layouts; dtype.
Workload: TypeAlias = tuple[
    Literal["conv2d_NCHWc.x86", "depthwise_conv2d_NCHWc.x86"],
    _Tensor,
    _Tensor,
    tuple[_Extent, _Extent],
    tuple[_Offset, _Offset, _Offset, _Offset],
    tuple[_Extent, _Extent],
    str,
    str,
    str,
]
Choice: TypeAlias = tuple[int, ...]
Choices: TypeAlias = Mapping[Workload, Choice]
# Of a library, whose target is one of CPU cores, or of GPUs.
AnyWorkload: TypeAlias = Workload | DeviceWorkload
AnyChoice: TypeAlias = Choice | DeviceChoice
AnyChoices: TypeAlias = Mapping[Any, AnyChoice]


class Output(NamedTuple):
    """What a convolution computes: channel blocks, vectors in a block, rows, columns, bytes of weights of a block."""

    blocks: int
    vectors: int
    height: int
    width: int
    block_bytes: int


def output_of(workload: Workload, lanes: int) -> Output:
    """Return what a workload computes on a core with vectors of so many float32."""
    _, data, kernel, strides, padding, dilation, *_ = workload
    channels = kernel[1][0]
    block = channel_block(channels, lanes)
    height, width = (
        (data[1][2 + axis] + padding[axis] + padding[2 + axis] - (kernel[1][2 + axis] - 1) * dilation[axis] - 1)
        // strides[axis]
        + 1
        for axis in (0, 1)
    )
    return Output(channels // block, -(-block // lanes), height, width, 4 * block * math.prod(kernel[1][1:]))


def possible_choices(workload: Workload, lanes: int) -> list[Choice]:
    """Return all choices of a workload: first that of the static rule, then by their estimates."""
    blocks, vectors, height, width, block_bytes = output_of(workload, lanes)
    if height < 1 or width < 1:
        return []
    if workload[0] == CONV2D:
        return [tuple(tile) for _, tile in sorted(tiles(blocks, vectors, height, width, REGISTERS[lanes], block_bytes))]
    rule = band_rule(height, width)
    others = [band for _, band in sorted(bands(height, width, REGISTERS[lanes])) if band != rule]
    return [tuple(rule), *map(tuple, others)]


def is_for_winograd(workload: Workload) -> bool:
    """Return whether Winograd's algorithm can compute a workload, if its channels fill vectors."""
    template, data, kernel, strides, _, dilation, *_, dtype = workload
    is_plain = template == CONV2D and kernel[1][2:] == (KERNEL, KERNEL) and kernel[1][1] == data[1][1]
    return is_plain and strides == (1, 1) and dilation == (1, 1) and dtype == "float32"


def winograd_choices(workload: Workload, lanes: int) -> list[Choice]:
    """Return the choices of a workload by Winograd's algorithm, the most promising first."""
    sizes = _sizes(workload, lanes)
    return [tuple(form) for _, form in sorted(winograd_forms(*sizes))] if sizes else []


def winograd_by_rule(workload: Workload, lanes: int) -> list[Choice]:
    """Return the choices by Winograd's algorithm that the static rule prefers to direct sums, the fastest first."""
    sizes = _sizes(workload, lanes)
    return [tuple(form) for form in winograd_rule(*sizes)] if sizes else []


def static_choice(workload: Workload, lanes: int, *, winograd: bool) -> Choice:
    """Return what is taken of a workload without measurement, if its weights lose no more than the tolerance."""
    return [*(winograd_by_rule(workload, lanes)[:1] if winograd else []), *possible_choices(workload, lanes)][0]


def _sizes(workload: Workload, lanes: int) -> tuple[int, int, int, int, int, int] | None:
    """Return the arguments of `winograd_forms`; None where the algorithm does not serve the workload."""
    kernel = workload[2]
    _, _, height, width, _ = output_of(workload, lanes)
    if not is_for_winograd(workload) or height < 1 or width < 1 or kernel[1][0] % lanes or kernel[1][1] % lanes:
        return None
    return kernel[1][1], kernel[1][0], lanes, height, width, REGISTERS[lanes]


def is_winograd(choice: AnyChoice | None) -> TypeGuard[Choice]:
    """Return whether a choice is that of Winograd's algorithm."""
    return isinstance(choice, tuple) and len(choice) == len(Winograd._fields)


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
    return (
        template,
        ("TENSOR", (n, inputs * input_block, height, width), "float32"),
        ("TENSOR", (outputs * output_block, kernel_inputs * kernel_block, rows, columns), "float32"),
        tuple(strides),
        tuple(padding),
        tuple(dilation),
        "NCHW",
        "NCHW",
        dtype,
    )


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
