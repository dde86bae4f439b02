"""Feed every reader and every protocol with inputs that nobody expects, from new seeds.

    python -m tests.fuzz [--seconds 60] [--seed FIRST] [NAME ...]        (`make fuzz`)

Each fuzzer runs in a child, so that a crash is found, too. What is found is printed with its seed, and
`python -m tests.fuzz NAME --seed SEED --seconds 0` feeds that input again, in this process.
"""

from __future__ import annotations

import argparse
import faulthandler
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.fuzz import feed, fuzzers

INPUT_S = 60  # of CPU time, after which one input counts as a hang
MOST_BYTES = 8 << 30
MOST_FOUND = 5  # after so many findings a fuzzer ends


def hung(*_: object) -> None:
    raise TimeoutError(f"the input took more than {INPUT_S} s")


def run(name: str, first: int, seconds: float, at: Path) -> int:
    """Feed inputs for some seconds, at least one, and write the seed of each into a file; return how many failed."""
    signal.signal(signal.SIGPROF, hung)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))  # what takes more is a MemoryError, and found
    seed, found, until_s = first, 0, time.monotonic() + seconds
    while found < MOST_FOUND and (seed == first or time.monotonic() < until_s):
        at.write_text(str(seed))
        signal.setitimer(signal.ITIMER_PROF, INPUT_S)
        try:
            feed(name, seed)
        except Exception:
            found += 1
            print(f"{name}, seed {seed}:\n{traceback.format_exc()}", flush=True)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        seed += 1
    print(f"{name}: {seed - first} inputs, seeds {first} to {seed - 1}, {found} findings", flush=True)
    return found


def run_in_child(name: str, first: int, seconds: float) -> int:
    """Return how many inputs failed; one that ends the child counts, and names its seed."""
    with tempfile.NamedTemporaryFile() as at:
        command = [sys.executable, "-m", "tests.fuzz", name, "--seed", str(first), "--seconds", str(seconds)]
        try:
            status = subprocess.run([*command, "--at", at.name], timeout=seconds + 10 * INPUT_S, check=False).returncode
        except subprocess.TimeoutExpired:
            status = "a hang"
        if status in range(MOST_FOUND + 1):
            return int(status)
        print(f"{name}, seed {at.read().decode()}: the process ended with {status}", flush=True)
        return 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="fuzzers; all without any")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each fuzzer")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32), help="of the first input")
    parser.add_argument("--at", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    faulthandler.enable()
    known = fuzzers()
    if unknown := set(options.names) - set(known):
        sys.exit(f"there is no fuzzer {', '.join(unknown)}; there are {', '.join(known)}")
    if options.at or (options.names and not options.seconds):
        at = options.at or Path(tempfile.gettempdir(), "fuzz-seed")
        sys.exit(sum(run(name, options.seed, options.seconds, at) for name in options.names))
    found = {name: run_in_child(name, options.seed, options.seconds) for name in options.names or known}
    failed = [name for name, count in found.items() if count]
    sys.exit(f"findings: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
