"""Real children that answer, exit, are killed, hang, cannot be killed, and outlive nobody."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.crashes import children_of, held
from tests.support.waiting import until
from tvm_pipeline import processes
from tvm_pipeline.processes import MOST_BYTES, Child, how_ended, run_program, status_of_copy

CHILDREN = """
import os, resource, runpy, signal, subprocess, sys, time

talk = runpy.run_path(os.environ.get("PROCESSES", os.devnull))

def echoes(order, channel):
    channel.send(order)
    while message := channel.recv(1000):
        channel.send(message)

def echoes_long(order, channel):
    while order:
        talk["send"](channel, order)
        order, _ = talk["receive"](channel)

def shares(order, channel):
    file = os.memfd_create("shared")
    os.write(file, order)
    talk["send"](channel, order, file)

def lists_files(order, channel):
    channel.send(b"|".join(os.readlink(f"/proc/self/fd/{number}").encode() for number in (0, 1, 2)))

def exits(order, channel):
    sys.exit(int(order))

def kills_itself(order, channel):
    print("the last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), int(order))

def takes_memory(order, channel):
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    bytes(1 << 31)

def takes_time(order, channel):
    resource.setrlimit(resource.RLIMIT_CPU, (1, 2))
    while True:
        pass

def hangs(order, channel):
    channel.send(b"here")
    ctypes = __import__("ctypes")
    ctypes.PyDLL(None).sleep(1000)  # with the interpreter's lock, as a kernel may

def starts_another(order, channel):
    other = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)"])
    channel.send(b"%d" % other.pid)
    if order == b"and leaves":
        os._exit(0)
    time.sleep(1000)

def forks(order, channel):
    if os.fork() == 0:
        time.sleep(1000)  # and holds the channel
    os._exit(4)

def never_reads(order, channel):
    channel.send(b"here")
    time.sleep(1000)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """Start a child that runs a function of CHILDREN."""
    (tmp_path / "children.py").write_text(CHILDREN)
    environment = {**os.environ, "PROCESSES": processes.__file__}
    started: list[Child] = []

    def start_(function: str, order: bytes = b"an order", **options: bool) -> Child:
        named = f"{tmp_path / 'children.py'}:{function}"
        started.append(Child(named, order, environment=environment, alone=True, **options))
        return started[-1]

    before = descriptors()
    yield start_
    for pid in [child.pid for child in started if child.end()]:
        assert not is_running(pid)
    started.clear()
    if not descriptors() <= before:
        gc.collect()
    assert descriptors() <= before


def descriptors() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.add(os.readlink(entry))
    return {one for one in found if "memfd" in one or "socket" in one or "pipe" in one}


