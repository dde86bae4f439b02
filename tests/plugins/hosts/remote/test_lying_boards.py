"""A client leaves a board that breaks the protocol with one error, and a board such a client."""

from __future__ import annotations

import socket

import pytest

from tests.plugins.hosts.remote.conftest import serving_board
from tests.plugins.hosts.remote.lying_board import WELCOME, answering, lying_board, raw
from tests.support.log_lines import log_lines
from tests.support.waiting import until
from tvm_pipeline.errors import BoardLostError, OptionError, StageError
from tvm_pipeline.option_names import explained
from tvm_pipeline_hosts.remote import dialing
from tvm_pipeline_hosts.remote.board import Board
from tvm_pipeline_hosts.remote.frames import read_frame

TIMES = {"silent_s": 1.0, "keep_s": 3.0}


@pytest.mark.parametrize("facts", [{}, {"option": "listen", "device": "cpu0"}])
@pytest.mark.parametrize("expected", [OptionError("no"), StageError(-1, "", -1, ValueError())])
def test_an_error_without_its_facts_has_others(expected, facts):
    value = {"name": type(expected).__name__, "text": "no", "facts": facts}
    answer = answering(lambda call: raw({"kind": "error", "number": 1, "call": call.call, "value": value}))
    with lying_board(answer) as address, pytest.raises(type(expected)) as error:
        Board.connect(address, **TIMES)
    assert explained(error.value, str).endswith("no")
    assert vars(error.value) == vars(expected) | {name: facts[name] for name in facts if hasattr(expected, name)}


@pytest.mark.parametrize(
    "answer",
    [
        lambda call: raw({"kind": "done", "number": 50, "call": call.call}),
        lambda call: raw({"kind": "done", "number": 2**70, "seen": 2**70, "call": call.call}),
        lambda _: raw(b"{"),
        lambda _: raw({"kind": "done", "number": 1, "arrays": [["float32", [2**32, 2**32, 0]]]}),
    ],
)
def test_a_board_that_breaks_the_protocol_again_and_again_is_left(answer):
    why = "broke the protocol again and again in describe, at last with .*; look what answers at"
    with lying_board(answering(answer)) as address, pytest.raises(BoardLostError, match=f"{why} {address}"):
        Board.connect(address, **TIMES)


@pytest.mark.parametrize("sent", [b"", raw({"kind": "tell", "number": 1})])
def test_a_board_that_takes_each_link_and_sends_nothing_new_is_left(sent):
    """It hangs up as soon as it has a call, and never beats."""

    def talk(link: socket.socket) -> None:
        link.sendall(raw(WELCOME))
        read_frame(link)
        link.sendall(sent)

    with lying_board(talk) as address, pytest.raises(BoardLostError, match=r"could not be had back within 0\.5 s"):
        Board.connect(address, silent_s=1.0, keep_s=0.5)


def test_a_session_that_never_starts_is_left(monkeypatch):
    monkeypatch.setattr(dialing, "START_S", 0.1)

    def beat(link: socket.socket) -> None:
        while True:
            link.sendall(raw({"kind": "beat"}))

    with lying_board(beat) as address, pytest.raises(BoardLostError, match=r"its session did not start within 0\.1 s"):
        Board.connect(address, **TIMES)


@pytest.mark.thorough
def test_a_client_that_breaks_the_protocol_again_and_again_loses_its_session(tmp_path):
    told = log_lines("INFO")
    with serving_board(tmp_path, **TIMES) as server, Board.connect(str(server.address), **TIMES) as board:
        channel = board._channel
        while channel.end is None:
            if (link := channel._link) is not None:
                link.sendall(b"\xff" * 100)
                assert until(lambda link=link: channel._link is not link or channel.end)
        assert any("client broke the protocol again and again" in line for line in server.told)
        assert board.call("count", {})[0] == 1  # of another session
        assert any("client broke the protocol again and again between two calls" in line for line in told)
