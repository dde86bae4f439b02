"""Stand-ins for what is not on the machines that run the tests: Google's libedgetpu and edgetpu_compiler.

With `preload_libedgetpu()`, the environment variable FAKE_EDGETPUS lists the devices that are plugged in. For a process
of its own, put the folder of `libedgetpu()` into its LD_LIBRARY_PATH. `write_compiler` gives a compiler for the PATH;
edgetpu_compiler.py says how to make it fail.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.support.parts import needs

_HERE = Path(__file__).parent
_FOLDER = tempfile.TemporaryDirectory(prefix="fake-libedgetpu-")


@cache
def libedgetpu(*defines: str) -> Path:
    """Return the fake library, built once for these names, which libedgetpu.c explains.

    The test is skipped where there is no C compiler.
    """
    library = Path(_FOLDER.name) / "-".join(("built", *defines)) / "libedgetpu.so.1"
    library.parent.mkdir()
    return _built("libedgetpu.c", library, "-Wl,-soname,libedgetpu.so.1", *(f"-D{name}" for name in defines))


@cache
def external_delegate() -> Path:
    """Return the library of an external delegate of TFLite, which delegate.c explains; skip as above."""
    return _built("delegate.c", Path(_FOLDER.name) / "libfake_npu.so")


def _built(source: str, library: Path, *options: str) -> Path:
    needs("C compiler")
    compiler = shutil.which("cc") or str(shutil.which("gcc"))
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", *options, "-o", library, _HERE / source], check=True)
    return library


def preload_libedgetpu() -> None:
    """Make the fake this process's libedgetpu.so.1, for good: the loader finds a loaded library by its name.

    A test that needs the library to be absent therefore runs a process of its own.
    """
    ctypes.CDLL(str(libedgetpu()))


def usb_device(folder: Path, name: str, vendor: str, product: str, **more: str) -> None:
    """Plug a device into a tree like /sys/bus/usb/devices."""
    (folder / name).mkdir(parents=True)
    for key, text in {"idVendor": vendor, "idProduct": product, **more}.items():
        (folder / name / key).write_text(f"{text}\n")


def write_compiler(folder: Path) -> Path:
    """Write the fake edgetpu_compiler as a program into this folder, which the test puts on the PATH."""
    script = folder / "edgetpu_compiler"
    script.write_text(f"#!{sys.executable}\n{(_HERE / 'edgetpu_compiler.py').read_text()}")
    script.chmod(0o755)
    return script
