"""Tables: the candidates of a decision, the devices, the stages, and predicted beside measured.

Each function returns a TextTable, which rich prints (`console.print(candidates_table(decision))`) and which
becomes Markdown for `markdown.py`. Figures are for people: ms, MB, percent; `-` means "not known".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.table import Table
from rich.text import Text

from tvm_pipeline.core.frame_energy import FrameEnergy
from tvm_pipeline.core.plan import Decision, Measured, Plan, Prediction, describe, margin
from tvm_pipeline.core.platform import Platform, Transfer, core_ranges
from tvm_pipeline.core.problem import Objective, counts_edges
from tvm_pipeline.core.profile import DeviceProfile, IdlePower, Profile
from tvm_pipeline.core.statistics import RunStatistics
from tvm_pipeline.cost.evaluate import Evaluation
from tvm_pipeline.planning.deployment import Deployment
from tvm_pipeline.power import Sensor

UNKNOWN = "-"
SINGLE_OBJECTIVES = ("throughput", "latency", "energy")


@dataclass(frozen=True, slots=True)
class TextTable:
    """Cells under columns: the first column holds text, the others figures. Rows whose index is `marked` stand out.

    Attributes:
        note: a sentence under the table.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: frozenset[int] = frozenset()
    note: str = ""

    def __rich__(self) -> Table:
        table = Table(title=self.title, title_justify="left", caption=Text(self.note), caption_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left", overflow="fold")
        for index, row in enumerate(self.rows):
            # Text, since a target such as `llvm -mattr=[...]` must not be read as markup.
            table.add_row(*map(Text, row), style="bold green" if index in self.marked else None)
        return table

    def markdown(self) -> str:
        """Return the table in GitHub's Markdown, without its title."""
        lines = [_line(self.columns), _line((":--", *["--:"] * (len(self.columns) - 1)))]
        for index, row in enumerate(self.rows):
            cells = [cell.replace("|", "\\|") for cell in row]
            lines.append(_line(f"**{cell}**" if index in self.marked and cell else cell for cell in cells))
        return "\n".join(lines) + "\n" + (f"\n{self.note}\n" if self.note else "")


def candidates_table(decision: Decision) -> TextTable:
    """Return every plan that was considered; the chosen one is marked, with its lead over the others.

    The lead is the measured one where both plans were measured, and else that of the predictions. The latencies are
    that of one frame in an idle pipeline, and under load: the median and, where they were simulated, the quantiles at
    90 and 99 %. The note says what no plan can exceed.
    """
    figures: dict[str, Callable[[Plan], str]] = {
        "fps": lambda plan: _interval(plan.predicted.throughput_fps, plan.predicted.uncertainty),
        "latency, one frame": lambda plan: duration(plan.predicted.latency_s),
        "under load": _under_load,
        "J/frame": lambda plan: joules(plan.predicted.energy_j),
    }
    if decision.plan.objective not in SINGLE_OBJECTIVES:
        figures = {
            "memory": lambda plan: size(plan.predicted.memory_bytes),
            "DRAM": lambda plan: size(plan.predicted.dram_bytes),
            "communication": lambda plan: size(plan.predicted.communication_bytes),
            "edge communication": lambda plan: size(plan.predicted.edge_communication_bytes),
            **figures,
        }
    if not counts_edges(decision.plan.objective):
        figures.pop("edge communication", None)
    # A column in which everything is unknown is left out.
    known = {name: show for name, show in figures.items() if any(show(p) != UNKNOWN for p in decision.candidates)}
    found = {result.plan.stages: _as_measured(result) for result in decision.measured}
    columns = ["plan", *known, *(["measured"] if found else []), "chosen is ahead by"]
    rows, marked = [], set()
    for index, plan in enumerate(decision.candidates):
        chosen = (plan.stages, plan.power_mode) == (decision.plan.stages, decision.plan.power_mode)
        if chosen:
            marked.add(index)
        row = [describe(plan), *(show(plan) for show in known.values())]
        measured = found.get(plan.stages)
        if found:
            row.append(in_units_of(plan.objective, measured.value if measured else None))
        best = found.get(decision.plan.stages)  # none for a plan that a run changed to
        lead = margin(best, measured) if best and measured else margin(decision.plan, plan)
        rows.append((*row, "chosen" if chosen else percent(lead, signed=True)))
    batch = f", {decision.plan.batch} frames a call" if decision.plan.batch > 1 else ""
    title = f"Candidates for best {decision.plan.objective}{batch}"
    return TextTable(title, tuple(columns), tuple(rows), frozenset(marked), best_possible(decision))


def _under_load(plan: Plan) -> str:
    """Return the latency under load: `60.0 / 64.1 / 80.0 ms` for 50, 90 and 99 %, where these were simulated."""
    quantiles = (plan.predicted.latency_p90_s, plan.predicted.latency_p99_s)
    shown = [duration(seconds) for seconds in (plan.loaded_latency_s, *quantiles) if seconds is not None]
    unit = shown[-1].partition(" ")[2] if shown else ""
    return " / ".join([*(one.removesuffix(f" {unit}") for one in shown[:-1]), *shown[-1:]]) or UNKNOWN


def best_possible(decision: Decision) -> str:
    """Return a sentence with what no plan of the kinds that were considered can exceed; empty if that is not known."""
    plan, bounds = decision.plan, [candidate.bound for candidate in decision.candidates if candidate.bound]
    if plan.value is None or len(bounds) < len(decision.candidates):
        return ""
    if plan.objective not in SINGLE_OBJECTIVES:
        return f"The chosen plan is at most {percent(plan.gap)} above the best possible."
    is_rate = plan.objective == "throughput"
    bound = max(bounds) if is_rate else min(bounds)
    distance = abs(plan.value[0] - bound[0]) / max(abs(plan.value[0]), 1e-12)
    limit = f"{in_units_of(plan.objective, bound)}{' fps' if is_rate else ''}"
    verb = "exceed" if is_rate else "take less than"
    if distance < 0.0005:
        return f"No plan of these kinds can {verb} {limit}: by its prediction, the chosen one is the best possible."
    side = "above" if is_rate else "below"
    return f"No plan of these kinds can {verb} {limit} ({percent(distance)} {side} the chosen one)."


def deployment_table(deployment: Deployment) -> TextTable:
    """Return where each model runs, at which rate, and how busy each device is then."""
    rows = []
    for plan, requested, reached in zip(deployment.plans, deployment.rates_fps, deployment.reachable_fps, strict=True):
        rows.append((f"{plan.graph}: {describe(plan)}", fps(requested), fps(reached)))
    for name, share in deployment.utilisation.items():
        rows.append((f"{name} is busy", percent(share), ""))
    for name, size in deployment.memory_bytes.items():
        rows.append((f"{name} holds, bytes", str(size), ""))
    proof = "optimal" if deployment.status == "optimal" else f"feasible, gap {percent(deployment.gap)}"
    return TextTable(f"Deployment ({proof})", ("model", "asked, fps", "reached, fps"), tuple(rows))


def devices_table(platform: Platform, profile: Profile | None = None) -> TextTable:
    """Return the devices of a platform and, with a profile, how fast each runs the whole model.

    If a device was measured to receive and send tensors, two columns show latency and bandwidth of that.
    """
    columns = ["device", "backend", "cores", "target", "memory", "power"]
    columns += ["whole model", "all busy", "spread"] if profile else []
    has_transfers = profile is not None and any(d.receive or d.send for d in profile.devices.values())
    columns += ["receive", "send"] if has_transfers else []
    rows = []
    for device in platform.devices:
        row = [device.label, device.backend, " ".join(core_ranges(device.cores)) or UNKNOWN, device.target or UNKNOWN]
        row.append(UNKNOWN if device.memory_bytes is None else size(device.memory_bytes))
        row.append(UNKNOWN if device.active_w is None else f"{device.active_w:.3g} W")
        measured = profile.devices.get(device.name) if profile else None
        if profile:
            row += _measured(measured)
        if has_transfers:
            row += [_transfer(measured.receive), _transfer(measured.send)] if measured else [UNKNOWN, UNKNOWN]
        rows.append(tuple(row))
    return TextTable(f"Devices of {platform.name}", tuple(columns), tuple(rows))


def joules_table(platform: Platform, idle: IdlePower, profile: Profile) -> TextTable:
    """Return the idle machine's power and the joules of a frame on each device above it, with their intervals.

    Args:
        idle: that of the profile.
    """
    rows = [("idle machine", f"{idle.power_w:.3g} W", f"±{percent(idle.uncertainty)}")]
    for device in platform.devices:
        found = profile.devices.get(device.name)
        whole_j = found.whole_j if found else None
        doubt = UNKNOWN if found is None or whole_j is None else f"±{percent(found.whole_j_uncertainty)}"
        rows.append((device.label, joules(whole_j), doubt))
    return TextTable(f"Joules by {idle.sensor} ({idle.covers})", ("", "J/frame above idle", "95 %"), tuple(rows))


def sensors_table(sensors: Sequence[Sensor], watts: Mapping[str, float]) -> TextTable:
    """Return the sensors of power, the best first, with the watts of each by name, where it could be read."""
    rows = []
    for sensor in sensors:
        now_w = watts.get(sensor.name)
        rows.append((sensor.name, sensor.covers, UNKNOWN if now_w is None else f"{now_w:.4g} W"))
    return TextTable("Sensors of power", ("sensor", "what it covers", "now"), tuple(rows))


def stages_table(evaluation: Evaluation, plan: Plan, statistics: RunStatistics | None = None) -> TextTable:
    """Return the seconds of a frame in each stage on each of its devices, predicted and, after a run, measured.

    The stage that sets the pace is marked. Measured figures are medians; `bubble` is the share of time in
    which the stage waited.
    """
    columns = ["stage", "operators", "compute", "transfer", "together"]
    columns += ["measured compute", "measured transfer", "wait", "bubble"] if statistics else []
    # Both are in the order of the plan; a measured stage may have the name of a stand-in.
    measured = dict(enumerate(statistics.stages)) if statistics else {}
    rows = []
    for index, cost in enumerate(evaluation.costs):
        found = measured.get(index)
        row = [f"{cost.stage} on {found.device if found else cost.device}", str(len(plan.stages[cost.stage].operators))]
        row += [duration(cost.compute_s), duration(cost.transfer_s), duration(cost.seconds)]
        if statistics:
            figures = (found.compute_s, found.transfer_s, found.wait_s) if found else (None, None, None)
            row += [*map(duration, figures), percent(found.bubble_share if found else None)]
        rows.append(tuple(row))
    marked = frozenset(i for i, cost in enumerate(evaluation.costs) if cost.stage == evaluation.bottleneck)
    return TextTable("Stages, a frame (the bottleneck stands out)", tuple(columns), tuple(rows), marked)


# A pipeline is full if it holds at least this share of the frames that it may hold.
FULL = 0.7


def is_source_limited(statistics: RunStatistics, inside: int | None) -> bool:
    """Return whether the source set the pace of a run: fewer frames were inside than the pipeline may hold.

    By Little's law, rate times latency are the frames inside.
    """
    rate, latency_s = statistics.throughput_fps, statistics.latency_p50_s
    return inside is not None and rate is not None and latency_s is not None and rate * latency_s < FULL * inside


def statistics_table(
    predicted: Prediction,
    statistics: RunStatistics,
    energy: FrameEnergy | None = None,
    inside: int | None = None,
    *,
    paced: bool = False,
) -> TextTable:
    """Return predicted beside measured figures; the error is that of the prediction, relative to the measurement.

    The predicted latencies under load are those that were simulated; else that of a full pipeline follows from the
    frames inside and the rate. If a source with its own pace is slower than the pipeline, frames meet no queue, and the
    predicted throughput is what the pipeline could do: it has no error. Where nothing was predicted, one column stays.

    Args:
        energy: the joules of a frame, with who says so; None where nothing tells.
        inside: how many frames the pipeline may hold; None if that is not known.
        paced: frames come when the source has them, as those of a camera, and not when the pipeline takes them.
    """
    by_source = paced and is_source_limited(statistics, inside)
    fps_error = UNKNOWN if by_source else relative_error(predicted.throughput_fps, statistics.throughput_fps)
    loaded_s = None if inside is None else predicted.loaded_latency_s(inside)
    expected_s, under = (predicted.latency_s, "") if by_source else (loaded_s, " under load")
    if predicted.latency_p50_s is not None:
        expected_s = predicted.latency_p50_s
    rows = [
        ("throughput, fps", fps(predicted.throughput_fps), fps(statistics.throughput_fps), fps_error),
        *([] if by_source else [("latency, one frame", duration(predicted.latency_s), UNKNOWN, UNKNOWN)]),
        *(
            (name, duration(expected), duration(found), relative_error(expected, found))
            for name, expected, found in (
                (f"latency{under}, median", expected_s, statistics.latency_p50_s),
                ("latency, 90 %", predicted.latency_p90_s, statistics.latency_p90_s),
                ("latency, 99 %", predicted.latency_p99_s, statistics.latency_p99_s),
            )
        ),
        ("latency, longest", UNKNOWN, duration(statistics.latency_max_s), UNKNOWN),
        ("frames", UNKNOWN, str(statistics.frames), UNKNOWN),
    ]
    if energy is not None:
        rows += _energy_rows(predicted, energy)
    elif predicted.energy_j is not None:
        rows.append(("energy, J/frame", joules(predicted.energy_j), "not measured", UNKNOWN))
    note = ""
    if by_source:
        note = (
            f"The source sets the pace: {fps(statistics.throughput_fps)} fps. The pipeline has a capacity of "
            f"{fps(predicted.throughput_fps)} fps (predicted)."
        )
    if predicted == Prediction():
        known = tuple((name, found) for name, _, found, _ in rows if found != UNKNOWN)
        return TextTable("Measured", ("", "measured"), known, note=note)
    return TextTable("Predicted and measured", ("", "predicted", "measured", "error"), tuple(rows), note=note)


def _energy_rows(predicted: Prediction, energy: FrameEnergy) -> list[tuple[str, str, str, str]]:
    """Return the joules of a frame with the idle machine's and above; those by watts are not called measured."""
    error = relative_error(predicted.energy_j, energy.energy_j) if energy.active_j is not None else UNKNOWN
    note = "" if energy.is_measured else " by watts"
    rows = [("energy, J/frame", joules(predicted.energy_j), f"{joules(energy.energy_j)}{note}", error)]
    if energy.active_j is not None:
        rows.append(("above idle, J/frame", UNKNOWN, f"{joules(energy.active_j)}{note}", UNKNOWN))
    if energy.is_measured:
        rows.append(("energy by", UNKNOWN, energy.by, UNKNOWN))
    return rows


def comparison_table(results: Sequence[Measured], notes: Sequence[str] = ()) -> TextTable:
    """Return the predicted and measured figures of plans that ran side by side; the fastest is marked.

    Args:
        notes: what stands behind the name of each plan; nothing without them.
    """
    rows = [
        (
            f"{describe(result.plan)} {note}".strip(),
            fps(result.plan.predicted.throughput_fps),
            fps(result.throughput_fps),
            relative_error(result.plan.predicted.throughput_fps, result.throughput_fps),
            percent(result.spread),
            duration(result.plan.predicted.latency_s),
            duration(result.latency_s),
            duration(result.statistics.latency_p99_s),
        )
        for result, note in zip(results, notes or ("",) * len(results), strict=True)
    ]
    fastest = max(range(len(results)), key=lambda index: results[index].throughput_fps)
    columns = ("plan", "fps predicted", "measured", "error", "spread", "latency predicted", "measured", "full, 99 %")
    title, of_energy, cells = _energy_columns(results)
    every = tuple((*row, *more) for row, more in zip(rows, cells, strict=True))
    return TextTable(f"Side by side{title}", (*columns, *of_energy), every, frozenset({fastest}))


def _energy_columns(results: Sequence[Measured]) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
    """Return what the title says of who tells the joules, their columns and their cells; none where nothing tells."""
    told = next((result.energy for result in results if result.energy), None)
    if told is None and all(result.plan.predicted.energy_j is None for result in results):
        return "", (), [() for _ in results]
    title = f"; joules {'measured ' if told.is_measured else ''}by {told.by}" if told else "; joules not measured"
    columns = "J/frame predicted", "measured" if told is None or told.is_measured else "by watts", "error", "above idle"
    cells: list[tuple[str, ...]] = []
    for result in results:
        energy, predicted_j = result.energy, result.plan.predicted.energy_j
        if energy is None:
            cells.append((joules(predicted_j), UNKNOWN, UNKNOWN, UNKNOWN))
            continue
        error = relative_error(predicted_j, energy.energy_j) if energy.active_j is not None else UNKNOWN
        cells.append((joules(predicted_j), joules(energy.energy_j), error, joules(energy.active_j)))
    return title, columns, cells


def relative_error(predicted: float | None, measured: float | None) -> str:
    """Return how far a prediction is from the measurement, such as `+3.2 %` for one that is too high."""
    return percent(None if predicted is None or not measured else predicted / measured - 1, signed=True)


def duration(seconds: float | None) -> str:
    """Return seconds for people, to three figures: `840 ns`, `12.3 µs`, `4.56 ms`, `1.20 s`.

    >>> duration(0.0353)
    '35.3 ms'
    """
    return _scaled(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")), "s")


def size(count_bytes: float | None) -> str:
    """Return bytes for people, in powers of ten: `602 kB`, `4.94 MB`."""
    if count_bytes is not None and count_bytes < 1000:
        return f"{count_bytes:.0f} B"
    return _scaled(count_bytes, ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")), "B")


def joules(energy_j: float | None) -> str:
    return _scaled(energy_j, ((1.0, "J"), (1e-3, "mJ"), (1e-6, "µJ")), "J")


def fps(frames_a_second: float | None) -> str:
    return UNKNOWN if frames_a_second is None else _three_figures(frames_a_second)


def _interval(figure: float | None, uncertainty: float | None) -> str:
    """Return frames a second with their 95 % confidence interval: `56.9 ± 1.4`."""
    if figure is None or not uncertainty:
        return fps(figure)
    shown = fps(figure)
    return f"{shown} ± {figure * uncertainty:.{len(shown.partition('.')[2])}f}"


def percent(share: float | None, *, signed: bool = False) -> str:
    if share is None:
        return UNKNOWN
    return f"{share:+.1%}" if signed else f"{share:.1%}"


def _scaled(figure: float | None, units: tuple[tuple[float, str], ...], zero_unit: str) -> str:
    if figure is None:
        return UNKNOWN
    if not figure:
        return f"0 {zero_unit}"
    for unit, name in units:
        # 999.96 would round up to four figures, so it is written as 1.00 of the next unit.
        if abs(figure) >= unit * 0.9995:
            return f"{_three_figures(figure / unit)} {name}"
    unit, name = units[-1]
    return f"{figure / unit:.2g} {name}"


def _three_figures(figure: float) -> str:
    decimals = 2 if abs(figure) < 9.995 else 1 if abs(figure) < 99.95 else 0
    return f"{figure:.{decimals}f}"


def in_units_of(objective: Objective, figures: tuple[float, ...] | None) -> str:
    """Return figures of an objective, in its unit; frames a second stand without one."""
    if figures is None:
        return UNKNOWN
    show = {"throughput": fps, "latency": duration, "energy": joules}.get(objective, size)
    return ", ".join(map(show, figures))


def _as_measured(result: Measured) -> Plan:
    """Return the plan with its measured figures in the place of the predicted ones."""
    return replace(
        result.plan,
        predicted=Prediction(
            result.throughput_fps, result.latency_s, result.energy.energy_j if result.energy else None
        ),
    )


def _measured(device: DeviceProfile | None) -> list[str]:
    if device is None:
        return ["not profiled", UNKNOWN, UNKNOWN]
    whole = duration(device.whole_s)
    if device.runs < len(device.seconds):
        whole = f"runs {device.runs} of {len(device.seconds)} operators"
    if device.predicted_from:
        whole += " (predicted from shapes)"
    return [whole, f"x{device.busy_factor:.2f}", percent(device.median_spread)]


def _transfer(transfer: Transfer | None) -> str:
    """`Transfer(2e-5, 4e9)` as `20.0 µs, 4.00 GB/s`."""
    if transfer is None:
        return UNKNOWN
    latency, bandwidth = duration(transfer.latency_s), transfer.bandwidth_bytes_per_s
    return latency if bandwidth is None else f"{latency}, {size(bandwidth)}/s"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
