"""Which TVM is installed is found without an import of it, and what does not fit is said with what to install."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tvm_pipeline_tvm import installed_ir as installed

Asked = Callable[[Path], str]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """`asked(folder)` is what is found where a folder comes before all others, or the reason why nothing is."""

    def ask(folder: Path) -> str:
        monkeypatch.syspath_prepend(folder)
        try:
            return installed.installed_ir()
        except ImportError as error:
            return str(error)

    installed.installed_ir.cache_clear()
    monkeypatch.delitem(sys.modules, "tvm", raising=False)
    yield ask
    installed.installed_ir.cache_clear()


def tvm_in(folder: Path, version: str, *rooms: str) -> Path:
    """Write a package `tvm` that has these rooms, and fails where it is imported."""
    package = folder / "tvm"
    for room in rooms:
        (package / room).mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    told_by = package / ("_ffi/libinfo.py" if "relay" in rooms else "_version.py")
    told_by.parent.mkdir(exist_ok=True)
    told_by.write_text(
        f'__version__ = "{version}"\n'
        if "relay" in rooms
        else f"__version__: str\n__version__ = version = '{version}'\n"
    )
    return folder


def distribution_in(folder: Path, name: str, version: str) -> Path:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


@pytest.mark.parametrize("version", ["0.19.0", "0.19.dev12"])
def test_relay_decides_where_tvm_has_an_early_relax_as_well(version: str, tmp_path: Path, asked: Asked) -> None:
    assert asked(tvm_in(tmp_path, version, "relay", "relax")) == "relay"


@pytest.mark.parametrize("version", ["0.27.0", "0.27.0.post1"])
def test_relax_is_found(version: str, tmp_path: Path, asked: Asked) -> None:
    assert asked(tvm_in(tmp_path, version, "relax")) == "relax"


@pytest.mark.parametrize(
    ("version", "rooms", "extra"),
    [("0.18.0", ("relay", "relax"), "relay"), ("0.28.0", ("relax",), "tvm"), ("0.27.1", ("relax",), "tvm")],
)
def test_another_version_is_refused_with_what_fits(
    version: str, rooms: tuple[str, ...], extra: str, tmp_path: Path, asked: Asked
) -> None:
    assert asked(tvm_in(tmp_path, version, *rooms)) == (
        f"TVM {version} is installed in {tmp_path / 'tvm'}, and tvm-pipeline uses Relax (TVM 0.27) or Relay (TVM 0.19) "
        f"alone: run `pip install 'tvm-pipeline[{extra}]'`, which installs the version that fits"
    )


def test_the_other_ir_is_said_with_the_way_to_both(tmp_path: Path, asked: Asked) -> None:
    assert asked(tvm_in(tmp_path, "0.27.0.post1", "relax")) == "relax"
    installed.demand("relax")
    with pytest.raises(
        ImportError, match=r"TVM with Relay is not installed, and Relax \(TVM 0\.27\) is: the two cannot"
    ):
        installed.demand("relay")


def test_one_distribution_over_the_other_is_refused(tmp_path: Path, asked: Asked) -> None:
    both = tvm_in(tmp_path, "0.27.0.post1", "relay", "relax")
    distribution_in(distribution_in(both, "apache-tvm", "0.27.0.post1"), "xtc-tvm-python-bindings", "0.19.0.12")
    said = asked(both)
    assert said.startswith(
        "apache-tvm 0.27.0.post1 and xtc-tvm-python-bindings 0.19.0.12 are installed in one environment"
    )
    assert "run `pip uninstall apache-tvm xtc-tvm-python-bindings`" in said
