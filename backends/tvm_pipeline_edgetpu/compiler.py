"""Call Google's edgetpu_compiler for the slices that Edge TPUs run, and read its report.

It is a closed x86-64 program. On some models it crashes, hangs or exits without a message (google-coral/edgetpu issues
411, 418 and 669). Each call here ends with compiled files, or with an error that contains its output. The cache keeps
the compiled files, so that the same parts are compiled once. The page https://coral.ai/docs/edgetpu/compiler describes
the program. Next: `compiled.py`, which calls this file.
"""

from __future__ import annotations

import hashlib
import logging
import math
import platform
import re
import shutil
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tvm_pipeline import files
from tvm_pipeline.errors import ModelError, PlatformError
from tvm_pipeline.processes import run_program

_log = logging.getLogger(__name__)

_NAME = "edgetpu_compiler"
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# The program keeps its time limit itself and reports it. Only if it does not, it is killed this much later.
_GRACE_S = 2.0
_VERSION_WITH_OPTIONS = 16
_VERSION_S = 30.0
_TAIL_LINES = 12


@dataclass(frozen=True, slots=True)
class Report:
    """The compiler's report of one model.

    Attributes:
        compiler_version: the version as the compiler prints it, such as "16.0.384591198".
        on_chip_used_bytes: parameters in the device's cache, as the report rounds them.
        on_chip_remaining_bytes: free bytes of the cache, for all models that were compiled together.
        off_chip_bytes: parameters that are streamed to the device in every run.
        subgraphs: pieces of the model that run on the Edge TPU.
        mapped: operators that run on the Edge TPU.
        on_cpu: operators that are left to the CPU.
        operators: the operation log: a kind, the number of operators, and "Mapped to Edge TPU" or the reason why not.
    """

    compiler_version: str
    on_chip_used_bytes: int
    on_chip_remaining_bytes: int
    off_chip_bytes: int
    subgraphs: int
    mapped: int
    on_cpu: int
    operators: tuple[tuple[str, int, str], ...]


def find_compiler() -> Path | None:
    """Return the path of edgetpu_compiler; None where it is not on the PATH."""
    found = shutil.which(_NAME)
    return Path(found) if found else None


def parse_report(text: str) -> Report:
    """Parse what the compiler prints of one model, with its operation log or without.

    Raises:
        ModelError: a line that versions 2.1 to 16.0 print is missing.
    """
    total = int(_field(text, "Total number of operations", r"\d+"))
    # The compiler prints this line only if it leaves an operator to the CPU.
    on_cpu = re.search(r"^Number of operations that will run on CPU: (\d+)", text, re.M)
    left = int(on_cpu[1]) if on_cpu else 0
    rows = re.findall(r"^([A-Za-z]\S*)[ \t]+(\d+)[ \t]+(\S.*?)\s*$", text, re.M)
    return Report(
        compiler_version=_version(text),
        on_chip_used_bytes=_size(text, "On-chip memory used for caching model parameters"),
        on_chip_remaining_bytes=_size(text, "On-chip memory remaining for caching model parameters"),
        off_chip_bytes=_size(text, "Off-chip memory used for streaming uncached model parameters"),
        subgraphs=int(_field(text, "Number of Edge TPU subgraphs", r"\d+")),
        mapped=total - left,
        on_cpu=left,
        operators=tuple((kind, int(count), status) for kind, count, status in rows),
    )


def compile_parts(
    parts: Sequence[bytes], names: Sequence[str], *, timeout_s: float = 180
) -> list[tuple[bytes, Report]]:
    """Compile .tflite files for one Edge TPU in one call, so that they share its cache; the first has priority.

    Args:
        parts: the files' contents.
        names: the names of the parts in messages.
        timeout_s: seconds that the program may take.

    Returns:
        The compiled file and the report of each part, in order. The folder `edgetpu` of the cache keeps them.

    Raises:
        PlatformError: the program is not on the PATH, or cannot be started here.
        ModelError: it fails, crashes, hangs or leaves a part out; with its last lines.
    """
    program = find_compiler()
    if program is None:
        raise PlatformError(
            f"{_NAME} is not on the PATH; install Google's package edgetpu-compiler as "
            f"https://coral.ai/docs/edgetpu/compiler says (for x86-64 Linux only; this machine is {platform.machine()})"
        )
    code, output = _run([str(program), "--version"], _VERSION_S)
    if code != 0:
        raise PlatformError(
            f"{program} --version {_ending(code, _VERSION_S)}; install it again. It said: {_tail(output)}"
        )
    version = _version(output)
    key = hashlib.sha256(version.encode())
    for part in parts:
        key.update(hashlib.sha256(part).digest())
    folder = files.cache_folder() / "edgetpu" / key.hexdigest()
    if files.damaged(folder):
        with files.locked(folder, f"{', '.join(names)} with {_NAME}"):
            if name := files.damaged(folder):
                if folder.exists():
                    _log.warning("%s is damaged and is made anew", folder / name)
                    shutil.rmtree(folder)
                _log.info(f"compiling {', '.join(names)} with {_NAME} {version}")
                made = _compile(program, version, parts, names, timeout_s)
                with files.replacing(folder) as temporary:
                    temporary.mkdir(parents=True)
                    for index, (content, text) in enumerate(made):
                        (temporary / f"{index}.tflite").write_bytes(content)
                        (temporary / f"{index}.txt").write_text(text, encoding="utf-8")
                    files.seal(temporary)
    return [_cached(folder, index) for index in range(len(parts))]


