"""A run as a service runs: as a user without a home, on a file system that is read-only or full.

Each run is a process in a mount namespace of its own, without the rights of root but the one to read all files, since
Python may lie in root's home.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

LINES = 100
NOBODY, NO_ENTRY = 65534, 60123  # the second has no entry in the password file
MAY_UNSHARE = bool(
    shutil.which("setpriv") and shutil.which("unshare") and not subprocess.call(["unshare", "--mount", "true"])
)
pytestmark = pytest.mark.skipif(not MAY_UNSHARE, reason="to lay file systems over others takes root, and unshare")

READ_ONLY = """
mount --bind / /mnt; mount -o remount,ro,bind /
for kept in state tmp; do mount --bind {folder}/$kept {folder}/$kept; mount -o remount,rw,bind {folder}/$kept; done
"""
FULL = """
mkdir -p {folder}/{full}; mount -t tmpfs -o size=64k,mode=777 none {folder}/{full}
head -c 65536 /dev/zero > {folder}/{full}/filler || true
"""


@pytest.fixture
def folder():
    """A folder that every user can reach, with some that every user can write into."""
    with tempfile.TemporaryDirectory() as name:
        for path in (Path(name), *(Path(name, part) for part in ("state", "tmp", "cache"))):
            path.mkdir(exist_ok=True)
            path.chmod(0o777)
        yield Path(name)


def python_of(folder: Path, user: int, **variables: str) -> list[str]:
    """Return the command of Python as a user has it."""
    environment = {"PATH": "/usr/bin:/bin", "TMPDIR": f"{folder}/tmp", "OMP_NUM_THREADS": "1", **variables}
    return [
        *("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs"),
        *(
            "--inh-caps=-all,+dac_read_search",
            "--ambient-caps=+dac_read_search",
            "--bounding-set=-all,+dac_read_search",
        ),
        *("env", "-i", *(f"{name}={value}" for name, value in environment.items())),
        sys.executable,
    ]


def run(folder: Path, bundle: Path, *options: str, before: str = "", user: int = NOBODY, **variables: str) -> str:
    """Run a bundle on all frames of a film as a user; return what it said after the results were counted.

    Without a home, numba would compile its loops in each run.
    """
    arguments = [
        "run",
        shutil.copy(bundle, folder),
        "--source",
        f"synthetic:64x48@300:{LINES}",
        "--policy",
        "block",
        "--verify",
        "0",
    ]
    command = [
        *python_of(folder, user, NUMBA_DISABLE_JIT="1", **variables),
        *("-c", "import tvm_pipeline_command as c; c.main()", *arguments),
        *("--results", folder / "state" / "r.jsonl", *options),
    ]
    script = f"set -e\n{before}\ncd /\nexec {shlex.join(map(str, command))}"
    done = subprocess.run(["unshare", "--mount", "bash", "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert len((folder / "state" / "r.jsonl").read_text().splitlines()) == LINES
    return done.stderr


@pytest.mark.thorough
def test_a_user_without_an_entry_and_with_a_home_that_is_not_there(folder, bundle):
    said = run(folder, bundle, user=NO_ENTRY, HOME="/nonexistent")
    assert "the cache /nonexistent/.cache/tvm-pipeline cannot be written" in said
    assert f"{folder}/tmp/tvm-pipeline-{NO_ENTRY} is used" in said
    cache = folder / "tmp" / f"tvm-pipeline-{NO_ENTRY}"
    assert list((cache / "applications").iterdir())
    # numba keeps a loop there, too.
    loop = "import numpy; from tvm_pipeline.solvers.hot import draw; draw(numpy.ones(1, 'uint64'), numpy.uint64(3))"
    subprocess.run([*python_of(folder, NO_ENTRY, HOME="/nonexistent"), "-c", loop], check=True, cwd="/")
    assert list((cache / "numba").rglob("*.nbc"))


@pytest.mark.thorough
def test_the_folders_of_the_unit_on_a_read_only_system(folder, bundle):
    before = READ_ONLY.format(folder=folder)
    said = run(folder, bundle, before=before, HOME="/home/none", STATE_DIRECTORY=f"{folder}/state")
    assert f"{folder}/state/cache is used" in said


@pytest.mark.thorough
def test_a_full_cache_and_a_full_folder_for_temporary_files(folder, bundle):
    before = "".join(FULL.format(folder=folder, full=full) for full in ("cache", "tmp"))
    said = run(folder, bundle, "--supervise", before=before, TVM_PIPELINE_CACHE=f"{folder}/cache")
    assert "is not kept for the next time" in said
