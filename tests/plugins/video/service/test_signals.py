"""Signals to the command itself, in whatever it is: it ends as is documented, and leaves nothing behind.

Each process has a folder of its own for temporary files and for the cache, and a standard error that is read.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.plugins.video.service.test_service import count, meanwhile, rows
from tests.support.onnx_models import write_picture_net
from tvm_pipeline.signals import AGAIN_S
from tvm_pipeline_video.service.progress import WORKER


class Command:
    """`tvm-pipeline` in a process of its own, which may run a line of Python before."""

    def __init__(self, folder: Path, *arguments: object, before: str = "pass", **variables: str) -> None:
        self.temporary, self.cache = folder / "temporary", folder / "cache"
        self.temporary.mkdir(exist_ok=True)
        folders = {"TMPDIR": str(self.temporary), "TVM_PIPELINE_CACHE": str(self.cache)}
        environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", **folders, **variables}
        command = [sys.executable, "-c", f"{before}; import tvm_pipeline_command as c; c.main()", *map(str, arguments)]
        self._errors = folder / "stderr"
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=errors, cwd=folder
            )

    def wait_until(self, true: Callable[[], object]) -> None:
        until_s = time.monotonic() + 60
        while not true():
            assert self.process.poll() is None, self.errors
            assert time.monotonic() < until_s
            time.sleep(0.01)

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def end(self) -> int:
        """Return the status; nothing may be left, and no traceback be printed."""
        status = self.process.wait(60)
        assert "Traceback" not in self.errors, self.errors
        left = [path for path in self.temporary.iterdir() if path.name.startswith(("tvm", "tmp"))]
        left += [path for path in self.cache.rglob("*") if path.name.startswith((".", "new-"))]
        assert left == []
        return status


# The import of a module takes long, after a sign of it; an interrupt is swallowed there, as in a callback of C.
SLOW = """
import os, pathlib, sys, time

class Slow:
    def find_spec(self, name, *_):
        if name == os.environ["SLOW_MODULE"]:
            pathlib.Path("begun").touch()
            for _ in range(600):
                try:
                    time.sleep(0.1)
                except KeyboardInterrupt:
                    pass

if os.environ["SLOW"] in os.environ:
    sys.meta_path.insert(0, Slow())
"""


def slow_start(folder: Path, who: str, module: str = "tvm_pipeline") -> dict[str, str]:
    """Return variables with which processes that have the variable `who` take long to import a module."""
    (folder / "slow").mkdir()
    (folder / "slow" / "sitecustomize.py").write_text(SLOW)
    path = os.pathsep.join([str(folder / "slow"), *filter(None, sys.path)])
    return {"PYTHONPATH": path, "SLOW": who, "SLOW_MODULE": module}


@pytest.mark.parametrize(
    ("number", "module"),
    [
        (signal.SIGINT, "tvm_pipeline"),
        (signal.SIGINT, "tvm_pipeline.cli.devices"),
        (signal.SIGTERM, "tvm_pipeline"),
        (signal.SIGHUP, "tvm_pipeline.cli.devices"),
    ],
)
def test_one_that_comes_while_modules_are_imported(tmp_path, number, module):
    command = Command(tmp_path, "devices", **slow_start(tmp_path, "PATH", module))
    command.wait_until((tmp_path / "begun").exists)
    command.send(number)
    assert command.end() == 128 + number
    assert command.errors == "stopped\n"


@pytest.mark.thorough
def test_an_interrupt_while_a_supervised_worker_imports_is_not_lost(tmp_path):
    slow = slow_start(tmp_path, WORKER)
    command = Command(tmp_path, "run", "net.tar", "--source", "camera:0", "--supervise", **slow)
    command.wait_until((tmp_path / "begun").exists)
    command.send(signal.SIGINT)
    assert command.end() in (130, 0), "0: it came before the supervisor knew of the worker"


@pytest.mark.thorough
def test_a_supervised_worker_takes_no_code_from_the_working_folder(tmp_path):
    """`email` is imported early, and would be found there by `python -m`. The supervisor is as a script starts it."""
    (tmp_path / "email.py").write_text("import pathlib\npathlib.Path('taken').touch()\n")
    script = "import sys; sys.path[:] = sys.argv.pop(1).split(':'); import tvm_pipeline_command as c; c.main()"
    arguments = ["run", "none.tar", "--source", "synthetic:8x8", "--supervise"]
    command = [sys.executable, "-c", script, ":".join(filter(None, sys.path)), *arguments]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, "none.tar: No such file" in ended.stderr) == (1, True), ended.stderr
    assert not (tmp_path / "taken").exists()


def test_a_compile_that_is_ended_leaves_nothing(empty_cache, tmp_path):
    """While a process of its own makes the library, of which the unfinished folder is in the cache."""
    empty_cache(tmp_path / "cache")
    write_picture_net(tmp_path / "net.onnx")
    command = Command(tmp_path, "compile", "net.onnx", "-o", "net.tar", "--verify", 0)
    command.wait_until(lambda: list(command.cache.glob("libraries/.*")))
    command.send(signal.SIGTERM)
    assert command.end() == 128 + signal.SIGTERM
    told = [line for line in command.errors.splitlines() if "Warning: BlockBuilder destroyed" not in line]  # TVM's own
    assert told[-1] == "stopped"
    assert not (tmp_path / "net.tar").exists()


# An object whose end, when the interpreter takes itself down, waits for a file. Modules may be gone by then.
LATE = """
import os

