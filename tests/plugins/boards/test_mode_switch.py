"""A power mode is put back, whatever happens: by the block itself, or by who comes after a process that was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.plugins.boards.fake_nvpmodel import FakeNvpmodel
from tests.support.log_lines import log_lines
from tvm_pipeline.core.power_mode import PowerMode
from tvm_pipeline.errors import PowerError
from tvm_pipeline_boards.clock_limits import read_limit
from tvm_pipeline_boards.mode_record import RECORD, ModeRecord, read_record, state_folder, write_record
from tvm_pipeline_boards.mode_switch import BoardModes

LOW = PowerMode("5W", nvpmodel=1, clock_limits={"cpu4": 1113600, "gpu": 420750000})
SLOW = PowerMode("slow", clock_limits={"cpu0": 729600})
# A process that sets LOW, says so, and waits.
CHILD = """
import logging, signal, sys, time
from pathlib import Path
from tvm_pipeline_boards.mode_switch import BoardModes
from tvm_pipeline.core.power_mode import PowerMode
from tvm_pipeline.signals import Interrupts, ending, handling
mode = PowerMode("5W", nvpmodel=1, clock_limits={"cpu4": 1113600, "gpu": 420750000})
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
logging.basicConfig(stream=sys.stdout, format="%(message)s")
with BoardModes(Path(sys.argv[1])).mode_set(mode):
    print("set", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def said() -> list[str]:
    return log_lines("INFO", "WARNING")


def state(root: Path, nvpmodel: FakeNvpmodel) -> tuple[int, int, int]:
    return nvpmodel.mode, read_limit("cpu4", root), read_limit("gpu", root)


def attempt(mode: PowerMode, root: Path, said: list[str]) -> None:
    with BoardModes(root).mode_set(mode):
        pytest.fail("it began")


BEFORE, DURING = (0, 1510400, 624750000), (1, 1113600, 420750000)


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, SystemExit])
def test_it_is_put_back_at_the_end_and_on_errors(
    root: Path, nvpmodel: FakeNvpmodel, said: list[str], error: type[BaseException] | None
) -> None:
    with pytest.raises(error) if error else nullcontext(), BoardModes(root).mode_set(LOW):
        assert state(root, nvpmodel) == DURING
        assert BoardModes(root).is_set(LOW)
        if error:
            raise error
    assert state(root, nvpmodel) == BEFORE
    assert nvpmodel.asked == [1, 0]
    assert not (nvpmodel.state / RECORD).exists()
    assert said == [
        "power mode 5W is set for this; `sudo nvpmodel -m 0`, then limit cpu4 to 1510400, then limit gpu to 624750000 "
        "when it ends"
    ]


def test_what_was_before_is_on_record_before_the_first_change(root: Path, nvpmodel: FakeNvpmodel, said) -> None:
    with BoardModes(root).mode_set(LOW):
        # The program has kept what was in the folder when it was asked.
        seen = json.loads((nvpmodel.folder / "seen.json").read_text())
    assert seen == {
        "mode": "5W",
        "pid": os.getpid(),
        "boot": "first",
        "nvpmodel": 0,
        "clock_limits": {"cpu4": 1510400, "gpu": 624750000},
    }


def test_a_mode_that_is_set_is_not_touched(root: Path, nvpmodel: FakeNvpmodel, said: list[str]) -> None:
    (nvpmodel.folder / "mode").write_text("1\n")
    with BoardModes(root).mode_set(PowerMode("5W", nvpmodel=1)):
        pass
    assert (nvpmodel.asked, nvpmodel.mode, said) == ([], 1, [])


def test_what_fails_in_the_middle_is_put_back(root: Path, nvpmodel: FakeNvpmodel, said: list[str]) -> None:
    """The mode was set and the first clock limited, but the second clock takes no limit."""
    with pytest.raises(PowerError, match="clock npu"):
        attempt(PowerMode("x", 1, {"cpu4": 1113600, "npu": 5}), root, said)
    assert state(root, nvpmodel) == BEFORE
    assert nvpmodel.asked == [1, 0]
    assert not (nvpmodel.state / RECORD).exists()


