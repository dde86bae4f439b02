"""The key of a fleet: who has it belongs to the fleet, nobody else does, and other versions are told at once."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from tvm_pipeline.errors import OptionError, PipelineError
from tvm_pipeline_hosts.fleet import credentials
from tvm_pipeline_hosts.fleet.credentials import check_reach, make_key, own_address, read_key, unpack, write_key

HERE = "127.0.0.2"

pytestmark = pytest.mark.needs("openssl")


@pytest.fixture(autouse=True)
def _ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here needs Ray but its version."""
    monkeypatch.setattr(credentials, "ray_version", lambda: "2.60.0")


@contextmanager
def listening(folder: Path) -> Iterator[int]:
    """Speak TLS as a head does, which asks for a certificate of its fleet; yield the port."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "authority.pem"))
    context.load_cert_chain(str(folder / "node.pem"), str(folder / "node.key"))
    context.verify_mode = ssl.CERT_REQUIRED
    with socket.create_server((HERE, 0)) as server:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    plain, _ = server.accept()
                    with suppress(OSError), context.wrap_socket(plain, server_side=True) as speaking:
                        speaking.sendall(b"x")

        threading.Thread(target=answer, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def test_a_key_is_made_once_and_is_its_owners_alone(tmp_path: Path) -> None:
    """The secrets outlive `up`; no file of them can be read by others."""
    key = make_key(tmp_path / "head", f"{HERE}:19100")
    write_key(tmp_path / "fleet.key", key)
    assert read_key(tmp_path / "fleet.key") == key
    assert make_key(tmp_path / "head", f"{HERE}:19100") == key
    unpack(key, tmp_path / "host", HERE)
    secret = [tmp_path / "fleet.key", *(tmp_path / "head").iterdir(), *(tmp_path / "host").iterdir()]
    held = [path for path in secret if path.name != "authority.pem"]
    assert len(held) > 6
    assert [path for path in held if stat.S_IMODE(path.stat().st_mode) & 0o077] == []
    assert stat.S_IMODE((tmp_path / "head").stat().st_mode) == 0o700


def test_a_host_knows_its_head_and_no_other(tmp_path: Path) -> None:
    """A host of the same fleet is let in; a head of another fleet, and one that is not there, are told as such."""
    key, other = make_key(tmp_path / "head", f"{HERE}:1"), make_key(tmp_path / "other", f"{HERE}:1")
    for name, one in (("head", key), ("host", key), ("stranger", other)):
        unpack(one, tmp_path / f"{name}-files", HERE)
    with listening(tmp_path / "head-files") as port:
        there = msgspec.structs.replace(key, address=f"{HERE}:{port}")
        check_reach(there, tmp_path / "host-files")
        with pytest.raises(PipelineError, match=r"belongs to another fleet.*fleet\.key"):
            check_reach(there, tmp_path / "stranger-files")
    with pytest.raises(PipelineError, match=rf"no head answers at {HERE}:{port}.*fleet up --head"):
        check_reach(there, tmp_path / "host-files")


def test_a_head_that_is_none_is_told(tmp_path: Path) -> None:
    """At the address is something else, which speaks no TLS."""
    key = make_key(tmp_path, f"{HERE}:1")
    unpack(key, tmp_path / "host", HERE)
    with socket.create_server((HERE, 0)) as server:

        def answer() -> None:
            plain, _ = server.accept()
            with plain:
                plain.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                plain.recv(1 << 16)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(PipelineError, match="another fleet, or is none"):
            check_reach(msgspec.structs.replace(key, address=f"{HERE}:{server.getsockname()[1]}"), tmp_path / "host")


@pytest.mark.parametrize(
    ("field", "version", "told"),
    [
        ("python", "3.9.1", r"Python \S+ here and 3\.9\.1 on the head"),
        ("ray", "2.59.1", r"Ray 2\.60\.0 here and 2\.59\.1 on the head"),
        ("tvm_pipeline", "0.0.1", r"tvm-pipeline \S+ here and 0\.0\.1 on the head"),
    ],
)
def test_other_versions_are_told_at_once(tmp_path: Path, field: str, version: str, told: str) -> None:
    """Ray would try for ever; both versions are told before anything starts."""
    key = make_key(tmp_path, f"{HERE}:19100")
    write_key(tmp_path / "fleet.key", msgspec.structs.replace(key, **{field: version}))
    with pytest.raises(PipelineError, match=told):
        read_key(tmp_path / "fleet.key")


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"{}", b"[[[[", b'{"address": "10.0.0.1:19100"}', b"spare = 1\n"],
)
def test_what_is_no_key_is_told(tmp_path: Path, content: bytes) -> None:
    """Any other file is refused by its name."""
    (tmp_path / "fleet.key").write_bytes(content)
    with pytest.raises(OptionError, match=r"fleet\.key: this is no key of a fleet"):
        read_key(tmp_path / "fleet.key")


@pytest.mark.parametrize("address", ["head:19100", "10.0.0.1", "10.0.0.1:", "10.0.0.1:99999999", "10.0.0.1:-1"])
def test_an_address_that_is_none_is_told(tmp_path: Path, address: str) -> None:
    """The head's address is an IP and a port."""
    write_key(tmp_path / "fleet.key", make_key(tmp_path, address))
    with pytest.raises(OptionError, match="no key of a fleet"):
        read_key(tmp_path / "fleet.key")


def test_ray_that_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is named."""
    monkeypatch.undo()
    monkeypatch.setattr(credentials.metadata, "version", _missing)
    with pytest.raises(PipelineError, match=r"tvm-pipeline\[fleet\]"):
        make_key(tmp_path, f"{HERE}:1")


def _missing(name: str) -> str:
    raise credentials.metadata.PackageNotFoundError(name)


def test_openssl_that_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is named, with how to get it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PipelineError, match="apt install openssl"):
        make_key(tmp_path / "head", f"{HERE}:1")


def test_the_own_address_is_that_towards_the_other(tmp_path: Path) -> None:
    """On the head itself it is the head's."""
    assert own_address("127.0.0.3") == "127.0.0.3"
    assert own_address("192.0.2.200") != "192.0.2.200"