class Late:
    def __del__(self, open=os.open, create=os.O_CREAT, stat=os.stat, missing=FileNotFoundError):
        open("ended", create)
        while True:
            try:
                return stat("sent") and None
            except missing:
                pass

late = Late()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_that_comes_after_all_is_done_changes_no_status(tmp_path, number):
    command = Command(tmp_path, "--version", before=f"exec({LATE!r})")
    command.wait_until((tmp_path / "ended").exists)
    command.send(number)
    (tmp_path / "sent").touch()
    assert command.end() == 0


# Measuring what the decoder costs takes seconds.
NOT_MEASURED = "import tvm_pipeline_video.service.model_plan as m; m.host_devices = lambda *_: []"


def hanging_decoder(folder: Path) -> str:
    """A decoder that hangs while there is a file `hang`."""
    (folder / "found.py").write_text(
        f"import time\nfrom pathlib import Path\nhang = Path({str(folder / 'hang')!r})\n"
        "from tvm_pipeline_video import Annotation\n"
        "def decode(outputs, transform):\n    time.sleep(0.005)\n    while hang.exists(): time.sleep(0.01)\n"
        "    return [Annotation('thing')]\n"
    )
    return f"{folder / 'found.py'}:decode"


def frames_in_order(folder: Path) -> int:
    frames = [row["frame"] for row in rows(folder / "lines.jsonl")]
    assert frames == list(range(len(frames)))
    return len(frames)


def test_the_first_one_drains_a_run(cli, bundle, tmp_path, monkeypatch):
    """A SIGHUP, too, where no settings can be read anew: its terminal was closed. Two at once are one."""
    monkeypatch.setattr("tvm_pipeline_video.service.model_plan.host_devices", lambda *_: [])
    decode, lines = hanging_decoder(tmp_path), tmp_path / "lines.jsonl"

    def hang_up() -> None:
        (tmp_path / "hang").touch()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.3)
        (tmp_path / "hang").unlink()

    with meanwhile(hang_up, lines, 5):
        outcome = cli("run", bundle, "--source", "synthetic:64x48", "--decoder", decode, "--results", lines)
    assert (outcome.code, "draining" in outcome.err) == (0, True)
    assert frames_in_order(tmp_path) > 5


@pytest.mark.thorough
def test_another_one_ends_a_run_at_once(bundle, tmp_path):
    """Also where nothing can be drained, because a decoder does not return."""
    command = Command(
        tmp_path, "run", bundle, "--source", "synthetic:64x48", "--decoder", hanging_decoder(tmp_path),
        "--results", "lines.jsonl", "--verify", 0, "--watchdog", 1000, before=NOT_MEASURED,
    )  # fmt: skip
    command.wait_until(lambda: count(tmp_path / "lines.jsonl") > 5)
    (tmp_path / "hang").touch()
    command.send(signal.SIGTERM)
    command.wait_until(lambda: "draining" in command.errors)
    time.sleep(2 * AGAIN_S)
    command.send(signal.SIGTERM)
    assert command.end() == 128 + signal.SIGTERM
    assert command.errors.splitlines()[-1] == "stopped"
    assert frames_in_order(tmp_path) > 5