def is_running(pid: int) -> bool:
    """Whether a process is there, and more than one that waits to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# Talking


def test_messages_go_both_ways_until_one_side_hangs_up(start: Callable[..., Child]) -> None:
    child = start("echoes", b"first")
    assert child.receive() == (b"first", [])
    child.send(b"second")
    child.send(b"third")
    assert [child.receive()[0] for _ in range(2)] == [b"second", b"third"]
    child.hang_up()
    assert child.receive() == (b"", [])
    assert child.wait(20)
    assert (child.status, child.how()) == (0, "ended with status 0")


@pytest.mark.parametrize("length", [1, MOST_BYTES, MOST_BYTES + 1, 5_000_000])
def test_messages_of_any_length_arrive_whole(start: Callable[..., Child], length: int) -> None:
    content = os.urandom(length)
    child = start("echoes_long", content)
    assert child.receive() == (content, [])
    child.send(content[::-1])
    assert child.receive() == (content[::-1], [])


@pytest.mark.parametrize("length", [4, MOST_BYTES + 4])
def test_a_message_brings_a_descriptor(start: Callable[..., Child], length: int) -> None:
    content = os.urandom(length)
    message, [shared] = start("shares", content).receive()
    with open(shared, "rb") as file:
        file.seek(0)
        assert message == file.read() == content


def test_a_child_may_die_after_its_last_message_which_is_heard(start: Callable[..., Child]) -> None:
    child = start("starts_another", b"and leaves")
    assert child.wait(20)
    other = int(child.receive()[0])
    assert child.receive() == (b"", [])
    assert is_running(other)
    assert child.end()
    assert until(lambda: not is_running(other))  # what it started goes with it


def test_an_end_is_heard_even_where_a_fork_of_the_child_holds_the_channel(start: Callable[..., Child]) -> None:
    child = start("forks")
    assert child.receive(time.monotonic() + 20) == (b"", [])
    assert child.status == 4


def test_a_long_order_that_is_never_read_holds_nobody_up(start: Callable[..., Child], tmp_path: Path) -> None:
    """The child hangs in the start of the interpreter."""
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(1000)")
    child = Child("json:loads", bytes(10_000_000), environment={**os.environ, "PYTHONPATH": str(tmp_path)})
    with pytest.raises(TimeoutError):
        child.receive(time.monotonic() + 0.1)
    assert child.end()


def test_messages_that_are_never_read_are_refused_in_the_end(start: Callable[..., Child]) -> None:
    child = start("never_reads")
    assert child.receive()[0] == b"here"

    def send_for_ever() -> None:
        while True:
            child.send(bytes(1000))

    with pytest.raises(BlockingIOError):
        send_for_ever()


def test_standard_input_is_empty_and_standard_output_is_not_that_of_results(start: Callable[..., Child]) -> None:
    told = start("lists_files", keeps_words=True).receive()[0].decode().split("|")
    assert told == ["/dev/null", os.readlink("/proc/self/fd/2"), "/memfd:tvm-pipeline (deleted)"]


# How it ended


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("function", "order", "how", "words"),
    [
        ("exits", b"0", "ended with status 0", ""),
        ("exits", b"3", "ended with status 3", ""),
        ("kills_itself", b"9", "was killed by SIGKILL", "the last words"),
        ("kills_itself", b"11", "was killed by SIGSEGV", "the last words"),
        ("kills_itself", b"40", "was killed by signal 40", "the last words"),
        ("takes_memory", b"x", "ended with status 1", "MemoryError"),
        ("takes_time", b"x", "was killed by SIGXCPU", ""),
        ("is_not_there", b"x", "ended with status 1", "KeyError: 'is_not_there'"),
    ],
)
def test_how_a_child_ended(start: Callable[..., Child], function: str, order: bytes, how: str, words: str) -> None:
    child = start(function, order, keeps_words=True)
    assert child.receive(time.monotonic() + 30) == (b"", [])
    assert child.how() == how
    assert child.words.strip().rpartition("\n")[2] == words


def test_signals_of_the_terminal_and_of_a_service_manager_are_for_the_parent(start: Callable[..., Child]) -> None:
    child = start("echoes")
    child.receive()
    assert os.getsid(child.pid) == child.pid
    os.kill(child.pid, signal.SIGINT)
    os.kill(child.pid, signal.SIGTERM)
    child.send(b"still here")
    assert child.receive()[0] == b"still here"


def test_one_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = descriptors()
    monkeypatch.setattr("sys.executable", str(tmp_path / "gone"))
    with pytest.raises(FileNotFoundError):
        Child("json:loads", b"x")
    gc.collect()
    assert descriptors() <= before


# Waiting and ending


@pytest.mark.parametrize("function", ["hangs", "never_reads"])
def test_one_that_hangs_is_waited_for_with_a_limit_and_killed(start: Callable[..., Child], function: str) -> None:
    child = start(function)
    assert child.receive() == (b"here", [])
    with pytest.raises(TimeoutError):
        child.receive(time.monotonic() + 0.1)
    assert not child.wait(0.1)
    assert child.end()
    assert child.how() == "was killed by SIGKILL"


def test_a_kill_wakes_who_waits(start: Callable[..., Child]) -> None:
    child, heard = start("hangs"), []
    child.receive()
    thread = threading.Thread(target=lambda: heard.append(child.receive()))
    thread.start()
    child.kill()
    thread.join(20)
    assert heard == [(b"", [])]


def test_one_that_cannot_be_killed_is_left_behind(start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GONE_S", 0.2)
    child, heard = start("hangs"), []
    child.receive()
    thread = threading.Thread(target=lambda: heard.append(child.receive()))
    thread.start()
    with held(child.pid):
        child.kill()
        thread.join(20)
        assert heard == [(b"", [])]
        assert not child.end()
        assert is_running(child.pid)
    assert until(lambda: child.status == -signal.SIGKILL)


# The end of the parent

PARENT = """
import sys, threading, time
from runpy import run_path
processes = run_path(sys.argv[1])
children = []
def start():
    for function in ("hangs", "starts_another", "echoes"):
        children.append(processes["Child"](f"{sys.argv[2]}:{function}", b"x", alone=True))
