"""Say what `make demo` and `make test` need and this machine lacks, before they start.

    python3 .ci/needs.py FOLDER [--new | --registry PACKAGE]

FOLDER is where the environment is, or with `--new` will be. `--registry` asks whether pip of this Python finds a
package that the environment needs. If something is missing, the script prints one line and ends with status 1. It runs
on any Python 3, since it checks the version, too.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile

FIRST, AFTER = (3, 10), (3, 14)
COMPILERS = ("gcc", "clang", "cc", "g++", "clang++", "c++")  # one of them links what TVM compiles
ENVIRONMENT_BYTES = 2 * 10**9  # all packages of `make test`, and pip's copies while it unpacks them
WORKING_BYTES = 500 * 10**6  # what the tests write


def wrong_python(version):
    """Return what is wrong with a Python of a version, (major, minor), or an empty string."""
    major, minor = version[:2]
    if FIRST <= (major, minor) < AFTER:
        return ""
    return (
        f"Python {major}.{minor} is not supported; name one of 3.10 to 3.13, for example: make PYTHON=python3.12 test"
    )


def no_venv():
    if importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip"):
        return ""
    return (
        "this Python makes no virtual environments; install its module venv (Debian, Ubuntu: apt install python3-venv)"
    )


def no_compiler():
    if os.environ.get("CXX") or any(map(shutil.which, COMPILERS)):
        return ""
    return "there is no C compiler to link compiled networks; install gcc or clang (Debian, Ubuntu: apt install gcc)"


def full_disk(folder, need_bytes):
    """Return what is wrong if a folder, which need not exist yet, has too little space, else an empty string."""
    folder = os.path.abspath(folder)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    free = shutil.disk_usage(folder).free
    if free >= need_bytes:
        return ""
    return (
        f"{folder} has {free / 1e9:.1f} GB of free space, and {need_bytes / 1e9:.1f} GB are needed; make space, or "
        "choose other folders by VENV and TMPDIR"
    )


def no_registry(package):
    """Return what is wrong if pip, as it is set up here, finds a package in no registry, else an empty string."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--disable-pip-version-check"]
    ask = subprocess.run(
        [*command, "--retries", "0", "--timeout", "10", package],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if ask.returncode == 0:
        return ""
    return (
        f"pip reaches no package registry that has {package}; connect this machine to a network, or name an index by "
        "PIP_INDEX_URL"
    )


def main():
    folder, is_new = sys.argv[1], sys.argv[2:] == ["--new"]
    if sys.argv[2:3] == ["--registry"]:
        missing = no_registry(sys.argv[3])
    else:
        missing = (
            wrong_python(sys.version_info)
            or (is_new and no_venv())
            or no_compiler()
            or full_disk(folder, ENVIRONMENT_BYTES if is_new else WORKING_BYTES)
            or full_disk(tempfile.gettempdir(), WORKING_BYTES)
        )
    if missing:
        sys.exit("tvm-pipeline: " + missing)


if __name__ == "__main__":
    main()
