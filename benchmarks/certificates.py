"""Write certificates of exact plans and of orders in memory, and check them by the programs of `tools/`.

    python benchmarks/certificates.py                # some 15 minutes
    python benchmarks/certificates.py --only memory  # one of bytes, cp-sat, seconds, bound, memory
    python benchmarks/certificates.py --short        # a network of each kind, for CI

1. bytes: the 330 published instances of SEC 2022, as `planner.py` solves them: 11 networks on 2 to 6 equal devices, in
   three orders, with and without the children of an operator in one stage. cp-sat: the 33 of them on 4 devices, without
   children, by CP-SAT in place of `ideals`.
2. seconds: the 13 networks of `profiles/keras` on 4 modelled Edge TPUs, for throughput and for latency, and on 6 and 8
   for throughput. bound: a bound of all plans for throughput, of these and of NASNets of up to a thousand operators.
3. memory: the order of least memory of these 13, of NASNets and of RandWire, and its layout in an arena.

Each certificate is checked again with a bound that is beyond the plan by a byte or a thousandth, which must be refused.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tools and tests.support

from edgetpu_model import as_tflite
from planner import ORDERS, OTHERS, PUBLISHED, coral, keras, of_bytes, s, show

from tests.support.generators import nasnet, randwire
from tools import check_bound, check_certificate, check_memory
from tvm_pipeline import planning
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.problem import Objective, Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.memory.arena import exact_layout, lifetimes
from tvm_pipeline.memory.certificate import memory_certificate
from tvm_pipeline.memory.minimum_peak import minimum_peak
from tvm_pipeline.memory.stage_memory import stage_graph
from tvm_pipeline.planning.certificate import bound_certificate, certificate

Make = Callable[[], str]
NASNETS = (1, 2, 4, 6)  # by their cells
PARTS = ("bytes", "cp-sat", "seconds", "bound", "memory")


def on_edge_tpus(graph: OperatorGraph, objective: Objective, count: int = 4) -> Problem:
    platform = coral(count)
    devices = tuple(replace(device, bus="") for device in platform.devices)
    links = tuple(replace(link, bus="") for link in platform.links)
    return Problem(graph, replace(platform, devices=devices, links=links), unmeasured(graph), objective)


def of_seconds(network: str, objective: Objective, count: int = 4) -> str:
    return planned(on_edge_tpus(as_tflite(keras(network)), objective, count))


def of_bound(make: Callable[[], OperatorGraph]) -> str:
    return bound_certificate(on_edge_tpus(make(), "throughput"))


def published(network: str, stages: int, order: Objective, together: bool, scheduler: str = "ideals") -> str:
    return planned(of_bytes(keras(network), stages, order, children_together=together), scheduler)


def planned(problem: Problem, scheduler: str = "ideals") -> str:
    return certificate(problem, planning.plan(problem, scheduler).plan)


def of_memory(make: Callable[[], OperatorGraph]) -> str:
    graph = stage_graph(make())
    found = minimum_peak(graph)
    return memory_certificate(graph, found, exact_layout(lifetimes(graph, found.order)[0]))


def instances(short: bool) -> Iterator[tuple[str, str, Make]]:
    """Yield the part, a title and the maker of each certificate."""
    networks, counts = (("Xception",), (4,)) if short else (PUBLISHED, range(2, 7))
    for network in networks:
        for count in counts:
            for order in ORDERS:
                for together in (False, True):
                    yield "bytes", "bytes, published", partial(published, network, count, order, together)
        for order in ORDERS:
            yield "cp-sat", "bytes, by CP-SAT", partial(published, network, 4, order, False, "cp-sat")
    timed: tuple[Objective, ...] = ("throughput", "latency")
    every = ("Xception",) if short else (*PUBLISHED, *OTHERS)
    for network in every:
        for objective in timed:
            yield "seconds", f"{objective}, 4 Edge TPUs", partial(of_seconds, network, objective)
        for count in () if short else (6, 8):
            yield "seconds", f"throughput, {count} Edge TPUs", partial(of_seconds, network, "throughput", count)
    for make in (*(partial(keras, network) for network in every), *(partial(nasnet, cells) for cells in NASNETS)):
        yield "bound", "bound, 4 Edge TPUs", partial(of_bound, make)
    for network in every:
        yield "memory", "memory, Keras", partial(of_memory, partial(keras, network))
    for cells in () if short else NASNETS:
        yield "memory", "memory, NASNet-A", partial(of_memory, partial(nasnet, cells))
    for seed in range(1 if short else 20):
        for nodes in (32,) if short else (32, 48, 64):
            yield "memory", "memory, RandWire", partial(of_memory, partial(randwire, random.Random(seed), nodes))


def is_checked(text: str) -> bool:
    """Return whether the checker of its kind takes a certificate."""
    checkers = {'"arena_bound"': check_memory, '"bound_fps"': check_bound, "": check_certificate}
    checker = next(checker for field, checker in checkers.items() if field in text)
    try:
        checker.check(text.encode())
    except (check_bound.Refused, check_certificate.Refused, check_memory.Refused):
        return False
    return True


def beyond(text: str) -> str:
    """Return the certificate with a bound that is a little better than what it certifies."""
    stated = json.loads(text)
    objective = stated.get("objective", "")
    if "bound_fps" in stated:
        stated["bound_fps"] *= 0.999
    elif not objective:
        stated["bound"] += 1
    elif "," in objective:
        stated["bound"][0] += 1
    else:
        stated["bound"][0] *= 1.001 if objective == "latency" else 0.999
    return json.dumps(stated)


def checked(make: Make) -> tuple[bool, bool, float, float, int]:
    """Return whether the certificate is checked, and the other refused; seconds to make and to check; its bytes."""
    begin = time.perf_counter()
    text = make()
    made_s, begin = time.perf_counter() - begin, time.perf_counter()
    good = is_checked(text)
    return good, not is_checked(beyond(text)), made_s, time.perf_counter() - begin, len(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only", choices=PARTS, help="one of the parts")
    args = parser.parse_args()
    _, kinds, makes = zip(*(each for each in instances(args.short) if args.only in (None, each[0])), strict=True)
    with ProcessPoolExecutor(2) as pool:
        found = [*pool.map(checked, makes)]
    rows = []
    for kind in dict.fromkeys(kinds):
        here = [one for one, other in zip(found, kinds, strict=True) if other == kind]
        good, refused, made_s, checked_s, size = zip(*here, strict=True)
        times = [f"{s(statistics.median(taken))} / {s(max(taken))}" for taken in (made_s, checked_s)]
        rows.append((kind, len(here), sum(good), sum(refused), *times, f"{statistics.median(size):.0f} / {max(size)}"))
    show(
        "Certificates: median / most",
        ("instances", "number", "checked", "beyond: refused", "made in", "both checked in", "bytes"),
        rows,
    )
    sys.exit(not all(one[0] and one[1] for one in found))


if __name__ == "__main__":
    main()
