"""The server of a board: who is let in, what strangers get, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plugins.hosts.remote.conftest import serving_board
from tests.plugins.hosts.remote.lying_board import raw
from tests.support.examples import examples
from tests.support.parts import needs
from tests.support.waiting import until
from tvm_pipeline.errors import BoardLostError, OptionError
from tvm_pipeline.version import __version__
from tvm_pipeline_hosts.remote import serving
from tvm_pipeline_hosts.remote.address import Address, parse_address
from tvm_pipeline_hosts.remote.board import Board
from tvm_pipeline_hosts.remote.channel import KEEP_S, SILENT_S
from tvm_pipeline_hosts.remote.frames import PREFACE, Header, read_frame, write_frame
from tvm_pipeline_hosts.remote.greetings import TVM_IN_USE, TVM_MAGIC
from tvm_pipeline_hosts.remote.serving import BoardServer

TIMES = {"silent_s": 1.0, "keep_s": 3.0}


# ------------------------------------------------------------------------------------------------ strangers


def answer_to(server, content):
    """Return what the server answers to these bytes until it hangs up."""
    with socket.create_connection(server.address, 10) as link:
        came = b""
        try:
            link.sendall(content)
            link.shutdown(socket.SHUT_WR)
            while piece := link.recv(1 << 16):
                came += piece
        except OSError:  # it hung up before it had all
            pass
        return came


@examples(40)
@given(st.binary(max_size=100), st.sampled_from([b"", PREFACE, PREFACE[:10], struct.pack("<i", 0xFF271)[:3]]))
def test_any_bytes_are_survived(server, content, before):
    answer_to(server, before + content)
    assert server.is_free


def test_a_hostile_hello_gets_nothing(server):
    def framed(header, said=0):
        content = json.dumps(header).encode()
        return PREFACE + struct.pack("!IQ", len(content), said) + content

    for content in (
        framed({"kind": "hello", "value": {"client": 1}}),
        framed({"kind": "call", "method": "echo"}),
        framed({"kind": "hello", "arrays": [["uint8", [1 << 31]]]}, 1 << 31),
        PREFACE + struct.pack("!IQ", 1 << 20, 0),
    ):
        assert answer_to(server, content) == PREFACE
        assert server.is_free


@pytest.mark.thorough
def test_garbage_inside_a_session_costs_its_link_alone(server):
    with Board.connect(str(server.address), **TIMES) as board:
        board._channel._link.sendall(b"\xff" * 100)
        assert board.call("echo", {"x": 1})[0] == {"x": 1}
        assert board.call("count", {})[0] == 1
    assert until(lambda: server.is_free)


def test_a_web_browser_is_told_where_it_is(server):
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(f"http://{server.address}/", timeout=10)
    assert error.value.code == 400
    assert b"serve-rpc" in error.value.read()


def test_who_says_nothing_is_sent_away(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "HELLO_S", 0.2)
    monkeypatch.setattr(serving, "MOST_AT_THE_DOOR", 2)
    with closing(BoardServer(Address("127.0.0.1", 0), tmp_path)) as server:
        threading.Thread(target=server.serve, daemon=True).start()
        idle = [socket.create_connection(server.address, 10) for _ in range(2)]
        for link in idle:
            with link:
                assert link.recv(1) == b""
        assert answer_to(server, b"GET / HTTP/1.0\r\n\r\n" + bytes(10)).startswith(b"HTTP/1.0 400")


def test_silent_connections_keep_nobody_out(tmp_path, monkeypatch):
    """The door is full of them, and so is what the kernel keeps; each makes room in its turn."""
    monkeypatch.setattr(serving, "MOST_AT_THE_DOOR", 2)
    monkeypatch.setattr(serving, "OLD_S", 0.05)
    with closing(BoardServer(Address("127.0.0.1", 0), tmp_path)) as server, ExitStack() as stack:
        threading.Thread(target=server.serve, daemon=True).start()
        for _ in range(8):
            stack.enter_context(socket.create_connection(server.address, 10))
        assert answer_to(server, b"GET / HTTP/1.0\r\n\r\n" + bytes(10)).startswith(b"HTTP/1.0 400")


def hello_of(name):
    value = {"client": name, "tvm_pipeline": __version__}
    return PREFACE + raw({"kind": "hello", "value": value})


def test_the_name_of_a_client_is_a_line_of_text(server):
    for name in ("\x1b]0;pwned\x07", "me\nboard attic listens on"):
        assert answer_to(server, hello_of(name)) == PREFACE
        assert server.is_free


@pytest.mark.thorough
def test_of_a_long_name_the_beginning_is_shown(tmp_path):
    with serving_board(tmp_path, **TIMES) as server, socket.create_connection(server.address, 10) as link:
        link.sendall(hello_of("x" * 50_000))
        assert until(lambda: server.told)
        assert server.told == [f"{'x' * 80} is here"]
        assert "x" * 81 not in answer_to(server, hello_of("another one")).decode(errors="replace")


def test_another_version_hears_of_both(server):
    with socket.create_connection(server.address, 10) as link:
        link.sendall(PREFACE)
        write_frame(link, Header("hello", value=msgspec.Raw(b'{"client":"me","tvm_pipeline":"9.8.7"}')))
        assert link.recv(len(PREFACE), socket.MSG_WAITALL) == PREFACE
        header = read_frame(link).header
        assert header.kind == "refused"
        assert f"the board has tvm-pipeline {__version__}, and here is 9.8.7" in bytes(header.value).decode()


def test_a_signal_that_comes_just_before_the_wait_for_a_client_is_handled(server):
    """Here another thread takes the signal while the main thread waits, so that it does not interrupt the wait."""
    threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        server.serve()


# ------------------------------------------------------------------------------------------------ not a board


def answering(content):
    """Serve one connection with these bytes; return the address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        with listener, listener.accept()[0] as link:
            link.sendall(content)
            link.recv(1 << 16)

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", r"it is an SSH server \(SSH-2.0-OpenSSH_9.2\); forward a port"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it is a web server"),
        (b"220 mail ready\r\n", "it begins with '220 mail"),
        (PREFACE.replace(b"/001", b"/002"), f"version 2 of the protocol, and this .*{__version__}.* version 1"),
        (PREFACE + bytes(12), "damaged header"),
        (PREFACE.replace(b" l", b" b"), "another byte order"),
        (b"", "closed at once, as `ssh -L` does where nothing listens"),
    ],
)
def test_another_service_is_named(content, why):
    with pytest.raises(BoardLostError, match=why):
        Board.connect(answering(content), **TIMES)


