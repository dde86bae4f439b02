"""What tuning measured on a GPU: AutoTVM's JSON lines, one file for each target and GPU.

Each candidate has a line, so that no later search measures it again; one that failed has an error in its result, as
AutoTVM writes it. A line with the entity `own_proven` says what runs fastest in a whole network, and such lines alone
apply to builds; an empty config stands for TOPI's default. Templates are TVM's, so the lines of another version of TVM
are skipped. Files are read and written by `tuning_records.py`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import tvm

from tvm_pipeline.files import cache_folder
from tvm_pipeline_kernels.relay.schedules.choice_context import AnyChoices
from tvm_pipeline_kernels.relay.schedules.device_choices import (
    DEFAULT,
    DeviceChoice,
    DeviceWorkload,
    keeps_order,
    text_of,
    workload_of_text,
)
from tvm_pipeline_kernels.tuning.tuning_records import (
    VERSION,
    Line,
    OtherGenerationError,
    append_line,
    best_of,
    file_of,
    read_lines,
    recorded_choices,
)
from tvm_pipeline_tvm.devices.runtimes import ready_to_run
from tvm_pipeline_tvm.devices.targets import compiler_target, has_own_memory, index_of, kind_of

FAILED = 4  # AutoTVM's number of an error on the device
_GENERATION = 1  # raise it when a knob of `device_choices.py` is fixed otherwise
_FAILED_S = 1e10  # what AutoTVM has for a failure


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """What was measured of a kernel.

    Attributes:
        seconds: of one call; infinite where it failed.
        proven: the choice is the one to build with, which a whole network has shown.
    """

    workload: DeviceWorkload
    choice: DeviceChoice
    seconds: float
    proven: bool = False


_Number = Annotated[int, msgspec.Meta(ge=-1, le=1 << 20)]
_Entity = tuple[str, Literal["sp", "re", "an", "ot"], list[_Number | str] | _Number | bool]


class _DeviceLine(Line):
    tvm_version: str


def device_file(target: str) -> Path:
    """Return the file of what was measured for a target on the GPU that it means.

    Raises:
        PlatformError: TVM cannot use such a GPU here.
    """
    kind = kind_of(target)
    ready_to_run(kind)
    return file_of(f"{compiler_target(target)} {tvm.device(kind, index_of(target)).device_name}")


def read_device_records(target: str) -> list[DeviceRecord]:
    """Return what was measured for a target on its GPU, in the order of the file."""
    described = str(tvm.target.Target(compiler_target(target)))
    return read_lines(device_file(target), lambda line: _record(line, described))


def recorded(target: str, *, winograd: bool = False, measured_on: str = "") -> AnyChoices:
    """Return what tuning recorded for a target, with the index of its device if that is a GPU.

    Args:
        measured_on: the processor of a CPU's target; this machine's without it.

    Raises:
        PlatformError: TVM cannot use such a GPU here.
    """
    if has_own_memory(target):
        return recorded_device_choices(target)
    return recorded_choices(target, winograd=winograd, measured_on=measured_on)


def recorded_device_choices(target: str) -> dict[DeviceWorkload, DeviceChoice]:
    """Return the best proven choice of each workload, without TOPI's defaults."""
    if not (cache_folder() / "tuning").exists():
        return {}
    return proven_choices(read_device_records(target))


def proven_choices(records: Iterable[DeviceRecord]) -> dict[DeviceWorkload, DeviceChoice]:
    """Return the best proven choice of each workload, without TOPI's defaults."""
    best = best_of(record for record in records if record.proven)
    return {workload: record.choice for workload, record in best.items() if record.choice != DEFAULT}


def append_device_record(target: str, record: DeviceRecord) -> None:
    """Append a record to the file of a target and its GPU."""
    append_line(device_file(target), device_line(target, record))


def device_line(target: str, record: DeviceRecord) -> bytes:
    """Return a record as AutoTVM writes it, without the end of line."""
    template, *arguments = json.loads(record.workload)
    own = [("own_generation", "ot", _GENERATION), ("own_proven", "ot", record.proven)]
    has_failed = math.isinf(record.seconds)
    line = {
        "input": [str(tvm.target.Target(compiler_target(target))), template, arguments, {}],
        "config": {"index": -1, "code_hash": None, "entity": [*json.loads(record.choice), *own]},
        "result": [[_FAILED_S if has_failed else record.seconds], FAILED if has_failed else 0, 0.0, time.time()],
        "version": VERSION,
        "tvm_version": tvm.__version__,
    }
    return json.dumps(line).encode()


def _record(line: bytes, target: str) -> DeviceRecord:
    """Read one line; raise ValueError where it is no record of this target."""
    read = msgspec.json.decode(line, type=_DeviceLine)
    own = {name: value for name, _, value in read.config.entity if name.startswith("own_")}
    if "own_generation" not in own or not isinstance(own.get("own_proven"), bool):
        raise ValueError("it does not say which of the schedules it is of")
    if (own["own_generation"], read.tvm_version) != (_GENERATION, tvm.__version__):
        raise OtherGenerationError
    described, template, arguments, _ = read.input
    if described != target:
        raise ValueError(f"it is for {described[:80]}, not for {target}")
    entities = [entity for entity in read.config.entity if not entity[0].startswith("own_")]
    choice = json.dumps(msgspec.convert(entities, list[_Entity]), separators=(",", ":"))
    if any(kind == "sp" and 0 in value for _, kind, value in entities):
        raise ValueError(f"{choice[:200]} splits by 0")
    try:
        workload = text_of(workload_of_text(json.dumps([template, *arguments])))
        keeps = choice == DEFAULT or (workload is not None and keeps_order(workload, choice))
    except (LookupError, TypeError) as error:
        raise ValueError(f"{str(arguments)[:100]} are no arguments of {template[:80]}") from error
    if workload is None:
        raise ValueError(f"{template[:80]} is no template that is tuned")
    if not keeps:
        raise ValueError(f"{choice[:200]} would change results of {workload[:100]}")
    [seconds], fault, _, _ = read.result
    return DeviceRecord(workload, choice, math.inf if fault else seconds, own["own_proven"] and not fault)
