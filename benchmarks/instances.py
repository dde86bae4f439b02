"""Write a library of planning instances with the best that is known of each, or solve one again.

    python benchmarks/instances.py --output FOLDER     # write the library, and docs/instances.md as its README.md
    python benchmarks/instances.py --check FOLDER      # solve the instances of a folder again
    python benchmarks/instances.py --short             # a few instances, written and checked, for CI

An instance is a JSON file with a graph, a platform, a profile, an objective and limits, and the best plan that is known
(`tvm_pipeline/core/instance.py`). `tvm-pipeline plan FILE` solves it. The library:

sec2022    eleven networks of Yin et al., SEC 2022, on 2 to 6 equal devices, by three orders of bytes
modelled   the same networks on four modelled Edge TPUs on PCIe, the most frames a second and the least latency
generated  RandWire, NASNet and transformers of up to 10 000 operators, the fewest bytes of four stages
unequal    chains of 60 operators on four unequal devices: throughput, latency, energy
measured   networks of the package onnx, compiled and measured on this machine, with --measured NAME ...

`proof` in the table: the bound is proven by the scheduler alone, or by `tools/check_certificate.py` as well. `--check`
fails where a plan is not worth what its file says, or is proven best and another one is better.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support and tools

from planner import LARGE, ORDERS, PUBLISHED, coral, keras, of_bytes, unequal
from rich.console import Console

from tests.support import generators
from tools.check_certificate import check
from tvm_pipeline import planning
from tvm_pipeline.core.instance import Instance, read_instance, write_instance
from tvm_pipeline.core.plan import Plan, cost_key
from tvm_pipeline.core.problem import Objective, Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.errors import OptionError
from tvm_pipeline.planning.certificate import certificate
from tvm_pipeline.report import TextTable

CONSOLE = Console(width=max(Console().width, 150))
COLUMNS = ("instance", "operators", "devices", "objective", "best", "bound", "status", "scheduler", "s", "proof")
CHECKED = 40  # operators of a graph whose certificate is checked here; `certificates.py` checks the larger ones
TIME_LIMIT_S = 10.0
SECONDS: tuple[Objective, ...] = ("throughput", "latency")
HERE = "python benchmarks/instances.py"
PAGE = """# Instances

An instance is a problem of planning in one JSON file, with the best plan that is known of it. Others can solve it,
compare with it and cite it. Its [schema](instance.schema.json) is that of a `Problem`, with four keys beside it:

| Key | Meaning |
|---|---|
| `name` | unique in a library |
| `source` | who published the problem, or what was measured, where and when |
| `problem` | the graph, the platform, the profile, the objective and the limits: see [How it works](how-it-works.md) |
| `best` | the best known plan, as the text that `--plan` reads, with its bound and its scheduler; null without |
| `seconds` | that its scheduler took; null where that is not known |

    python benchmarks/instances.py --output FOLDER      # write this library
    tvm-pipeline plan FOLDER/unequal-0-latency.json     # solve one; --objective and --stages ask for something else
    tvm-pipeline plan FILE --scheduler ideals --certificate plan.cert    # with a certificate that others can check
    python benchmarks/instances.py --check FOLDER       # solve all again, and tell where a file is wrong

A `Problem` does not express the cost models of other suites, so this library does not hold their instances: see
[Public suites](public-suites.md).

The table is written by the first command. `proof` tells who proves the bound: the scheduler, or
`tools/check_certificate.py` as well. Values are frames a second, seconds, joules or bytes. Column `bound` is empty
where the bound is the value, and column `s` has the seconds of one plan on two cores.

