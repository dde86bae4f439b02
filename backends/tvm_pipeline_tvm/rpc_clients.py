"""TVM's own clients of RPC (`tvm.rpc.connect`, tvmc) at a port of ours: a connection is given to TVM's own server.

The process is made for one such client, by remote/serving.py, and ends with it.
"""

from __future__ import annotations

import faulthandler
import signal
import socket
import struct

MOST_KEY_BYTES = 4096


def serve(order: bytes, control: socket.socket) -> None:
    """Take the connection that comes, and have TVM's server serve it to its end; `order` says nothing."""
    faulthandler.enable(all_threads=False)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which TVM ends its process of a client whose time is over
    if descriptors := socket.recv_fds(control, 16, 1)[1]:
        with socket.socket(fileno=descriptors[0]) as link:
            serve_client(link)


def serve_client(link: socket.socket) -> None:
    """Greet one of TVM's clients as TVM's server does, and serve what it asks for until it hangs up.

    TVM keeps the files of a client in a temporary folder, and runs it in a process of its own, with the time limit that
    the client gave as `session_timeout`.
    """
    from tvm.rpc import base, server

    if struct.unpack("<i", base.recvall(link, 4))[0] != base.RPC_MAGIC:
        return
    length = struct.unpack("<i", base.recvall(link, 4))[0]
    if not 0 < length <= MOST_KEY_BYTES:
        return
    key, *options = base.recvall(link, length).decode("utf-8", "replace").split() or [""]
    if not key.startswith("client:"):
        link.sendall(struct.pack("<i", base.RPC_CODE_MISMATCH))
        return
    told = b"server:"
    link.sendall(struct.pack("<ii", base.RPC_CODE_SUCCESS, len(told)) + told)
    server._serving(link, link.getpeername(), server._parse_server_opt(options), None)
