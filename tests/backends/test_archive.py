"""Archives from strangers: what is no plain file of an honest length is refused before anything is unpacked."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tvm_pipeline.backends import archive
from tvm_pipeline.backends.archive import BLOCK, open_archive
from tvm_pipeline.errors import BundleError

LONG = "folder/" + "x" * 120


def write(path: Path, *members: tuple[tarfile.TarInfo, bytes], **options) -> Path:
    with tarfile.open(path, "w", **options) as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def plain(name: str, content: bytes = b"content") -> tuple[tarfile.TarInfo, bytes]:
    return tarfile.TarInfo(name), content


def listed(path: Path) -> dict[str, bytes]:
    with open_archive(path) as found:
        return {name: found.read(name, 100) for name in found.files}


def test_plain_files_are_read_with_long_names_and_folders(tmp_path: Path) -> None:
    folder = tarfile.TarInfo("folder")
    folder.type = tarfile.DIRTYPE
    path = write(tmp_path / "net.tar", (folder, b""), plain(LONG, b"long"), plain("short", b""), plain("last"))
    assert listed(path) == {LONG: b"long", "short": b"", "last": b"content"}
    file = tmp_path / "here"
    file.write_bytes(b"x" * 1000)
    with tarfile.open(tmp_path / "added.tar", "w") as tar:
        tar.add(file, "added")  # with the exact time of the file in an extended header
    with open_archive(tmp_path / "added.tar") as found:
        assert found.read("added", 1000) == file.read_bytes()


def header(name: str = "evil", kind: bytes = tarfile.REGTYPE, size: int = 0) -> bytes:
    """Return a header with any size, which tarfile would not write."""
    made = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT))
    made[156:157] = kind
    made[124:136] = (size % (1 << 96)).to_bytes(12, "big", signed=False) if size < 0 else f"{size:011o}\0".encode()
    made[148:156] = b" " * 8
    made[148:156] = f"{sum(made[:BLOCK]):06o}\0 ".encode()
    return bytes(made)


def extended(record: str) -> bytes:
    length = len(record) + 3
    return header("pax", tarfile.XHDTYPE, length) + f"{length} {record}\n".encode().ljust(BLOCK, b"\0")


END = b"\0" * BLOCK * 2
FORGED = {
    "a negative size": header(size=-512) + END,
    "a size beyond the end": header(size=1 << 30) + END,
    "a sparse file": header(kind=tarfile.GNUTYPE_SPARSE) + END,
    "a symbolic link": header(kind=tarfile.SYMTYPE) + END,
    "a hard link": header(kind=tarfile.LNKTYPE) + END,
    "a device": header(kind=tarfile.CHRTYPE) + END,
    "a pipe": header(kind=tarfile.FIFOTYPE) + END,
    "an extended size": extended("size=99") + header() + END,
    "a sparse map": extended("GNU.sparse.map=1,a,2") + header() + END,
    "a damaged extended header": header("pax", tarfile.XHDTYPE, 9) + b"99 path=x".ljust(BLOCK, b"\0") + header() + END,
    "no end": header(),
    "a damaged sum": header().replace(b"evil", b"fvil") + END,
    "a name twice": header() * 2 + END,
    "nothing": b"",
    "zeros": END,
    "noise": bytes(range(256)) * 8,
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_archives_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "net.tar"
    path.write_bytes(FORGED[name])
    with pytest.raises(BundleError, match=rf"^{path}: "):
        listed(path)


def test_a_sparse_file_of_tar_s_own_is_refused(tmp_path: Path) -> None:
    """235 KB would become 2 GB: the header is one that GNU tar writes."""
    sparse = tarfile.TarInfo("bomb")
    sparse.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 31)}
    path = write(tmp_path / "net.tar", (sparse, b"0\n".ljust(BLOCK, b"\0")), format=tarfile.PAX_FORMAT)
    with pytest.raises(BundleError, match=r"GNU\.sparse"):
        listed(path)


@pytest.mark.parametrize(("limit", "most"), [("MOST_FILES", 2), ("MOST_BYTES", 20)])
def test_files_and_bytes_have_a_limit_in_all(limit: str, most: int, tmp_path: Path, monkeypatch) -> None:
    path = write(tmp_path / "net.tar", plain("a"), plain("b"), plain("c"))
    assert len(listed(path)) == 3
    monkeypatch.setattr(archive, limit, most)
    with pytest.raises(BundleError, match=r"net\.tar: it has more than"):
        listed(path)


def test_a_file_that_is_longer_than_it_may_be_is_not_read(tmp_path: Path) -> None:
    with (
        open_archive(write(tmp_path / "net.tar", plain("a"))) as found,
        pytest.raises(BundleError, match="a has 7 bytes"),
    ):
        found.read("a", 6)


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("what", [pipe, lambda _: Path("/dev/zero")])
def test_what_is_no_file_is_not_waited_for(what: Callable[[Path], Path], tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="it is no file"):
        listed(what(tmp_path / "net.tar"))
