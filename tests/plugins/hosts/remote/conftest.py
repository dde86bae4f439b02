from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.cli.conftest import cli
from tests.plugins.hosts.remote.extra_methods import SESSION
from tests.support.log_lines import log_lines
from tvm_pipeline.testing import example_backend, example_bundle, installed
from tvm_pipeline_hosts.remote import serving
from tvm_pipeline_hosts.remote.address import Address
from tvm_pipeline_hosts.remote.serving import BoardServer

__all__ = ["bundle", "cli", "server"]


@contextmanager
def serving_board(folder: Path, session: str = SESSION, **times: float) -> Iterator[BoardServer]:
    """Run the server of a board whose sessions have the tests' methods, too.

    Args:
        session: its program; `serving.SESSION` where devices are of interest.
    """
    told = log_lines("INFO", of=serving.__name__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "SESSION", session)
        server = BoardServer(Address("127.0.0.1", 0), folder, **times)
        server.told = told
        with closing(server):
            threading.Thread(target=server.serve, daemon=True).start()
            yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BoardServer]:
    """A board that gives links up after one second, and keeps sessions for three."""
    with serving_board(tmp_path_factory.mktemp("parcels"), silent_s=1.0, keep_s=3.0) as server:
        yield server


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle of the fake backend."""
    from tvm_pipeline import write_bundle

    with installed(example_backend()):
        write_bundle(tmp_path / "net.tar", example_bundle())
    return tmp_path / "net.tar"
