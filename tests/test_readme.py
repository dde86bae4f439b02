"""Every command of the README runs in CI: by `.ci/run`, by `.ci/bare`, by a test named here, or by this file."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import tvm_pipeline
from tests import test_examples
from tests.support.command import run_command
from tests.support.parts import needs
from tests.test_figures import TOOLS

ROOT = Path(__file__).parents[1]
if not (ROOT / ".ci/run").exists():
    pytest.skip("the source distribution holds no CI", allow_module_level=True)

README = (ROOT / "README.md").read_text()
CI = (ROOT / ".ci/run").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()

BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
IN_BLOCKS = [
    line.partition("  #")[0].strip()
    for language, block in BLOCKS
    if language == "sh"
    for line in block.splitlines()
    if line.strip()
]
IN_TEXT = re.findall(
    r"`((?:make|pip|python|tvm-pipeline|\.ci/run)[^`\n]*)`", re.sub(r"```.*?```", "", README, flags=re.DOTALL)
)
COMMANDS = list(dict.fromkeys(IN_BLOCKS + IN_TEXT))

# Commands that `.ci/run` does not contain, and the test below that says how CI runs each.
RUN_OTHERWISE = {
    "make demo": "test_a_bare_machine_makes_the_demo_and_the_tests",
    "make test": "test_a_bare_machine_makes_the_demo_and_the_tests",
    "make test-all": "test_all_tests_run_and_the_demo_with_them",
    "make coverage": "test_coverage_compares_the_two_test_commands",
    "make bench": "test_every_benchmark_is_run_in_short",
    "pip install '.[tvm,video,plot,edgetpu,onnxruntime,openvino,watch]'": "test_the_extras_are_installed",
    "tvm-pipeline run model.onnx --source bikes.mp4 --output out.mp4": "test_the_commands_for_a_model_run",
    "tvm-pipeline compile model.onnx -o model.tar": "test_the_commands_for_a_model_run",
    "tvm-pipeline run model.tar --source bikes.mp4 --output out.mp4": "test_the_commands_for_a_model_run",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_runs_in_ci(command: str) -> None:
    if command in RUN_OTHERWISE:
        assert RUN_OTHERWISE[command] in globals()
    elif command != ".ci/run":
        assert re.search(rf"(?m)^ *(\w+=\S+ )?{re.escape(command)}( [&#].*)?$", CI), f".ci/run does not run {command!r}"


def test_nothing_is_listed_that_the_readme_does_not_say() -> None:
    assert RUN_OTHERWISE.keys() <= set(COMMANDS)


def test_a_bare_machine_makes_the_demo_and_the_tests() -> None:
    assert re.search(r"(?m)^part .* bash \.ci/bare$", CI)
    assert "for goal in demo test; do" in (ROOT / ".ci/bare").read_text()


def test_all_tests_run_and_the_demo_with_them() -> None:
    """tests/test_examples.py looks at what `make demo` of the bare machine wrote."""
    assert re.search(r'(?m)^part .* BARE_DEMO="\$demo" bash \.ci/bare$', CI)
    assert 'make "$goal" OUT="${BARE_DEMO:-out}"' in (ROOT / ".ci/bare").read_text()
    assert 'TVM_PIPELINE_DEMO="$demo" make test-all' in CI
    assert "tvm-pipeline run examples/street/detector.tflite" in MAKEFILE
    assert hasattr(test_examples, "test_the_demo_writes_all_it_promises")


def test_coverage_compares_the_two_test_commands() -> None:
    """It runs all tests once more, so CI does not make it; it selects the quick tests as `make test` does."""
    [quick] = re.findall(r"(?m)^QUICK := (.+)$", MAKEFILE)
    program = (ROOT / ".ci/compare_coverage.py").read_text()
    assert all(f'"{word}"' in program for word in shlex.split(quick))


def test_every_benchmark_is_run_in_short() -> None:
    together = re.findall(r"\.ci/benchmarks\.py ((?:[\w ]|\\\n)+)", CI)
    listed = [*" ".join(together).replace("\\", " ").split(), *re.findall(r"benchmarks/(\w+)\.py --short", CI)]
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    assert scripts - TOOLS == {f"{name}.py" for name in listed}


def test_the_extras_are_installed() -> None:
    """`make` installs all of them for the tests, and .ci/packages.py each alone from the built package."""
    [extras] = re.findall(r"pip install '\.\[([\w,]+)\]'", README)
    assert f".[{extras.replace('tvm', '$(TVM)', 1)},dev]" in MAKEFILE
    assert ".ci/packages.py" in CI


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120
    assert all(len(line) <= 120 for line in README.splitlines() if "](" not in line)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the README's commands name."""
    needs("tvm")
    needs("onnx")
    from tests.support.onnx_models import write_picture_net

    monkeypatch.chdir(tmp_path)
    return write_picture_net(tmp_path / "model.onnx").parent


def test_the_commands_for_a_model_run(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("av")
    needs("tvm_pipeline_video")
    from tests.plugins.video.test_sources import encode

    encode(here / "bikes.mp4")
    commands = [command for command in COMMANDS if command.startswith("tvm-pipeline ")]
    for command in commands:
        (here / "out.mp4").unlink(missing_ok=True)
        done = run_command(capfd, monkeypatch, *shlex.split(command)[1:], "--verify", "0")  # tests/cli measures them
        assert done.code == 0, done.err
        assert " compile " in command or (here / "out.mp4").stat().st_size > 0
    assert len(commands) == 3


def test_the_program_runs(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tvm_pipeline.compile.__kwdefaults__, "verify_s", 0.0)  # tests/cli measures candidates
    program, _ = [block for language, block in BLOCKS if language == "python"]  # the other needs Relax
    public = {name: getattr(tvm_pipeline, name) for name in tvm_pipeline.__all__}
    exec(program, {**public, "frames": [np.zeros((1, 3, 32, 32), np.float32)] * 3})
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[-3:]] == ["0", "1", "2"]


def test_the_page_first_pipeline_has_the_same_program() -> None:
    program, _ = [block for language, block in BLOCKS if language == "python"]
    page = re.sub(r"  # .*", "", (ROOT / "docs/first-pipeline.md").read_text())
    assert program in page
