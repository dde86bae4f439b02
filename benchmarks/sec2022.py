"""The experiments of Yin, Zhang and Yu (SEC 2022) on modelled Edge TPUs, each beside what the paper states.

    python benchmarks/sec2022.py                   # all parts: about two minutes
    python benchmarks/sec2022.py --only table2     # one of the parts below
    python benchmarks/sec2022.py --short           # a little of each, for CI

speed      Figure 6: three strategies against the compiler's cuts, 11 networks in 2 to 6 stages, 165 rows
memory     Figure 7: cache and DRAM of each stage of ResNet152 and DenseNet201, as a table and a picture
energy     Figures 8 and 9: watts and joules a frame by stated watts
table1     Table I by the compiler's cuts and by the exact ones
table2     Table II row by row: what its first cuts are, and what the model makes of them
table3     Table III: operators, in-degree and depth of the eleven graphs
together   Figure 11: ResNet101 and DenseNet169 merged, in 2 to 5 stages
edges      communication by the paper's counting: how often its optimum is another one, and at what difference
solving    Figure 10: seconds of solving by network and stages

No Edge TPU was at hand: all times are those of the simulator (`cost/simulate.py`) on the calibrated model of Edge TPUs
at one USB hub, and some also on a path of their own. Its worst error against published measurements is a factor of two
(`benchmarks/edgetpu_model.py`). The compiler's cuts are modelled too, see `sec2022_instances.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from planner import PUBLISHED
from sec2022_bytes import edges, memory
from sec2022_instances import Instance, Keeper, instances
from sec2022_table2 import table_2
from sec2022_tables import solving, table_1, table_3, together
from sec2022_times import energy, speed


@dataclass(frozen=True)
class Run:
    """What the parts share: their instances, and the options."""

    found: list[Instance]
    options: argparse.Namespace


PARTS: dict[str, Callable[[Run], None]] = {
    "speed": lambda run: speed(run.found),
    "memory": lambda run: memory(run.found, run.options.output),
    "energy": lambda run: energy(run.found, run.options.busy_w, run.options.idle_w),
    "table1": lambda run: table_1(run.options.short),
    "table2": lambda run: table_2(),
    "table3": lambda run: table_3(),
    "together": lambda run: together(run.options.short, run.options.limit, Keeper(run.options.keep)),
    "edges": lambda run: edges(run.found),
    "solving": lambda run: solving(run.options.short),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be given several times")
    parser.add_argument("--short", action="store_true", help="one network on 2 and 6 devices, for CI")
    parser.add_argument("--output", type=Path, default=Path("out/sec2022"), help="the folder of the pictures")
    parser.add_argument("--keep", type=Path, help="a folder in which plans are kept, and found by a later run")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each search of merged graphs")
    parser.add_argument(
        "--busy-w",
        type=float,
        default=2.0,
        help="watts of an Edge TPU that works; 2.0: Coral's USB Accelerator datasheet 1.4, `4 TOPS, using 2 watts`",
    )
    parser.add_argument(
        "--idle-w", type=float, default=0.5, help="watts of one that waits; 0.5 is assumed, no datasheet states it"
    )
    options = parser.parse_args()
    networks, counts = (("ResNet50",), (2, 6)) if options.short else (PUBLISHED, range(2, 7))
    run = Run(instances(networks, counts, Keeper(options.keep)), options)
    for name, part in PARTS.items():
        if options.only is None or name in options.only:
            part(run)


if __name__ == "__main__":
    main()
