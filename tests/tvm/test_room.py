"""The walls of TVM's backend: what is beside the IRs knows none of them, and the engine knows no TVM."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tvm_pipeline
import tvm_pipeline_tvm

PACKAGE = Path(tvm_pipeline.__file__).parent
ROOM = Path(tvm_pipeline_tvm.__file__).parent
# The IRs' names of modules, as `import tvm_pipeline_tvm.relay.build` or `from tvm import relay` give them.
RELAY = ("tvm_pipeline_tvm.relay", "tvm.relay")
RELAX = ("tvm_pipeline_tvm.relax", "tvm.relax")
DOORS = {"relay_passes.py", "relax_passes.py"}  # the public doors to passes of each IR


def imported(file: Path) -> Iterator[str]:
    """The dotted names that a file imports anywhere, in functions as well."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules_of_the_engine() -> list[str]:
    files = sorted(PACKAGE.rglob("*.py"))
    names = [".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


def run_python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("file", sorted({file.name for file in ROOM.glob("*.py")} - DOORS))
def test_beside_the_irs_nothing_imports_them(file: str) -> None:
    assert of(ROOM / file, *RELAY, *RELAX) == []


@pytest.mark.parametrize(("room", "other"), [("relay", RELAX), ("relax", RELAY)])
def test_no_ir_imports_the_other(room: str, other: tuple[str, ...]) -> None:
    assert [file.name for file in sorted((ROOM / room).rglob("*.py")) if of(file, *other)] == []


def of(file: Path, *roots: str) -> list[str]:
    """The imports of a file that lie under any of these modules."""
    return [name for name in imported(file) if f"{name}.".startswith(tuple(f"{root}." for root in roots))]


def test_the_engine_is_imported_without_tvm() -> None:
    """TVM is not installed for a planner alone; and where it is, importing it takes a second."""
    modules = modules_of_the_engine()
    assert {"tvm_pipeline.core.plan", "tvm_pipeline.planning.deployment", "tvm_pipeline.frontends"} <= set(modules)
    program = f"""
import importlib, sys
sys.modules["tvm"] = None  # every import of it fails
for name in {modules}:
    importlib.import_module(name)
assert not [name for name in sys.modules if name.startswith("tvm_pipeline_tvm")]
print(len(sys.modules))
"""
    assert int(run_python(program)) > len(modules)


def test_without_tvm_the_room_says_what_to_install() -> None:
    program = """
import sys
sys.modules["tvm"] = None
import tvm_pipeline_tvm
for ir in ("relay", "relax"):
    try:
        __import__(f"tvm_pipeline_tvm.{ir}")
    except ImportError as error:
        print(error)
from tvm_pipeline.backends.registry import find_backend
try:
    find_backend("host")
except Exception as error:
    print(type(error).__name__, error)
"""
    relay, relax, host = run_python(program).splitlines()
    assert relay.startswith("TVM with Relay is not installed: run `pip install 'tvm-pipeline[relay]'`")
    assert relax.startswith("TVM with Relax is not installed: run `pip install 'tvm-pipeline[tvm]'`")
    assert host.startswith("PlatformError the backend host cannot be used: TVM is not installed: run `pip install")
    assert "'tvm-pipeline[relay]'" in host
    assert "'tvm-pipeline[tvm]'" in host


def test_importing_the_room_sets_the_environment_up() -> None:
    program = """
import os
os.environ.pop("TOPHUB_LOCATION", None)
import tvm_pipeline_tvm
print(os.environ["TOPHUB_LOCATION"])
"""
    assert run_python(program) == "NONE\n"
