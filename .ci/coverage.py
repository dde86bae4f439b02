"""Print how many lines of the product the quick tests execute, beside how many all tests execute.

    python .ci/coverage.py          (`make coverage`; child processes count, too)

Both runs leave an HTML report: `htmlcov-quick/index.html` and `htmlcov-all/index.html`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

RUNS = {"quick": ("-m", "not thorough", "--hypothesis-profile", "quick"), "all": ()}


def lines(name: str, folder: Path) -> tuple[int, int]:
    """Run tests; return how many lines of the product they execute, and how many there are."""
    report = folder / f"{name}.json"
    command = [sys.executable, "-m", "pytest", "--numprocesses", "auto", "--dist", "worksteal", *RUNS[name]]
    reports = ("--cov", "--cov-report", f"json:{report}", "--cov-report", f"html:htmlcov-{name}")
    if subprocess.run([*command, *reports], check=False).returncode:
        sys.exit(f"the {name} tests fail; mend them first")
    totals = json.loads(report.read_text())["totals"]
    return totals["covered_lines"], totals["num_statements"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (quick, count), (all_, _) = (lines(name, Path(folder)) for name in RUNS)
    print(f"the quick tests execute {quick} of {count} lines, and all tests {all_}: a share of {quick / all_:.1%}")


if __name__ == "__main__":
    main()
