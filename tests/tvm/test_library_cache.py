"""The cache of libraries: who comes second waits and takes what the first has made; damaged entries are mended."""

from __future__ import annotations

import queue
import shutil
import threading
from pathlib import Path

import pytest

from tests.support.log_lines import log_lines, on_line
from tests.support.parts import needs

needs("tvm")

from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import BundleError
from tvm_pipeline.files import locked
from tvm_pipeline_tvm.machine_code import load_kernels
from tvm_pipeline_tvm.relay.build import build_library

NET = Model("net", "relay", b'#[version = "0.0.5"]\ndef @main(%x: Tensor[(1, 8), float32]) { sin(%x) }')


@pytest.fixture(scope="module")
def made(target: str) -> Path:
    folder = build_library(NET, target).folder
    assert folder is not None
    return folder


@pytest.fixture
def entry(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own, which has one library and may compile for its target in this process."""
    for part in ("libraries", "targets"):
        # Other workers compile into it at the same time.
        shutil.copytree(made.parents[1] / part, tmp_path / part, ignore=shutil.ignore_patterns(".*", "*.lock"))
    monkeypatch.setenv("TVM_PIPELINE_CACHE", str(tmp_path))
    return tmp_path / "libraries" / made.name


def test_who_comes_second_waits_and_compiles_nothing(entry: Path, target: str) -> None:
    aside, said, built = entry.with_name("aside"), queue.Queue(), []
    entry.rename(aside)
    on_line(said.put, "INFO")

    def build() -> None:
        built.append(build_library(NET, target))

    with locked(entry, "it"):  # as another process that compiles it
        second = threading.Thread(target=build)
        second.start()
        assert said.get(timeout=20) == f"another process makes net for {target}; waiting for it"
        aside.rename(entry)
    second.join(20)
    assert built[0].folder == entry
    assert said.empty(), "it compiled, too"


def test_a_damaged_entry_is_compiled_anew_and_said(entry: Path, target: str, caplog) -> None:
    code, said = entry / "kernels.so", log_lines("INFO", "WARNING")
    whole = {file.name: file.stat().st_size for file in entry.iterdir()}
    code.write_bytes(code.read_bytes()[:1000])
    left = entry.with_name(f".{entry.name}.0123abcd")  # of a process that was killed
    left.mkdir()
    build_library(NET, target)
    assert "what the cache has of net" in caplog.text
    assert "kernels.so" in caplog.text
    assert f"compiling net for {target}" in said
    assert {file.name: file.stat().st_size for file in entry.iterdir()} == whole
    assert not left.exists()
    caplog.clear()
    said.clear()
    build_library(NET, target)
    assert said == []


@pytest.mark.parametrize("name", ["weights.bin", "graph.json", "sums.json"])
def test_a_flipped_bit_is_found(name: str, entry: Path, target: str, caplog) -> None:
    content = bytearray((entry / name).read_bytes())
    content[len(content) // 2] ^= 1
    (entry / name).write_bytes(content)
    library = build_library(NET, target)
    assert "is not as it was written" in caplog.text
    assert library.folder == entry
    assert (entry / name).read_bytes() != content


def test_code_of_another_processor_is_said_to_be_that(entry: Path, tmp_path: Path) -> None:
    content = bytearray((entry / "kernels.so").read_bytes())
    content[18:20] = (183 if content[18] != 183 else 62).to_bytes(2, "little")
    (tmp_path / "kernels.so").write_bytes(content)
    with pytest.raises(BundleError, match=r"kernels\.so was made for another machine \((AArch64|x86-64)"):
        load_kernels(tmp_path / "kernels.so", alone=False)
