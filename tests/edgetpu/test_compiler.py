"""The wrapper of edgetpu_compiler: reports of real runs, and a fake program that behaves well or badly."""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.log_lines import log_lines
from tests.support.parts import needs

needs("ai_edge_litert")

from tests.edgetpu.fakes import write_compiler
from tests.edgetpu.networks import random_network
from tvm_pipeline.errors import ModelError, PlatformError
from tvm_pipeline_edgetpu.compiler import Report, compile_parts, find_compiler, parse_report
from tvm_pipeline_edgetpu.model import file_ends

PARTS = [random_network(1), random_network(2)]
NAMES = ["stage 0", "stage 1"]


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Put the fake program on the PATH, set how it behaves, and count its compilations."""
    (tmp_path / "bin").mkdir()
    program = write_compiler(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("TVM_PIPELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FAKE_EDGETPU_CALLS", str(tmp_path / "calls"))
    return program


def wrap(compiler, before):
    """Replace the program by a shell script that calls it."""
    real = compiler.rename(compiler.with_name("real"))
    compiler.write_text(f'#!/bin/sh\n{before} "{real}" "$@"\nexit $?\n')
    compiler.chmod(0o755)


def calls(tmp_path):
    return (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []


# google-coral/edgetpu issue 60, with the lines of its table that were quoted.
PARTLY_MAPPED = """\
Edge TPU Compiler version 2.1.302470888

Model compiled successfully in 12264 ms.

Input model: model2.tflite
Input size: 8.11MiB
Output model: model2_edgetpu.tflite
Output size: 9.47MiB
On-chip memory used for caching model parameters: 6.86MiB
On-chip memory remaining for caching model parameters: 7.75KiB
Off-chip memory used for streaming uncached model parameters: 1.22MiB
Number of Edge TPU subgraphs: 1
Total number of operations: 93
Operation log: model2_edgetpu.log

Model successfully compiled but not all operations are supported by the Edge TPU. A percentage of the model will \
instead run on the CPU, which is slower. If possible, consider updating your model to use only operations supported \
by the Edge TPU. For details, visit g.co/coral/model-reqs.
Number of operations that will run on Edge TPU: 83
Number of operations that will run on CPU: 10

Operator                       Count      Status

LOGISTIC                       1          More than one subgraph is not supported
ADD                            10         Mapped to Edge TPU
CONCATENATION                  1          More than one subgraph is not supported
CONCATENATION                  3          Mapped to Edge TPU
"""

# This is issue 572: everything is mapped, and no table was requested.
MAPPED = """\
Edge TPU Compiler version 16.0.384591198
Started a compilation timeout timer of 180 seconds.

Model compiled successfully in 542 ms.

