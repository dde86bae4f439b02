"""The figures of `ieee_access.py`, as the paper has them: 4, 5, 6, 8, 9, 11 and 12, and one of every cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tvm_pipeline.report.drawing import new_figure, save_figure

Row = dict[str, Any]
COLOURS = ("#1f77b4", "#e07b00", "#2a9d4b", "#c1272d", "#8a5fbf", "#7f6a55", "#d08cb6", "#6b6b6b")
MARKERS = "os^Dvp*X"


def draw_all(found: Row, folder: Path) -> dict[str, Path]:
    """Draw each figure that was measured; return their files by the paper's numbers."""
    wanted: dict[str, tuple[str, Callable[[Any, Row], None], float]] = {
        "4": ("layers", _layers, 10),
        "5": ("sweep", _stages, 8),
        "6": ("transfers", _transfers, 6),
        "8": ("configurations", _throughput, 11),
        "9": ("configurations", _costs, 11),
        "11": ("schedules", _schedules, 10),
        "12": ("loaded_sweep", _loaded, 8),
        "cuts": ("sweep", _cuts, 8),
    }
    files = {}
    for name, (key, draw, width) in wanted.items():
        if not found.get(key):
            continue
        figure = new_figure(width, 4.2)
        figure.set_layout_engine("constrained")
        draw(figure, found)
        files[name] = folder / f"figure_{name}.png"
        save_figure(figure, files[name])
    return files


def _axes(figure: Any, title: str, x: str, y: str, place: tuple[int, int, int] = (1, 1, 1)) -> Any:
    axes = figure.add_subplot(*place)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return axes


def _ms(seconds: Sequence[float | None]) -> list[float]:
    return [math.nan if each is None else each * 1e3 for each in seconds]


def _layers(figure: Any, found: Row) -> None:
    devices = found["layers"]["devices"]
    axes = _axes(figure, f"Figure 4: {found['layers']['network']}, operator by operator", "operator", "ms")
    for index, (name, seconds) in enumerate(devices.items()):
        at = [position + (index - 0.5) * 0.4 for position in range(len(seconds))]
        axes.bar(at, _ms(seconds), 0.4, color=COLOURS[index], label=name)
    axes.legend(frameon=False)


def _stages(figure: Any, found: Row) -> None:
    sweep = found["sweep"]
    first, second = found["pair"]
    rows = [row for row in sweep["rows"] if row["devices"] == [first, second] and len(row["expected_stages_s"]) == 2]
    axes = _axes(figure, f"Figure 5: {sweep['network']}, {first} | {second}", f"operators on {first}", "ms a frame")
    counts = [row["operators"] for row in rows]
    for index, name in enumerate((first, second)):
        expected = [row["expected_stages_s"][index] for row in rows]
        seen = [row["measured_stages_s"][index] if len(row["measured_stages_s"]) == 2 else None for row in rows]
        axes.plot(counts, _ms(expected), "--", color=COLOURS[index], label=f"{name}, expected")
        axes.plot(counts, _ms(seen), MARKERS[index], color=COLOURS[index], markersize=4, label=f"{name}, measured")
    if rows:
        best = min(rows, key=lambda row: row["expected_s"])
        axes.axvline(best["operators"], color=COLOURS[3], linewidth=1, label=f"expected best: {best['operators']}")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)


def _transfers(figure: Any, found: Row) -> None:
    axes = _axes(figure, "Figure 6: transfers", "MB", "ms")
    for index, row in enumerate(found["transfers"]):
        name, counts = " to ".join(row["devices"]), [each / 1e6 for each in row["bytes"]]
        axes.plot(counts, _ms(row["measured_s"]), MARKERS[index], color=COLOURS[index], label=f"{name}, measured")
        axes.plot(counts, _ms(row["fitted_s"]), "--", color=COLOURS[index], label=f"{name}, as planned with")
    axes.legend(frameon=False, fontsize=8)


def _throughput(figure: Any, found: Row) -> None:
    rows = found["configurations"]
    titles = list(dict.fromkeys(row["configuration"] for row in rows))
    groups = list(dict.fromkeys((row["network"], row["kernels"]) for row in rows))
    axes = _axes(figure, "Figure 8: frames a second over the faster device alone", "", "ratio")
    width = 0.8 / len(titles)
    for index, title in enumerate(titles):
        heights = []
        for group in groups:
            here = [row for row in rows if (row["network"], row["kernels"]) == group]
            alone = max(row["measured_fps"] for row in here if row["configuration"].endswith(" alone"))
            heights.append(next((r["measured_fps"] / alone for r in here if r["configuration"] == title), math.nan))
        at = [position + (index - (len(titles) - 1) / 2) * width for position in range(len(groups))]
        axes.bar(at, heights, width, color=COLOURS[index % len(COLOURS)], label=title)
    axes.set_xticks(range(len(groups)), [f"{network}\n{kernels}" for network, kernels in groups], fontsize=8)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left", bbox_to_anchor=(1, 1))


