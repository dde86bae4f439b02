"""A session on a board that has another TVM."""

from __future__ import annotations

import socket

from tvm_pipeline_hosts.remote import session
from tvm_pipeline_tvm.host.host import HostBackend

SESSION = f"{__name__}:serve"


def serve(order: bytes, control: socket.socket) -> None:
    """Believe in another TVM."""
    HostBackend.versions = lambda _: {"tvm": "0.99 with Relay"}
    session.serve(order, control)
