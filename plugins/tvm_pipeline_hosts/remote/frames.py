"""Frames on a socket: a header in JSON and the raw bytes of arrays, both with limits, and nothing that is unpickled.

Both ends begin with PREFACE, whose length never changes, so that each can tell another version, and another service.
A frame after that is

    4 bytes   the length of the header         8 bytes   the length of the arrays, all together (both big-endian)
    header    JSON, see `Header`               arrays    their elements in order, in the byte order of both ends

and a tensor is received where it stays: `recv_into` an array that is aligned as compiled kernels want it. What no other
end of this version sends is a FrameError, after which the link is of no use. Next: channel.py, whose frames these are.
"""

from __future__ import annotations

import math
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from tvm_pipeline.backends.ports import Array, aligned_empty

PROTOCOL = 1
GREETING = b"TVM-PIPELINE REMOTE/"
# The empty line has a web server answer at once, which tells the user what it is.
PREFACE = GREETING + b"%03d %s\r\n\r\n" % (PROTOCOL, sys.byteorder[:1].encode())
MOST_HEADER_BYTES = 16 << 20
MOST_ARRAYS = 4096
MOST_DIMENSIONS = 32
MOST_ARRAY_BYTES = 4 << 30  # of all arrays of a frame
DTYPES = frozenset(
    (
        *("bool", "float16", "float32", "float64"),
        *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    )
)
_DTYPES = {name: np.dtype(name) for name in DTYPES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}  # those of another byte order are other dtypes
_LENGTHS = struct.Struct("!IQ")
_MOST_PIECES = 512  # that one call of the system takes; Linux allows 1024
_RECEIVE_ALL = socket.MSG_WAITALL
_HUNG_UP = "the other end hung up"

# hello, welcome, refused: see serving.py. beat: nothing but that its sender lives. call, tell, done, error: a call, its
# progress and its end. bye: the client wants nothing more.
Kind = Literal["hello", "welcome", "refused", "beat", "call", "tell", "done", "error", "bye"]


class FrameError(Exception):
    """What came is no frame of this protocol."""


class Header(msgspec.Struct, omit_defaults=True):
    """What stands before the arrays of a frame.

    Attributes:
        number: 1, 2, ... of the frames that must arrive; 0 for others.
        seen: the number of the last frame that the sender has of the other end.
        call: to which call it belongs.
        method: of a call.
        value: arguments or result, as JSON.
        arrays: dtype and shape of each array.
    """

    kind: Kind
    number: int = 0
    seen: int = 0
    call: int = 0
    method: str = ""
    value: msgspec.Raw = msgspec.Raw(b"null")
    arrays: tuple[tuple[str, tuple[int, ...]], ...] = ()


class Frame(NamedTuple):
    header: Header
    arrays: list[Array]


_decoder = msgspec.json.Decoder(Header)
_encoder = msgspec.json.Encoder()


