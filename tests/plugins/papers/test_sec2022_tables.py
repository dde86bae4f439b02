"""What `benchmarks/sec2022.py` derives from the tables of SEC 2022, recomputed from the files of the networks."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.cost.simulate import simulate

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import sec2022_instances
import sec2022_table2
import sec2022_tables
import sec2022_times
from edgetpu_model import hub

ROOT = Path(__file__).parents[3]
ROWS: list[dict[str, Any]] = json.loads((ROOT / "profiles/published/sec2022-table-2.json").read_text())["rows"]
NODES = json.loads((ROOT / "profiles/keras/ResNet50V2.json").read_text())
# The last operator in front of each first cut, and whether the pooling of the block's shortcut is in front, too. The
# other layers in front are those that the file lists before that operator.
FRONTS = {
    "I": ("conv5_block1_preact_bn", "pool"),
    "II": ("conv4_block6_3_conv", "pool"),
    "III": ("conv4_block6_2_conv", "pool"),
    "IV": ("conv4_block6_1_conv", "pool"),
    "V": ("conv4_block6_preact_bn", "pool"),
    "VI": ("conv4_block6_preact_bn", "pool"),
    "VII": ("conv4_block6_3_conv", ""),
    "VIII": ("conv4_block6_preact_bn", ""),
    "IX": ("conv4_block5_out", ""),
}


@cache
def readings() -> dict[str, sec2022_table2.Reading]:
    found, _ = sec2022_table2.readings()
    return {reading.row["choice"]: reading for reading in found}


def mib(layers: list[dict[str, Any]]) -> tuple[float, float]:
    """What layers of the file hold and fetch: 10 bytes a channel of a convolution beside its parameters, and 32 a
    channel of a normalisation that follows a sum, which is never cached."""
    held = streamed = 0
    for layer in layers:
        channels = layer["output_shape"][-1]
        if "preact_bn" in layer["name"] or layer["name"] == "post_bn":
            streamed += 32 * channels
        else:
            held += layer["param_bytes"] + (10 * channels if layer["op"] in ("Conv2D", "Dense") else 0)
    return held / 2**20, streamed / 2**20


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["choice"])
def test_the_cut_of_each_row_holds_and_fetches_what_is_published(row) -> None:
    choice = readings()[row["choice"]].choice
    ends, pool = FRONTS[row["choice"]]
    assert (choice.ends, choice.pooled_in) == (ends, 0 if pool else 1)
    names = [layer["name"] for layer in NODES["nodes"]]
    # A batch normalisation behind a convolution belongs to the convolution, and so does the activation behind both.
    end = names.index(ends) + 1
    while NODES["nodes"][end]["op"] == "BatchNormalization" and not ends.endswith("out"):
        end += 1
    first = mib(NODES["nodes"][:end])
    assert sum(first) == pytest.approx(row["dram_mib"][0] + row["cache_mib"][0], abs=0.01)
    held, streamed = mib(NODES["nodes"][end : names.index("conv5_block1_out") + 1])
    assert (held, streamed) == (
        pytest.approx(row["cache_mib"][1], abs=0.01),
        pytest.approx(row["dram_mib"][1], abs=0.001),
    )


def test_the_bytes_that_cross_are_those_of_the_shapes() -> None:
    map_, half, pooled = 14 * 14 * 1024, 14 * 14 * 256, 7 * 7 * 1024
    found = {name: reading.choice.crossing_bytes for name, reading in readings().items()}
    assert found == {
        "I": pooled,
        "II": 2 * pooled,
        "III": 7 * 7 * 256 + pooled,
        "IV": half + pooled,
        "V": map_ + pooled,
        "VI": map_ + pooled,
        "VII": pooled + map_,
        "VIII": 2 * map_,
        "IX": map_,
    }


def test_another_reading_of_a_row_chosen_by_time_is_farther_from_a_line() -> None:
    found = readings()
    rows, choices = [r.row for r in found.values()], [r.choice for r in found.values()]
    rms_ms, _ = sec2022_table2.line_rms_ms(rows, choices)
    assert rms_ms < 0.1
    for index, reading in enumerate(found.values()):
        if reading.by != "time" or np.isnan(reading.rms_otherwise_ms):
            continue
        assert reading.rms_otherwise_ms > 1.5 * rms_ms
        other = sec2022_table2.Choice(choices[index].front, choices[index].crossing_bytes + 14 * 14 * 1024)
        changed = [other if i == index else choice for i, choice in enumerate(choices)]
        assert sec2022_table2.line_rms_ms(rows, changed)[0] > 2 * rms_ms


def test_graphs_have_the_size_that_table_3_prints() -> None:
    """V, deg(V) and depth of the eleven networks, as the paper prints them."""
    rows = json.loads((ROOT / "profiles/published/sec2022-table-3.json").read_text())["rows"]
    published = {row["network"]: (row["operators"], row["most_reads"], row["depth"]) for row in rows}
    assert len(published) == 11
    assert published["InceptionResNetV2"] == (782, 4, 571)
    assert {name: sec2022_tables.statistics_of(sec2022_tables.keras(name)) for name in published} == published


def test_joules_are_those_of_busy_and_idle_watts() -> None:
    keeper = sec2022_instances.Keeper(None)
    (each,) = sec2022_instances.instances(["ResNet50"], [2], keeper)
    graph, stages = each.graph, each.plans["(1)(2)(3)"].stages
    found = simulate(Problem(graph, hub(2, bus=False), unmeasured(graph)), stages, 300)
    bars = {(bar.stage, bar.frame): bar.transfer_s + bar.compute_s for bar in found.events}
    busy_s = sum(bars[stage, 200] for stage in (0, 1))  # nobody waits for a bus here
    watts, joules = sec2022_times.joules(each, "(1)(2)(3)", busy_w=3.0, idle_w=1.0)
    period_s = each.times_ms["(1)(2)(3)"] / 1e3
    assert joules == pytest.approx(2.0 * busy_s + 2 * 1.0 * period_s, rel=1e-6)
    assert watts == pytest.approx(joules / period_s)


def test_kept_plans_are_found_again(tmp_path) -> None:
    keeper = sec2022_instances.Keeper(tmp_path)
    (each,) = sec2022_instances.instances(["Xception"], [3], keeper)
    first = each.plans
    for file in tmp_path.iterdir():
        file.write_text(file.read_text().replace(" by ideals", " by memory-of-it"))
    (again,) = sec2022_instances.instances(["Xception"], [3], keeper)
    assert [plan.stages for plan in again.plans.values()] == [plan.stages for plan in first.values()]
    assert {plan.scheduler for plan in again.plans.values()} >= {"memory-of-it"}