def test_a_real_web_server_is_named():
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(BoardLostError, match="it is a web server"):
            Board.connect(f"127.0.0.1:{server.server_port}", **TIMES)


def test_nothing_there():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(BoardLostError, match=rf"no board at 127.0.0.1:{port}: .*ssh -N -L {port}:localhost:9190 BOARD"):
        Board.connect(f"127.0.0.1:{port}")
    with pytest.raises(BoardLostError, match=r"there is no host board.invalid"):
        Board.connect("board.invalid")


def test_one_who_takes_and_says_nothing():
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, pytest.raises(BoardLostError, match="it does not answer"):
        Board.connect(f"127.0.0.1:{listener.getsockname()[1]}", silent_s=0.2)


# ------------------------------------------------------------------------------------------------ addresses


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("board", ("board", 9190)),
        ("10.0.0.7:80", ("10.0.0.7", 80)),
        ("[fe80::1]", ("fe80::1", 9190)),
        ("[::1]:9", ("::1", 9)),
    ],
)
def test_an_address(text, address):
    assert parse_address(text) == address
    assert parse_address(str(parse_address(text))) == address


@pytest.mark.parametrize("text", ["", ":9190", "a:b", "a:", "::1", "a:99999", "me@board", "a b", "a:-1", "[]:1"])
def test_what_is_no_address(text):
    with pytest.raises(OptionError, match="`remote`"):
        parse_address(text)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_others_reach_is_refused(tmp_path, host):
    with pytest.raises(OptionError, match=r"no authentication: whoever reaches the port runs code.*`allow_others`"):
        BoardServer(Address(host, 0), tmp_path)
    BoardServer(Address("0.0.0.0", 0), tmp_path, allow_others=True).close()


def test_a_port_that_is_taken(server, tmp_path):
    with pytest.raises(OptionError, match="Address already in use"):
        BoardServer(server.address, tmp_path)


# ------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def serve_rpc(tmp_path):
    """Start `tvm-pipeline serve-rpc` at any port; return the process and its address."""
    processes = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-m", "tvm_pipeline.cli", "serve-rpc", "--listen", "127.0.0.1:0", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TVM_PIPELINE_CACHE": str(tmp_path)},
        )
        processes.append(process)
        line = process.stderr.readline()
        threading.Thread(target=process.stderr.read, daemon=True).start()
        return process, line

    yield start
    for process in processes:
        process.kill()
        process.wait()