def _cached(folder: Path, index: int) -> tuple[bytes, Report]:
    content = files.read_bytes(folder / f"{index}.tflite", ModelError)
    return content, parse_report(files.read_bytes(folder / f"{index}.txt", ModelError).decode())


def _compile(
    program: Path, version: str, parts: Sequence[bytes], names: Sequence[str], timeout_s: float
) -> list[tuple[bytes, str]]:
    """Return the compiled files, each with what the program printed and logged about it.

    Version 16 searches for the operator before which it can compile a part, as libcoral's partitioner has it do
    (coral/tools/partitioner/profiling_based_partitioner.cc). Earlier versions have neither option; `_run` limits them.
    """
    with tempfile.TemporaryDirectory(prefix="tvm-pipeline-edgetpu-") as name:
        folder = Path(name)
        inputs = [folder / f"part{index}.tflite" for index in range(len(parts))]
        outputs = [folder / f"part{index}_edgetpu.tflite" for index in range(len(parts))]
        for path, part in zip(inputs, parts, strict=True):
            path.write_bytes(part)
        limit_s = max(1, math.ceil(timeout_s))
        has_options = int(version.partition(".")[0]) >= _VERSION_WITH_OPTIONS
        options = ["--timeout_sec", limit_s, "--search_delegate"] if has_options else []
        command = [program, "--out_dir", folder, *options, *inputs]
        code, output = _run([str(word) for word in command], timeout_s + _GRACE_S)
        left_out = [name for name, path in zip(names, outputs, strict=True) if not path.is_file()]
        if code != 0 or left_out:
            how = _ending(code, timeout_s) + (" and wrote no compiled file" if code == 0 else "")
            raise ModelError(
                f"{_NAME} {how} for {', '.join(left_out or names)}; cut the model elsewhere or let another device run "
                f"that part. Its last lines:\n{_tail(output)}"
            )
        sections = _sections(output)
        reports = [
            f"{sections.get(part.stem, output)}\n{_log_file(path)}" for part, path in zip(inputs, outputs, strict=True)
        ]
        for report in reports:
            parse_report(report)  # a report that cannot be read must not enter the cache
        return [(path.read_bytes(), report) for path, report in zip(outputs, reports, strict=True)]


def _sections(output: str) -> dict[str, str]:
    """Return what was printed about each model, after the common head, by the name of the model's file."""
    head, *bodies = re.split(r"^(?=Input model: )", output, flags=re.M)
    return {Path(body.splitlines()[0].removeprefix("Input model: ").strip()).stem: head + body for body in bodies}


def _log_file(compiled: Path) -> str:
    path = compiled.with_suffix(".log")
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _run(command: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
    """Run the program; return its exit code, None where it exceeded its time and was killed, and its output."""
    try:
        return run_program(command, timeout_s)
    except OSError as error:
        raise PlatformError(
            f"{command[0]} cannot be started: {error.strerror or error}; it runs on x86-64 Linux only, and this "
            f"machine is {platform.machine()}"
        ) from error


def _ending(code: int | None, timeout_s: float) -> str:
    """Describe how the program ended; a shell script that called it reports a signal as 128 + its number."""
    if code is None:
        return f"did not end within {timeout_s:g} s"
    number = -code if code < 0 else code - 128
    if number in set(signal.Signals):
        return f"was ended by signal {signal.Signals(number).name}"
    return f"ended with exit code {code}"


def _tail(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-_TAIL_LINES:]) or "(it printed nothing)"


def _field(text: str, name: str, value: str) -> str:
    found = re.search(rf"^{re.escape(name)}: ({value})", text, re.M)
    if not found:
        raise ModelError(
            f"the report of {_NAME} has no line {name!r}; versions 2.1 to 16.0 print it. Its last lines:\n{_tail(text)}"
        )
    return found[1]


def _size(text: str, name: str) -> int:
    """Parse a size such as "604.50KiB" into bytes."""
    size = _field(text, name, r"[\d.]+(?:[KMG]i)?B")
    number = size.rstrip("BGKMi")
    return round(float(number) * _UNITS[size.removeprefix(number)])


def _version(text: str) -> str:
    found = re.search(r"^Edge TPU Compiler version (\d+\S*)", text, re.M)
    if not found:
        raise ModelError(f"{_NAME} does not say which version it is. Its last lines:\n{_tail(text)}")
    return found[1]
