"""Write certificates of exact plans, and check them by `tools/check_certificate.py` with exact fractions.

    python benchmarks/certificates.py          # some 15 minutes
    python benchmarks/certificates.py --short  # a network of each kind, for CI

1. bytes: the 330 published instances of SEC 2022, as `planner.py` solves them: 11 networks on 2 to 6 equal devices, in
   three orders, with and without the children of an operator in one stage.
2. seconds: the 13 networks of `profiles/keras` on 4 modelled Edge TPUs, for throughput and for latency.

Each certificate is checked again with a bound that is beyond the plan by a byte or a thousandth, which must be refused.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tools

from edgetpu_model import as_tflite
from planner import ORDERS, OTHERS, PUBLISHED, coral, keras, of_bytes, s, show

from tools.check_certificate import Refused, check
from tvm_pipeline import planning
from tvm_pipeline.core.problem import Objective, Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.planning.certificate import certificate

Make = Callable[[], Problem]


def of_seconds(network: str, objective: Objective) -> Problem:
    graph, platform = as_tflite(keras(network)), coral(4)
    devices = tuple(replace(device, bus="") for device in platform.devices)
    links = tuple(replace(link, bus="") for link in platform.links)
    return Problem(graph, replace(platform, devices=devices, links=links), unmeasured(graph), objective)


def published(network: str, stages: int, order: Objective, together: bool) -> Problem:
    return of_bytes(keras(network), stages, order, children_together=together)


def instances(short: bool) -> Iterator[tuple[str, Make]]:
    networks, counts = (("Xception",), (4,)) if short else (PUBLISHED, range(2, 7))
    for network in networks:
        for count in counts:
            for order in ORDERS:
                for together in (False, True):
                    yield "bytes, published", partial(published, network, count, order, together)
    timed: tuple[Objective, ...] = ("throughput", "latency")
    for network in ("Xception",) if short else (*PUBLISHED, *OTHERS):
        for objective in timed:
            yield f"{objective}, 4 Edge TPUs", partial(of_seconds, network, objective)


def is_checked(text: str) -> bool:
    try:
        check(text.encode())
    except Refused:
        return False
    return True


def beyond(text: str) -> str:
    """Return the certificate with a bound that is a little better than the plan."""
    stated = json.loads(text)
    objective, bound = stated["objective"], stated["bound"]
    bound[0] += 1 if "," in objective else bound[0] / (-1000 if objective == "throughput" else 1000)
    return json.dumps(stated)


def checked(make: Make) -> tuple[bool, bool, float, float, int]:
    """Return whether the certificate is checked, and the other refused; seconds to plan and to check; its bytes."""
    problem, begin = make(), time.perf_counter()
    text = certificate(problem, planning.plan(problem, "ideals").plan)
    planned_s, begin = time.perf_counter() - begin, time.perf_counter()
    good = is_checked(text)
    return good, not is_checked(beyond(text)), planned_s, time.perf_counter() - begin, len(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    kinds, makes = zip(*instances(parser.parse_args().short), strict=True)
    with ProcessPoolExecutor(2) as pool:
        found = [*pool.map(checked, makes)]
    rows = []
    for kind in dict.fromkeys(kinds):
        here = [one for one, other in zip(found, kinds, strict=True) if other == kind]
        good, refused, planned_s, checked_s, size = zip(*here, strict=True)
        times = [f"{s(statistics.median(taken))} / {s(max(taken))}" for taken in (planned_s, checked_s)]
        rows.append((kind, len(here), sum(good), sum(refused), *times, f"{statistics.median(size):.0f} / {max(size)}"))
    show(
        "Certificates: median / most",
        ("instances", "number", "checked", "beyond: refused", "planned in", "both checked in", "bytes"),
        rows,
    )
    sys.exit(not all(one[0] and one[1] for one in found))


if __name__ == "__main__":
    main()
