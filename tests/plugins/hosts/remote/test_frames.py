"""Frames are read as they were written, and what is none is refused, whatever it is."""

from __future__ import annotations

import socket
import struct
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.plugins.hosts.remote.lying_board import raw
from tvm_pipeline_hosts.remote.frames import (
    DTYPES,
    MOST_ARRAY_BYTES,
    MOST_HEADER_BYTES,
    FrameError,
    Header,
    described,
    limit_waits,
    read_frame,
    write_frame,
)


def read_back(content: bytes):
    """Return the frame that these bytes are, with nothing after them."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = threading.Thread(target=lambda: (ours.sendall(content), ours.shutdown(socket.SHUT_WR)))
        writer.start()
        try:
            return read_frame(theirs)
        finally:
            theirs.close()
            writer.join()


arrays = st.lists(
    st.sampled_from(sorted(DTYPES)).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    ),
    max_size=4,
)


@given(arrays, st.integers(0, 2**40), st.text(max_size=20))
def test_a_frame_comes_as_it_went(sent, number, method):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        write_frame(ours, Header("call", number, 3, 4, method, arrays=described(sent)), sent)
        header, came = read_frame(theirs)
    assert (header.kind, header.number, header.seen, header.call, header.method) == ("call", number, 3, 4, method)
    for one, other in zip(sent, came, strict=True):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def test_many_arrays_go_in_one_frame():
    sent = [np.full(2, number, "int32") for number in range(2000)]  # more pieces than one call of the system takes
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = threading.Thread(target=write_frame, args=(ours, Header("done", arrays=described(sent)), sent))
        writer.start()
        came = read_frame(theirs).arrays
        writer.join()
    assert [array[1] for array in came] == list(range(2000))


@given(st.binary(max_size=200))
def test_any_bytes_end_in_an_error(content):
    with pytest.raises((FrameError, OSError)):
        read_back(content)


@given(st.binary(max_size=100))
def test_any_header_ends_in_an_error(content):
    with pytest.raises((FrameError, OSError)):
        read_back(raw(content))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (struct.pack("!IQ", MOST_HEADER_BYTES + 1, 0), "more than any"),
        (struct.pack("!IQ", 2, MOST_ARRAY_BYTES + 1), "more than any"),
        (raw({"kind": "fly"}), "damaged header"),
        (raw({"kind": "call", "number": "1"}), "damaged header"),
        (raw(b'{"kind":"call","value":' + b"[" * 100_000), "damaged header"),
        (raw(b'{"kind":"call","value":"\x80"}'), "damaged header"),
        (raw({"kind": "call", "arrays": [["object", [1]]]}, bytes(8)), "'object'"),
        (raw({"kind": "call", "arrays": [[">f4", [1]]]}, bytes(4)), "'>f4'"),
        (raw({"kind": "call", "arrays": [["float32", [-1, -4]]]}, bytes(16)), "impossible shape"),
        (raw({"kind": "call", "arrays": [["float32", [2**62, 0]]]}), "impossible shape"),
        (raw({"kind": "call", "arrays": [["uint8", [1] * 40]]}, b"1"), "impossible shape"),
        (raw({"kind": "call", "arrays": [["float32", [2**32, 2**32, 0]]]}), "impossible shape"),
        (raw({"kind": "call", "arrays": [["float32", [0, 2**30 + 1]]]}), "impossible shape"),
        (raw({"kind": "call", "arrays": [["float32", [2**31, 2**31]]]}, said=16), "impossible shape"),
        (raw({"kind": "call", "arrays": [["float32", [2**16, 2**14]]]}, said=16), "another length"),
        (raw({"kind": "call", "arrays": [["float32", [4]]]}, bytes(15)), "another length"),
        (raw({"kind": "call", "arrays": [["uint8", [0]]] * 5000}), "more than any"),
    ],
)
def test_a_hostile_frame_is_refused_before_memory_is_taken(content, why):
    with pytest.raises(FrameError, match=why):
        read_back(content)


def test_a_silent_end_is_left_in_time():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        limit_waits(theirs, 0.05)
        with pytest.raises(BlockingIOError):
            read_frame(theirs)
        ours.sendall(raw({"kind": "beat"})[:9])
        with pytest.raises(BlockingIOError):
            read_frame(theirs)
