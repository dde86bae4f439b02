"""Print how many lines of the product the quick tests execute, beside how many all tests execute.

    python .ci/compare_coverage.py          (`make coverage`; child processes count, too)

Each report is also written as pages: `htmlcov-quick/index.html` and `htmlcov-all/index.html`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

QUICK = ("-m", "not thorough", "--hypothesis-profile", "quick")
THE_OTHERS = ("-m", "thorough", "--cov-append")


def executed(tests: tuple[str, ...], name: str, folder: Path) -> tuple[int, int]:
    """Run tests; return how many lines of the product were executed, and how many there are."""
    report = folder / f"{name}.json"
    command = [sys.executable, "-m", "pytest", "--numprocesses", "3", "--dist", "worksteal", *tests]
    reports = ("--cov", "--cov-report", f"json:{report}", "--cov-report", f"html:htmlcov-{name}")
    ended = subprocess.run([*command, *reports], check=False)
    if ended.returncode:  # coverage.py delays signals of a child process, which tests of signals notice
        print(f"some of the {name} tests fail while they are observed: the lines of these may be missing", flush=True)
    totals = json.loads(report.read_text())["totals"]
    return totals["covered_lines"], totals["num_statements"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        quick, count = executed(QUICK, "quick", Path(folder))
        print(f"the quick tests execute {quick} of {count} lines", flush=True)
        all_, _ = executed(THE_OTHERS, "all", Path(folder))
    print(f"all tests execute {all_} of {count} lines, of which the quick tests execute {quick / all_:.1%}")


if __name__ == "__main__":
    main()
