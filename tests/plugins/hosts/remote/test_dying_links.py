"""Links to a board die in the middle of frames, fall silent, come back late or never."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.plugins.hosts.remote.bundles import tar_of
from tests.plugins.hosts.remote.conftest import serving_board
from tests.plugins.hosts.remote.proxy import Proxy
from tests.support.log_lines import log_lines
from tests.support.waiting import until
from tvm_pipeline.errors import BoardLostError, RunError
from tvm_pipeline_hosts.remote import serving
from tvm_pipeline_hosts.remote.board import Board
from tvm_pipeline_hosts.remote.parcels import CHUNK, sum_of

TIMES = {"silent_s": 1.0, "keep_s": 3.0}


@pytest.fixture
def free(tmp_path, monkeypatch):
    """A server of the test's own: no other test's session is open on it, whatever ran before."""
    monkeypatch.setattr(serving, "GRACE_S", 0.5)  # for calls that never end
    with serving_board(tmp_path / "board", silent_s=1.0, keep_s=1.0) as server:
        yield server


def connected(proxy, told=None):
    return Board.connect(proxy.address, **TIMES)


@pytest.fixture(scope="module")
def proxied(server):
    """A proxy before the board, and a client behind it; these live through many broken links."""
    assert until(lambda: server.is_free)
    with Proxy(server.address.port) as proxy, connected(proxy) as board:
        yield proxy, board


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("way", ["cut_up", "cut_down"])
@pytest.mark.parametrize("after", [1, 40, 100_000])
def test_a_link_that_breaks_inside_a_frame(proxied, way, after):
    proxy, board = proxied
    array = np.random.default_rng(1).integers(0, 255, 300_000).astype("uint8")
    before, links = board.call("count", {})[0], proxy.links
    setattr(proxy, way, after)
    done, [back] = board.call("count", {}, [array])
    assert done == before + 1  # it ran once
    assert np.array_equal(array, back)
    assert proxy.links > links  # more where a busy machine is silent


@pytest.mark.thorough
def test_many_breaks(proxied):
    proxy, board = proxied
    draw = np.random.default_rng(2)
    before = board.call("count", {})[0]
    for turn in range(1, 16):
        array = draw.integers(0, 255, int(draw.integers(1, 200_000))).astype("uint8")
        setattr(proxy, str(draw.choice(["cut_up", "cut_down"])), int(draw.integers(1, 200_000)))
        done, [back] = board.call("count", {}, [array])
        assert done == before + turn
        assert np.array_equal(array, back)
    proxy.cut_up = proxy.cut_down = None


@pytest.mark.thorough
def test_a_silent_link_is_noticed_and_the_call_goes_on(proxied, tmp_path):
    proxy, board = proxied
    pid, links = board.call("wait", {"file": str(tmp_path)})[0], proxy.links
    lines = log_lines("INFO")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(board.call, "wait", {"file": str(tmp_path / "go")}, [np.ones(3)])
        assert until(lambda: lines)
        proxy.hold()
        assert until(lambda: proxy.links > links, TIMES["silent_s"] + 3)
        (tmp_path / "go").touch()
        value, [back] = running.result(20)
        assert (value, back.tolist()) == (pid, [1, 1, 1])
        assert [line for line in lines if "link" not in line] == ["waiting", "waited"]


def test_a_link_is_made_again_between_two_calls(proxied):
    proxy, board = proxied
    before, links = board.call("count", {})[0], proxy.links
    proxy.cut()
    assert until(lambda: proxy.links == links + 1)  # without a call
    assert board.call("count", {})[0] == before + 1


@pytest.mark.thorough
def test_a_slow_link_is_no_dead_one(proxied):
    """A machine that stands still for longer than silent_s breaks a link, too, but not each time."""
    proxy, board = proxied
    proxy.delay_s, kept = 0.1, []
    array = np.zeros(800_000, "uint8")  # 13 pieces: longer than silent_s in all
    try:
        while not any(kept) and len(kept) < 4:
            links = proxy.links
            assert board.call("echo", {}, [array])[1][0].nbytes == array.nbytes
            kept.append(proxy.links == links)
    finally:
        proxy.delay_s = 0.0
    assert any(kept)


def test_ctrl_c_in_a_call_leaves_the_board_usable(proxied, tmp_path):
    _, board = proxied
    lines = log_lines("INFO")
    threading.Thread(target=lambda: (until(lambda: lines), signal.raise_signal(signal.SIGINT))).start()
    with pytest.raises(KeyboardInterrupt):
        board.call("wait", {"file": str(tmp_path / "go")}, ())
    (tmp_path / "go").touch()
    assert board.call("echo", {"x": 2})[0] == {"x": 2}


@pytest.mark.thorough
def test_an_upload_goes_on_where_it_broke_off(proxied, server, tmp_path):
    proxy, board = proxied
    content = np.random.default_rng(3).bytes(5_000_000)
    path = tar_of(tmp_path / "big.tar", {"weights": content})
    before, links = proxy.up, proxy.links
    proxy.cut_up = 3_300_000
    board.send(path)
    assert proxy.links > links  # more where a busy machine is silent
    assert proxy.up - before < 5_000_000 + CHUNK + 100_000


@pytest.mark.thorough
def test_another_client_waits_for_one_that_leaves(free):
    with Board.connect(str(free.address), **TIMES) as board:
        board.call("count", {})
    assert until(lambda: free.is_free or all(one.leaving.is_set() for one in free._sessions.values()))
    with Board.connect(str(free.address), **TIMES) as other:
        assert other.call("count", {})[0] == 1


@pytest.mark.thorough
def test_an_upload_of_another_session_goes_on(free, tmp_path):
    content = np.random.default_rng(4).bytes(5_000_000)
    path = tar_of(tmp_path / "other.tar", {"weights": content})
    with Proxy(free.address.port) as proxy:
        proxy.refuses_after_cut = True
        with Board.connect(proxy.address, silent_s=1.0, keep_s=0.3) as board:
            proxy.cut_up = 3_300_000
            with pytest.raises(BoardLostError, match="broke while put ran"):
                board.send(path)
        assert until(lambda: free.is_free)
        here = (free._folder / "parts" / f"{sum_of(content)}.part").stat().st_size
        assert here >= 2_000_000
        proxy.is_refusing, before = False, proxy.up
        with connected(proxy) as board:
            board.send(path)
        assert proxy.up - before < 5_000_000 - here + 20_000


@pytest.mark.thorough
def test_a_link_that_stays_away_costs_the_session(free, tmp_path):
    lines = log_lines("INFO")
    with Proxy(free.address.port) as proxy, ThreadPoolExecutor(1) as pool:
        with Board.connect(proxy.address, silent_s=1.0, keep_s=1.5) as board:
            running = pool.submit(board.call, "wait", {"file": str(tmp_path / "never")}, ())
            assert until(lambda: lines)
            proxy.is_refusing = True
            proxy.cut()
            with pytest.raises(BoardLostError, match=r"broke while wait ran .* within 1.5 s .*start again"):
                running.result(20)
        assert until(lambda: "given up, since its client was gone for 1 s" in free.told[-1], TIMES["keep_s"] + 5)
        assert free.is_free
        with Board.connect(str(free.address), **TIMES) as board:
            assert board.call("count", {})[0] == 1


@pytest.mark.thorough
def test_a_client_may_wait_less_once_it_is_served(free, tmp_path):
    with Proxy(free.address.port) as proxy, Board.connect(proxy.address, silent_s=600.0, keep_s=1.0) as board:
        board.expect_within(0.5)
        with ThreadPoolExecutor(1) as pool:
            lines = log_lines("INFO")
            running = pool.submit(board.call, "wait", {"file": str(tmp_path / "never")}, [])
            assert until(lambda: lines)
            proxy.is_refusing = True
            proxy.hold()
            with pytest.raises(BoardLostError, match=r"nothing came for 0\.5 s"):
                running.result(20)


@pytest.mark.thorough
def test_a_client_that_leaves_ends_what_it_called(free, tmp_path):
    lines = log_lines("INFO")
    with ThreadPoolExecutor(1) as pool, Board.connect(str(free.address), **TIMES) as board:
        running = pool.submit(board.call, "wait", {"file": str(tmp_path / "never")}, ())
        assert until(lambda: lines)
        board.close()
        with pytest.raises(RunError, match="closed while wait ran"):
            running.result(20)
        assert until(lambda: free.is_free)


@pytest.mark.thorough
def test_a_server_that_was_started_again_is_told(tmp_path):
    with serving_board(tmp_path, **TIMES) as first, Proxy(first.address.port) as proxy, connected(proxy) as board:
        board.call("count", {})
        with serving_board(tmp_path, **TIMES) as second:
            proxy._target = second.address.port
            proxy.cut()
            assert until(lambda: board._channel.end is not None)
            assert board.call("count", {})[0] == 1
        assert until(lambda: second.is_free)
