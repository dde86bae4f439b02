"""What tuning measured, as AutoTVM's JSON lines: one file for each target and processor, and lines are only appended.

A line has AutoTVM's fields, so that AutoTVM reads it. The choice stands among the config's entities, under names of
ours. The entity `own_proven` says whether the choice has won in a whole network, or is that of the static rule because
no other has. Only such records apply to builds; others are results of a search that a later run need not repeat. The
entity `own_winograd_allowed` marks what a search found that was allowed Winograd's algorithm: such records apply to
models that allow it, and others to those that do not, where the algorithm can compute the convolution at all.

Lines that are broken, or are of another generation of the schedules, are skipped. The file is read as plain JSON, and a
line in it can do no more than choose a tile.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
import tvm

from tvm_pipeline.errors import PipelineError
from tvm_pipeline.files import cache_folder
from tvm_pipeline_kernels.choices import (
    GENERATION,
    KNOBS,
    WINOGRAD_KNOBS,
    Choice,
    Workload,
    is_for_winograd,
    is_winograd,
    possible_choices,
    static_choice,
    winograd_choices,
    workload_in,
)
from tvm_pipeline_kernels.gpu_tiles import Gpu
from tvm_pipeline_kernels.tiles import Cores, channel_block
from tvm_pipeline_kernels.tuning.targets import cores_of, measures_here, written
from tvm_pipeline_tvm.devices.targets import compiler_target
from tvm_pipeline_tvm.installed_ir import installed_ir

VERSION = 0.2  # of AutoTVM's format
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Record:
    """What was measured of a convolution.

    Attributes:
        seconds: of one call, in processor time.
        proven: the choice won in a whole network, or is that of the static rule because no other did.
        winograd: Winograd's algorithm was allowed in the search, so the choice may be a `Winograd`.
    """

    workload: Workload
    choice: Choice
    seconds: float
    proven: bool
    winograd: bool = False


class _Measured(Protocol):
    @property
    def workload(self) -> Any: ...

    @property
    def seconds(self) -> float: ...


T = TypeVar("T")
R = TypeVar("R", bound=_Measured)


class OtherGenerationError(Exception):
    """The line is a record of other schedules."""


class _Config(msgspec.Struct):
    entity: list[tuple[str, str, Any]]


class Line(msgspec.Struct):
    """A record as one line of AutoTVM's JSON."""

    input: tuple[str, str, list[Any], dict[str, Any]]
    config: _Config
    result: tuple[tuple[Annotated[float, msgspec.Meta(gt=0)]], int, float, float]


def records_file(target: str, measured_on: str = "") -> Path:
    """Return the file of what was measured for a target on a processor; on this one, or on its GPU, without its name.

    Relay and Relax have separate files, since a choice gives different code in each.
    """
    ir = " relax" if installed_ir() == "relax" else ""  # files of before there was Relax name none
    return file_of(f"{compiler_target(target)} {measured_on or measures_here(target)}{ir}")


def folder_of_records() -> Path:
    return cache_folder() / "tuning"


def file_of(described: str) -> Path:
    """Return the file of records for what is described: a target and the hardware."""
    readable = re.sub(r"[^\w.=+-]+", "_", described)[:80]
    return folder_of_records() / f"{readable}-{hashlib.sha256(described.encode()).hexdigest()[:8]}.jsonl"


def read_records(target: str, measured_on: str = "") -> list[Record]:
    """Return what was measured for a target, on this processor unless another is named; log how many are skipped."""
    if not folder_of_records().exists():  # no driver of a GPU need be asked
        return []
    file = records_file(target, measured_on)
    if not file.exists():  # TVM may not even know the target
        return []
    described, cores = written(target), cores_of(target)
    return read_lines(file, lambda line: _record(line, described, cores))


def read_lines(file: Path, read: Callable[[bytes], T]) -> list[T]:
    """Return what `read` makes of each line of a file; log how many lines are skipped because it raises ValueError."""
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        _log.warning("%s cannot be read (%s): nothing in it is applied", file, error.strerror or error)
        return []
    found, broken = [], []
    for number, line in enumerate(lines, 1):
        try:
            found += [read(line)] if line.strip() else []
        except OtherGenerationError:
            continue
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            broken.append(f"line {number}: {error}")
    if broken:
        _log.warning("%s: %d lines are no records of tuning and are skipped (%s)", file, len(broken), broken[0])
    return found


def recorded_choices(target: str, *, winograd: bool = False, measured_on: str = "") -> dict[Workload, Choice]:
    """Return the best proven choice of each workload, without those that the static rule makes anyway.

    Args:
        winograd: whether Winograd's algorithm is allowed. What a search without it has found applies only where the
            algorithm does not serve, since the static rule may be faster.
        measured_on: the processor; this machine's without it.
    """
    proven = [record for record in read_records(target, measured_on) if record.proven]
    best = best_of(
        record for record in proven if not (record.winograd or (winograd and is_for_winograd(record.workload)))
    )
    if winograd:
        best |= best_of(record for record in proven if record.winograd)
    if not best:
        return {}
    cores = cores_of(target)
    return {
        workload: record.choice
        for workload, record in best.items()
        if record.choice != static_choice(workload, cores, winograd=winograd)
    }


