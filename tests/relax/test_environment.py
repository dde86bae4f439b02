"""What the commands say in an environment with Relax of what is Relay's, and of a TVM that cannot be used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import run_command
from tests.support.onnx_models import write_picture_net
from tvm_pipeline.errors import BundleError
from tvm_pipeline.frontends import load
from tvm_pipeline_tvm.compiled_model import IR
from tvm_pipeline_tvm.relax.compiled import RelaxModel

RELAY, RELAX = "pip install 'tvm-pipeline[relay]'", "pip install 'tvm-pipeline[tvm]'"


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TVM_PIPELINE_CACHE", str(tmp_path / "cache"))
    return write_picture_net(tmp_path / "net.onnx")


def command_after(folder: Path, *arguments: object) -> tuple[int, str]:
    """Run a command where packages in a folder come before all others; return its exit code and its errors."""
    path = os.pathsep.join([str(folder), *(entry for entry in sys.path if entry)])
    done = subprocess.run(
        [sys.executable, "-m", "tvm_pipeline.cli", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def distribution(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_a_tvm_of_another_version_is_refused_with_the_version_that_fits(net: Path, tmp_path: Path) -> None:
    package = tmp_path / "tvm"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('it was imported')")
    (package / "_version.py").write_text("__version__ = version = '0.28.0'\n")
    code, said = command_after(tmp_path, "compile", net, "-o", tmp_path / "net.tar")
    assert code == 1
    assert f"TVM 0.28.0 is installed in {package}, and tvm-pipeline uses Relax (TVM 0.27) or Relay (TVM 0.19)" in said
    assert RELAX in said
    assert not (tmp_path / "net.tar").exists()
    assert "devices` says why" in command_after(tmp_path, "--version")[1]


def test_two_tvms_one_over_the_other_are_refused(net: Path, tmp_path: Path) -> None:
    distribution(tmp_path, "xtc-tvm-python-bindings", "0.19.0.12")
    code, said = command_after(tmp_path, "compile", net, "-o", tmp_path / "net.tar")
    assert code == 1
    assert "apache-tvm 0.27.0.post1 and xtc-tvm-python-bindings 0.19.0.12 are installed in one environment" in said
    assert "pip uninstall apache-tvm xtc-tvm-python-bindings" in said


@pytest.mark.parametrize(("command", "options"), [("compile", ("-o", "net.tar")), ("memory", ()), ("profile", ())])
def test_models_of_relay_name_the_environment_that_takes_them(
    command: str,
    options: tuple[str, ...],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = tmp_path / "net.relay"
    module.write_text("#[version = '0.0.5']")
    for model in (module, "squeezenet"):
        outcome = run_command(capfd, monkeypatch, command, model, *options)
        assert outcome.code == 1
        assert f"needs TVM with Relay: run `{RELAY}` in an environment of its own" in " ".join(outcome.err.split())


def test_what_relay_compiled_is_refused_with_where_it_runs(net: Path, tmp_path: Path) -> None:
    """A saved model of before names no IR, and is Relay's."""
    model = RelaxModel.compile(load(net), ["llvm"], lambda _: None)
    folder = tmp_path / "saved"
    folder.mkdir()
    model.save(folder)
    assert RelaxModel.load(folder, lambda _: None).graph == model.graph
    for change in (lambda file: file.write_text("relay"), lambda file: file.unlink()):
        change(folder / IR)
        with pytest.raises(BundleError) as refused:
            RelaxModel.load(folder, lambda _: None)
        assert "compiled with Relay (TVM 0.19), and this environment has Relax (TVM 0.27)" in str(refused.value)
        assert "compile the model again here" in str(refused.value)


def test_all_but_the_room_of_tvm_imports_without_relay() -> None:
    code = (
        "import pkgutil, importlib, tvm_pipeline\n"
        "found = [module.name for module in pkgutil.walk_packages(tvm_pipeline.__path__, 'tvm_pipeline.')]\n"
        "names = [name for name in found if '.tvm.' not in name and not name.endswith(('__main__', '.relay'))]\n"
        "for name in (*names, 'tvm_pipeline_edgetpu', 'tvm_pipeline_onnxruntime', 'tvm_pipeline_tvm.gpu'):\n"
        "    importlib.import_module(name)\n"
        "print(len(names))\n"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 200
