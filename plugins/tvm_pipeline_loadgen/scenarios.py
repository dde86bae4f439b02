"""One test of LoadGen: the settings of a scenario, its logs, and its verdict as a `Verdict`.

LoadGen asks for a duration and a number of queries before it calls a result valid. Its logs stay in a folder, as
MLCommons' own tools read them.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tvm_pipeline import PipelineError
from tvm_pipeline.errors import OptionError
from tvm_pipeline_loadgen.under_test import Pace, UnderTest

SCENARIOS = ("SingleStream", "MultiStream", "Server", "Offline")
STREAMS = {"SingleStream": "90th", "MultiStream": "99th"}  # their score is this percentile of the latency of a query
# The keys of the detailed log that may hold the score of a scenario. LoadGen ranks streams by the percentile that early
# stopping estimates, which is never below the measured one.
_SCORES = {
    "SingleStream": ("early_stopping_latency_ss", "result_90.00_percentile_latency_ns"),
    "MultiStream": ("early_stopping_latency_ms", "result_99.00_percentile_per_query_latency_ns"),
    "Server": ("result_completed_samples_per_sec",),
    "Offline": ("result_samples_per_second",),
}
# Queries from which early stopping estimates the percentile of a stream.
_LEAST_QUERIES = {"SingleStream": 64, "MultiStream": 662}
SERVER_LOAD = 0.8  # of the rate of a full pipeline, where no file of settings says another rate
SLACK = 1.25  # LoadGen prepares as many samples as a system needs that is so much faster than its measured pace


@dataclass(frozen=True, slots=True)
class Verdict:
    """What LoadGen found.

    Attributes:
        scenario: one of `SCENARIOS`.
        valid: LoadGen calls the result valid.
        score: seconds of a query, the percentile of `STREAMS`; of the other scenarios samples a second.
        reasons: why the result is not valid, and what LoadGen recommends.
        folder: where its logs lie.
    """

    scenario: str
    valid: bool
    score: float
    reasons: tuple[str, ...]
    folder: Path

    @property
    def is_latency(self) -> bool:
        return self.scenario in STREAMS

    @property
    def speed(self) -> float:
        """The score as a rate: queries a second of one after another, or samples a second."""
        return 1 / self.score if self.is_latency and self.score else self.score

    def __str__(self) -> str:
        """
        >>> str(Verdict("SingleStream", True, 0.0125, (), Path("logs")))
        'SingleStream: VALID, 90th percentile 12.5 ms a query'
        """
        score = f"{self.score:.4g} fps"
        if self.is_latency:
            score = f"{STREAMS[self.scenario]} percentile {1e3 * self.score:.4g} ms a query"
        return f"{self.scenario}: {'VALID' if self.valid else 'INVALID'}, {score}"


def loadgen() -> ModuleType:
    """Return LoadGen; raise PipelineError where it is not installed."""
    try:
        import mlperf_loadgen
    except ImportError as error:
        raise PipelineError(
            f"MLPerf LoadGen cannot be loaded ({error}); install it: pip install 'tvm-pipeline[loadgen]'"
        ) from error
    found: ModuleType = mlperf_loadgen
    return found


def settings_of(scenario: str, seconds: float, pace: Pace, config: Path | None = None, model: str = "*") -> Any:
    """Return LoadGen's settings of a performance test.

    Args:
        seconds: the least duration. MLPerf asks for 600.
        pace: of the system; LoadGen prepares its queries by it.
        config: a file in the format of MLPerf's `user.conf`, which goes first.
        model: the name by which that file calls the model.

    Raises:
        OptionError: LoadGen cannot read the file.
    """
    lg = loadgen()
    settings = lg.TestSettings()
    settings.scenario = getattr(lg.TestScenario, scenario)
    settings.min_duration_ms = round(1000 * seconds)
    settings.min_query_count = _LEAST_QUERIES.get(scenario, 1)
    settings.single_stream_expected_latency_ns = max(1, round(1e9 * pace.alone_s / SLACK))
    settings.multi_stream_expected_latency_ns = max(1, round(8e9 / pace.full_fps / SLACK))
    settings.offline_expected_qps = SLACK * pace.full_fps
    settings.server_target_qps = SERVER_LOAD * pace.full_fps
    if config is not None:
        if not config.is_file():
            raise OptionError(f"{config}: no such file; give one in the format of MLPerf's user.conf")
        if settings.FromConfig(str(config), model, scenario):
            raise OptionError(
                f"{config}: LoadGen cannot read it; a line is MODEL.SCENARIO.KEY = NUMBER, as *.Server.target_qps = 30"
            )
    settings.mode = lg.TestMode.PerformanceOnly  # whatever the file asks for
    return settings


def run_test(system: UnderTest, settings: Any, scenario: str, folder: Path) -> Verdict:
    """Run a performance test, and return LoadGen's verdict. Its logs lie in `folder`, which is made.

    Raises what `start_test` raises.
    """
    start_test(system, settings, folder)
    return read_verdict(scenario, folder)


def start_test(system: UnderTest, settings: Any, folder: Path) -> None:
    """Run a test of any mode until LoadGen ends it.

    Ctrl-C ends the test, because LoadGen, which hears no signal, runs in another thread.

    Raises:
        PipelineError: a stage failed while the test ran.
    """
    lg = loadgen()
    folder.mkdir(parents=True, exist_ok=True)
    logs = lg.LogSettings()
    logs.enable_trace = False
    output = lg.LogOutputSettings()
    output.outdir = str(folder)
    output.copy_summary_to_stdout = False
    logs.log_output = output
    count = len(system.frames)
    under_test = lg.ConstructSUT(system.issue, lambda: None)
    library = lg.ConstructQSL(count, count, lambda samples: None, lambda samples: None)
    # No file of the working folder changes the test, such as an audit.config that lies there.
    arguments = (under_test, library, settings, logs, str(folder / "no-audit.config"))
    ended = threading.Event()  # a `join` that Ctrl-C interrupts takes the thread for ended

    def test() -> None:
        lg.StartTestWithLogSettings(*arguments)
        ended.set()

    thread = threading.Thread(target=test, name="loadgen", daemon=True)
    thread.start()
    try:
        while not ended.wait(0.2):
            pass
    except BaseException as error:
        system.fail(error)
        ended.wait(60.0)
        raise
    finally:  # LoadGen crashes a process that ends before this thread
        if ended.is_set():
            thread.join()
    lg.DestroyQSL(library)
    lg.DestroySUT(under_test)
    if system.failure:
        raise system.failure


def read_verdict(scenario: str, folder: Path) -> Verdict:
    """Return the verdict of the logs in a folder; raise PipelineError where LoadGen wrote none."""
    found: dict[str, Any] = {}
    reasons: list[str] = []
    detail = folder / "mlperf_log_detail.txt"
    for line in detail.read_text(errors="replace").splitlines():
        if line.startswith(":::MLLOG "):
            event = json.loads(line.removeprefix(":::MLLOG "))
            found[event["key"]] = event["value"]
            if event["metadata"].get("is_error"):
                reasons.append(str(event["value"]))
    if found.get("result_validity") == "INVALID":
        told = (found.get("result_invalid_reason", ""), found.get("early_stopping_result", ""))
        reasons += [" ".join(str(text).replace(" * ", " ").split()) for text in told if text]
    score = next((float(found[key]) for key in _SCORES[scenario] if found.get(key)), None)  # 0: it found none
    if "result_validity" not in found or score is None:
        raise PipelineError(f"{detail}: LoadGen wrote no result for {scenario}: {'; '.join(reasons) or 'no reason'}")
    seconds = score / 1e9 if scenario in STREAMS else score
    return Verdict(scenario, found["result_validity"] == "VALID", seconds, tuple(reasons), folder)