def best_of(records: Iterable[R]) -> dict[Any, R]:
    """Return the record of the least seconds of each workload."""
    best: dict[Any, R] = {}
    for record in records:
        if record.workload not in best or record.seconds < best[record.workload].seconds:
            best[record.workload] = record
    return best


def append_record(target: str, record: Record) -> None:
    """Append a record to the file of its target."""
    append_line(records_file(target), line_of(target, record))


def lines_for(target: str) -> list[bytes]:
    """Return the lines of what was measured for a target on this processor, for another machine that compiles for it.

    See `take_lines`, which that machine calls.
    """
    file = records_file(target)
    return [line for line in file.read_bytes().split(b"\n") if line.strip()] if file.exists() else []


def take_lines(target: str, measured_on: str, lines: Iterable[bytes]) -> int:
    """Keep lines of another processor that are not here yet; return how many. They are checked when they are read."""
    file = records_file(target, measured_on)
    known = set(file.read_bytes().split(b"\n")) if file.exists() else set()
    new = [line for line in lines if line not in known and b"\n" not in line]
    for line in new:
        append_line(file, line)
    return len(new)


def append_line(file: Path, line: bytes) -> None:
    """Append one line, whole: a process that is killed leaves no more than one broken line, the last."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            is_broken = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            os.write(descriptor, (b"\n" if is_broken else b"") + line + b"\n")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise PipelineError(
            f"cannot write {file}: {error.strerror or error}; set TVM_PIPELINE_CACHE to another folder"
        ) from error


def digest_of(choices: Mapping[Any, Any]) -> str:
    """Return a digest of choices, whatever their order is; empty for none."""
    text = "\n".join(sorted(f"{GENERATION} {workload} {choice}" for workload, choice in choices.items()))
    return hashlib.sha256(text.encode()).hexdigest() if choices else ""


def line_of(target: str, record: Record) -> bytes:
    """Return a record as AutoTVM writes it, without the end of line."""
    template, cores = record.workload[0], cores_of(target)
    knobs = WINOGRAD_KNOBS if is_winograd(record.choice) else KNOBS[template]
    entities = [
        *([] if isinstance(cores, Gpu) else _knobs_of_topi(record, cores)),
        ("own_generation", "ot", GENERATION),
        ("own_proven", "ot", record.proven),
        *((name, "ot", value) for name, value in zip(knobs, record.choice, strict=True)),
    ]
    if record.winograd:
        entities.append(("own_winograd_allowed", "ot", True))
    line = {
        "input": [written(target), template, record.workload[1:], {}],
        "config": {"index": -1, "code_hash": None, "entity": entities},
        "result": [[record.seconds], 0, 0.0, time.time()],
        "version": VERSION,
        "tvm_version": tvm.__version__,
    }
    return json.dumps(line).encode()


def _knobs_of_topi(record: Record, cores: Cores) -> list[tuple[str, str, Any]]:
    """Return the knobs that TOPI's template for CPU cores has."""
    _, data, kernel, *_ = record.workload
    channels = {"tile_ic": data[1][1], "tile_oc": kernel[1][0]}
    blocks = {name: channel_block(count, cores.lanes) for name, count in channels.items()}
    return [
        *((name, "sp", [count // blocks[name], blocks[name]]) for name, count in channels.items()),
        ("tile_ow", "sp", [-1, record.choice[-1]]),
        ("tile_oh", "ot", 1),
        ("unroll_kw", "ot", False),
    ]


def _record(line: bytes, target: str, cores: Cores | Gpu) -> Record:
    """Read one line; raise ValueError where it is no record of this target, as `written` has it."""
    read = msgspec.json.decode(line, type=Line)
    knobs = {name: value for name, _, value in read.config.entity}
    generation, proven = knobs.get("own_generation"), knobs.get("own_proven")
    if generation is None or not isinstance(proven, bool):
        raise ValueError("it does not say which of the schedules it is of")
    if generation != GENERATION:
        raise OtherGenerationError
    described, template, arguments, _ = read.input
    if described != target:
        raise ValueError(f"it is for {described[:80]}, not for {target}")
    workload = workload_in([template, *arguments])
    allowed = knobs.get("own_winograd_allowed", False) is True
    is_other = WINOGRAD_KNOBS[0] in knobs
    names = WINOGRAD_KNOBS if is_other else KNOBS[workload[0]]
    choice = msgspec.convert([knobs.get(name) for name in names], Choice)
    possible = winograd_choices if is_other and allowed else possible_choices
    if choice not in possible(workload, cores):
        raise ValueError(f"{choice} is no tile of {workload}"[:300])
    [seconds], error, _, _ = read.result
    if error:
        raise ValueError(f"its measurement failed with error {error}")
    return Record(workload, choice, seconds, proven, allowed)