def described(arrays: Sequence[Array]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return dtype and shape of arrays, for a header.

    Raises:
        TypeError: an array has a dtype that no board takes.
    """
    for array in arrays:
        if array.dtype not in _NAMES:
            raise TypeError(f"an array of {array.dtype} cannot be sent; send one of {', '.join(sorted(DTYPES))}")
    return tuple((_NAMES[array.dtype], array.shape) for array in arrays)


def limit_waits(link: socket.socket, seconds: float) -> None:
    """Have the kernel end each wait for a socket after so many seconds with BlockingIOError; never where that is 0."""
    limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def write_frame(link: socket.socket, header: Header, arrays: Sequence[Array] = ()) -> None:
    """Send a frame whose arrays lie in C order; raise OSError where the link breaks or takes nothing any more."""
    content = _encoder.encode(header)
    total = 0
    for array in arrays:
        total += array.nbytes
    head = _LENGTHS.pack(len(content), total) + content
    # Nearly always one call takes all of it.
    pieces: list[Any] = [head, *arrays] if len(arrays) < _MOST_PIECES else [head]
    sent = link.sendmsg(pieces)
    if sent < len(head) + total:
        _write_rest(link, [memoryview(head), *(_bytes_of(array) for array in arrays if array.nbytes)], sent)


def _write_rest(link: socket.socket, pieces: list[memoryview], sent: int) -> None:
    """Send pieces of which so many bytes were sent."""
    while True:
        done = 0
        while done < len(pieces) and sent >= len(pieces[done]):
            sent -= len(pieces[done])
            done += 1
        del pieces[:done]
        if not pieces:
            return
        pieces[0] = pieces[0][sent:]
        sent = link.sendmsg(pieces[:_MOST_PIECES])


def read_frame(
    link: socket.socket, most_header_bytes: int = MOST_HEADER_BYTES, most_array_bytes: int = MOST_ARRAY_BYTES
) -> Frame:
    """Receive a frame.

    Raises:
        FrameError: it is none.
        OSError: the link broke, or was silent for as long as `limit_waits` allows.
    """
    header_bytes, array_bytes = _LENGTHS.unpack(_received(link, _LENGTHS.size))
    if header_bytes > most_header_bytes or array_bytes > most_array_bytes:
        raise FrameError(f"a frame of {header_bytes} and {array_bytes} bytes, which is more than any")
    content = _received(link, header_bytes)
    try:
        content.decode()  # msgspec looks at the texts in `value` only when that is decoded
        header = _decoder.decode(content)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise FrameError(f"a frame with a damaged header ({error})") from error
    if _checked_bytes(header) != array_bytes:
        raise FrameError("a frame whose arrays have another length than it says")
    arrays: list[Any] = [aligned_empty(shape, _DTYPES[dtype]) for dtype, shape in header.arrays]
    for array in arrays:
        # Nearly always one call takes all of it; what is empty would end in a false hang-up.
        if (size := array.nbytes) and (received := link.recv_into(array, 0, _RECEIVE_ALL)) < size:
            if not received:
                raise ConnectionResetError(_HUNG_UP)
            read_into(link, _bytes_of(array)[received:])
    return Frame(header, arrays)


def _received(link: socket.socket, size: int) -> bytes | bytearray:
    """Receive so many bytes."""
    content = link.recv(size, _RECEIVE_ALL)
    if len(content) == size:
        return content
    if not content:
        raise ConnectionResetError(_HUNG_UP)
    whole = bytearray(content).ljust(size)
    read_into(link, memoryview(whole)[len(content) :])
    return whole


def read_into(link: socket.socket, into: memoryview) -> None:
    """Fill a buffer from a socket; raise OSError as `read_frame` does."""
    while len(into):
        received = link.recv_into(into, 0, _RECEIVE_ALL)
        if not received:
            raise ConnectionResetError(_HUNG_UP)
        into = into[received:]


def _checked_bytes(header: Header) -> int:
    """Return how long the arrays of a header are, all together; raise FrameError where they cannot be."""
    if len(header.arrays) > MOST_ARRAYS:
        raise FrameError(f"a frame of {len(header.arrays)} arrays, which is more than any")
    total = 0
    for dtype, shape in header.arrays:
        if dtype not in DTYPES:
            raise FrameError(f"a frame with an array of {dtype[:40]!r}, which is none of {', '.join(sorted(DTYPES))}")
        # numpy makes no array without elements either whose other extents are too many elements.
        room = math.prod(max(extent, 1) for extent in shape) * _DTYPES[dtype].itemsize
        if len(shape) > MOST_DIMENSIONS or min(shape, default=0) < 0 or room > MOST_ARRAY_BYTES:
            raise FrameError(f"a frame with an array of an impossible shape ({str(shape)[:80]})")
        total += math.prod(shape) * _DTYPES[dtype].itemsize
    return total


def _bytes_of(array: Any) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))
