"""A folder of bundles in parts: whole or not at all, whoever sends what."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from functools import partialmethod

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plugins.hosts.remote.bundles import tar_of
from tvm_pipeline.backends.bundle import FORMAT, Manifest, open_bundle
from tvm_pipeline.errors import BundleError
from tvm_pipeline.testing import example_backend, installed
from tvm_pipeline_hosts.remote.methods import put
from tvm_pipeline_hosts.remote.parcels import CHUNK, Parcels, manifest_of, parts_of, sum_of
from tvm_pipeline_hosts.remote.session import Session


def sent(parcels, path):
    """Send what is missing of a bundle; return its id and the bytes that went."""
    manifest, went = manifest_of(path), 0
    for sum, offset, content, total in parts_of(path, parcels.missing(manifest)):
        parcels.put(sum, offset, content, total)
        went += len(content)
    return parcels.assemble(manifest), went


def files_of(path):
    with tarfile.open(path) as tar:
        return {entry.name: tar.extractfile(entry).read() for entry in tar}


def test_a_bundle_comes_as_it_is(bundle, tmp_path):
    parcels = Parcels(tmp_path / "store")
    id, _ = sent(parcels, bundle)
    assert id == sum_of(manifest_of(bundle))
    assert files_of(parcels.bundle(id)) == files_of(bundle)
    with installed(example_backend()), open_bundle(parcels.bundle(id)) as opened:
        assert opened.graph.name == "net"


def test_what_another_bundle_holds_does_not_travel(tmp_path):
    weights = np.random.default_rng(0).bytes(3 * CHUNK + 5)
    parcels = Parcels(tmp_path / "store")
    first = tar_of(tmp_path / "a.tar", {"weights": weights, "plan.txt": b"one", "none": b""})
    assert sent(parcels, first)[1] == len(weights) + 3
    assert not list((parcels.folder / "parts").iterdir())  # nothing is held twice
    second = tar_of(tmp_path / "b.tar", {"weights": weights, "plan.txt": b"other", "again": weights})
    id, went = sent(parcels, second)
    assert went == 5
    assert files_of(parcels.bundle(id)) == files_of(second)
    assert sent(parcels, second) == (id, 0)


@given(st.binary(max_size=200), st.lists(st.tuples(st.integers(-5, 250), st.integers(0, 250)), max_size=6))
def test_pieces_in_any_order_make_the_file_or_nothing(tmp_path_factory, content, pieces):
    parcels = Parcels(tmp_path_factory.mktemp("store"))
    whole = parcels.folder / "parts" / sum_of(content)
    for offset, length in pieces:
        try:
            parcels.put(sum_of(content), offset, content[max(0, offset) :][:length], len(content))
        except BundleError:
            continue
    here = parcels._part(sum_of(content))
    if here.exists():
        assert content.startswith(here.read_bytes())
    assert not whole.exists() or whole.read_bytes() == content
    if not whole.exists():
        held = here.stat().st_size if here.exists() else 0
        parcels.put(sum_of(content), held, content[held:], len(content))
    assert whole.read_bytes() == content


def test_a_piece_that_comes_again_is_no_other(tmp_path):
    parcels, content = Parcels(tmp_path), b"0123456789"
    for begin, end in ((0, 4), (2, 6), (1, 3), (6, 10)):
        parcels.put(sum_of(content), begin, content[begin:end], len(content))
    assert (tmp_path / "parts" / sum_of(content)).read_bytes() == content


@pytest.mark.parametrize(
    ("sum", "offset", "content", "total"),
    [
        ("../../etc/passwd", 0, b"x", 1),
        ("/etc/passwd" + "0" * 53, 0, b"x", 1),
        ("A" * 64, 0, b"x", 1),
        ("0" * 64 + "\n", 0, b"x", 1),
        ("0" * 64, -1, b"xy", 1),
        ("0" * 64, 1, b"x", 2),
        ("0" * 64, 0, b"xyz", 2),
        ("0" * 64, 0, b"x", 1 << 60),
        ("0" * 64, 0, b"x", 1),  # another sum
    ],
)
def test_a_hostile_piece_leaves_nothing(tmp_path, sum, offset, content, total):
    parcels = Parcels(tmp_path / "store")
    with pytest.raises(BundleError):
        parcels.put(sum, offset, content, total)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"null",
        b"[" * 100_000,
        b'{"format":2,"tvm_pipeline":"0","backend":"x","versions":{},"sha256":{"a":"../../x"}}',
        b'{"format":2,"tvm_pipeline":"0","backend":"x","versions":{},"sha256":{"manifest.json":"' + b"0" * 64 + b'"}}',
        b" " * (9 << 20),
    ],
)
def test_a_hostile_manifest_is_refused(tmp_path, manifest):
    parcels = Parcels(tmp_path)
    for method in (parcels.missing, parcels.assemble):
        with pytest.raises(BundleError, match="manifest"):
            method(manifest)


@pytest.mark.parametrize("id", ["../x", "", "0" * 64, "/etc/passwd"])
def test_only_bundles_that_are_here_are_given(tmp_path, id):
    with pytest.raises(BundleError, match="send it again"):
        Parcels(tmp_path).bundle(id)


def test_a_path_that_leads_outside_makes_no_file_there(tmp_path):
    """The name is refused when the bundle is opened, as in any other bundle."""
    path = tar_of(tmp_path / "evil.tar", {"../../evil": b"x"})
    parcels = Parcels(tmp_path / "store")
    id, _ = sent(parcels, path)
    with pytest.raises(BundleError), open_bundle(parcels.bundle(id)):
        pass
    assert not list(tmp_path.parent.rglob("evil"))


def test_a_file_that_did_not_come_is_named(tmp_path):
    manifest = Manifest(FORMAT, "0", "fake", {}, {"weights": "0" * 64})
    with pytest.raises(BundleError, match=r"weights of the bundle .* did not come"):
        Parcels(tmp_path).assemble(msgspec.json.encode(manifest))


def test_what_was_used_longest_ago_goes(tmp_path):
    parcels = Parcels(tmp_path / "store")
    bundles = [tar_of(tmp_path / f"{n}.tar", {"weights": bytes([n]) * 50_000}) for n in range(4)]
    ids = [sent(parcels, path)[0] for path in bundles]
    for age, id in enumerate(reversed(ids)):
        stamp(parcels.bundle(id), age)
    stamp(parcels.bundle(ids[0]), -1)  # used last
    parcels.forget_older(150_000, keep=(ids[1],))
    assert [id for id in ids if parcels._path(id).exists()] == [ids[0], ids[1]]
    parcels.put("0" * 64, 0, b"x" * 10, 20)
    parcels.forget_older(0)
    assert not list(parcels.folder.rglob("*.*"))


def test_parts_that_no_bundle_takes_have_a_limit(tmp_path, monkeypatch):
    """Whoever sends parts without end, and never a bundle of them, does not fill the disk."""
    monkeypatch.setattr(Parcels, "forget_older", partialmethod(Parcels.forget_older, 150_000))
    session, content = Session("attic", tmp_path), np.zeros(50_000, np.uint8)
    for number in range(10):
        sum = sum_of(bytes([number]))
        put(session, {"sum": sum, "offset": 0, "total": 100_000}, [content])
        stamp(session.parcels._part(sum), -number)
    left = {path.stem for path in (tmp_path / "parts").iterdir()}
    assert left == {sum_of(bytes([number])) for number in (7, 8, 9)}


def test_what_a_bundle_shares_with_another_one_is_kept_while_it_is_sent(tmp_path):
    parcels, weights = Parcels(tmp_path / "store"), bytes(50_000)
    for age, content in enumerate([b"1" * 50_000, weights]):  # the one with the same weights was used longest ago
        id, _ = sent(parcels, tar_of(tmp_path / f"{age}.tar", {"weights": content}))
        stamp(parcels.bundle(id), age)
    path = tar_of(tmp_path / "new.tar", {"weights": weights, "plan": b"1"})
    for piece in parts_of(path, parcels.missing(manifest_of(path))):
        parcels.put(*piece)
        parcels.forget_older(70_000)
    assert files_of(parcels.bundle(parcels.assemble(manifest_of(path)))) == files_of(path)


def stamp(path, age):
    import os

    os.utime(path, (10**9 - age, 10**9 - age))


FULL = """
import resource, sys
from pathlib import Path
from tvm_pipeline.errors import PipelineError
from tvm_pipeline_hosts.remote.parcels import CHUNK, Parcels, manifest_of, parts_of
parcels, path = Parcels(Path(sys.argv[1])), Path(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    for piece in parts_of(path, parcels.missing(manifest_of(path))):
        parcels.put(*piece)
    parcels.assemble(manifest_of(path))
except PipelineError as error:
    print(error)
"""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("room", [CHUNK + 12_345, 2 * CHUNK + 100])
def test_a_full_disk_leaves_a_beginning_that_goes_on(tmp_path, room):
    """The limit of a file's size stands for a full disk: in the middle of a piece, and when the bundle is assembled."""
    content = np.random.default_rng(0).bytes(2 * CHUNK)
    path = tar_of(tmp_path / "a.tar", {"weights": content})
    store = tmp_path / "store"
    told = subprocess.run(
        [sys.executable, "-c", FULL, store, path, str(room)], capture_output=True, text=True, check=True
    ).stdout
    assert f"cannot write {store}" in told
    left = [file for file in store.rglob("*") if file.is_file()]
    assert all(content.startswith(file.read_bytes()) for file in left)
    assert Parcels(store).missing(manifest_of(path)) == ({sum_of(content): room} if room < 2 * CHUNK else {})
    id, went = sent(Parcels(store), path)
    assert went == max(0, 2 * CHUNK - room)
    assert files_of(Parcels(store).bundle(id)) == files_of(path)
