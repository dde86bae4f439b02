"""Records of tuning: AutoTVM's lines that nobody needs to trust, and what of them applies to builds."""

from __future__ import annotations

import base64
import json
import logging
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.parts import needs

needs("tvm")

from tvm_pipeline_kernels.choices import (
    CONV2D,
    DEPTHWISE,
    Workload,
    possible_choices,
)
from tvm_pipeline_kernels.relay.schedules.choice_context import _chosen, following
from tvm_pipeline_kernels.tiles import Cores
from tvm_pipeline_kernels.tuning import tuning_records
from tvm_pipeline_kernels.tuning.tuning_records import (
    Record,
    append_record,
    line_of,
    read_records,
    recorded_choices,
    records_file,
)

from tvm import autotvm  # isort: skip

TARGET = "llvm -mcpu=x86-64-v3"
CORES = Cores(8, 16)


def convolution(channels: int = 32, template: str = CONV2D) -> Workload:
    inputs = 1 if template == DEPTHWISE else 16
    shapes = (1, 16 if template == CONV2D else channels, 14, 14), (channels, inputs, 3, 3)
    data, kernel = (("TENSOR", shape, "float32") for shape in shapes)
    return (template, data, kernel, (1, 1), (1, 1, 1, 1), (1, 1), "NCHW", "NCHW", "float32")  # type: ignore[return-value]


def record(workload: Workload | None = None, seconds: float = 1e-4, proven: bool = True, place: int = 3) -> Record:
    """Return a record of the choice at this place of all that are possible; 0 is the static rule's."""
    workload = workload or convolution()
    return Record(workload, possible_choices(workload, CORES)[place], seconds, proven)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TVM_PIPELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("template", [CONV2D, DEPTHWISE])
def test_autotvm_reads_what_is_written(template: str) -> None:
    written = record(convolution(template=template))
    append_record(TARGET, written)
    assert read_records(TARGET) == [written]
    [line] = records_file(TARGET).read_text().splitlines()
    read, result = autotvm.record.decode(line)
    assert read.task.workload == written.workload
    assert result.costs == (written.seconds,)
    assert all(read.config[name].size[-1] == 8 for name in ("tile_ic", "tile_oc"))


def test_without_a_file_there_is_nothing(cache: Path) -> None:
    assert read_records(TARGET) == []
    assert recorded_choices(TARGET) == {}
    assert not (cache / "tuning").exists()


def test_each_target_has_a_file_with_a_name_that_every_system_takes() -> None:
    files = {records_file(target) for target in (TARGET, f"{TARGET} -mattr=+fma", "llvm -mcpu=../../etc/x")}
    assert len(files) == 3
    assert {file.parent for file in files} == {records_file(TARGET).parent}


