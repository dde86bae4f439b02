"""The child of an engine that ends the process which it is in, as a driver does that meets an unknown processor."""

from __future__ import annotations

import os
import signal
import socket
import sys

from tvm_pipeline.processes import receive


def serve(order: bytes, channel: socket.socket) -> None:
    """Die of the first question."""
    receive(channel)
    sys.stderr.write("no such instruction")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGSEGV)