"""


def library(short: bool, measured: Sequence[str]) -> Iterator[tuple[Instance, str]]:
    """Yield the instances without a plan, each with the scheduler that solves it."""
    networks, counts = (("Xception",), (2,)) if short else (PUBLISHED, range(2, 7))
    for network in networks:
        for count in counts:
            for order in ORDERS:
                name = f"sec2022-{network}-{count}-{order.replace(',', '-')}"
                problem = of_bytes(keras(network), count, order)
                yield Instance(name, "a network of Yin et al., SEC 2022, Table III, from Keras", problem), "ideals"
        for objective in SECONDS:
            graph = keras(network)
            problem = Problem(graph, coral(4), unmeasured(graph), objective, time_limit_s=TIME_LIMIT_S)
            source = "a network of Keras; Edge TPUs by profiles/platforms/coral-pcie-8.toml"
            yield Instance(f"modelled-{network}-{objective}", source, problem), "best"
    for name, made in LARGE.items():
        graph = made()
        if len(graph) <= (600 if short else 10_000):
            problem = of_bytes(graph, 4, ORDERS[2], time_limit_s=TIME_LIMIT_S)
            yield Instance(f"generated-{'-'.join(re.findall('[A-Za-z0-9]+', name))}", HERE, problem), "best"
    for seed in range(1 if short else 3):
        chain = generators.chain(random.Random(seed), 12 if short else 60)
        for objective in (*SECONDS, "energy"):
            problem = unequal(random.Random(seed), chain, 4, objective=objective, time_limit_s=TIME_LIMIT_S)
            yield Instance(f"unequal-{seed}-{objective}", HERE, problem), "best"
    for name in measured:
        from networks import load

        from tvm_pipeline.workflow.steps import compile_source, measured_profile

        made = compile_source(load(name))
        problem = Problem(made.compiled.graph, made.platform, measured_profile(made), time_limit_s=TIME_LIMIT_S)
        environment = problem.profile.environment
        source = f"measured on {environment.get('cpu', 'a machine')}, {time.strftime('%Y-%m-%d')}"
        yield Instance(f"measured-{name}", source, problem), "best"


def solved(instance: Instance, scheduler: str) -> Instance:
    """Return the instance with the plan of a scheduler, or with the one it had where that is better."""
    begin = time.perf_counter()
    plan = planning.plan(instance.problem, scheduler).plan
    seconds = round(time.perf_counter() - begin, 3)
    known = instance.plan
    if known and cost_key(known) < cost_key(plan):
        return instance
    return Instance(instance.name, instance.source, instance.problem, str(plan), seconds)


def proof(problem: Problem, plan: Plan) -> str:
    """Return who proves the bound of a plan."""
    if plan.status != "optimal":
        return ""
    if len(problem.graph) <= CHECKED:
        try:
            check(certificate(problem, plan))
            return "certificate"
        except OptionError:  # there is none of such plans
            pass
    return "scheduler"


def row(instance: Instance, plan: Plan) -> tuple[str, ...]:
    problem = instance.problem
    digits = ".0f" if problem.is_lexicographic else ".9g"
    best, bound = (" ".join(format(figure, digits) for figure in figures or ()) for figures in (plan.value, plan.bound))
    return (
        *(instance.name, str(len(problem.graph)), str(len(problem.platform.devices)), problem.objective, best),
        "" if bound == best else bound,
        *(plan.status, plan.scheduler, "" if instance.seconds is None else f"{instance.seconds:g}"),
        proof(problem, plan),
    )


def write(folder: Path, short: bool, measured: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for empty, scheduler in library(short, measured):
        instance = solved(empty, scheduler)
        write_instance(folder / f"{instance.name}.json", instance)
        if plan := instance.plan:
            rows.append(row(instance, plan))
    CONSOLE.print(f"{len(rows)} instances in {folder}, {sum('optimal' in cells for cells in rows)} of them proven")
    lines = [" | ".join(("", *cells, "")).strip() for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows)]
    (folder / "README.md").write_text(PAGE + "\n".join(lines) + "\n")


def alike(plan: Plan, other: Plan) -> bool:
    """Return whether two plans have the same value, but for the order of sums."""
    return all(abs(a - b) <= 1e-9 * abs(a) for a, b in zip(plan.value or (), other.value or (), strict=True))


def check_folder(folder: Path) -> None:
    """Solve the instances of a folder again; exit with 1 where a file says what is not so."""
    wrong, rows = [], []
    files = sorted(folder.glob("*.json"))
    if not files:
        sys.exit(f"no instances in {folder}: {HERE} --output {folder} writes them")
    for path in files:
        instance = read_instance(path)
        found = solved(instance, "best")
        plan, known = found.plan, instance.plan
        if plan is None:
            continue
        rows.append(row(found, plan))
        if known is None:
            continue
        worth = judged(instance.problem, known)
        if not alike(worth, known):
            wrong.append(f"{path}: the plan is worth {worth.value}, the file says {known.value}")
        if known.status == "optimal" and cost_key(plan) < cost_key(known) and not alike(plan, known):
            wrong.append(f"{path}: a plan of {plan.value} is better than {known.value}, which the file calls optimal")
    CONSOLE.print(TextTable(f"{len(rows)} instances", COLUMNS, tuple(rows)))
    if wrong:
        sys.exit("\n".join(wrong))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--output", type=Path, help="a folder for the library")
    what.add_argument("--check", type=Path, help="a folder with instances")
    what.add_argument("--short", action="store_true", help="a few instances, written and checked, for CI")
    parser.add_argument("--measured", nargs="+", default=(), help="names that networks.py knows, measured here as well")
    arguments = parser.parse_args()
    if arguments.check:
        check_folder(arguments.check)
    elif arguments.output:
        write(arguments.output, False, arguments.measured)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            write(Path(temporary), True, ())
            check_folder(Path(temporary))


if __name__ == "__main__":
    main()