class Payload:
    """What runs when it is read by pickle."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Path]]:
        return Path.touch, (self.file,)


def changed(**fields: Any) -> str:
    """Return a line whose fields, or entities of the config, are others."""
    line = json.loads(line_of(TARGET, record()))
    entities = {name: (name, kind, value) for name, kind, value in line["config"]["entity"]}
    for name, value in fields.items():
        if name in entities:
            entities[name] = (name, "ot", value)
        else:
            line[name] = value
    line["config"]["entity"] = [entity for entity in entities.values() if entity[2] is not None]
    return json.dumps(line)


def workload_line(**parts: Any) -> str:
    """Return a line for a convolution with other data, kernel, strides or padding."""
    line = json.loads(line_of(TARGET, record()))
    arguments = dict(zip(("data", "kernel", "strides", "padding"), line["input"][2], strict=False))
    line["input"][2][:4] = (arguments | parts).values()
    return json.dumps(line)


HOSTILE = {
    "half a line": line_of(TARGET, record())[:100].decode(),
    "no JSON": "nothing of this kind",
    "another JSON": "[1, 2, 3]",
    "no text": "\udcff\udc80",
    "deep": "[" * 100_000,
    "no fields": "{}",
    "another target": changed(input=["llvm", *json.loads(line_of(TARGET, record()))["input"][1:]]),
    "another template": changed(input=["llvm -keys=cpu -mcpu=x86-64-v3", "dense.x86", [], {}]),
    "a failed measurement": changed(result=[[1e-4], 4, 0.1, 1.0]),
    "no time": changed(result=[[0.0], 0, 0.1, 1.0]),
    "endless time": changed(result=[[1e-4], 0, 0.1, 1.0]).replace("0.0001", "1e999"),
    "no tile": changed(own_chunks=None),
    "a tile that does not divide": changed(own_chunks=3),
    "a tile of text": changed(own_rows="1"),
    "a tile that is no number": changed(own_rows=True),
    "a tile that spills": changed(own_columns=1_000_000),
    "a negative tile": changed(own_columns=-1),
    "no generation": changed(own_generation=None),
    "an image smaller than its kernel": workload_line(data=["TENSOR", [1, 16, 1, 1], "float32"], padding=[0, 0, 0, 0]),
    "a huge image": workload_line(data=["TENSOR", [1, 16, 10**30, 14], "float32"]),
    "no channels": workload_line(kernel=["TENSOR", [0, 16, 3, 3], "float32"]),
    "no stride": workload_line(strides=[0, 1]),
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
def test_a_line_that_is_no_record_is_skipped(line: str, caplog: pytest.LogCaptureFixture) -> None:
    file = records_file(TARGET)
    file.parent.mkdir(parents=True)
    file.write_bytes(line.encode(errors="surrogateescape") + b"\n")
    append_record(TARGET, record())
    with caplog.at_level(logging.WARNING):
        assert read_records(TARGET) == [record()]
    assert len(caplog.records) == 1
    assert f"{file}: 1 lines are no records of tuning" in caplog.text


def test_nothing_is_unpickled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """AutoTVM's older lines hold pickles, which run code when they are read."""
    packed = base64.b64encode(pickle.dumps(Payload(tmp_path / "ran"))).decode()
    file = records_file(TARGET)
    file.parent.mkdir(parents=True)
    file.write_text("\t".join([TARGET, packed, packed, packed, "0.2", "0.19.0"]) + "\n")
    assert read_records(TARGET) == []
    assert not (tmp_path / "ran").exists()
    assert "1 lines are no records" in caplog.text


def test_a_line_that_was_cut_short_costs_no_other() -> None:
    """A process that was killed may leave half a line; the next one begins a line of its own."""
    append_record(TARGET, record(seconds=1e-4))
    file = records_file(TARGET)
    file.write_bytes(file.read_bytes() + line_of(TARGET, record())[:80])
    append_record(TARGET, record(seconds=2e-4))
    append_record(TARGET, record(seconds=3e-4))
    assert [read.seconds for read in read_records(TARGET)] == [1e-4, 2e-4, 3e-4]


def test_records_of_other_schedules_are_void(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    append_record(TARGET, record())
    monkeypatch.setattr(tuning_records, "GENERATION", tuning_records.GENERATION + 1)
    assert read_records(TARGET) == []
    assert not caplog.records


def test_the_fastest_proven_choice_applies() -> None:
    first, second, third = (convolution(channels) for channels in (32, 64, 96))
    append_record(TARGET, record(first, seconds=2e-4, place=1))
    append_record(TARGET, record(first, seconds=1e-4, place=2))
    append_record(TARGET, record(first, seconds=1e-6, place=3, proven=False))
    append_record(TARGET, record(second, place=0))  # what the static rule makes anyway
    append_record(TARGET, record(third, proven=False))
    assert recorded_choices(TARGET) == {first: possible_choices(first, CORES)[2]}


def test_threads_that_build_at_once_have_their_own_choices() -> None:
    workload = convolution()
    asked: dict[str, Any] = {}
    first_is_inside, first_may_go = threading.Event(), threading.Event()

    def config() -> Any:
        found = _chosen._query_inside(None, workload)
        return None if found is None else [found[f"own_{name}"].val for name in ("chunks", "rows", "columns")]

    def other() -> None:
        with following({workload: (1, 1, 7)}):
            asked["other"] = config()
            first_is_inside.set()
            first_may_go.wait(10)

    stock = autotvm.task.DispatchContext.current
    thread = threading.Thread(target=other)
    with following({workload: (2, 1, 4)}):
        thread.start()
        first_is_inside.wait(10)
        asked["own"] = config()
    asked["after"] = config()
    first_may_go.set()
    thread.join()
    assert asked == {"other": [1, 1, 7], "own": [2, 1, 4], "after": None}
    assert autotvm.task.DispatchContext.current is stock
