"""What keeps Ray on a machine: one keeper for a folder, and nothing that an earlier one has left lives on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.hosts.ray_fleet import wait_for
from tvm_pipeline.errors import OptionError, PipelineError, RunError
from tvm_pipeline_hosts.fleet.host_processes import HostProcess
from tvm_pipeline_hosts.fleet.node_keeper import identity_of, kept_alone
from tvm_pipeline_hosts.fleet.ray_actors import enclosed, lives_in, opened, write_actor
from tvm_pipeline_hosts.fleet.ray_node import RayNode, scratch_folder, session_of

# A process that begins another one in the same session, as `ray start` does.
PARENT = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1], 'ray::child']); input()"
CHILD = "import time; time.sleep(1000)"


def begun() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdin=subprocess.PIPE, start_new_session=True)


def test_a_node_ends_what_an_earlier_one_has_left(tmp_path: Path) -> None:
    """Also if the process that began the session has gone; a process of another kind is let be."""
    left = begun()
    leader = HostProcess.of(left.pid)
    assert leader
    try:
        wait_for(lambda: len(session_of(leader.pid, leader.began_ticks)) == 2, 10.0, "two processes")
        (tmp_path / "ray.pid").write_text(json.dumps([leader.pid, leader.began_ticks]))
        left.kill()
        left.wait()
        (child,) = session_of(leader.pid, leader.began_ticks)
        RayNode(tmp_path, (), {}).end()
        assert HostProcess.of(child) is None
        assert not (tmp_path / "ray.pid").exists()
    finally:
        for pid in session_of(leader.pid, leader.began_ticks):
            os.kill(pid, signal.SIGKILL)


def test_a_number_that_came_again_is_another_process(tmp_path: Path) -> None:
    """A session of that number which began before is none of Ray's, nor is one without its processes."""
    own = subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True)
    try:
        found = HostProcess.of(own.pid)
        assert found
        (tmp_path / "ray.pid").write_text(json.dumps([own.pid, found.began_ticks]))
        RayNode(tmp_path, (), {}).end()
        assert own.poll() is None
        assert session_of(own.pid, found.began_ticks + 1) == []
    finally:
        own.kill()
        own.wait()


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    """The last line that tells an error stands in the message, with the file of all of them."""
    node = RayNode(tmp_path, ("--no-such-option",), {**os.environ, "PYTHONPATH": str(tmp_path)})
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("")
    (tmp_path / "ray" / "scripts").mkdir()
    (tmp_path / "ray" / "scripts" / "__init__.py").write_text("")
    (tmp_path / "ray" / "scripts" / "scripts.py").write_text(
        "def main():\n    print('it begins')\n    raise ConnectionError('port 7 is taken')\n"
    )
    node.start()
    try:
        wait_for(node.has_ended, 20.0, "it has ended")
        with pytest.raises(PipelineError, match=r"ConnectionError: port 7 is taken.*ray\.log"):
            node.is_up()
    finally:
        node.forget()


def test_the_folder_for_sockets_is_this_users(tmp_path: Path) -> None:
    """Ray lets everyone write into its own folder, so that it stands in one that nobody else can enter."""
    inner = scratch_folder(tmp_path)
    try:
        assert inner.parent.stat().st_mode & 0o077 == 0
        assert len(str(inner)) < 40  # what a socket of Ray may have is 107, of which Ray's names take 62
        inner.parent.chmod(0o777)
        with pytest.raises(PipelineError, match="belongs to another user"):
            scratch_folder(tmp_path)
    finally:
        inner.rmdir()
        inner.parent.rmdir()


def test_a_folder_has_one_keeper(tmp_path: Path) -> None:
    """The second is told the process of the first; afterwards the folder is free."""
    with (
        kept_alone(tmp_path),
        pytest.raises(RunError, match=rf"process {os.getpid()} keeps .*`folder`"),
        kept_alone(tmp_path),
    ):
        pass
    with kept_alone(tmp_path):
        pass


def test_a_folder_keeps_its_identity(tmp_path: Path) -> None:
    """It tells two hosts of one name from one that was started again."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert identity_of(tmp_path / "a") == identity_of(tmp_path / "a") != identity_of(tmp_path / "b")


def test_an_actor_lives_as_long_as_its_process(tmp_path: Path) -> None:
    """Its number and the moment at which it began stand in a file."""
    assert not lives_in(tmp_path)
    write_actor(tmp_path)
    assert lives_in(tmp_path)
    pid, began = json.loads((tmp_path / "actor.json").read_bytes())
    (tmp_path / "actor.json").write_text(json.dumps([pid, began - 1]))
    assert not lives_in(tmp_path)
    (tmp_path / "actor.json").write_text("[")
    assert not lives_in(tmp_path)


def test_errors_come_back_as_their_class() -> None:
    """What an actor raises is raised where it was called; what is unknown is a RunError with its name."""

    def fails() -> None:
        raise OptionError("`name` attic: taken", option="name", value="attic")

    assert opened(enclosed(lambda: {"a": 1}), "") == b'{"a":1}'
    with pytest.raises(OptionError, match="host attic: `name` attic: taken") as found:
        opened(enclosed(fails), "host attic: ")
    assert found.value.option == "name"
    with pytest.raises(RunError, match="ZeroDivisionError"):
        opened(enclosed(lambda: 1 / 0), "")
