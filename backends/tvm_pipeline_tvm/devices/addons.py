"""Build what the TVM of PyPI lacks, from its own sources, into the cache.

The TVM of PyPI has no runtime of OpenCL or CUDA in its library, but the package carries the sources of both. An add-on
is a shared library of some of them, and of C++ beside this file; it registers its functions with TVM when it is loaded.

An add-on lies in `addons/<key>/` of the cache. The key is made of everything that goes into it: the version of TVM, the
texts, the options, the version of other headers and that of the compiler. Its file is named after its own content, so
a file that was damaged is not loaded, since code that was cut short would end the process, and two processes that build
it at the same time do not disturb each other.

Loading an add-on cannot be undone, and loading a second copy ends the process: `runtimes.py` asks TVM first.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import tvm
from tvm._ffi.libinfo import find_lib_path

from tvm_pipeline.errors import PlatformError
from tvm_pipeline.files import cache_folder, write_bytes

_log = logging.getLogger(__name__)

OWN = Path(__file__).parent  # C++ of this package lies beside this file
# Symbols of an add-on are hidden: libtvm.so has some of the same names, and its own would be taken. The headers on
# PyPI are those of a build with TVM's own logging.
_OPTIONS = (
    *("-shared", "-fPIC", "-O1", "-std=c++17", "-fvisibility=hidden", "-w"),
    "-DDMLC_USE_LOGGING_LIBRARY=<tvm/runtime/logging.h>",
)
# One file that includes all sources, since the compiler spends nearly all of its time on TVM's headers.
_ONE = "addon.cc"


@dataclass(frozen=True, slots=True)
class Addon:
    """An add-on to TVM.

    Attributes:
        title: what it is, as a user reads it.
        folders: folders under TVM's `src` whose headers the sources include by a relative path.
        sources: files under TVM's `src` that are compiled.
        own: files beside this one that are compiled, each by the place under `src` where it is compiled.
        replaced: texts in files under `src` that are replaced: (file, old, new).
        includes: folders of headers that are not TVM's.
        includes_version: what version of headers these folders hold.
        third_party: folders of headers under TVM's `3rdparty`.
        options: more options of the compiler.
        functions: what is registered with TVM once it is loaded.
    """

    title: str
    functions: tuple[str, ...]
    folders: tuple[str, ...] = ("runtime",)
    sources: tuple[str, ...] = ()
    own: tuple[tuple[str, str], ...] = ()
    replaced: tuple[tuple[str, str, str], ...] = ()
    includes: tuple[Path, ...] = ()
    includes_version: str = ""
    third_party: tuple[str, ...] = ("dlpack/include", "dmlc-core/include")
    options: tuple[str, ...] = ()


def load_addon(addon: Addon) -> None:
    """Load an add-on into TVM, built first where it is not in the cache.

    Raises:
        PlatformError: it cannot be built or loaded here; the message says what is missing.
    """
    path = build_addon(addon)
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        raise PlatformError(
            f"{addon.title} does not fit this TVM ({tvm.__version__}, {find_lib_path()[0]}): {error}; where TVM was "
            f"replaced, remove {path.parent} and start again; else use the TVM of `pip install tvm-pipeline[relay]`"
        ) from error
    missing = [name for name in addon.functions if tvm.get_global_func(name, allow_missing=True) is None]
    if missing:
        raise PlatformError(
            f"{addon.title} was loaded, but did not register {', '.join(missing)} with TVM {tvm.__version__}: it uses "
            "another copy of TVM; see that only one TVM is installed, and that TVM_LIBRARY_PATH names no other"
        )


def build_addon(addon: Addon) -> Path:
    """Return the library of an add-on in the cache, built where it is not there.

    Raises:
        PlatformError: it cannot be built here; the message says what is missing.
    """
    root = tvm_sources(addon.title)
    texts = _texts(addon, root)
    compiler, version = _compiler(addon.title)
    described = (
        tvm.__version__,
        os.stat(find_lib_path()[0]).st_size,  # builds of one version differ in it
        sorted(texts.items()),
        (*_OPTIONS, *addon.options),
        addon.includes_version,
        version,
    )
    folder = cache_folder() / "addons" / hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32]
    return _whole(folder, addon.title) or _build(addon, root, texts, compiler, folder)


def tvm_sources(title: str) -> Path:
    """Return the folder that holds TVM's `src` and `include`; `title` is what they are needed for.

    Raises:
        PlatformError: this TVM came without them.
    """
    package = Path(tvm.__file__).resolve().parent
    for root in (package, package.parents[1]):  # of PyPI; a checkout, with the package in its `python`
        if all((root / part).exists() for part in ("src/runtime/meta_data.h", "include/tvm/runtime/module.h")):
            return root
    raise PlatformError(
        f"{title} is built from TVM's sources, which this TVM ({tvm.__version__}, {package}) came without; use the TVM "
        "of `pip install tvm-pipeline[relay]`, or import the one in the checkout that it was built from"
    )


def _texts(addon: Addon, root: Path) -> dict[str, str]:
    """Return all files that are compiled or included by a relative path, by where each lies under `src`."""
    source = root / "src"
    try:
        texts = {name: (source / name).read_text() for name in addon.sources}
        texts |= {name: (OWN / file).read_text() for name, file in addon.own}
        for folder in addon.folders:
            texts |= {f"{folder}/{path.name}": path.read_text() for path in sorted((source / folder).glob("*.h"))}
        for header in sorted((OWN / "include").rglob("*.h")):
            texts[f"own/{header.relative_to(OWN / 'include')}"] = header.read_text()
    except OSError as error:
        raise PlatformError(
            f"{addon.title} is built from TVM's sources, of which this TVM lacks {error.filename}; use the TVM of "
            "`pip install tvm-pipeline[relay]`"
        ) from error
    for name, old, new in addon.replaced:
        if texts[name].count(old) != 1:
            raise PlatformError(
                f"{source / name} is not that of TVM 0.19: {old!r} is in it {texts[name].count(old)} times, not once; "
                f"{addon.title} needs the TVM of `pip install tvm-pipeline[relay]`"
            )
        texts[name] = texts[name].replace(old, new)
    compiled = (*addon.sources, *(name for name, _ in addon.own))
    return texts | {_ONE: "".join(f'#include "{name}"\n' for name in compiled)}


def _compiler(title: str) -> tuple[list[str], str]:
    """Return the command of the C++ compiler, and what it says of its version."""
    chosen = os.environ.get("CXX", "")
    try:
        command = shlex.split(chosen) or ["g++"]
    except ValueError as error:
        raise PlatformError(f"CXX={chosen} is not a command: {error}") from error
    if shutil.which(command[0]) is None:
        raise PlatformError(
            f"{title} is built once, by a C++ compiler, and "
            + (f"CXX={chosen} is not found; " if chosen else "there is no g++ on the PATH; ")
            + "install one (Debian and Ubuntu: apt install g++), or name one in CXX"
        )
    try:
        told = subprocess.run([*command, "-v"], capture_output=True, text=True, errors="replace", check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PlatformError(
            f"the C++ compiler cannot be run: {error}; install one (Debian and Ubuntu: apt install g++), or name "
            "another in CXX"
        ) from error
    return command, told.stderr


def _whole(folder: Path, title: str) -> Path | None:
    """Return the library in the folder of an add-on; remove what is damaged."""
    for path in sorted(folder.glob("*.so")):
        if path.name.startswith("."):
            continue  # another process is writing it
        try:
            if _name(path.read_bytes()) == path.name:
                return path
        except OSError as error:
            raise PlatformError(f"cannot read {path}: {error.strerror}; make it readable, or remove it") from error
        _log.info(f"{path} is damaged: {title} is built again")
        with suppress(OSError):
            path.unlink()
    return None


def _build(addon: Addon, root: Path, texts: dict[str, str], compiler: list[str], folder: Path) -> Path:
    _log.info(f"building {addon.title} (some seconds, once)")
    includes = [root / "include", *(root / "3rdparty" / name for name in addon.third_party), *addon.includes]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="tvm-pipeline-") as scratch:
            for name, text in texts.items():
                path = Path(scratch, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            output = Path(scratch, "addon.so")
            # Relative names of the sources make the library the same wherever it is built.
            command = [
                *(*compiler, *_OPTIONS, *addon.options, "-I.", "-Iown"),
                *(f"-I{path}" for path in includes),
                _ONE,
                *("-o", str(output), find_lib_path()[0]),
            ]
            done = subprocess.run(
                command, cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
            )
            if done.returncode:
                raise PlatformError(_failed(addon.title, command, done, folder / "build.log"))
            content = output.read_bytes()
    except OSError as error:
        raise PlatformError(
            f"cannot build {addon.title}: {error.filename or folder}: {error.strerror or error}; see that there is "
            "room on the disk, or choose another place for the cache with TVM_PIPELINE_CACHE"
        ) from error
    path = folder / _name(content)
    write_bytes(path, content)
    return path


def _failed(title: str, command: list[str], done: subprocess.CompletedProcess[str], log: Path) -> str:
    """Return what is said of a compile that failed, and write all that the compiler said."""
    write_bytes(log, f"{shlex.join(command)}\n{done.stdout}".encode())
    errors = [line for line in done.stdout.splitlines() if "error" in line.lower()] or done.stdout.splitlines()
    said = "\n".join(f"  {line}" for line in errors[-4:])
    return f"cannot build {title}: {command[0]} ended with status {done.returncode}; all of it is in {log}\n{said}"


def _name(content: bytes) -> str:
    return f"{hashlib.sha256(content).hexdigest()[:32]}.so"