def test_nothing_is_changed_that_could_not_be_put_back(root: Path, nvpmodel: FakeNvpmodel, said: list[str]) -> None:
    with pytest.raises(PowerError, match="clock cpu9 has no limit here"):
        attempt(PowerMode("x", None, {"cpu4": 1113600, "cpu9": 5}), root, said)
    assert state(root, nvpmodel) == BEFORE
    (nvpmodel.folder / "mode").write_text("")
    with pytest.raises(PowerError, match="the present mode is not known"):
        attempt(LOW, root, said)
    assert nvpmodel.asked == []


def started(root: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(root)], stdout=subprocess.PIPE, text=True)
    assert child.stdout
    assert "is set for this" in child.stdout.readline()
    assert child.stdout.readline() == "set\n"
    return child


def test_a_process_that_is_killed(root: Path, nvpmodel: FakeNvpmodel, said: list[str]) -> None:
    """As long as it lives its mode is left alone; then whoever comes first puts back what was before, once."""
    with started(root) as child:
        BoardModes(root).put_back_left()
        with pytest.raises(PowerError, match=f"slow cannot be set: process {child.pid} has set power mode 5W"):
            attempt(SLOW, root, said)
        assert (state(root, nvpmodel), said) == (DURING, [])
        with BoardModes(root).mode_set(LOW):  # which is set
            assert said.pop() == ("another process has set power mode 5W; when it ends, it puts back what was before")
        child.send_signal(signal.SIGKILL)
    assert state(root, nvpmodel) == DURING
    with pytest.raises(
        PowerError, match=r"what power mode 5W had changed is not put back .*`sudo nvpmodel -m 0`, then"
    ):
        attempt(SLOW, root, said)
    BoardModes(root).put_back_left()
    BoardModes(root).put_back_left()
    assert state(root, nvpmodel) == BEFORE
    assert said == [f"process {child.pid} was killed in power mode 5W; what was before is put back"]
    with BoardModes(root).mode_set(SLOW):
        assert read_limit("cpu0", root) == 729600


def test_a_process_that_is_asked_to_end_puts_it_back(root: Path, nvpmodel: FakeNvpmodel) -> None:
    with started(root) as child:
        child.terminate()
    assert state(root, nvpmodel) == BEFORE
    assert not (nvpmodel.state / RECORD).exists()


def test_a_signal_while_it_is_put_back(root: Path, nvpmodel: FakeNvpmodel, said: list[str]) -> None:
    """It is raised when everything is put back."""
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))

    def interrupted() -> None:
        with BoardModes(root).mode_set(LOW):
            (nvpmodel.folder / "slow").touch()
            timer.start()

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert state(root, nvpmodel) == BEFORE
    assert not (nvpmodel.state / RECORD).exists()


def test_a_boot_puts_clocks_back_itself(root: Path, nvpmodel: FakeNvpmodel, said: list[str]) -> None:
    """The mode of nvpmodel outlives it."""
    write_record(nvpmodel.state, ModeRecord("5W", 77, "earlier", 2, {"cpu4": 999}))
    BoardModes(root).put_back_left()
    assert state(root, nvpmodel) == (2, *BEFORE[1:])
    assert said == ["process 77 was killed in power mode 5W; what was before is put back"]


def test_what_cannot_be_put_back_is_told_and_tried_again(root: Path, nvpmodel: FakeNvpmodel, said: list[str]) -> None:
    with BoardModes(root).mode_set(LOW):
        said.clear()
        (nvpmodel.folder / "reboot-0").touch()
    assert state(root, nvpmodel) == (1, *BEFORE[1:])
    assert "what was before power mode 5W is not put back: nvpmodel 0 takes effect only after a reboot" in said[0]
    assert "Do it by hand: `sudo nvpmodel -m 0`, then limit cpu4" in said[0]
    (nvpmodel.folder / "reboot-0").unlink()
    BoardModes(root).put_back_left()
    assert state(root, nvpmodel) == BEFORE
    assert read_record(nvpmodel.state) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"mode": "5W", "pid": 1, "boo',
        b'{"mode": "5W", "pid": 1, "boot": "first", "nvpmodel": -1}',
        b'{"mode": "5W", "pid": 1, "boot": "first", "nvpmodel": "0; reboot"}',
        b'{"mode": "5W", "pid": 1, "boot": "first", "clock_limits": {"../../../etc/passwd": 1}}',
        b'{"mode": "5W", "pid": 1, "boot": "first", "clock_limits": {"cpu4": -5}}',
        b'{"mode": "5W", "pid": 1, "boot": "first", "files": {"/etc/passwd": "1"}}',
        b"[" * 5000,
        bytes(range(256)) * 1000,
    ],
)
def test_a_record_that_is_damaged_or_forged(root: Path, nvpmodel: FakeNvpmodel, said: list[str], content) -> None:
    """It changes nothing, is told with what to do, and keeps a mode from being set, but not a run."""
    record = nvpmodel.state / RECORD
    record.write_bytes(content)
    record.chmod(0o600)
    BoardModes(root).put_back_left()
    assert len(said) == 1
    assert str(record) in said[0]
    assert "remove the file" in said[0]
    assert state(root, nvpmodel) == BEFORE
    with pytest.raises(PowerError, match="remove the file"):
        attempt(LOW, root, said)
    assert nvpmodel.asked == []
    assert record.read_bytes() == content