def _costs(figure: Any, found: Row) -> None:
    """Draw throughput against latency and, where joules are known, against energy."""
    rows = found["configurations"]
    joules = [row["measured_j"] if row["measured_j"] is not None else row["expected_j"] for row in rows]
    panels = [("latency of a frame alone, ms", [row["measured_latency_s"] * 1e3 for row in rows])]
    if any(each is not None for each in joules):
        panels.append(("J a frame", [math.nan if each is None else each for each in joules]))
    networks = list(dict.fromkeys(row["network"] for row in rows))
    titles = list(dict.fromkeys(row["configuration"] for row in rows))
    for panel, (label, figures) in enumerate(panels, 1):
        title = "Figure 9: throughput against latency" if panel == 1 else "and against energy"
        axes = _axes(figure, title, "frames a second", label, (1, len(panels), panel))
        axes.set_xscale("log")
        axes.set_yscale("log")
        for row, height in zip(rows, figures, strict=True):
            colour = COLOURS[networks.index(row["network"]) % len(COLOURS)]
            marker = MARKERS[titles.index(row["configuration"]) % len(MARKERS)]
            hollow = "full" if row["kernels"] == "default" else "none"
            axes.plot(row["measured_fps"], height, marker, color=colour, fillstyle=hollow)
        if panel == 1:
            for index, network in enumerate(networks):
                axes.plot([], [], "-", color=COLOURS[index % len(COLOURS)], label=network)
            for index, name in enumerate(titles):
                axes.plot([], [], MARKERS[index % len(MARKERS)], color="#444444", label=name)
            if any(row["kernels"] == "tuned" for row in rows):
                axes.plot([], [], "o", color="#444444", fillstyle="none", label="hollow: tuned kernels")
            figure.legend(frameon=False, fontsize=8, loc="outside right")


def _schedules(figure: Any, found: Row) -> None:
    rows = found["schedules"]
    places = range(len(rows))
    names = [row["plan"].replace(" | ", "\n") for row in rows]
    panels = (("frames a second", "fps", 1.0), ("latency, ms", "latency_s", 1e3))
    for panel, (label, key, scale) in enumerate(panels, 1):
        title = f"Figure 11: {rows[0]['network']}, {rows[0]['kernels']} kernels" if panel == 1 else ""
        axes = _axes(figure, title, "", label, (2, 1, panel))
        for index, kind in enumerate(("expected", "measured")):
            heights = [(row[f"{kind}_{key}"] or math.nan) * scale for row in rows]
            axes.bar(
                [place + (index - 0.5) * 0.38 for place in places], heights, 0.38, color=COLOURS[index], label=kind
            )
        axes.set_xticks(places, names if panel == 2 else [""] * len(rows), fontsize=7)
        if panel == 1:
            axes.legend(frameon=False, fontsize=8)


def _loaded(figure: Any, found: Row) -> None:
    sweep = found["loaded_sweep"]
    first, second = sweep["devices"]
    title = f"Figure 12: {sweep['network']}, {first} | {second}, load {sweep['load']}"
    axes = _axes(figure, title, f"operators on {first}", "period, ms")
    rows = sorted(sweep["rows"], key=lambda row: row["operators"])
    period = {row["operators"]: row["measured_s"] * 1e3 for row in rows}
    axes.plot(list(period), list(period.values()), "o-", color=COLOURS[0], markersize=4, label="measured")
    walk = _walk(found, first, second)
    if walk:
        heights = [period.get(count, math.nan) for count in walk]
        axes.plot(walk, heights, "s--", color=COLOURS[3], fillstyle="none", markersize=9, label="Algorithm 2's walk")
        axes.plot(walk[-1], heights[-1], "*", color=COLOURS[3], markersize=15, label=f"its answer: {walk[-1]}")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)


def _walk(found: Row, first: str, second: str) -> list[int]:
    """Return the operators on the first device at each cut that Algorithm 2 tried in this order of the devices."""
    load = found["loaded_sweep"]["load"]
    walks = [
        row["walks"]["Algorithm 2"]
        for row in found["loads"]
        if row["load"] == load and "Algorithm 2" in row.get("walks", {})
    ]
    counts = []
    for shown in walks[0] if walks else []:
        stages = [stage.split(" ", 1) for stage in shown.split(" | ")]
        if [device for _, device in stages] == [first, second] or [device for _, device in stages] == [first]:
            counts.append(int(stages[0][0]))
        elif [device for _, device in stages] == [second]:
            counts.append(0)
    return counts


def _cuts(figure: Any, found: Row) -> None:
    sweep = found["sweep"]
    axes = _axes(figure, f"Every cut of {sweep['network']}", "operators on the first device", "period, ms")
    for index, devices in enumerate((found["pair"], found["pair"][::-1])):
        rows = [row for row in sweep["rows"] if row["devices"] == devices]
        counts, name = [row["operators"] for row in rows], " | ".join(devices)
        axes.plot(
            counts, _ms([row["expected_s"] for row in rows]), "--", color=COLOURS[index], label=f"{name}, expected"
        )
        axes.plot(
            counts,
            _ms([row["measured_s"] for row in rows]),
            "o-",
            color=COLOURS[index],
            markersize=3.5,
            label=f"{name}, measured",
        )
    for key, marker, label in (("chosen", "*", "expected best"), ("best", "o", "measured best")):
        row = sweep[key]
        axes.plot(
            row["operators"],
            row["measured_s"] * 1e3,
            marker,
            color=COLOURS[3],
            markersize=14,
            fillstyle="none",
            linestyle="",
            label=label,
        )
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
