"""A run plans the work around the model, too: measured on its source, and kept for the next run of the same."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from tvm_pipeline import Plan
from tvm_pipeline.backends.bundle import open_bundle
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.errors import OptionError
from tvm_pipeline_video.service.inputs import taken_fps
from tvm_pipeline_video.service.settings import Settings

FILM = "synthetic:64x48@30:12"


@pytest.fixture(autouse=True)
def cache(own_cache):
    """Keeps the plans of one test from another."""
    return own_cache / "applications"


def operators(report: dict) -> list[str]:
    return [name for stage in report["stages"] for name in stage["operators"]]


@pytest.mark.thorough
def test_the_plan_of_a_run_holds_the_work_around_the_model(cli, bundle, tmp_path):
    lines, video = tmp_path / "out.jsonl", tmp_path / "out.mp4"
    outcome = cli("run", bundle, "--source", FILM, "--results", lines, "--output", video, "--json")
    names = operators(outcome.json)
    assert [names[0], names[1], *names[-3:]] == ["host/read", "host/prepare", "host/decode", "host/draw", "host/write"]
    assert outcome.json["measured"]["frames"] == len(lines.read_text().splitlines()) == 12
    with open_bundle(bundle) as opened:
        assert set(names) - {name for name in names if name.startswith("host/")} == {
            operator.name for operator in opened.graph.operators
        }
    alone = cli("run", bundle, "--source", FILM, "--json").json  # nothing is written
    assert [name for name in operators(alone) if name.startswith("host/")] == [
        "host/read", "host/prepare", "host/decode",
    ]  # fmt: skip


@pytest.mark.thorough
def test_what_was_measured_is_kept_for_the_same_application_alone(cli, bundle, cache):
    first = cli("run", bundle, "--plan-first", "--source", FILM, "--json")
    assert "planned for this bundle" not in first.err
    again = cli("run", bundle, "--source", FILM, "--json")
    assert "planned for this bundle, source and decoder before; --fresh measures again" in again.err
    assert again.json["stages"] == first.json["stages"]
    assert again.json["predicted"] == first.json["predicted"]
    assert "before" not in cli("run", bundle, "--plan-first", "--source", FILM, "--fresh").err
    assert len(list(cache.iterdir())) == 1
    assert (
        "before" not in cli("run", bundle, "--plan-first", "--source", "synthetic:96x48@30:12").err
    )  # frames of another size
    assert len(list(cache.iterdir())) == 2
    for path in cache.iterdir():
        path.write_text("{")  # damaged: it is measured again
    assert "before" not in cli("run", bundle, "--plan-first", "--source", FILM).err


def test_a_plan_that_was_asked_for_stays_and_what_was_measured_around_it_is_kept(cli, model, tmp_path):
    given = tmp_path / "given.tar"
    assert cli("compile", model, "-o", given, "--scheduler", "single", "--verify", 0).code == 0
    first = cli("run", given, "--source", FILM, "--json")
    again = cli("run", given, "--source", FILM, "--json")
    assert "planned for this bundle" not in first.err
    assert "planned for this bundle" in again.err
    assert again.json["stages"] == first.json["stages"]
    other = cli("run", given, "--source", FILM, "--objective", "throughput", "--json")  # asks for the best plan
    assert "planned for this bundle" not in other.err


@pytest.mark.thorough
@pytest.mark.needs("two cores")
def test_candidates_run_side_by_side_on_the_source(cli, bundle):
    outcome = cli("run", bundle, "--plan-first", "--source", FILM, "--verify", 0.2)
    assert outcome.code == 0, outcome.err
    assert "plan: " in outcome.err
    assert "measure" in outcome.err  # what it measured; or, on a machine that is very busy, that there was no time


@pytest.mark.thorough
def test_a_plan_of_the_model_alone_gets_the_work_around_it(cli, bundle, tmp_path):
    with open_bundle(bundle) as opened:
        names = opened.graph.operator_names
        device = opened.platform.devices[0].name
        plan = Plan(
            opened.graph.name, "by hand", "throughput", (Stage((device,), tuple(names)),), opened.plan.predicted
        )
    (tmp_path / "plan.txt").write_text(str(plan))
    outcome = cli("run", bundle, "--source", FILM, "--plan", tmp_path / "plan.txt", "--adapt", "off", "--json")
    whole = next(stage for stage in outcome.json["stages"] if names[0] in stage["operators"])
    assert whole["devices"] == [device]
    assert set(names) <= set(whole["operators"])
    assert operators(outcome.json) == ["host/read", "host/prepare", *names, "host/decode"]
    other = replace(plan, stages=(Stage((device,), ("of-another-network",)),))
    (tmp_path / "other.txt").write_text(str(other))
    outcome = cli("run", bundle, "--source", FILM, "--plan", tmp_path / "other.txt")
    assert "other.txt: " in outcome.err
    assert "names operator of-another-network, which" in outcome.err


@pytest.mark.thorough
def test_a_rate_that_no_plan_keeps_up_with_is_said(cli, bundle):
    outcome = cli("run", bundle, "--source", FILM, "--rate", 1e6, "--json")
    assert "no plan keeps up with 1e+06 frames a second and 10% to spare: the best makes" in outcome.err
    assert "--policy every=" in outcome.err
    assert outcome.json["measured"]["frames"] == 12
    assert "throughput" in outcome.json["objectives"]


@pytest.mark.thorough
def test_a_rate_below_the_capacity_is_no_error_of_the_prediction(cli, bundle, monkeypatch):
    monkeypatch.setattr("tvm_pipeline.report.tables.FULL", 1e9)  # a busy machine fills the pipeline at this rate, too
    outcome = cli("run", bundle, "--source", FILM, "--rate", 20)
    assert "The source sets the pace:" in outcome.out
    [throughput] = [line for line in outcome.out.splitlines() if "throughput, fps" in line]
    assert "%" not in throughput


@pytest.mark.thorough
def test_a_rate_makes_latency_the_objective(cli, bundle):
    outcome = cli("run", bundle, "--source", FILM, "--rate", 50, "--json")
    assert "no plan keeps up" not in outcome.err
    assert "latency" in outcome.json["objectives"]
    assert outcome.json["predicted"]["throughput_fps"] >= 55


@pytest.mark.thorough
def test_a_deadline_is_kept_or_what_would_be_kept_is_told(cli, bundle):
    rate = ("--rate", 20, "--miss", 0.1)  # the rarer a miss may be, the more frames are simulated
    outcome = cli("run", bundle, "--source", FILM, *rate, "--deadline", "2s", "--adapt", "off", "--json")
    assert "no candidate keeps" not in outcome.err
    assert outcome.json["deadline"] == {"seconds": 2.0, "miss_share": 0.1, "rate_fps": 20.0}
    assert outcome.json["late_share"] == 0
    assert outcome.json["predicted"]["latency_p99_s"] >= outcome.json["predicted"]["latency_p50_s"] > 0
    outcome = cli("run", bundle, "--source", FILM, *rate, "--deadline", "0.001ms")
    assert "no candidate keeps --deadline 0.001 ms" in outcome.err
    assert "100.0% took longer" in outcome.err


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"deadline": "soon"}, "write it as 50ms"),
        ({"deadline": "50ms", "miss": 0.0}, "`miss` 0"),
        ({"deadline": "50ms", "late": "never"}, "it is drop or keep"),
        ({"late": "drop"}, "goes with `deadline`"),
    ],
)
def test_deadlines_that_cannot_be(wrong, words):
    with pytest.raises(OptionError, match=words):
        Settings(bundle=["net.tar"], source=[FILM], **wrong).check()


def test_cameras_come_together_by_their_policies():
    assert taken_fps(30.0, ["camera:0", "camera:1", "camera:2", FILM], [None, "every=3", "fps=5", None]) == 30 + 10 + 5


@pytest.mark.parametrize("rate", [0, -1, 1e-300, 1e300, float("inf")])
def test_a_rate_is_positive(rate):
    with pytest.raises(OptionError, match=rf"`rate` {re.escape(f'{rate:g}')}: it must be positive"):
        Settings(bundle=["net.tar"], source=[FILM], rate=rate).check()


@pytest.mark.thorough
def test_isolated_stages_have_the_work_around_them_in_the_parent(cli, bundle, tmp_path):
    lines = tmp_path / "out.jsonl"
    outcome = cli("run", bundle, "--source", FILM, "--isolate", "--results", lines, "--adapt", "off")
    assert outcome.code == 0, outcome.err
    assert [json.loads(line)["frame"] for line in lines.read_text().splitlines()] == list(range(12))


def test_a_decoder_that_fails_is_named_before_anything_runs(cli, bundle, tmp_path):
    (tmp_path / "bad.py").write_text("def decode(outputs, transform):\n    raise KeyError('heat')\n")
    outcome = cli("run", bundle, "--source", FILM, "--decoder", f"{tmp_path / 'bad.py'}:decode")
    assert outcome.code == 1
    assert "the decoder bad:decode failed at frame 0 of synthetic:64x48@30:12: KeyError: 'heat'" in outcome.err


@pytest.mark.thorough
def test_a_bundle_of_a_whole_application_is_shown_like_any_other(cli, model, tmp_path):
    app, lines = tmp_path / "app.tar", tmp_path / "out.jsonl"
    compiled = cli("compile", model, "-o", app, "--source", FILM, "--verify", 0, "--json")
    assert compiled.code == 0, compiled.err
    names = operators(compiled.json)
    assert [name for name in names if name.startswith("host/")] == [
        "host/read", "host/prepare", "host/decode", "host/write",
    ]  # fmt: skip
    planned = cli("plan", app, "--json").json
    assert sorted(operators(planned)) == sorted(names)
    assert cli("simulate", app, "--frames", 50, "--json").json["simulated"]["frames"] == 50
    shown = cli("show", app, "-o", tmp_path / "shown", "--format", "svg", "--json").json
    assert [picture.rpartition("/")[2] for picture in shown["pictures"]] == ["gantt.svg", "graph.svg", "frame.svg"]
    assert "prepare" in (tmp_path / "shown" / "frame.svg").read_text()
    (first, *_) = cli("bench", app, "--seconds", 0.02, "--rounds", 1, "--json").json["candidates"]
    assert set(operators(first)) == set(names)
    assert first["measured"]["throughput_fps"] > 0
    refused = cli("plan", app, "--verify", 2)
    assert "holds a whole application, which `run` and `bench` run on its source" in refused.err

    outcome = cli("run", app, "--source", FILM, "--results", lines, "--adapt", "off", "--json")
    assert outcome.json["stages"] == compiled.json["stages"]
    assert len(lines.read_text().splitlines()) == 12
    other = cli("run", app, "--source", "synthetic:96x48@30:12", "--results", lines)
    text = "planned for another application (frame width 96 instead of 64), so it is measured and planned anew"
    assert text in other.err
    assert other.code == 0


def test_a_decoder_without_a_source_is_refused(cli, model, tmp_path):
    outcome = cli("compile", model, "-o", tmp_path / "app.tar", "--decoder", "found.py:decode")
    assert "--decoder goes with --source" in outcome.err
    assert outcome.code != 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--source", "nowhere.mp4"), "there is no file or folder nowhere.mp4"),
        (("--source", FILM, "--video", "mp4"), "--video mp4: a video needs one of the extensions"),
    ],
)
def test_a_mistake_in_an_application_is_told_before_compiling(cli, model, tmp_path, monkeypatch, options, said):
    monkeypatch.setattr("tvm_pipeline.cli.compile.compile_source", None)
    outcome = cli("compile", model, "-o", tmp_path / "app.tar", *options)
    assert said in outcome.err
    assert outcome.code != 0


def test_the_bundle_of_a_model_alone_takes_no_source(cli, bundle):
    outcome = cli("bench", bundle, "--source", FILM)
    assert "holds the model alone; compile it with --source" in outcome.err
    assert outcome.code == 1
