"""An emulated aarch64 machine: QEMU runs Debian's Python for aarch64, with the packages that this project requires.

QEMU translates the instructions of one program, and passes its system calls on to the kernel of this machine. So
nothing is booted, and files and processes are those of this machine. Everything lies in one folder of the cache, is
fetched once (2 GB) by apt-get and pip, and needs no rights: nothing is installed on this machine.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Collection
from importlib.metadata import distribution
from pathlib import Path

from tvm_pipeline.files import cache_folder, replacing

# Debian 12: Python 3.11 and glibc 2.36.
SOURCE = """Types: deb
URIs: http://deb.debian.org/debian
Suites: bookworm
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""
PYTHON, NEWEST_GLIBC = "3.11", 36
SYSTEM = ("python3", "libstdc++6", "libgomp1")  # of the machine
TOOLS = ("qemu-user-static:amd64", "binutils-aarch64-linux-gnu:amd64")  # of this one: the emulator and a linker
NEEDS = "an x86-64 machine with apt-get, dpkg-deb and Debian's keyring (debian-archive-keyring)"

# QEMU's -0 tells Python that the script is its executable, so that children are emulated, too.
_PYTHON = """#!/bin/sh
here=${0%/*}
exec "$here/tools/usr/bin/qemu-aarch64-static" -0 "$0" -L "$here/system" "$here/system/usr/bin/python3" -s -S "$@"
"""
# Called as a C compiler that links: the linker would take -fPIC for an option of its own.
_COMPILER = """#!/bin/sh
for option; do shift; [ "$option" = -fPIC ] || set -- "$@" "$option"; done
exec "${0%/*}/bin/aarch64-linux-gnu-ld" "$@"
"""
_LINKER = """#!/bin/sh
here=${0%/*}/..
LD_LIBRARY_PATH="$here/tools/usr/lib/x86_64-linux-gnu" exec "$here/tools/usr/bin/aarch64-linux-gnu-ld" "$@"
"""


class Machine:
    """The emulated machine in its folder; `machine` sets it up."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def linkers(self) -> Path:
        """A folder for the PATH of this machine, with the linker for code of the emulated one."""
        return self._folder / "bin"

    @property
    def emulator(self) -> str:
        """QEMU, which runs a program of the emulated machine."""
        return str(self._folder / "tools/usr/bin/qemu-aarch64-static")

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs Python there."""
        return [str(self._folder / "python"), *arguments]

    def settings(self, processor: str, cache: Path, *, compiler: bool = True) -> dict[str, str]:
        """Return the environment of a command: with this project's sources, and a cache of its own.

        Args:
            processor: that QEMU knows.
            compiler: what is taken for a C compiler, and links, is there; otherwise no program is on the PATH.
        """
        root = Path(__file__).parents[1]
        places = [root, root / "backends", root / "plugins", root / "benchmarks", self._folder / "packages"]
        settings: dict[str, object] = {
            "PATH": os.environ["PATH"] if compiler else "/nowhere",
            "PYTHONPATH": os.pathsep.join(map(str, places)),
            "PYTHONDONTWRITEBYTECODE": 1,
            "QEMU_CPU": processor,
            "TVM_PIPELINE_CACHE": cache,
        }
        if compiler:
            settings["CXX"] = self._folder / "compiler"
        return {key: str(value) for key, value in settings.items()}

    def python(self, *arguments: str, processor: str, cache: Path) -> None:
        """Run Python there and wait for it; the arguments are those of `command` and `settings`.

        Raises:
            subprocess.CalledProcessError: it failed; what it printed stands above.
        """
        subprocess.run(self.command(*arguments), env=self.settings(processor, cache), check=True)


def machine(install: bool, extras: Collection[str] = ("relay", "video")) -> Machine | None:
    """Return the machine; None, with the reason on stdout, where it is not set up and is not to be, or cannot be.

    Args:
        extras: of this project, whose requirements are installed there.
    """
    required = [
        requirement.partition(";")[0]
        for requirement in distribution("tvm-pipeline").requires or []
        if "extra" not in requirement or any(f'extra == "{extra}"' in requirement for extra in extras)
    ]
    described = "|".join((SOURCE, *SYSTEM, *TOOLS, *required, _PYTHON, _COMPILER, _LINKER))
    folder = cache_folder() / "tools" / f"emulated-aarch64-{hashlib.sha256(described.encode()).hexdigest()[:8]}"
    if folder.exists():
        return Machine(folder)
    if not install:
        print(f"The emulated machine is not set up. Run this once without --short; it needs {NEEDS}.")
        return None
    missing = [program for program in ("apt-get", "dpkg-deb") if not shutil.which(program)]
    if platform.machine() != "x86_64" or missing:
        print(f"The emulated machine cannot be set up: it needs {NEEDS}.")
        return None
    print(f"setting up an emulated machine in {folder} (once)", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(folder) as temporary:
            _set_up(temporary, required)
    except subprocess.CalledProcessError as error:
        print(f"The emulated machine cannot be set up: {' '.join(map(str, error.cmd[:2]))} ... failed, see above.")
        return None
    return Machine(folder)


def _set_up(folder: Path, required: list[str]) -> None:
    apt = folder / "apt"
    for place in ("lists/partial", "archives/partial", "sources"):
        (apt / place).mkdir(parents=True)
    (apt / "status").touch()
    (apt / "sources" / "debian.sources").write_text(SOURCE)
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64,amd64",
        "APT::Sandbox::User": "root",
        "Debug::NoLocking": 1,
        "Dir::Cache": apt,
        "Dir::Etc::SourceList": "/dev/null",
        "Dir::Etc::SourceParts": apt / "sources",
        "Dir::State": apt,
        "Dir::State::Status": apt / "status",
    }
    get = ["apt-get", "-qq", "-y", *(f"-o{name}={value}" for name, value in settings.items())]
    subprocess.run([*get, "update"], check=True)
    subprocess.run([*get, "--no-install-recommends", "--download-only", "install", *SYSTEM, *TOOLS], check=True)
    for file in sorted((apt / "archives").glob("*.deb")):
        place = "tools" if file.name.endswith("_amd64.deb") else "system"
        subprocess.run(["dpkg-deb", "--extract", file, folder / place], check=True)
    shutil.rmtree(apt)
    tags = ["manylinux2014", *(f"manylinux_2_{minor}" for minor in range(17, NEWEST_GLIBC + 1))]
    wheels = ["--only-binary=:all:", "--python-version", PYTHON, *(f"--platform={tag}_aarch64" for tag in tags)]
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*pip, *wheels, "--target", folder / "packages", *required], check=True)
    described = folder / "packages" / "tvm_pipeline.dist-info"  # by which backends are found
    described.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (described / name).write_text(distribution("tvm-pipeline").read_text(name) or "")
    (folder / "bin").mkdir()
    for name, content in (("python", _PYTHON), ("compiler", _COMPILER), ("bin/aarch64-linux-gnu-ld", _LINKER)):
        (folder / name).write_text(content)
        (folder / name).chmod(0o755)
