"""The report of `ieee_access.py`: Markdown tables, with the published rows beside them, and links to the figures.

It takes what `ieee_measure.py` returns, as figures.json holds it. Next: ieee_figures.py, which draws.
"""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ieee_figures

from tvm_pipeline.files import write_bytes
from tvm_pipeline.report import TextTable, duration, size
from tvm_pipeline.report.tables import fps, joules, percent, relative_error

PUBLISHED = json.loads((Path(__file__).parent / "ieee_published.json").read_text())
THERE = PUBLISHED["machine"]
TWO = "two stages"

Row = dict[str, Any]


def write(found: Row, folder: Path) -> Path:
    """Write report.md and its pictures into the folder; return its path."""
    pictures = ieee_figures.draw_all(found, folder)
    parts = [
        "# IEEE Access 2023 on this machine",
        _opening(found),
        "## Table 2: the networks",
        _networks(found).markdown(),
        "## Tables 3 and 4: throughput",
        "Expected is what the planner predicts from the profile. Spread is the range of the middle half of the rounds "
        "over their median. The configurations of a network took turns; the fastest stands out.",
        *_throughput(found),
        *_errors(found),
        *_pictures(pictures, "8", "9"),
        *_sweep(found),
        *_pictures(pictures, "4", "5", "6", "cuts"),
        *_schedules(found),
        *_pictures(pictures, "11"),
        *_loads(found),
        *_pictures(pictures, "12"),
        "## What is missing",
        "\n".join(f"- {line}" for line in _missing(found)),
        "## Environment",
        TextTable("", ("measured with", ""), tuple(found["environment"].items())).markdown(),
        "\n".join(f"- warning: {line}" for line in found["warnings"]),
        f"```\n{shlex.join(found['command'])}\n```",
        f"It took {found['took_s']:.0f} s.",
    ]
    path = folder / "report.md"
    write_bytes(path, ("\n\n".join(part.strip("\n") for part in parts if part) + "\n").encode())
    return path


def _opening(found: Row) -> str:
    targets = {device["name"]: device["target"] for device in found["devices"]}
    first, second = found["pair"]
    return (
        f"The two devices are {first} (`{targets[first]}`) and {second} (`{targets[second]}`), of "
        f"{found['environment']['processor']}; {found['environment']['date']}. Rows marked *{THERE}* are copied from "
        f"{PUBLISHED['source']}: another machine, whose figures no figure of this one has to equal."
    )


def _networks(found: Row) -> TextTable:
    rows = []
    for row in found["networks"]:
        known = PUBLISHED["networks"].get(row["network"], {})
        paper = (str(known.get("layers", "-")), known.get("modules", "-"))
        figures = (str(row["operators"]), f"{row['macs'] / 1e6:.0f} M", size(row["param_bytes"]))
        rows.append((known.get("title", row["network"]), *figures, *paper))
    columns = (
        "network",
        "operators here",
        "multiply-accumulates",
        "parameters",
        "layers, published",
        "modules, published",
    )
    return TextTable("Table 2", columns, tuple(rows))


def _throughput(found: Row) -> Iterable[str]:
    """Yield a table for each kind of kernels, with the published row of each network behind its rows."""
    kinds = dict.fromkeys(row["kernels"] for row in found["configurations"])
    if by := ", ".join(dict.fromkeys(row["joules_by"] for row in found["configurations"] if row["joules_by"])):
        yield f"Joules a frame are those of {by}."
    with_joules = any(row["expected_j"] is not None or row["measured_j"] is not None for row in found["configurations"])
    columns = ["network", "configuration", "operators on devices", "expected fps", "measured fps", "spread", "error"]
    columns += ["over the best device", "latency expected", "latency measured"]
    columns += ["J/frame expected", "J/frame measured"] if with_joules else []
    for kernels in kinds:
        rows, marked = [], set()
        for network in dict.fromkeys(row["network"] for row in found["configurations"]):
            here = [row for row in found["configurations"] if (row["network"], row["kernels"]) == (network, kernels)]
            alone = max((row["measured_fps"] for row in here if row["configuration"].endswith(" alone")), default=None)
            best = max((row["measured_fps"] for row in here), default=None)
            for row in here:
                if row["measured_fps"] == best:
                    marked.add(len(rows))
                rows.append(_configuration(network, row, alone, with_joules))
            if here and (known := PUBLISHED["throughput"][kernels].get(network)):
                rows.append(_published(network, known, len(columns)))
        number = 3 if kernels == "default" else 4
        yield f"### Table {number}: {kernels} kernels"
        yield TextTable("", tuple(columns), tuple(rows), frozenset(marked)).markdown()


def _configuration(network: str, row: Row, alone: float | None, with_joules: bool) -> tuple[str, ...]:
    cells = [network, row["configuration"], row["plan"], fps(row["expected_fps"]), fps(row["measured_fps"])]
    cells += [percent(row["spread"]), relative_error(row["expected_fps"], row["measured_fps"])]
    cells.append(f"{row['measured_fps'] / alone:.2f}" if alone else "-")
    cells += [duration(row["expected_latency_s"]), duration(row["measured_latency_s"])]
    return (*cells, *([joules(row["expected_j"]), joules(row["measured_j"])] if with_joules else []))


def _published(network: str, known: Row, columns: int) -> tuple[str, ...]:
    measured = f"{known['measured_fps']} ± {known['plus_minus_fps']}"
    error = relative_error(known["expected_fps"], known["measured_fps"])
    cells = (network, f"*{THERE}*", known["cut"], str(known["expected_fps"]), measured, "-", error)
    return cells + ("-",) * (columns - len(cells))


