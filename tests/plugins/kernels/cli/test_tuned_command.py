"""`tune` on the command line: what it prints, and that later commands say what is tuned."""

from __future__ import annotations

import platform
import re

import pytest

from tests.support.parts import needs
from tvm_pipeline_tvm.host.detection import host_target

needs("Relay")
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="tunes schedules for x86")


@pytest.mark.thorough
@pytest.mark.usefixtures("own_cache")
def test_tune_then_compile_show_and_bench(cli, model, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    _tune_by_hand(model)
    reported = cli("tune", model, "--seconds", 0, "--json")
    assert reported.code == 0, reported.err
    [target] = reported.json["targets"]
    assert (target["target"], target["kernels"], target["tuned"]) == (host_target(), 3, 3)

    bundle = tmp_path / "net.tar"
    compiled = cli("compile", model, "-o", bundle, "--verify", 0)
    assert f"kernels for {host_target()}: 3 of 3 tuned" in compiled.out
    shown = cli("show", bundle, "-o", tmp_path, "--format", "svg", "--json").json
    assert shown["tuned"] == [{"target": host_target(), "tuned": 3, "kernels": 3, "winograd": 0, "error": None}]
    assert f"kernels for {host_target()}: 3 of 3 tuned" in cli("show", bundle, "-o", tmp_path, "--format", "svg").out

    # bench runs the plan that is not tuned beside it.
    benched = cli("bench", model, "--rounds", 1, "--seconds", 0.02, "--json").json["candidates"]
    *tuned, untuned = benched
    assert [plan["note"] for plan in benched] == [*[""] * len(tuned), "not tuned"]
    assert untuned["stages"] == tuned[0]["stages"]
    assert untuned["measured"]["throughput_fps"] > 0
    assert untuned["predicted"]["throughput_fps"] is None


@pytest.mark.thorough
def test_tune_for_an_objective_says_how_the_plan_moved(cli, model):
    reported = cli("tune", model, "--objective", "throughput", "--seconds", 0)
    assert reported.code == 0, reported.err
    assert "there was no time for it" in " ".join(reported.out.split())
    assert re.search(r"throughput of the best plan, as predicted after each batch: \d+ frames", reported.out)


@pytest.mark.thorough
def test_direct_sums_have_records_of_their_own(cli, model, tmp_path):
    from tvm_pipeline_kernels.tuning.tuning_records import records_file

    try:
        _tune_by_hand(model, winograd=True)
        tuned = cli("tune", model, "--seconds", 0, "--json").json["targets"]
        assert [(target["kernels"], target["tuned"]) for target in tuned] == [(3, 1)]
        assert cli("tune", model, "--seconds", 0, "--tolerance", 0, "--json").json["targets"][0]["tuned"] == 0
        compile_ = "compile", model, "-o", tmp_path / "net.tar", "--verify", 0
        [made] = cli(*compile_, "--json").json["tuned"]
        assert 0 < made.pop("error") <= 1e-5
        assert made == {"target": host_target(), "tuned": 1, "kernels": 3, "winograd": 1}
        assert "1 by Winograd's algorithm (error against float64: " in " ".join(cli(*compile_).out.split())
        assert cli(*compile_, "--tolerance", 0, "--json").json["tuned"] == []
    finally:
        records_file(host_target()).unlink()


@pytest.mark.parametrize("tolerance", [-1e-9, 0.02, "nan"])
def test_a_tolerance_that_nobody_means_is_refused(cli, model, tmp_path, tolerance):
    for command in (("compile", model, "-o", tmp_path / "net.tar"), ("profile", model), ("tune", model)):
        refused = cli(*command, "--tolerance", tolerance)
        assert refused.code == 2
        assert f"--tolerance {float(tolerance):g}: give the error of an output over its largest value" in " ".join(
            refused.err.split()
        )


def _tune_by_hand(model, winograd=False):
    """Record other choices than the rule's, and faster than any that was measured, for models with a tolerance."""
    from tvm_pipeline.frontends import load
    from tvm_pipeline_kernels.choices import possible_choices, winograd_choices
    from tvm_pipeline_kernels.tuning.targets import cores_of
    from tvm_pipeline_kernels.tuning.tuning_records import Record, append_record
    from tvm_pipeline_tvm.relay.build import build_library

    cores = cores_of(host_target())
    for workload in set(build_library(load(model), host_target()).tuning.workloads.values()):
        for choice in winograd_choices(workload, cores)[-1:] if winograd else possible_choices(workload, cores)[2:3]:
            append_record(host_target(), Record(workload, choice, 1e-9, proven=True, winograd=True))
