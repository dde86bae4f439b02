"""The threads of a process, as /proc has them: those of engines are no threads of Python."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from tvm_pipeline.backends.contract import StageRunner


def ticks(process: int | str = "self") -> dict[int, tuple[int, set[int]]]:
    """Return, by thread, the ticks of processor time that it has had, and the cores that it may use."""
    found = {}
    for task in Path(f"/proc/{process}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread ends meanwhile
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            found[int(task.name)] = int(fields[11]) + int(fields[12]), os.sched_getaffinity(int(task.name))
    return found


def cores_of_work(
    before: dict[int, tuple[int, set[int]]], after: dict[int, tuple[int, set[int]]]
) -> dict[int, set[int]]:
    """Return, by thread, the cores of those that had more than three ticks in between."""
    return {thread: cores for thread, (now, cores) in after.items() if now - before.get(thread, (0, set()))[0] > 3}


def frames(stage: StageRunner, seen: list[dict[int, tuple[int, set[int]]]]) -> None:
    """Run frames, from a bound thread, until it has had a fifth of a second of its core; note what threads had."""
    inputs, outputs = [port.buffer() for port in stage.inputs], [port.buffer() for port in stage.outputs]
    for array in inputs:
        array.fill(1)
    stage.bind()
    seen.append(ticks())
    begin = sum(os.times()[:2])
    while sum(os.times()[:2]) - begin < 0.2:
        stage.run(inputs, outputs)
    seen.append(ticks())