Input model: quantized_model.tflite
Input size: 4.04MiB
Output model: quantized_model_edgetpu.tflite
Output size: 4.13MiB
On-chip memory used for caching model parameters: 604.50KiB
On-chip memory remaining for caching model parameters: 511.50KiB
Off-chip memory used for streaming uncached model parameters: 3.45MiB
Number of Edge TPU subgraphs: 1
Total number of operations: 50
Operation log: quantized_model_edgetpu.log
See the operation log file for individual operation details.
Compilation child process completed within timeout period.
Compilation succeeded!
"""


def test_reports_of_real_runs():
    assert parse_report(PARTLY_MAPPED) == Report(
        compiler_version="2.1.302470888",
        on_chip_used_bytes=round(6.86 * 2**20),
        on_chip_remaining_bytes=7936,
        off_chip_bytes=round(1.22 * 2**20),
        subgraphs=1,
        mapped=83,
        on_cpu=10,
        operators=(
            ("LOGISTIC", 1, "More than one subgraph is not supported"),
            ("ADD", 10, "Mapped to Edge TPU"),
            ("CONCATENATION", 1, "More than one subgraph is not supported"),
            ("CONCATENATION", 3, "Mapped to Edge TPU"),
        ),
    )
    report = parse_report(MAPPED)
    assert (report.on_chip_used_bytes, report.on_chip_remaining_bytes) == (619008, 523776)
    assert (report.mapped, report.on_cpu, report.operators) == (50, 0, ())
    assert parse_report(MAPPED.replace("3.45MiB", "0.00B")).off_chip_bytes == 0


def test_a_report_that_lacks_a_line():
    text = MAPPED.replace("Number of Edge TPU subgraphs: 1\n", "")
    with pytest.raises(ModelError, match=r"no line 'Number of Edge TPU subgraphs'; versions 2\.1 to 16\.0"):
        parse_report(text)


@pytest.mark.thorough
def test_parts_are_compiled_together_and_once(tmp_path, compiler):
    assert find_compiler() == compiler
    told = log_lines("INFO")
    made = compile_parts(PARTS, NAMES)
    assert [file_ends(content) for content, _ in made] == [
        tuple(ends[::-1] for ends in file_ends(part)) for part in PARTS
    ]
    reports = [report for _, report in made]
    assert [report.mapped for report in reports] == [12, 12]
    assert all(sum(count for _, count, _ in report.operators) == 12 for report in reports)
    assert reports[0] != reports[1]
    assert reports[0].on_chip_remaining_bytes == reports[1].on_chip_remaining_bytes > 0  # one cache for both
    assert calls(tmp_path) == ["part0.tflite part1.tflite"]
    assert told == ["compiling stage 0, stage 1 with edgetpu_compiler 16.0.384591198"]
    assert compile_parts(PARTS, ["a", "b"]) == made  # their names are for people
    assert (len(calls(tmp_path)), len(told)) == (1, 1)
    compile_parts(PARTS[::-1], NAMES)  # the first has the cache first
    compile_parts(PARTS[:1], NAMES[:1])
    assert len(calls(tmp_path)) == 3


@pytest.mark.thorough
def test_another_version_compiles_anew(tmp_path, compiler):
    compile_parts(PARTS, NAMES)
    compiler.write_text(compiler.read_text().replace("16.0.384591198", "16.1.0"))
    assert compile_parts(PARTS, NAMES)[0][1].compiler_version == "16.1.0"
    assert len(calls(tmp_path)) == 2


def test_an_earlier_version_gets_no_option_that_it_does_not_know(compiler, monkeypatch):
    monkeypatch.setenv("FAKE_EDGETPU_COMPILER_VERSION", "15.0.340273435")
    [(_, report), _] = compile_parts(PARTS, NAMES)
    assert report.compiler_version == "15.0.340273435"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("crash", "was ended by signal SIGSEGV for stage 0, stage 1; cut .*timeout timer of 180 seconds"),
        ("partial", "ended with exit code 0 and wrote no compiled file for stage 1;"),
        ("fail", "ended with exit code 1 for stage 0, stage 1; .*static-sized tensors.*Compilation failed!"),
    ],
)
def test_a_compiler_that_fails(tmp_path, compiler, monkeypatch, mode, message):
    monkeypatch.setenv("FAKE_EDGETPU_COMPILER", mode)
    with pytest.raises(ModelError, match=f"(?s)^edgetpu_compiler {message}"):
        compile_parts(PARTS, NAMES)
    assert not [left for left in (tmp_path / "cache").rglob("*") if left.name != "edgetpu"]
    monkeypatch.delenv("FAKE_EDGETPU_COMPILER")
    assert len(compile_parts(PARTS, NAMES)) == 2


@pytest.mark.thorough
def test_a_report_that_cannot_be_read_is_not_kept(tmp_path, compiler):
    compiler.write_text(compiler.read_text().replace("Total number of operations", "Operations"))
    for _ in range(2):
        with pytest.raises(ModelError, match="no line 'Total number of operations'"):
            compile_parts(PARTS[:1], NAMES[:1])
    assert len(calls(tmp_path)) == 2


def running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.thorough
def test_a_compiler_that_hangs_is_ended_with_its_children(compiler, monkeypatch):
    monkeypatch.setenv("FAKE_EDGETPU_COMPILER", "hang")
    with pytest.raises(ModelError, match=r"did not end within 0\.5 s for stage 0; cut") as error:
        compile_parts(PARTS[:1], NAMES[:1], timeout_s=0.5)
    child = int(re.search(r"child (\d+)", str(error.value))[1])
    until = time.monotonic() + 30
    while running(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not running(child)


def test_a_signal_by_way_of_a_shell(compiler, monkeypatch):
    """The installed program is a script that calls the real one."""
    wrap(compiler, "")
    monkeypatch.setenv("FAKE_EDGETPU_COMPILER", "crash")
    with pytest.raises(ModelError, match="was ended by signal SIGSEGV"):
        compile_parts(PARTS[:1], NAMES[:1])


def test_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler() is None
    with pytest.raises(PlatformError, match=r"not on the PATH; install .*edgetpu-compiler .*x86-64"):
        compile_parts(PARTS, NAMES)


def test_a_compiler_of_another_machine(compiler):
    compiler.write_bytes(b"\x7fELF of another kind")
    with pytest.raises(PlatformError, match=r"edgetpu_compiler cannot be started: .*x86-64 Linux only"):
        compile_parts(PARTS, NAMES)


def test_a_compiler_that_does_not_say_its_version(compiler):
    compiler.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(
        PlatformError, match=r"--version ended with exit code 3; install it again. It said: \(it printed"
    ):
        compile_parts(PARTS, NAMES)


@pytest.mark.thorough
def test_two_at_once_compile_the_same_parts_once(tmp_path, compiler):
    """The second waits for the first, and takes what it has made."""
    said = log_lines("INFO")
    wrap(compiler, '[ "$1" = --version ] || sleep 0.3; exec')
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(compile_parts, PARTS, NAMES) for _ in range(2)]
        one, other = (done.result() for done in both)
    assert one == other
    assert sum("compiling" in line for line in said) == 1
    assert sum("another process makes stage 0, stage 1 with edgetpu_compiler; waiting" in line for line in said) == 1
    assert len(list((tmp_path / "cache" / "edgetpu").iterdir())) == 1
