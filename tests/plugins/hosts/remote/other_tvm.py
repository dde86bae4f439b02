"""A session on a board that has another TVM."""

from __future__ import annotations

from tvm_pipeline_host.host import HostBackend
from tvm_pipeline_hosts.remote import serving

SESSION = serving.SESSION.replace(
    "from tvm_pipeline", "from tests.plugins.hosts.remote import other_tvm; other_tvm.install(); from tvm_pipeline", 1
)


def install() -> None:
    """Have this process believe in another TVM."""
    HostBackend.versions = lambda _: {"tvm": "0.99 with Relay"}
