"""A board is called through its server: what goes there comes back, and what fails there is raised here."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.support.waiting import until
from tvm_pipeline.errors import BundleError, OptionError, RunError, StageError
from tvm_pipeline_hosts.remote.board import Board
from tvm_pipeline_hosts.remote.parcels import Parcels

TIMES = {"silent_s": 1.0, "keep_s": 3.0}


@pytest.fixture(scope="module")
def board(server):
    with Board.connect(str(server.address), **TIMES) as board:
        yield board
    assert until(lambda: server.is_free)


def test_arrays_go_there_and_back(board):
    arrays = [
        np.arange(12, dtype="float32").reshape(3, 4).T,  # not in C order
        np.array(7, "int64"),
        np.zeros((0, 3), "float16"),
        np.array([True, False]),
        np.random.default_rng(0).integers(0, 255, 3_000_001).astype("uint8"),
    ]
    value, back = board.call("echo", {"x": [1, None, "é"]}, arrays)
    assert value == {"x": [1, None, "é"]}
    for sent, came in zip(arrays, back, strict=True):
        assert (came.dtype, came.shape) == (sent.dtype, sent.shape)
        assert np.array_equal(sent, came)
        assert came.ctypes.data % 64 == 0 or not came.size


@pytest.mark.parametrize("array", [np.array([object()]), np.zeros(2, ">f4"), np.zeros(2, "complex64")])
def test_other_arrays_are_not_sent(board, array):
    with pytest.raises(TypeError, match="cannot be sent"):
        board.call("echo", {}, [array])
    assert board.call("echo", {"still": 1})[0] == {"still": 1}


def test_errors_keep_their_class_and_facts(board):
    with pytest.raises(BundleError, match=f"board {board.name}: it is so"):
        board.call("fail", {"name": "BundleError"})
    with pytest.raises(OptionError, match="too many") as option:
        board.call("fail", {"name": "OptionError"})
    assert (option.value.option, option.value.value) == ("stages", 9)
    with pytest.raises(StageError, match="host/decode in stage 2 on tpu0 failed at frame 7") as stage:
        board.call("fail", {"name": "StageError"})
    assert (stage.value.device, stage.value.operator) == ("tpu0", "host/decode")
    with pytest.raises(RunError, match="KeyError: 'it is so'"):
        board.call("fail", {"name": "KeyError"})


def test_an_unknown_method_is_told(board):
    with pytest.raises(RunError, match=r"no method 'fly', but assemble, .*describe"):
        board.call("fly", {})


@pytest.mark.thorough
def test_a_second_client_hears_who_is_there(board, server):
    connect = f"from tvm_pipeline_hosts.remote.board import Board; Board.connect({str(server.address)!r}, keep_s=3.0)"
    other = subprocess.run([sys.executable, "-c", connect], capture_output=True, text=True, check=False)
    assert re.search(rf"@.* \(pid {os.getpid()}\) has used .* since .*one client at a time", other.stderr)
    assert "BoardLostError" in other.stderr
    assert board.call("echo", {"x": 1})[0] == {"x": 1}


def test_a_client_may_have_several_sessions(board, server):
    """Each is a process of its own; the stages of a pipeline on several hosts take one each."""
    with Board.connect(str(server.address), **TIMES) as beside:
        board.call("count", {})
        assert board.call("count", {})[0] > 1
        assert beside.call("count", {})[0] == 1
    assert board.call("echo", {"x": 1})[0] == {"x": 1}


def test_a_bundle_travels_once(board, server, bundle):
    id = board.send(bundle)
    assert Parcels(server._folder).bundle(id).exists()
    held = sorted((path.name, path.stat().st_mtime_ns) for path in server._folder.rglob("*"))
    assert board.send(bundle) == id
    assert sorted((path.name, path.stat().st_mtime_ns) for path in server._folder.rglob("*")) == held


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("arguments", "how"),
    [
        ({"signal": int(signal.SIGKILL)}, "SIGKILL in crash"),
        ({"signal": int(signal.SIGILL)}, "SIGILL in crash"),
        ({}, "SIGSEGV in crash"),
    ],
)
def test_a_crash_ends_its_session_alone(board, server, bundle, arguments, how):
    id = board.send(bundle)
    with pytest.raises(RunError, match=f"the session of board {board.name} was killed by {how}"):
        board.call("crash", arguments)
    assert board.call("count", {})[0] == 1  # another process
    assert Parcels(server._folder).bundle(id).exists()
