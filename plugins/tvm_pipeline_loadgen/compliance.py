"""MLCommons' compliance tests: the answers of a performance test are the right ones, and none comes from a cache.

The settings and the limits are those of `compliance/TEST01` and `compliance/TEST04` of
https://github.com/mlcommons/inference, which compare scores as rates.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_pipeline_loadgen.scenarios import Verdict, loadgen, run_test, start_test
from tvm_pipeline_loadgen.under_test import UnderTest

SEED, LOGGED = 720381539243781796, 1024  # of TEST01's audit.config: how many answers LoadGen logs, about
SAME_INDEX = 3  # of TEST04's audit.config
MOST_APART = 0.1
MOST_APART_WHEN_SHORT = 0.2  # where a query of a stream takes less than the following seconds
SHORT_S = {"SingleStream": 200e-6, "MultiStream": 1600e-6}


@dataclass(frozen=True, slots=True)
class Check:
    """What a compliance test found.

    Attributes:
        name: TEST01 or TEST04.
        passed: it passed.
        what: the figures, as a person reads them.
    """

    name: str
    passed: bool
    what: str

    def __str__(self) -> str:
        return f"{self.name}: {'passed' if self.passed else 'FAILED'}, {self.what}"


def check_answers(system: UnderTest, settings: Callable[[], Any], performance: Verdict, folder: Path) -> Check:
    """Compare answers that LoadGen logs in a performance test with those of an accuracy test, and the two speeds.

    Args:
        settings: makes the settings of the performance test.
        performance: its verdict.
        folder: the logs of both tests go into folders of it.
    """
    accuracy = settings()
    accuracy.mode = loadgen().TestMode.AccuracyOnly
    start_test(system, accuracy, folder / "accuracy")
    right = dict(_logged(folder / "accuracy"))
    logging = settings()
    logging.accuracy_log_rng_seed, logging.accuracy_log_sampling_target = SEED, LOGGED
    again = run_test(system, logging, performance.scenario, folder / "TEST01")
    answers = _logged(folder / "TEST01")
    same = sum(right.get(index) == answer for index, answer in answers)
    ratio = again.speed / performance.speed
    passed = 0 < same == len(answers) and ratio > 1 - _most_apart(performance)
    return Check("TEST01", passed, f"{same} of {len(answers)} answers equal, speed {ratio:.3f} of the performance test")


def check_caching(system: UnderTest, settings: Callable[[], Any], performance: Verdict, folder: Path) -> Check:
    """Ask for one sample again and again: a system that keeps answers would be faster."""
    same = settings()
    same.performance_issue_same, same.performance_issue_same_index = True, SAME_INDEX
    again = run_test(system, same, performance.scenario, folder / "TEST04")
    ratio = again.speed / performance.speed
    what = f"speed {ratio:.3f} of the performance test where all samples are the same"
    return Check("TEST04", ratio < 1 + _most_apart(performance), what)


def _most_apart(performance: Verdict) -> float:
    return MOST_APART_WHEN_SHORT if performance.score <= SHORT_S.get(performance.scenario, 0.0) else MOST_APART


def _logged(folder: Path) -> list[tuple[int, str]]:
    """Return the index of each sample that LoadGen logged, and its answer in hexadecimal digits."""
    events = json.loads((folder / "mlperf_log_accuracy.json").read_text())
    return [(event["qsl_idx"], event["data"]) for event in events]