def test_a_record_of_others_is_not_trusted(root: Path, nvpmodel: FakeNvpmodel, said: list[str], tmp_path: Path) -> None:
    """One that others may write, a link, and a pipe, at which nothing waits."""
    record = nvpmodel.state / RECORD
    write_record(nvpmodel.state, ModeRecord("5W", 77, "first", 2))
    record.chmod(0o666)
    BoardModes(root).put_back_left()
    assert "another user could have written it" in said.pop()
    record.chmod(0o600)
    record.rename(tmp_path / "elsewhere")
    record.symlink_to(tmp_path / "elsewhere")
    BoardModes(root).put_back_left()
    assert "cannot be read" in said.pop()
    record.unlink()
    os.mkfifo(record, 0o600)
    BoardModes(root).put_back_left()
    assert "another user could have written it" in said.pop()
    assert (nvpmodel.asked, said) == ([], [])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_who_may_not_put_it_back_is_told_how(root: Path, nvpmodel: FakeNvpmodel, said: list[str], monkeypatch) -> None:
    """The record is root's and its process is dead; of a process that runs nothing is told."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        folder.chmod(0o755)
        monkeypatch.setenv("TVM_PIPELINE_STATE", place)
        for pid in (os.getpid(), 2**22 + 1):  # no process has such a number
            write_record(folder, ModeRecord("5W", pid, "first", 2))
            os.seteuid(65534)
            try:
                BoardModes(root).put_back_left()
            finally:
                os.seteuid(0)
            assert len(said) == (pid != os.getpid())
        assert (folder / RECORD).exists()
    assert "killed in power mode 5W, and this user cannot put back what was before. As root, run" in said[0]
    assert "by hand: `sudo nvpmodel -m 2`" in said[0]
    assert nvpmodel.asked == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize(("owner", "rights"), [(65534, 0o755), (0, 0o777), (0, 0o775)])
def test_a_folder_of_another_user_is_not_used(root, nvpmodel, said, owner: int, rights: int) -> None:
    """That user could exchange the file of root for a link while it is written."""
    os.chown(nvpmodel.state, owner, -1)
    nvpmodel.state.chmod(rights)
    with pytest.raises(PowerError, match="another user could exchange what is written there; set TVM_PIPELINE_STATE"):
        attempt(LOW, root, said)
    write_record(nvpmodel.state, ModeRecord("5W", 2**22 + 1, "first", 2))
    BoardModes(root).put_back_left()
    assert "is not used" in said[0]
    assert (nvpmodel.asked, state(root, nvpmodel)) == ([], BEFORE)


def test_where_the_record_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TVM_PIPELINE_STATE", str(tmp_path))
    assert state_folder() == tmp_path
    monkeypatch.delenv("TVM_PIPELINE_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    of_user = tmp_path / "tvm-pipeline"
    assert state_folder() == (Path("/var/lib/tvm-pipeline-modes") if os.geteuid() == 0 else of_user)


def test_a_folder_that_cannot_be_used_is_named(root, nvpmodel, said, monkeypatch, tmp_path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TVM_PIPELINE_STATE", str(tmp_path / "file" / "state"))
    with pytest.raises(PowerError, match="set TVM_PIPELINE_STATE to a folder of this user"):
        attempt(LOW, root, said)
    assert nvpmodel.asked == []
