"""ONNX's own backend tests by a compiler: how many are right, refused by name, and wrong.

    python benchmarks/onnx_suite.py                          # by the TVM of this environment, Relay or Relax
    python benchmarks/onnx_suite.py --compiler onnxruntime   # by an engine for ONNX files
    python benchmarks/onnx_suite.py --json verdicts.jsonl    # a line for each test
    python benchmarks/onnx_suite.py --together A.jsonl B.jsonl  # the tests that one compiler or another has right
    python benchmarks/onnx_suite.py --table docs/onnx-coverage.csv
    python benchmarks/onnx_suite.py --short                  # every 500th test, for CI

The tests are those of the package onnx that is installed: 1.16 with Relay, which has fewer of them, and the newest with
Relax. Nine more need the network. A test that is wrong, or no refusal, is printed, and the exit status is then 1.
`tests/support/onnx_suite.py` says how a test is run, and what the outcomes are.

`--table` writes the column of the compiler into the table of which docs/onnx-coverage.md is made (`python -c "from
tests.test_onnx_coverage import *; PAGE.write_text(page())"`): the tests of one kind of operator that are right, of all.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support.onnx_suite import OUTCOMES, Verdict, cases, verdicts
from tvm_pipeline_tvm.installed_ir import installed_ir

RIGHT = "right", "rounded"
SOUND = *RIGHT, "refused", "engine"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="tvm", help="tvm, or an engine for ONNX files")
    parser.add_argument("--only", nargs="+", metavar="TEST")
    parser.add_argument("--json", type=Path, help="write a line for each test here")
    parser.add_argument("--table", type=Path, help="write the column of the compiler into this CSV file")
    parser.add_argument("--short", action="store_true", help="every 500th test, for CI")
    parser.add_argument("--together", nargs="+", type=Path, metavar="JSON", help="files that --json wrote")
    options = parser.parse_args()
    if options.together:
        print(together(options.together))
        return
    names = options.only or sorted(cases())[:: 500 if options.short else 1]
    found = []
    for verdict in verdicts(names, options.compiler):
        found.append(verdict)
        if verdict.outcome not in SOUND:
            print(f"{verdict.name}: {verdict.outcome}: {verdict.message}", flush=True)
    if options.json:
        options.json.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in found))
    if options.table:
        write_column(options.table, str(installed_ir()) if options.compiler == "tvm" else options.compiler, found)
    counts = Counter(each.outcome for each in found)
    refused = [each for each in found if each.outcome == "refused"]
    print(f"{len(found)} tests: {', '.join(f'{counts[outcome]} {outcome}' for outcome in OUTCOMES)}")
    print(f"{sum(each.names_a_part for each in refused)} refusals name an operator or a tensor, the others the file")
    print(f"{sum(each.bound for each in found)} tests are right where inputs are constants")
    kinds = Counter(each.operators[0] for each in refused if len(each.operators) == 1)
    print("refused most often:", ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common(20)))
    raise SystemExit(sum(counts[outcome] for outcome in SOUND) < len(found))


def together(paths: Sequence[Path]) -> str:
    """Return how many tests one compiler or another has right, of the verdicts in these files."""
    found = [msgspec.json.decode(line, type=Verdict) for path in paths for line in path.read_bytes().splitlines()]
    names = {verdict.name for verdict in found}
    right = {verdict.name for verdict in found if verdict.outcome in RIGHT}
    unsound = {verdict.name for verdict in found if verdict.outcome not in SOUND}
    return f"{len(names)} tests: {len(right)} right with one compiler or another, {len(unsound)} not sound with some"


def write_column(path: Path, column: str, found: Sequence[Verdict]) -> None:
    """Write how many tests are right, of how many: of each operator, and all; and how many have each outcome."""
    total, right = Counter[str](), Counter[str]()
    for verdict in found:
        kinds = ["all tests", *(verdict.operators if len(verdict.operators) == 1 else ())]
        total.update(kinds)
        right.update(kinds if verdict.outcome in RIGHT else ())
    cells = {kind: f"{right[kind]}/{count}" for kind, count in total.items()}
    table: dict[str, dict[str, str]] = {}
    if path.exists():
        with path.open(newline="") as file:
            table = {row["operator"]: row for row in csv.DictReader(file)}
    columns = list(dict.fromkeys(["operator", *(next(iter(table.values()), {})), column]))
    for kind in table.keys() | cells.keys():
        table.setdefault(kind, {"operator": kind})[column] = cells.get(kind, "")
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(table[kind] for kind in sorted(table, key=lambda kind: (kind != "all tests", kind)))


if __name__ == "__main__":
    main()