thread = threading.Thread(target=start)
thread.start()
thread.join()  # a child outlives the thread that started it
other = children[1].receive()[0].decode()
print(*(child.pid for child in children), other, children[0].receive()[0].decode(), flush=True)
children[2].receive()
children[2].send(b"and again")
children[2].receive()
print("all live", flush=True)
if sys.argv[3] == "in a copy":
    processes["status_of_copy"](lambda: (sys.argv.append("copy"), time.sleep(1000)), 1000)
time.sleep(1000)
"""


@pytest.mark.parametrize("how", ["it sleeps", "in a copy"])
def test_no_child_outlives_a_parent_that_is_killed(tmp_path: Path, how: str) -> None:
    """Neither one that hangs in native code, nor what a child started, nor a copy, which holds all their lifelines."""
    (tmp_path / "children.py").write_text(CHILDREN)
    command = [sys.executable, "-c", PARENT, processes.__file__, str(tmp_path / "children.py"), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        *children, here = parent.stdout.readline().split()
        assert (here, parent.stdout.readline()) == ("here", "all live\n")
        if how == "in a copy":
            assert until(lambda: len(children_of(parent.pid)) == 4)
        pids = {*map(int, children), *children_of(parent.pid)}
        assert len(pids) == (5 if how == "in a copy" else 4)
        assert all(is_running(pid) for pid in pids)
        parent.kill()
    assert until(lambda: not any(is_running(pid) for pid in pids))


def test_one_whose_parent_is_gone_before_it_looks_does_nothing(tmp_path: Path) -> None:
    (tmp_path / "children.py").write_text(CHILDREN)
    ours, theirs = os.pipe()
    os.close(theirs)
    parents, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arguments = [processes.__file__, f"{tmp_path / 'children.py'}:hangs", str(channel.fileno()), *sys.path]
    with parents, channel:
        child = subprocess.Popen(
            [sys.executable, "-c", processes._START, *arguments],
            stdin=ours,
            pass_fds=[channel.fileno()],
            start_new_session=True,
        )
        os.close(ours)
        try:
            assert child.wait(20) == 0
        finally:
            child.kill()


# Programs


def test_a_program_is_run_and_what_it_wrote_comes_back() -> None:
    assert run_program(["sh", "-c", "echo told; echo wrong >&2; exit 3"], 20) == (3, "told\nwrong\n")
    assert run_program(["sh", "-c", "kill -9 $$"], 20) == (-signal.SIGKILL, "")
    assert run_program(["sh", "-c", "echo begun; sleep 1000"], 0.5)[0] is None
    with pytest.raises(FileNotFoundError, match="/nowhere/at-all"):
        run_program(["/nowhere/at-all"], 20)


def test_no_program_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    script = f"sleep 1000 & echo $$ $! >{file}.new; mv {file}.new {file}; wait"
    runs = (
        "import sys; from runpy import run_path; run_path(sys.argv[1])['run_program'](['sh', '-c', sys.argv[2]], 1000)"
    )
    with subprocess.Popen([sys.executable, "-c", runs, processes.__file__, script]) as parent:
        assert until(file.exists)
        pids = [int(word) for word in file.read_text().split()]
        assert [is_running(pid) for pid in pids] == [True, True]
        parent.kill()
    assert until(lambda: not any(is_running(pid) for pid in pids))


# Copies


def test_how_a_copy_ended(capfd: pytest.CaptureFixture[str]) -> None:
    before, others = descriptors(), children_of(os.getpid())  # a backend keeps a process to try models in
    changed: list[int] = []
    assert status_of_copy(lambda: (os.write(1, b"told"), changed.append(1)), 20) == 0
    assert status_of_copy(lambda: 1 // 0, 20) == 0  # this process will meet it as well
    assert how_ended(status_of_copy(lambda: ctypes.string_at(0), 20) or 0) == "was killed by SIGSEGV"
    assert status_of_copy(lambda: time.sleep(1000), 0.1) is None
    assert (changed, capfd.readouterr()) == ([], ("", ""))
    assert children_of(os.getpid()) <= others
    assert descriptors() <= before


def test_a_file_does_not_take_the_place_of_a_stream_that_is_closed() -> None:
    code = "import os, tvm_pipeline_command as c; c.open_standard_streams(); print(os.open(os.devnull, os.O_RDONLY))"
    done = subprocess.run(["sh", "-c", f"exec {sys.executable} -c '{code}' <&- 2>&-"], capture_output=True, text=True)
    assert int(done.stdout) > 2
