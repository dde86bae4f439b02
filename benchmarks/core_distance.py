"""How far the first two cores of this process are apart: nanoseconds until one sees what the other has written.

    python benchmarks/core_distance.py --times 60   # once a second
    python benchmarks/core_distance.py --short      # once, for CI

Cores that share a cache are some 25 ns apart, and others several times as far. The host of a virtual machine may move
its cores at any time. Single threads then run as before, and a stage on two threads takes half as long again:
squeezenet 5.5 ms at 25 ns, and 7.9 ms at 162 ns. So peers.py and prediction.py print the distance beside figures of two
cores.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

TURNS = 100_000
SOURCE = r"""
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

static _Atomic int turn __attribute__((aligned(128)));
static int turns;

static void bind(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

static void *answer(void *core) {
  bind(*(int *)core);
  for (int i = 0; i < turns; i++) {
    while (atomic_load_explicit(&turn, memory_order_acquire) != 1) {}
    atomic_store_explicit(&turn, 0, memory_order_release);
  }
  return 0;
}

static void *ask(void *cores) {
  pthread_t other;
  bind(*(int *)cores);
  pthread_create(&other, 0, answer, (int *)cores + 1);
  for (int i = 0; i < turns; i++) {
    atomic_store_explicit(&turn, 1, memory_order_release);
    while (atomic_load_explicit(&turn, memory_order_acquire) != 0) {}
  }
  pthread_join(other, 0);
  return 0;
}

double distance(int first, int second, int count) {
  int cores[] = {first, second};
  struct timespec begin, end;
  pthread_t thread;
  turns = count;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  pthread_create(&thread, 0, ask, cores);
  pthread_join(thread, 0);
  clock_gettime(CLOCK_MONOTONIC, &end);
  return ((end.tv_sec - begin.tv_sec) * 1e9 + (end.tv_nsec - begin.tv_nsec)) / count / 2;
}
"""


def core_distance() -> str:
    """Return the distance for people, or why it is not known."""
    if len(os.sched_getaffinity(0)) < 2:
        return "one core"
    nanoseconds = distance_ns()
    return f"cores {nanoseconds:.0f} ns apart" if nanoseconds else "distance of cores not known: no C compiler"


def distance_ns() -> float:
    """Return the distance; 0 where there is one core, or no C compiler."""
    cores = sorted(os.sched_getaffinity(0))
    try:
        return min(_measured()(*cores[:2], TURNS) for _ in range(3)) if len(cores) > 1 else 0.0
    except (OSError, subprocess.CalledProcessError):
        return 0.0


@functools.cache
def _measured() -> Callable[[int, int, int], float]:
    """Return the function of SOURCE: of two cores and a number of turns."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "distance.c", Path(folder) / "distance.so"
        source.write_text(SOURCE)
        subprocess.run(["cc", "-O2", "-pthread", "-shared", "-fPIC", "-o", library, source], check=True)
        measure = ctypes.CDLL(str(library)).distance
    measure.restype = ctypes.c_double
    return cast(Callable[[int, int, int], float], measure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10, help="how often, once a second")
    parser.add_argument("--short", action="store_true", help="once")
    options = parser.parse_args()
    for number in range(1 if options.short else options.times):
        time.sleep(1 if number else 0)
        sys.stdout.write(f"{time.strftime('%H:%M:%S')} {core_distance()}\n")
        sys.stdout.flush()
