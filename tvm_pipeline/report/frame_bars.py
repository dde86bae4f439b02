"""Where the time of a frame goes, as a picture: a bar for each device, a piece for each part of its work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tvm_pipeline.cost.frame_time import IDLE, TRANSFER
from tvm_pipeline.report.drawing import INK, PALETTE, new_figure, save_figure


def draw_frame_time(parts: Mapping[str, Mapping[str, float]], title: str, path: Path | str) -> None:
    """Draw what `cost.frame_time.frame_time` returned; idle time is left white, transfers are hatched.

    Raises:
        PipelineError: matplotlib is not installed, or the file cannot be written.
        OptionError: `path` is neither .png nor .svg.
    """
    work = dict.fromkeys(name for row in parts.values() for name in row if name not in (TRANSFER, IDLE))
    order = [*work, TRANSFER, IDLE]
    figure = new_figure(11, 1.9 + 0.62 * len(parts))
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot()
    left = dict.fromkeys(parts, 0.0)
    for index, name in enumerate(order):
        width_s = {device: row.get(name, 0.0) for device, row in parts.items()}
        colour = "white" if name == IDLE else PALETTE[index % len(PALETTE)]
        bars = axes.barh(
            list(parts),
            [1e3 * seconds for seconds in width_s.values()],
            0.7,
            [1e3 * seconds for seconds in left.values()],
            label=name.removeprefix("host/"),
            facecolor=colour,
            edgecolor=INK,
            linewidth=0.6,
            hatch="//////" if name == TRANSFER else None,
        )
        longest_s = max(sum(row.values()) for row in parts.values())
        texts = [f"{1e3 * s:.1f}" if s > 0.03 * longest_s and name != IDLE else "" for s in width_s.values()]
        axes.bar_label(bars, texts, label_type="center", fontsize=8)
        left = {device: left[device] + width_s[device] for device in parts}
    axes.invert_yaxis()
    axes.set_xlabel("ms of each device between two frames")
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(ncols=min(len(order), 9), loc="upper left", bbox_to_anchor=(0, -0.35), frameon=False, fontsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    save_figure(figure, path)
