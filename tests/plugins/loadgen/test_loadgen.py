"""LoadGen drives a real pipeline of the small example network; its own summary is what verdicts are compared with."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tests.cli.conftest import bundle, cli, model  # noqa: F401
from tests.support.parts import needs
from tvm_pipeline import Pipeline, PipelineError
from tvm_pipeline.errors import OptionError
from tvm_pipeline.testing import example_bundle
from tvm_pipeline_loadgen.compliance import check_answers, check_caching
from tvm_pipeline_loadgen.scenarios import SCENARIOS, Verdict, read_verdict, run_test, settings_of
from tvm_pipeline_loadgen.under_test import Pace, UnderTest, answer_of, samples

PACE = Pace(alone_s=0.001, full_fps=2000)


@pytest.fixture
def pipeline():
    needs("mlperf_loadgen")
    made = example_bundle()
    with Pipeline(made.compiled, made.plan, made.platform) as running:
        yield running


@pytest.fixture
def system(pipeline):
    with UnderTest(pipeline, samples(example_bundle().graph)) as under_test:
        yield under_test


class Lying:
    """A system that answers every sample as the one before it."""

    def __init__(self, pipeline):
        self._pipeline, self._last = pipeline, None
        self.drain = pipeline.drain
        self.results = pipeline.results

    def submit(self, inputs, *, tag=None):
        sent, self._last = inputs if self._last is None else self._last, inputs
        return self._pipeline.submit(sent, tag=tag)


def settings(scenario, seconds=0.2):
    return lambda: settings_of(scenario, seconds, PACE)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_verdict_is_what_the_summary_of_loadgen_says(system, scenario, tmp_path):
    verdict = run_test(system, settings(scenario)(), scenario, tmp_path / "logs")
    summary = (tmp_path / "logs" / "mlperf_log_summary.txt").read_text()
    assert f"Scenario : {scenario}" in summary
    assert f"Result is : {'VALID' if verdict.valid else 'INVALID'}" in summary
    assert verdict.score > 0
    shown = {  # the line of the summary, and the score in its unit
        "SingleStream": f"90.0th percentile estimate: {1e9 * verdict.score:.0f}",
        "MultiStream": f": {1e9 * verdict.score:.0f}",  # its estimate, or the percentile where it has no estimate
        "Server": f"Completed samples per second    : {verdict.score:.2f}",
        "Offline": f"Samples per second: {verdict.score:g}",
    }
    assert shown[scenario] in summary
    assert bool(verdict.reasons) != verdict.valid


def test_one_system_takes_one_test_after_another_and_answers_rightly(system, tmp_path):
    assert system.pace().full_fps > 0
    performance = run_test(system, settings("Offline")(), "Offline", tmp_path / "performance")
    beside = Verdict("Offline", True, performance.score / 1e3, (), tmp_path)  # so that speed decides nothing here
    check = check_answers(system, settings("Offline"), beside, tmp_path)
    same, _, count = check.what.split()[:3]
    assert check.passed
    assert same == count
    assert int(count) > 0


def test_wrong_answers_and_speeds_fail_the_compliance_tests(pipeline, tmp_path):
    slow = Verdict("Offline", True, 1e-3, (), tmp_path)
    fast = Verdict("Offline", True, 1e12, (), tmp_path)
    with UnderTest(Lying(pipeline), samples(example_bundle().graph)) as system:
        wrong = check_answers(system, settings("Offline"), slow, tmp_path / "a")
        same, _, count = wrong.what.split()[:3]
        assert not wrong.passed
        assert int(same) < int(count)
        assert not check_caching(system, settings("Offline"), slow, tmp_path / "b").passed
        assert check_caching(system, settings("Offline"), fast, tmp_path / "c").passed


def test_a_stage_that_fails_ends_the_test_with_its_error(tmp_path):
    needs("mlperf_loadgen")
    made = example_bundle()
    with Pipeline(made.compiled, made.plan, made.platform) as pipeline:

        class Failing:
            results, drain = pipeline.results, pipeline.drain
            count = 0

            def submit(self, inputs, *, tag=None):
                self.count += 1
                if self.count > 50:
                    raise PipelineError("stage 1 on d1 failed")
                return pipeline.submit(inputs, tag=tag)

        with (
            pytest.raises(PipelineError, match="stage 1 on d1 failed"),
            UnderTest(Failing(), samples(made.graph)) as system,
        ):
            run_test(system, settings("SingleStream")(), "SingleStream", tmp_path / "logs")


def test_a_file_of_settings_goes_first(tmp_path):
    needs("mlperf_loadgen")
    config = tmp_path / "user.conf"
    config.write_text("*.Server.target_qps = 33\nnet.Server.target_latency = 20\n")
    found = settings_of("Server", 1, PACE, config, "net")
    assert (found.server_target_qps, found.server_target_latency_ns) == (33, 20_000_000)
    assert settings_of("Server", 1, PACE).server_target_qps == 0.8 * PACE.full_fps
    with pytest.raises(OptionError, match=r"none\.conf: no such file"):
        settings_of("Server", 1, PACE, tmp_path / "none.conf")


def test_logs_without_a_result_are_an_error(tmp_path):
    (tmp_path / "mlperf_log_detail.txt").write_text("")
    with pytest.raises(PipelineError, match="LoadGen wrote no result for Offline"):
        read_verdict("Offline", tmp_path)


def test_samples_differ():
    frames = samples(example_bundle().graph)
    assert len({frame["x"].tobytes() for frame in frames[:4]}) == 4


def test_the_command_prints_the_verdict(cli, bundle, tmp_path):  # noqa: F811
    needs("mlperf_loadgen")
    logs = tmp_path / "logs"
    outcome = cli("loadgen", bundle, "--scenario", "Offline", "--seconds", 0.2, "-o", logs, "--json")
    assert outcome.code in (0, 1), outcome.err
    assert outcome.json["valid"] == (outcome.code == 0)
    assert outcome.json["unit"] == "samples/s"
    assert outcome.json["score"] > 0
    assert (logs / "performance" / "mlperf_log_summary.txt").is_file()
    assert "MLPerf's rules ask for tests of 600 s" in outcome.err
    again = cli("loadgen", bundle, "-o", logs)
    assert again.code == 2
    assert "exists; name a new folder" in again.err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--scenario", "Ofline"], "--scenario Ofline: did you mean Offline?"),
        (["--seconds", 0], "--seconds must be positive"),
        (["--seconds", "inf"], "--seconds must be positive, and below a million"),
        (["--device", "cpu"], "a bundle has its own devices and inputs"),
        (["--config", "none.conf"], "none.conf: no such file"),
    ],
)
def test_what_makes_no_test_is_refused(cli, bundle, tmp_path, arguments, error):  # noqa: F811
    needs("mlperf_loadgen")
    outcome = cli("loadgen", bundle, "-o", tmp_path / "logs", *arguments)
    assert outcome.code == 2
    assert error in outcome.err


def test_without_loadgen_the_extra_is_named(cli, bundle, monkeypatch):  # noqa: F811
    monkeypatch.setitem(sys.modules, "mlperf_loadgen", None)
    outcome = cli("loadgen", bundle)
    assert outcome.code == 1
    assert "pip install 'tvm-pipeline[loadgen]'" in outcome.err


def test_outputs_are_answers_by_name():
    outputs = {"b": np.arange(3, dtype="float32"), "a": np.ones((1, 2), "int8")}
    assert answer_of(outputs).tobytes() == outputs["a"].tobytes() + outputs["b"].tobytes()
    large = {"x": np.zeros(1 << 20, "float32")}
    changed = {"x": large["x"].copy()}
    changed["x"][-1] = 1
    assert answer_of(large).nbytes == 32
    assert answer_of(large).tobytes() != answer_of(changed).tobytes()