def children_of(pid):
    """Return the processes that a process has started."""
    found = [
        child
        for thread in os.listdir(f"/proc/{pid}/task")
        for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
    ]
    return [int(child) for child in found]


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_command_serves_until_it_is_ended(serve_rpc, number, tmp_path):
    process, line = serve_rpc()
    found = re.search(r"listens on (127\.0\.0\.1:\d+); devices: .*cpu.*; from a workstation: ssh -N -L 9190:", line)
    assert found
    with Board.connect(found[1]) as board:
        assert board.call("echo", {}, [np.ones(3)])[1][0].tolist() == [1, 1, 1]
        assert board.name == board.platform.name == socket.gethostname()
        assert board.platform.devices
        assert board.software["tvm-pipeline"] == __version__
        assert {"python", "machine"} < set(board.software)
        [child] = children_of(process.pid)
        process.send_signal(number)
        assert process.wait(20) == (143 if number == signal.SIGTERM else -9)
        assert until(lambda: not lives(child))


def test_the_command_refuses_other_addresses(cli):
    outcome = cli("serve-rpc", "--listen", "0.0.0.0:9")
    assert outcome.code == 2
    assert "--listen 0.0.0.0:9" in outcome.err
    assert "or give --allow-others" in outcome.err


def test_the_help_gives_the_times(cli):
    text = " ".join(cli("serve-rpc", "--help").out.split())
    assert f"silent for {SILENT_S:g} s is given up" in text
    assert f"kept for {KEEP_S:g} s for" in text.replace("│ ", "")


# ------------------------------------------------------------------------------------------------ TVM's own clients


@pytest.mark.thorough
def test_who_is_no_whole_client_of_tvm_holds_no_board(server):
    """Not for its magic, which is all that it sends; and what is no name of a client ends the connection."""
    assert until(lambda: server.is_free)
    with socket.create_connection(server.address, 10) as link:
        link.sendall(TVM_MAGIC)
        with Board.connect(str(server.address), **TIMES) as board:
            assert board.call("count", {})[0] == 1
    assert until(lambda: server.is_free)
    for length, name in (
        (-5, b"client:x"),
        (0, b"client:x"),
        (1 << 30, b"client:x"),
        (9, b"client:x"),
        (8, b"server:x"),
    ):
        assert answer_to(server, TVM_MAGIC + struct.pack("<i", length) + name) == b""
        assert server.is_free


def timers_of(port):
    """Return which timer runs for each connection to a port of this machine; see proc_net_tcp.txt of Linux."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [line[5].partition(":")[0] for line in lines if line[1].endswith(f":{port:04X}") and line[3] == "01"]


@pytest.mark.thorough
def test_a_stock_client_of_tvm(server):
    needs("tvm")
    import tvm
    from tvm import rpc

    assert until(lambda: server.is_free)
    remote = rpc.connect("127.0.0.1", server.address.port, session_timeout=60)
    array = np.arange(1000, dtype="float32")
    on_board = tvm.nd.array if hasattr(tvm, "nd") else tvm.runtime.tensor  # TVM 0.19, 0.27
    assert np.array_equal(on_board(array, remote.cpu()).numpy(), array)
    remote.upload(bytearray(b"content"), "file")
    assert remote.download("file") == b"content"
    assert until(lambda: timers_of(server.address.port) == ["02"])  # the kernel asks whether the client is still there
    with pytest.raises(BoardLostError, match=r"a client of TVM RPC at .* has used"):
        Board.connect(str(server.address), **TIMES)
    with pytest.raises(Exception, match="already"):
        rpc.connect("127.0.0.1", server.address.port)
    with socket.create_connection(server.address) as slow:  # the answer comes before it has said who it is
        slow.sendall(TVM_MAGIC)
        assert slow.recv(4) == TVM_IN_USE
        slow.sendall(b"who it is")
        slow.sendall(b"and the rest")
        slow.shutdown(socket.SHUT_WR)
        assert slow.recv(1) == b"", "a reset would have taken the answer back"
    del remote
    assert until(lambda: server.is_free)
    with Board.connect(str(server.address), **TIMES) as board:
        assert board.call("count", {})[0] == 1
