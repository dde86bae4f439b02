"""The tables: what rich prints and what Markdown shows hold the figures that went in, in units for people."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from tvm_pipeline.core.frame_energy import FrameEnergy
from tvm_pipeline.core.plan import Decision, Measured, Plan, Prediction, Stage
from tvm_pipeline.core.platform import Device, Platform, Transfer
from tvm_pipeline.core.profile import DeviceProfile, IdlePower, Profile
from tvm_pipeline.core.statistics import RunStatistics, StageStatistics
from tvm_pipeline.cost.evaluate import Evaluation, StageCost
from tvm_pipeline.report import (
    TextTable,
    candidates_table,
    comparison_table,
    devices_table,
    duration,
    joules_table,
    size,
    stages_table,
    statistics_table,
)

PIPELINE = Plan(
    "net",
    "chain",
    "throughput",
    (Stage(("big",), ("a", "b")), Stage(("little",), ("c",))),
    Prediction(50.0, 0.036),
    "optimal",
    (50.0,),
)
SINGLE = Plan(
    "net", "single", "throughput", (Stage(("big",), ("a", "b", "c")),), Prediction(40.0, 0.025), "feasible", (50.0,)
)
STATISTICS = RunStatistics(
    200, 48.0, 0.045, 0.050, 0.055, 0.060, (StageStatistics(0, "big", 200, 0.0205, 0.0, 0.00031, 0.015),)
)
EVALUATION = Evaluation(PIPELINE.predicted, (StageCost(0, "big", 0.020, 0.0), StageCost(1, "little", 0.015, 0.001)), 0)


def printed(table: TextTable) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def cells(table: TextTable, row: int) -> dict[str, str]:
    return dict(zip(table.columns, table.rows[row], strict=True))


def test_candidates_say_how_far_the_chosen_is_ahead() -> None:
    table = candidates_table(Decision(PIPELINE, (PIPELINE, SINGLE), ""))
    assert table.marked == {0}
    assert cells(table, 0) == {
        "plan": "chain (big | little)",
        "fps": "50.0",
        "latency, one frame": "36.0 ms",
        "under load": "80.0 ms",  # four frames inside at 50 frames a second
        "chosen is ahead by": "chosen",
    }
    assert cells(table, 1)["chosen is ahead by"] == "+25.0%"
    assert "chain (big | little)" in printed(table)
    assert (
        table.note
        == "No plan of these kinds can exceed 50.0 fps: by its prediction, the chosen one is the best possible."
    )
    assert table.note in table.markdown()


def test_one_sentence_says_what_no_plan_can_exceed() -> None:
    slower = replace(PIPELINE, predicted=Prediction(50.0, 0.036, uncertainty=0.03), bound=(52.5,))
    table = candidates_table(Decision(slower, (slower, SINGLE), ""))
    assert table.note == "No plan of these kinds can exceed 52.5 fps (5.0% above the chosen one)."
    assert cells(table, 0)["fps"] == "50.0 ± 1.5"
    unbounded = replace(SINGLE, bound=None)
    assert candidates_table(Decision(slower, (slower, unbounded), "")).note == ""


def test_measured_candidates_show_it_and_lead_by_it() -> None:
    rows = (Measured(SINGLE, 42.0, 0.01, 0.025, STATISTICS), Measured(PIPELINE, 30.0, 0.02, 0.036, STATISTICS))
    unrun = Plan("net", "replicas", "throughput", (Stage(("big", "little"), ("a", "b", "c")),), Prediction(20.0))
    table = candidates_table(Decision(SINGLE, (SINGLE, PIPELINE, unrun), "", measured=rows))
    assert table.columns[1:5] == ("fps", "latency, one frame", "under load", "measured")
    assert [row[1] for row in table.rows] == ["40.0", "50.0", "20.0"]
    assert [row[4] for row in table.rows] == ["42.0", "30.0", "-"]
    assert [row[-1] for row in table.rows] == ["chosen", "+40.0%", "+100.0%"]  # the last by predictions


def test_a_plan_that_a_run_changed_to_leads_by_prediction() -> None:
    moved = replace(
        PIPELINE, stages=(Stage(("big",), ("a",)), Stage(("little",), ("b", "c"))), predicted=Prediction(60.0)
    )
    rows = (Measured(SINGLE, 42.0, 0.01, 0.025, STATISTICS), Measured(PIPELINE, 30.0, 0.02, 0.036, STATISTICS))
    table = candidates_table(Decision(moved, (moved, SINGLE, PIPELINE), "", measured=rows))
    assert [row[-2:] for row in table.rows] == [("-", "chosen"), ("42.0", "+50.0%"), ("30.0", "+20.0%")]


def test_candidates_for_latency_and_energy() -> None:
    fast = Plan("net", "single", "latency", SINGLE.stages, Prediction(40.0, 0.020, 0.4), "optimal", (0.020,))
    slow = Plan("net", "chain", "latency", PIPELINE.stages, Prediction(50.0, 0.025), "optimal", (0.025,))
    table = candidates_table(Decision(fast, (fast, slow), ""))
    assert cells(table, 0)["J/frame"] == "400 mJ"
    assert table.note.startswith("No plan of these kinds can take less than 20.0 ms: ")
    assert cells(table, 1)["J/frame"] == "-"
    assert cells(table, 1)["chosen is ahead by"] == "+20.0%"


def test_candidates_for_bytes_show_every_part_and_no_column_of_unknowns() -> None:
    def plan(stages: tuple[Stage, ...], memory: int, communication: int) -> Plan:
        figures = Prediction(memory_bytes=memory, communication_bytes=communication)
        return Plan("net", "exact", "memory,communication", stages, figures, "optimal", (4_000_000, 1000))

    even, uneven = plan(PIPELINE.stages, 4_000_000, 1000), plan(SINGLE.stages, 8_000_000, 0)
    table = candidates_table(Decision(even, (even, uneven), ""))
    assert table.columns == ("plan", "memory", "communication", "chosen is ahead by")
    assert table.rows[0][1:3] == ("4.00 MB", "1.00 kB")
    assert table.rows[1][1:] == ("8.00 MB", "0 B", "+50.0%")
    assert table.note == "The chosen plan is at most 0.0% above the best possible."


def test_candidates_for_bytes_by_edges_show_both_counts_of_communication() -> None:
    figures = Prediction(memory_bytes=4_000_000, communication_bytes=1000, edge_communication_bytes=2000)
    bound = (4_000_000, 2000)
    plan = Plan("net", "cp-sat", "memory,edge_communication", PIPELINE.stages, figures, "optimal", bound)
    table = candidates_table(Decision(plan, (plan,), ""))
    assert table.columns[1:4] == ("memory", "communication", "edge communication")
    assert table.rows[0][1:4] == ("4.00 MB", "1.00 kB", "2.00 kB")


def test_devices_with_and_without_a_profile() -> None:
    platform = Platform(
        "board",
        (
            Device("a57", cores=(0, 3, 4, 5), target="llvm -mattr=[neon]", active_w=2.5),
            Device("tpu", backend="edgetpu", memory_bytes=8_000_000),
        ),
    )
    profile = Profile("net", "f", {"a57": DeviceProfile({"a": 0.010, "b": 0.002}, {"a": 0.1, "b": 0.3}, 1.25)})
    assert cells(devices_table(platform), 0) == {
        "device": "a57",
        "backend": "host",
        "cores": "0 3-5",
        "target": "llvm -mattr=[neon]",
        "memory": "-",
        "power": "2.5 W",
    }
    measured = devices_table(platform, profile)
    assert measured.rows[0][-3:] == ("12.0 ms", "x1.25", "20.0%")
    assert measured.rows[1][-3:] == ("not profiled", "-", "-")
    assert cells(measured, 1)["memory"] == "8.00 MB"
    # A target in brackets is no markup.
    assert "llvm -mattr=[neon]" in printed(measured)
    partly = Profile("net", "f", {"tpu": DeviceProfile({"a": 0.010, "b": None})})
    assert devices_table(platform, partly).rows[1][-3] == "runs 1 of 2 operators"
    guessed = Profile("net", "f", {"tpu": DeviceProfile({"a": 0.010}, predicted_from="tpu.json")})
    assert devices_table(platform, guessed).rows[1][-3] == "10.0 ms (predicted from shapes)"


def test_devices_show_measured_transfers() -> None:
    devices = (Device("cpu"), Device("gpu", backend="gpu"), Device("npu", backend="npu"))
    seconds = {"a": 0.010}
    figures = {
        "cpu": DeviceProfile(seconds),
        "gpu": DeviceProfile(seconds, receive=Transfer(2e-5, 4e9), send=Transfer(5e-6)),
    }
    table = devices_table(Platform("board", devices), Profile("net", "f", figures))
    assert table.columns[-2:] == ("receive", "send")
    assert [row[-2:] for row in table.rows] == [("-", "-"), ("20.0 µs, 4.00 GB/s", "5.00 µs"), ("-", "-")]


def test_stages_mark_the_bottleneck_and_show_what_was_measured() -> None:
    assert stages_table(EVALUATION, PIPELINE).rows[1] == ("1 on little", "1", "15.0 ms", "1.00 ms", "16.0 ms")
    table = stages_table(EVALUATION, PIPELINE, STATISTICS)
    assert table.marked == {0}
    assert cells(table, 0)["operators"] == "2"
    assert table.rows[0][-4:] == ("20.5 ms", "0 s", "310 µs", "1.5%")
    assert table.rows[1][-4:] == ("-", "-", "-", "-")


def test_statistics_give_the_error_of_the_prediction() -> None:
    table = statistics_table(PIPELINE.predicted, STATISTICS, inside=3)
    assert table.rows[0] == ("throughput, fps", "50.0", "48.0", "+4.2%")
    assert table.rows[1] == ("latency, one frame", "36.0 ms", "-", "-")
    assert table.rows[2] == ("latency under load, median", "60.0 ms", "45.0 ms", "+33.3%")
    unknown = statistics_table(PIPELINE.predicted, RunStatistics(1, None, None, None, None, None, ()))
    assert unknown.rows[0][2:] == ("-", "-")
    alone = statistics_table(Prediction(), STATISTICS)
    assert alone.columns == ("", "measured")
    assert alone.rows[:2] == (("throughput, fps", "48.0"), ("latency under load, median", "45.0 ms"))


def test_simulated_latencies_stand_in_the_row_under_load_and_beside_the_measured_ones() -> None:
    figures = replace(PIPELINE.predicted, latency_p50_s=0.06, latency_p90_s=0.075, latency_p99_s=0.11)
    told = replace(PIPELINE, predicted=figures)
    assert cells(candidates_table(Decision(told, (told, SINGLE), "")), 0)["under load"] == "60.0 / 75.0 / 110 ms"
    assert statistics_table(figures, STATISTICS, inside=4).rows[2:5] == (
        ("latency under load, median", "60.0 ms", "45.0 ms", "+33.3%"),
        ("latency, 90 %", "75.0 ms", "50.0 ms", "+50.0%"),
        ("latency, 99 %", "110 ms", "55.0 ms", "+100.0%"),
    )


def test_a_slow_source_is_no_error_of_the_prediction() -> None:
    slow = replace(STATISTICS, throughput_fps=10.0)
    assert statistics_table(PIPELINE.predicted, slow, inside=3).rows[0][-1] == "+400.0%", (
        "a file waits for the pipeline"
    )
    table = statistics_table(PIPELINE.predicted, slow, inside=3, paced=True)
    assert table.rows[0] == ("throughput, fps", "50.0", "10.0", "-")
    assert table.rows[1] == ("latency, median", "36.0 ms", "45.0 ms", "-20.0%")  # frames meet no queue
    assert table.note == "The source sets the pace: 10.0 fps. The pipeline has a capacity of 50.0 fps (predicted)."


WITH_JOULES = replace(PIPELINE, predicted=Prediction(50.0, 0.036, 0.3))


def test_statistics_say_who_tells_the_joules_and_what_they_hold() -> None:
    measured = FrameEnergy(0.25, 0.2, "VDD_IN", "the board", 0.001)
    assert statistics_table(WITH_JOULES.predicted, STATISTICS, measured).rows[-3:] == (
        ("energy, J/frame", "300 mJ", "250 mJ", "+20.0%"),
        ("above idle, J/frame", "-", "200 mJ", "-"),
        ("energy by", "-", "VDD_IN (the board)", "-"),
    )
    unknown_idle = statistics_table(WITH_JOULES.predicted, STATISTICS, replace(measured, active_j=None)).rows
    assert unknown_idle[-2] == ("energy, J/frame", "300 mJ", "250 mJ", "-")  # a prediction without idle differs
    by_watts = statistics_table(WITH_JOULES.predicted, STATISTICS, FrameEnergy(0.25, 0.2)).rows
    assert by_watts[-2][2] == "250 mJ by watts"
    assert "energy by" not in [row[0] for row in by_watts]
    assert statistics_table(WITH_JOULES.predicted, STATISTICS).rows[-1][2] == "not measured"
    assert statistics_table(PIPELINE.predicted, STATISTICS).rows[-1][0] == "frames"


def test_plans_side_by_side_have_joules_where_something_tells() -> None:
    plain = Measured(PIPELINE, 48.0, 0.01, 0.036, STATISTICS)
    assert len(comparison_table([plain]).columns) == 8
    unmeasured = comparison_table([replace(plain, plan=WITH_JOULES)])
    assert unmeasured.title == "Side by side; joules not measured"
    assert unmeasured.rows[0][8:] == ("300 mJ", "-", "-", "-")
    of_sensor = replace(plain, plan=WITH_JOULES, energy=FrameEnergy(0.25, 0.2, "VDD_IN", "the board"))
    table = comparison_table([of_sensor, replace(plain, plan=SINGLE)])
    assert table.title == "Side by side; joules measured by VDD_IN (the board)"
    assert table.rows[0][8:] == ("300 mJ", "250 mJ", "+20.0%", "200 mJ")
    assert table.rows[1][8:] == ("-", "-", "-", "-")
    by_watts = comparison_table([replace(plain, energy=FrameEnergy(0.25, 0.2))])
    assert by_watts.title == "Side by side; joules by the platform's watts"
    assert by_watts.columns[9] == "by watts"


def test_devices_have_joules_with_their_interval() -> None:
    figures = DeviceProfile({"a": 0.01}, joules={"a": 0.05}, joules_uncertainty={"a": 0.02})
    idle = IdlePower("VDD_IN", "the board", 4.0, 0.01)
    platform = Platform("box", (Device("cpu"), Device("tpu")))
    table = joules_table(platform, idle, Profile("net", "f", {"cpu": figures}, idle=idle))
    assert table.title == "Joules by VDD_IN (the board)"
    assert table.rows == (("idle machine", "4 W", "±1.0%"), ("cpu", "50.0 mJ", "±2.0%"), ("tpu", "-", "-"))


def test_markdown_keeps_bars_inside_cells() -> None:
    lines = candidates_table(Decision(PIPELINE, (PIPELINE, SINGLE), "")).markdown().splitlines()
    assert lines[1].startswith("| :-- | --: |")
    assert lines[2].startswith("| **chain (big \\| little)** | **50.0** |")
    assert lines[3].startswith("| single (big) | 40.0 |")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0 s"),
        (1.2, "1.20 s"),
        (0.99996, "1.00 s"),
        (0.0353, "35.3 ms"),
        (123e-6, "123 µs"),
        (4e-9, "4.00 ns"),
        (2e-12, "0.002 ns"),
        (-0.002, "-2.00 ms"),
        (321.4, "321 s"),
    ],
)
def test_durations_are_for_people(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (12, "12 B"), (602_112, "602 kB"), (4.94e6, "4.94 MB")])
def test_sizes_are_for_people(count: int, text: str) -> None:
    assert size(count) == text
