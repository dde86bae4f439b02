"""NVIDIA's power modes of a Jetson: read from /etc/nvpmodel.conf, set by the program `nvpmodel`.

The file's grammar, as its own header and the files of TX2, Nano, Xavier and Orin have it. They were read in public
copies, such as those of mlcommons/inference_results_v3.0 (closed/Neuchips/code/common), and in NVIDIA's "Jetson Linux
Developer Guide", power management:

    < PARAM TYPE=FILE NAME=CPU_ONLINE >        what a mode may write, and where
    CORE_1 /sys/devices/system/cpu/cpu1/online
    < POWER_MODEL ID=1 NAME=5W >               one mode: parameter, argument, value
    CPU_ONLINE CORE_1 0
    CPU_A57 MAX_FREQ 918000                    kHz for CPUs, Hz for others; -1 is no limit
    < PM_CONFIG DEFAULT=0 >

Some changes, mostly on Orin and Thor where the power gates of the GPU differ, take effect only after a reboot, for
which the program asks. It is always told no. Never run on a Jetson. Next: mode_switch.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tvm_pipeline.errors import PowerError
from tvm_pipeline.files import read_bytes
from tvm_pipeline.power import PowerMode
from tvm_pipeline.system_files import file_text

CONFIGURATION = "etc/nvpmodel.conf"
STATUS = "var/lib/nvpmodel/status"  # "pmode:0001", on newer systems with " fmode:quiet" behind it
PROGRAM = "nvpmodel"
ANSWER_S = 60.0  # the program waits for clocks and cores; it takes about a second
_MOST_BYTES = 1 << 20
_UNLIMITED = (-1, 0)  # values of MAX_FREQ that limit nothing

_HEADER = re.compile(r"<\s*(\w+)\s+(.*?)\s*>")
_CORE_PATH = re.compile(r"/cpu/cpu(\d{1,4})/online$")
_ASKED = re.compile(r"reboot", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class NvpMode:
    """One mode of the file.

    Attributes:
        clocks: the greatest frequency of each clock that the mode limits, by the file's name of it: kHz for those whose
            names begin with CPU, Hz for others.
    """

    number: int
    name: str
    offline_cores: tuple[int, ...] = ()
    clocks: Mapping[str, int] = field(default_factory=dict)

    @property
    def power_mode(self) -> PowerMode:
        """The mode as one of a platform; nothing is known of its power."""
        # A blank or a sign that names of modes do not have would make the file of one owner unusable for all.
        return PowerMode(re.sub(r"[^\w.+-]", "_", self.name), self.number, offline_cores=self.offline_cores)

    def __str__(self) -> str:
        said = [f"cores {', '.join(map(str, self.offline_cores))} off"] if self.offline_cores else []
        for clock, limit in self.clocks.items():
            said.append(f"{clock} up to {limit / (1e3 if clock.startswith('CPU') else 1e6):g} MHz")
        return f"power mode {self.name} (nvpmodel {self.number}): {', '.join(said) or 'no limits'}"


def nvpmodel_modes(root: Path = Path("/")) -> tuple[NvpMode, ...]:
    """Return the modes of this Jetson in the order of its file; none where there is no such file.

    Raises:
        PowerError: the file cannot be read, or is damaged; the message names the line.
    """
    path = root / CONFIGURATION
    if not path.is_file():
        return ()
    text = read_bytes(path, PowerError, _MOST_BYTES).decode(errors="replace")
    found: list[NvpMode] = []
    cores: dict[str, int] = {}  # the core of each argument of CPU_ONLINE
    for header, body in _sections(text):
        words = dict(part.partition("=")[::2] for part in header[1].split())
        if header[0] == "PARAM" and words.get("NAME") == "CPU_ONLINE":
            cores = {line[0]: int(m[1]) for _, line in body if len(line) > 1 and (m := _CORE_PATH.search(line[1]))}
        elif header[0] == "POWER_MODEL":
            found.append(_mode(path, words, body, cores))
    numbers = [mode.number for mode in found]
    names = [mode.power_mode.name for mode in found]
    if len(set(numbers)) < len(numbers) or len(set(names)) < len(names):
        raise PowerError(f"{path}: two power modes have one number or name: {', '.join(map(str, found))}")
    return tuple(found)


_Line = tuple[int, list[str]]  # its number and its words


def _sections(text: str) -> Iterator[tuple[tuple[str, str], list[_Line]]]:
    """Yield the kind and the attributes of each header, with the lines below it; comments are left out."""
    header, body = ("", ""), list[_Line]()
    for number, line in enumerate(text.splitlines(), 1):
        written = line.partition("#")[0].strip()
        if written.startswith("<"):
            yield header, body
            found = _HEADER.fullmatch(written)
            # What is no header that we know ends a section as well, such as `< /POWER_MODEL >` in edited files.
            header, body = ((found[1], found[2]) if found else ("", "")), []
        elif written:
            body.append((number, written.split()))
    yield header, body


def _mode(path: Path, words: Mapping[str, str], body: list[_Line], cores: Mapping[str, int]) -> NvpMode:
    number, name = words.get("ID", ""), words.get("NAME", "")
    if not re.fullmatch(r"\d{1,9}", number, re.ASCII) or not name:
        raise PowerError(f"{path}: a POWER_MODEL has ID {number!r} and NAME {name!r}; restore the file of JetPack")
    offline, clocks = [], {}
    for line, written in body:
        match written:
            case ["CPU_ONLINE", argument, value]:
                core = cores.get(argument, _number(path, line, argument.rpartition("_")[2]))
                if _number(path, line, value) == 0:
                    offline.append(core)
            case [clock, "MAX_FREQ", value] if (limit := _number(path, line, value)) not in _UNLIMITED:
                clocks[clock] = limit
    return NvpMode(int(number), name, tuple(sorted(set(offline))), clocks)


def _number(path: Path, line: int, text: str) -> int:
    if not re.fullmatch(r"-?\d{1,18}", text, re.ASCII):
        raise PowerError(f"{path}, line {line}: {text!r} is no number; restore the file of JetPack")
    return int(text)


def current_nvpmodel(root: Path = Path("/")) -> int | None:
    """Return the number of the mode that is set; None where nothing tells it."""
    if program := _program():
        try:
            answer = subprocess.run(
                [program, "-q"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            answer = None
        # "NV Power Mode: 5W", and its number on the next line
        if answer and (found := re.search(r"^NV Power Mode:.*\n\s*(\d{1,9})\s*$", answer.stdout, re.MULTILINE)):
            return int(found[1])
    return last_nvpmodel(root)


def last_nvpmodel(root: Path = Path("/")) -> int | None:
    """Return the number of the mode that `nvpmodel` set last, by its file of status; None where there is none."""
    found = re.match(r"pmode:(\d{1,9})\b", file_text(root / STATUS))
    return int(found[1]) if found else None


def set_nvpmodel(number: int, root: Path = Path("/")) -> None:
    """Set a mode, and check that it is set.

    Raises:
        PowerError: it is not: there is no such program, root is needed, or the change takes a reboot, which is refused.
    """
    program = _program()
    if program is None:
        raise PowerError(f"nvpmodel {number}: there is no program {PROGRAM}, which JetPack has; is this a Jetson?")
    try:
        answer = subprocess.run(
            [program, "-m", str(number)],
            input="no\n",  # to "DO YOU WANT TO REBOOT NOW? enter YES/yes to confirm:"
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PowerError(f"nvpmodel {number}: {program} failed: {error}") from error
    now = current_nvpmodel(root)
    if now == number:
        return
    if _ASKED.search(answer.stdout):
        raise PowerError(
            f"nvpmodel {number} takes effect only after a reboot, which was refused; mode {now} stays. To use it, set "
            f"it yourself (`sudo nvpmodel -m {number}`), reboot, and measure and run in that mode"
        )
    said = " ".join(answer.stdout.split()[-30:]) or f"status {answer.returncode}"
    advice = "" if os.geteuid() == 0 else "; setting modes needs root: run it with `sudo`"
    raise PowerError(f"nvpmodel {number} was not set, mode {now} is: {said}{advice}")


def _program() -> str | None:
    # The folder of system programs is on the search path of root alone.
    return shutil.which(PROGRAM) or shutil.which(PROGRAM, path="/usr/sbin")