def _errors(found: Row) -> Iterable[str]:
    """Yield how far expected throughputs are off, as the paper's were: over networks and kernels, best two stages."""
    by = {TWO: [], "all configurations": []}
    for row in found["configurations"]:
        error = abs(row["expected_fps"] / row["measured_fps"] - 1)
        by["all configurations"].append(error)
        if row["configuration"] == TWO:
            by[TWO].append(error)
    there = [
        abs(each["expected_fps"] / each["measured_fps"] - 1)
        for kind in PUBLISHED["throughput"].values()
        for each in kind.values()
    ]
    rows = [(name, *_summary(errors)) for name, errors in by.items() if errors]
    rows.append((f"best two stages, *{THERE}*", *_summary(there)))
    yield "### Expected against measured"
    yield TextTable("", ("throughput", "figures", "mean error", "median", "worst"), tuple(rows)).markdown()


def _summary(errors: Sequence[float]) -> tuple[str, ...]:
    return (str(len(errors)), *map(percent, (statistics.mean(errors), statistics.median(errors), max(errors))))


def _sweep(found: Row) -> Iterable[str]:
    if "sweep" not in found:
        return
    sweep = found["sweep"]
    chosen, best = sweep["chosen"], sweep["best"]
    yield f"## Every cut of {sweep['network']}"
    yield (
        f"{len(sweep['rows'])} cuts, both orders, measured in {sweep['took_s']:.0f} s. Predicted best: "
        f"{chosen['cut']}, {duration(chosen['expected_s'])} predicted, {duration(chosen['measured_s'])} measured. "
        f"Measured best: {best['cut']}, {duration(best['measured_s'])}. The period of the predicted best is "
        f"**{sweep['ratio']:.3f}** times that of the measured best."
    )
    measured = [row for row in sweep["rows"] if row["measured_s"]]
    errors = [abs(row["measured_s"] / row["expected_s"] - 1) for row in measured]
    figures = f"{percent(statistics.median(errors))} off in the median, {percent(max(errors))} at worst"
    yield f"Expected throughput of all cuts: {figures}."
    for row in sweep["rows"]:
        if row["obstacle"]:
            yield f"- {row['cut']} is not possible: {row['obstacle']}"


def _schedules(found: Row) -> Iterable[str]:
    if "schedules" not in found:
        return
    rows = found["schedules"]
    table = [
        (
            row["plan"],
            fps(row["expected_fps"]),
            fps(row["measured_fps"]),
            relative_error(row["expected_fps"], row["measured_fps"]),
            duration(row["expected_latency_s"]),
            duration(row["measured_latency_s"]),
        )
        for row in rows
    ]
    best = max(range(len(rows)), key=lambda index: rows[index]["measured_fps"])
    columns = ("operators on devices", "fps expected", "measured", "error", "latency expected", "measured")
    yield f"## Figure 11: schedules of {rows[0]['network']}, {rows[0]['kernels']} kernels"
    yield "For each order the cut predicted to be the best, one before it and one behind it; and each device alone."
    yield TextTable("", columns, tuple(table), frozenset({best})).markdown()


def _loads(found: Row) -> Iterable[str]:
    if not any(row["fps"] for row in found["loads"]):
        return
    titles = list(dict.fromkeys(title for row in found["loads"] for title in row["fps"]))
    rows = []
    for row in found["loads"]:
        rates = row["fps"]
        fixed = [rate for title, rate in rates.items() if title not in row.get("walks", {})]
        best = max(fixed, default=None)
        cells = [fps(rates.get(title)) for title in titles]
        again = [
            f"{rates[title] / best:.2f}" if best and title in rates else "-" for title in ("Algorithm 2", "re-planning")
        ]
        rows.append((row["load"], *cells, fps(best), *again))
    columns = ("load", *titles, "best fixed plan", "Algorithm 2 / best", "re-planning / best")
    yield f"## Table 5: {found['sweep']['network']} under loads, frames a second"
    yield "Plans were chosen without load. `two stages` is the static cut, where Algorithm 2 begins. Each ran once."
    yield TextTable("", columns, tuple(rows)).markdown()
    yield "\n".join(f"- {row['load']}: stands for {row['stands_for']}. Here: {row['here']}" for row in found["loads"])
    walks = [(row["load"], *walk) for row in found["loads"] for walk in row.get("walks", {}).items()]
    yield "\n".join(f"- {load}, {title}: {', then '.join(walk)}" for load, title, walk in walks)
    published = [
        (row["case"], str(row["gpu_fps"]), str(row["cpu_fps"]), str(row["pipeline_fps"]), row["cut"])
        for row in PUBLISHED["loads"]
    ]
    columns = (f"*{THERE}*", "GPU alone", "CPU alone", "pipeline found", "layers")
    yield TextTable("", columns, tuple(published)).markdown()


def _missing(found: Row) -> list[str]:
    lines = list(found["missing"])
    if all(row["measured_j"] is None for row in found["configurations"]):
        lines.append("measured energy (a part of Figures 9 and 11): no sensor of power, and no watts of the devices")
    if all(row["kernels"] == "default" for row in found["configurations"]):
        lines.append("Table 4: tuned kernels were not measured; --kernels default,tuned does that")
    lines += [f"load {row['load']}: {row['here']}" for row in found["loads"] if not row["fps"]]
    lines.append(
        "Figures 1, 7 and 10: 1 is a part of Table 3, 7 compares frameworks (see benchmarks/peers.py), 10 is a sketch"
    )
    return lines


def _pictures(pictures: dict[str, Path], *names: str) -> Iterable[str]:
    for name in names:
        if name in pictures:
            title = f"Figure {name}" if name.isdigit() else "Every cut"
            yield f"![{title}]({pictures[name].name})"
