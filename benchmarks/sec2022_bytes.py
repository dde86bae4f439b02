"""Figure 7 of SEC 2022, and its two ways to count communication."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from planner import CACHE_BYTES, show
from sec2022_instances import STRATEGIES, Instance, by_edges

from tvm_pipeline.report.drawing import new_figure, save_figure

DRAWN = ("ResNet152", "DenseNet201")  # of the networks that the paper draws
COLOURS = ("#5a5a5a", "#b0b0b0", "#1f77b4", "#e07b00", "#2a9d4b")
MIB = 2**20


def memory(found: Sequence[Instance], folder: Path) -> None:
    """Print cache less parameters of each stage in MiB, negative where they overflow, and draw it as Figure 7 does."""
    networks = [name for name in DRAWN if any(e.network == name for e in found)] or [found[0].network]
    here = [each for each in found if each.network in networks]
    left = {
        (id(e), name): [(CACHE_BYTES - size) / MIB for size in e.stage_bytes(name)] for e in here for name in e.plans
    }
    lines = [
        (e.network, e.stages, name, f"{min(left[id(e), name]):+.2f}", " ".join(f"{x:+.2f}" for x in left[id(e), name]))
        for e in here
        for name in e.plans
    ]
    columns = ("network", "stages", "cuts", "least", "cache of 8 MiB less parameters of each stage, MiB")
    show("Figure 7: negative MiB are fetched from DRAM for every frame", columns, lines)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "figure_7.png"
    _draw(here, networks, left, path)
    print(f"written: {path}\n")


def _draw(
    found: Sequence[Instance], networks: Sequence[str], left: dict[tuple[int, str], list[float]], path: Path
) -> None:
    figure = new_figure(3.1 * max(sum(e.network == n for e in found) for n in networks), 2.9 * len(networks))
    figure.set_layout_engine("constrained")
    for row, network in enumerate(networks):
        here = [each for each in found if each.network == network]
        for column, each in enumerate(here):
            axes = figure.add_subplot(len(networks), len(here), row * len(here) + column + 1)
            for index, name in enumerate(each.plans):
                at = [stage + (index - 2) * 0.17 for stage in range(each.stages)]
                axes.bar(at, left[id(each), name], 0.17, color=COLOURS[index], label=name)
            axes.axhline(0, color="black", linewidth=0.6)
            axes.set_title(f"{network}, {each.stages} stages", fontsize=9, loc="left")
            axes.set_xticks(range(each.stages), [f"s{stage}" for stage in range(each.stages)])
            if not column:
                axes.set_ylabel("MiB of cache left (< 0: DRAM)")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    save_figure(figure, path)


def edges(found: Sequence[Instance]) -> None:
    """Print how often the optimum by edges is none by tensors, and the reverse, and what that does to the times."""
    lines, apart, alike = [], [], []
    differing = dict.fromkeys(("by tensors", "by edges"), 0)
    for each in found:
        for order, name in STRATEGIES.items():
            ours, theirs = each.plans[name], each.keeper.plan(each.problem(by_edges(order)), "cp-sat")
            tensors = [plan.predicted.communication_bytes or 0 for plan in (ours, theirs)]
            counted = [plan.predicted.edge_communication_bytes or 0 for plan in (ours, theirs)]
            worse = {"by tensors": tensors[1] > tensors[0], "by edges": counted[0] > counted[1]}
            for which, is_worse in worse.items():
                differing[which] += is_worse
            ms = each.ms(theirs.stages)
            (apart if any(worse.values()) else alike).append(ms / each.times_ms[name])
            if any(worse.values()):
                sizes = [f"{ours / 1e3:.0f} / {theirs / 1e3:.0f}" for ours, theirs in (tensors, counted)]
                lines.append((each.network, each.stages, name, *sizes, f"{each.times_ms[name]:.1f} / {ms:.1f}"))
    columns = ("network", "stages", "order", "kB by tensors", "kB by edges", "simulated ms")
    show("Optimum by tensors / optimum by edges, where one count tells them apart", columns, lines)
    print(f"Of {len(apart) + len(alike)} instances:")
    print(f"the plan by edges is not optimal by tensors in {differing['by tensors']};")
    print(f"the plan by tensors is not optimal by edges in {differing['by edges']}.")
    print("Simulated time of the plan by edges over that by tensors:")
    print(f"{_spread(apart)} of the {len(apart)} where a count differs;")
    print(f"{_spread(alike)} of the {len(alike)} others, where both are optimal by both and may still be two plans.\n")


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return "none"
    return f"{min(ratios):.3f} to {max(ratios):.3f}, median {statistics.median(ratios):.3f}"
