"""The series for TVM is made of these sources, applies to TVM's tree, passes its tests there and computes our bits."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tvm

from tests.relax.scripts import TARGET, called, frame, machine, network
from tests.support.parts import needs
from tvm_pipeline_kernels.relax import TIR_PIPELINE, cpu_pipeline

needs("git")
pytestmark = pytest.mark.thorough  # TVM's tree with the patches takes seconds to make

ROOT = Path(__file__).parents[2]
PLACES = ("tvm.relax.backend.cpu.", "tvm.s_tir.dlight.cpu.fused.")
# What runs on the patched tree finds no part of this project.
ALONE = "import sys; sys.modules |= dict.fromkeys(('tvm_pipeline', 'tvm_pipeline_tvm', 'tvm_pipeline_kernels'));"
# The first case of each test: `upstream/README.md` says how all are run.
TESTS = f"""{ALONE}
import pytest
class FirstCases:
    def pytest_collection_modifyitems(self, items):
        items[:] = {{item.originalname: item for item in reversed(items)}}.values()
sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', sys.argv[1]], plugins=[FirstCases()]))
"""
OUTPUTS = f"""{ALONE}
import numpy as np, tvm
from tvm import relax
from tvm.relax.backend.cpu import TIR_PIPELINE, cpu_pipeline
mod = tvm.ir.load_json(open(sys.argv[1]).read())
target = tvm.target.Target({{"kind": "llvm", "mcpu": sys.argv[2]}})
made = tvm.compile(mod, target, relax_pipeline=cpu_pipeline(target), tir_pipeline=TIR_PIPELINE)
given = relax.VirtualMachine(made, tvm.cpu())["main"](tvm.runtime.tensor(np.load("frame.npy")))
np.savez("outputs.npz", *(each.numpy() for each in given))
"""


def run(*command: str | Path, cwd: Path) -> None:
    # PYTHONPATH has the patched tree alone.
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(cwd / "python")}
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def copied_or_linked(source: str, place: str) -> None:
    """Copy Python files, which patches may change; link what is compiled."""
    if source.endswith(".py"):
        shutil.copyfile(source, place)
    else:
        os.symlink(source, place)


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("series")
    run(sys.executable, ROOT / "upstream/make_series.py", folder, cwd=ROOT)
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def tree(series: Sequence[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return TVM's tree with the patches. After each, all that its files import is there."""
    folder = tmp_path_factory.mktemp("tree")
    shutil.copytree(
        Path(str(tvm.__file__)).parent,
        folder / "python/tvm",
        copy_function=copied_or_linked,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    before = set(folder.rglob("*.py"))
    identity = ("-c", "user.name=tests", "-c", "user.email=tests@localhost", "-c", "commit.gpgsign=false")
    run("git", "init", "--quiet", cwd=folder)
    for patch in series:
        run("git", *identity, "am", "--quiet", "--keep-non-patch", patch, cwd=folder)
        missing = [each for file in set(folder.rglob("*.py")) - before for each in absent(folder / "python", file)]
        assert not missing, patch.name
    return folder


def absent(python: Path, file: Path) -> list[str]:
    """Return what a file imports from the places of the series that is not there."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(PLACES):
            place = python / node.module.replace(".", "/")
            if place.is_dir():
                known = (place / "__init__.py").read_text()
                found += [
                    each.name
                    for each in node.names
                    if not (place / f"{each.name}.py").exists() and each.name not in known
                ]
            elif not place.with_suffix(".py").exists():
                found.append(node.module)
    return found


def test_the_series_applies_patch_by_patch_and_each_has_what_it_imports(series: list[Path], tree: Path) -> None:
    assert [patch.name[:4] for patch in series] == [f"{number:04}" for number in range(1, len(series) + 1)]
    written = subprocess.run(["git", "log", "--format=%s"], cwd=tree, capture_output=True, text=True).stdout
    assert all(subject.startswith(("[Relax]", "[DLight]")) for subject in written.splitlines())


def test_the_patched_tree_computes_our_bits(tree: Path) -> None:
    mod = network()
    (tree / "net.json").write_text(tvm.ir.save_json(mod))
    np.save(tree / "frame.npy", frame())
    run(sys.executable, "-c", OUTPUTS, "net.json", str(TARGET.attrs["mcpu"]), cwd=tree)
    wanted = called(machine(mod, relax_pipeline=cpu_pipeline(TARGET), tir_pipeline=TIR_PIPELINE), "main", frame())
    found = np.load(tree / "outputs.npz")
    assert len(found) == len(wanted)
    for output, expected in zip(found.values(), wanted, strict=True):
        np.testing.assert_array_equal(output, expected)


def test_the_first_case_of_each_test_of_the_series_passes(tree: Path) -> None:
    run(sys.executable, "-c", TESTS, "tests/python/relax/test_cpu_pipeline.py", cwd=tree)
