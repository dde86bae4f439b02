"""What ended plans have freed goes back to the system: seen by the resident memory of this process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.test_live_pipeline import check, live, random_plan
from tests.support.fake_backend import chain_model, number
from tvm_pipeline.runtime.freed_memory import FreedMemory, give_freed_memory_back

GARBAGE_BYTES = 50e6
PIECE_BYTES = 100_000  # malloc may map larger ones on their own
ROOT = Path(__file__).parents[2]

glibc = pytest.mark.skipif(not give_freed_memory_back(), reason="the C library is not glibc: it has no malloc_trim")


def resident_bytes() -> int:
    """Return the bytes of memory that no file backs: what other tests have mapped may come and go."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


def freed_in_pieces() -> list[np.ndarray]:
    """Free `GARBAGE_BYTES` between arrays that stay; return these."""
    freed, kept = [], []
    for _ in range(round(GARBAGE_BYTES / PIECE_BYTES)):
        freed.append(np.ones(PIECE_BYTES, np.uint8))
        kept.append(np.ones(2000, np.uint8))
    return kept


@pytest.mark.thorough
@glibc
def test_it_goes_back_when_a_plan_runs_and_when_another_one_follows():
    """In a process of its own: in one that ran other tests, malloc may serve it from what they have left."""
    code = f"from {__name__} import it_goes_back; it_goes_back()"
    paths = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH")]))
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, check=True)


def it_goes_back() -> None:
    model = chain_model(6)
    give_freed_memory_back()
    before = resident_bytes()
    kept = [freed_in_pieces()]
    assert resident_bytes() - before > 0.7 * GARBAGE_BYTES  # malloc alone keeps it; some lies in what was resident

    def is_back() -> bool:
        until_s = time.monotonic() + 10
        while (held := resident_bytes() - before > 0.5 * GARBAGE_BYTES) and time.monotonic() < until_s:
            time.sleep(0.05)
        return not held

    with live(model, "d0", "d1") as pipeline:
        assert is_back()
        kept.append(freed_in_pieces())
        pipeline.submit(number(0))
        time.sleep(0.5)
        assert resident_bytes() - before > 0.7 * GARBAGE_BYTES  # nothing happens while a plan runs
        assert pipeline.switch(random_plan(pipeline.problem, np.random.default_rng(1)), "for the test")
        pipeline.submit(number(1))
        check([pipeline.result(), pipeline.result()], 2)
        assert is_back()


def test_it_is_given_back_once_for_the_plans_of_a_second_and_none_is_forgotten():
    now_s, given_s = [5.0], []
    freed = FreedMemory(lambda: given_s.append(now_s[0]), lambda: now_s[0])
    for now_s[0], ended in [(5.0, 0), (5.5, 0), (9.0, 0), (9.1, 1), (9.2, 2), (9.9, 3), (10.2, 3), (10.3, 3), (12, 3)]:
        freed.look(ended)
    assert given_s == [5.0, 9.1, 10.2]


# Threads that allocate at the same time, and the number of heaps that malloc then has.
HEAPS = """
import ctypes, threading
together = threading.Barrier(12)
def allocate():
    together.wait()
    blocks = [ctypes.CDLL(None).malloc(3000) for _ in range(100)]
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(12)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc, text, size = ctypes.CDLL(None), ctypes.c_char_p(), ctypes.c_size_t()
libc.open_memstream.restype = ctypes.c_void_p
stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
libc.malloc_info(0, stream)
libc.fclose(stream)
print(text.value.count(b"<heap nr="))
"""
COMMAND = """
import sys, tvm_pipeline_command
sys.argv[1:] = ["--version"]
try:
    tvm_pipeline_command.main()
except SystemExit:
    pass
"""


@glibc
def test_all_threads_of_the_command_use_one_heap():
    def heaps(before: str) -> int:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        run = subprocess.run(
            [sys.executable, "-c", before + HEAPS], env=environment, capture_output=True, text=True, check=True
        )
        return int(run.stdout.split()[-1])

    assert heaps("") > 1
    assert heaps(COMMAND) == 1
