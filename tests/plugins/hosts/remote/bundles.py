"""Files of the form of a bundle, with any content."""

from __future__ import annotations

import io
import tarfile

import msgspec

from tvm_pipeline.backends.bundle import FORMAT, Manifest
from tvm_pipeline.version import __version__
from tvm_pipeline_hosts.remote.parcels import sum_of


def tar_of(path, files):
    """Write what has the form of a bundle."""
    manifest = Manifest(FORMAT, __version__, "fake", {}, {name: sum_of(content) for name, content in files.items()})
    with tarfile.open(path, "w") as tar:
        for name, content in {"manifest.json": msgspec.json.encode(manifest), **files}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path
