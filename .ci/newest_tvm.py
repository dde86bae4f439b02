"""Test the passes for Relax with the newest TVM of the registry, where the pinned one is older, and say what broke.

    python .ci/newest_tvm.py FOLDER

The script makes an environment in FOLDER, and removes it at the end. The exit status is always 0: the report is a
reason to move the pin, and none to refuse a change. `--pinned VERSION` replaces the version of pyproject.toml.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = "apache-tvm"
SHOWN = 20  # lines of what failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pinned", default=pinned())
    options = parser.parse_args()
    newest = newest_version()
    if newest in ("", options.pinned):
        told = "the newest" if newest else "no registry tells of another"
        print(f"{PACKAGE} {options.pinned} is pinned, and {told}")
        return
    try:
        print(f"{PACKAGE} {options.pinned} is pinned; with {newest}: {tested(options.folder, newest)}")
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)


def pinned() -> str:
    """Return the version that pyproject.toml has."""
    found = re.search(rf'"{PACKAGE}==([^"]+)"', Path("pyproject.toml").read_text())
    return found[1] if found else ""


def newest_version() -> str:
    """Return the newest version that pip finds; empty where it finds none."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--disable-pip-version-check", PACKAGE]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.match(rf"{PACKAGE} \((.+)\)", told)
    return found[1] if found else ""


def tested(folder: Path, version: str) -> str:
    """Install a version in a new environment, run the quick tests of Relax there, and return how they ended."""
    python, others = folder / "bin" / "python", folder / "overrides.txt"
    tests = ["tests/relax", "-q", "-n", "2", "-m", "not thorough", "--hypothesis-profile", "quick"]
    extras = ".[tvm,video,plot,edgetpu,onnxruntime,openvino,watch,dev]"
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", python, "--override", others]
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    others.write_text(f"{PACKAGE}=={version}\n{PACKAGE}-ffi\n")
    for command in ([*install, "--editable", extras], [python, "-m", "pytest", *tests]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            break
    lines = (done.stdout + done.stderr).strip().splitlines() or [f"status {done.returncode}"]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))][:SHOWN]
    return "\n".join([lines[-1], *failed])


if __name__ == "__main__":
    main()
