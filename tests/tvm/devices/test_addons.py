"""Add-ons to TVM are built once, by the compiler of this machine; what is missing is named."""

from __future__ import annotations

import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tvm

from tests.support.log_lines import log_lines
from tvm_pipeline.errors import PlatformError
from tvm_pipeline_tvm.devices import addons
from tvm_pipeline_tvm.devices.addons import Addon, build_addon, load_addon

SOURCE = """
#include <tvm/runtime/registry.h>
#include "meta_data.h"
TVM_REGISTER_GLOBAL("%s").set_body_typed([](int given) { return given + 1; });
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TVM_PIPELINE_CACHE", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return folder


def small_addon(folder: Path, function: str, **options: Any) -> Addon:
    """Return an add-on of one function, which includes a header of TVM's `src`."""
    source = folder / "small.cc"
    if not source.exists() or source.read_text() != SOURCE % function:  # another process may be reading it
        source.write_text(SOURCE % function)
    options["options"] = ("-O0", *options.get("options", ()))  # which is quick to compile
    return Addon("a small add-on", (function,), own=(("runtime/small.cc", str(source)),), **options)


def libraries(cache: Path) -> list[Path]:
    return sorted((cache / "addons").rglob("*.so"))


@pytest.mark.thorough
def test_an_add_on_is_built_once(tmp_path: Path, cache: Path) -> None:
    """The first load builds and says so; TVM then has the function; a second build finds the same library."""
    addon, said = small_addon(tmp_path, "tests.devices.once"), log_lines("INFO")
    load_addon(addon)
    assert len(said) == 1
    assert "building a small add-on" in said[0]
    assert tvm.get_global_func("tests.devices.once")(2) == 3
    assert [build_addon(addon)] == libraries(cache)
    assert len(said) == 1
    # It was loaded, but TVM does not know its functions, as when there are two copies of TVM.
    with pytest.raises(PlatformError, match=r"did not register tests.devices.wanted"):
        load_addon(replace(addon, functions=("tests.devices.wanted",)))


@pytest.fixture
def copying_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the compiler copy the source, where nothing is loaded."""
    compiler = tmp_path / "copy"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = -v ] && exit; until [ "$1" = -o ]; do shift; done; cp runtime/small.cc "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


@pytest.mark.usefixtures("copying_compiler")
def test_a_damaged_library_is_built_again(tmp_path: Path, cache: Path) -> None:
    """A library that was cut short is not loaded, which would end the process; it is said and built again."""
    addon, said = small_addon(tmp_path, "tests.devices.damaged"), log_lines("INFO")
    path = build_addon(addon)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert build_addon(addon).read_bytes() == content
    assert any("damaged" in line for line in said)


@pytest.mark.usefixtures("copying_compiler")
def test_another_text_another_version_and_another_option_are_other_libraries(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was built from other sources, for another TVM or with other options is never found again."""
    folders = [build_addon(small_addon(tmp_path, "tests.devices.first")).parent]
    folders.append(build_addon(small_addon(tmp_path, "tests.devices.second")).parent)
    folders.append(build_addon(small_addon(tmp_path, "tests.devices.second", options=("-DOTHER",))).parent)
    with monkeypatch.context() as patch:
        patch.setattr(tvm, "__version__", "0.18.0")
        folders.append(build_addon(small_addon(tmp_path, "tests.devices.second")).parent)
    assert len(set(folders)) == 4


@pytest.mark.thorough
def test_two_processes_build_at_the_same_time(tmp_path: Path, cache: Path) -> None:
    """Both end well, and the library is whole."""
    small_addon(tmp_path, "tests.devices.race")
    code = (
        "import sys; from pathlib import Path; from tests.tvm.devices.test_addons import small_addon, load_addon; "
        "load_addon(small_addon(Path(sys.argv[1]), 'tests.devices.race')); "
        "import tvm; print(tvm.get_global_func('tests.devices.race')(1))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate() for process in both] == [("2\n", ""), ("2\n", "")]
    assert len(libraries(cache)) == 1


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what needs a compiler and how to get one."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PlatformError, match=r"a small add-on is built once.*no g\+\+ on the PATH.*apt install g\+\+"):
        build_addon(small_addon(tmp_path, "tests.devices.none"))


@pytest.mark.parametrize(
    ("chosen", "said"),
    [("no-such-compiler -O3", "CXX=no-such-compiler -O3 is not found"), ("'", "not a command"), ("false", "be run")],
)
def test_a_compiler_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, said: str) -> None:
    monkeypatch.setenv("CXX", chosen)
    with pytest.raises(PlatformError, match=said):
        build_addon(small_addon(tmp_path, "tests.devices.none"))


def test_the_compiler_in_cxx_is_taken(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler of the user's own, with options; it fails, and its last words and all of its log are shown."""
    compiler = tmp_path / "their compiler"
    compiler.write_text('#!/bin/sh\n[ "$2" = -v ] && exit\necho "x.cc:1: error: no $1"; exit 3\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", f"'{compiler}' luck")
    with pytest.raises(PlatformError, match=r"status 3.*\n  x.cc:1: error: no luck") as raised:
        build_addon(small_addon(tmp_path, "tests.devices.none"))
    (log,) = cache.rglob("build.log")
    assert str(log) in str(raised.value)
    assert "error: no luck" in log.read_text()
    assert libraries(cache) == []


def test_an_error_in_the_sources_is_shown(tmp_path: Path) -> None:
    addon = small_addon(tmp_path, "tests.devices.wrong")
    (tmp_path / "small.cc").write_text("int wrong = nothing;\n")
    with pytest.raises(PlatformError, match=r"small.cc:1:13: error: .*nothing"):
        build_addon(addon)


def test_sources_of_another_tvm(tmp_path: Path) -> None:
    """What is replaced in a source must be there, and so must each source."""
    with pytest.raises(PlatformError, match=r"meta_data.h is not that of TVM 0.19: 'struct Nothing"):
        build_addon(small_addon(tmp_path, "tests.x", replaced=(("runtime/meta_data.h", "struct Nothing", ""),)))
    with pytest.raises(PlatformError, match=r"this TVM lacks .*runtime/nothing.cc"):
        build_addon(small_addon(tmp_path, "tests.x", sources=("runtime/nothing.cc",)))


def test_an_add_on_that_misses_a_symbol(tmp_path: Path) -> None:
    """As one for a TVM that hides its symbols, or for a driver that was not loaded."""
    addon = small_addon(tmp_path, "tests.devices.symbol")
    (tmp_path / "small.cc").write_text("void missing_here(); struct Calls { Calls() { missing_here(); } } calls;\n")
    with pytest.raises(PlatformError, match=r"does not fit this TVM .*missing_here"):
        load_addon(addon)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(addons, "cache_folder", lambda: tmp_path / "file")
    with pytest.raises(PlatformError, match=r"cannot build a small add-on: .*TVM_PIPELINE_CACHE"):
        build_addon(small_addon(tmp_path, "tests.devices.none"))
