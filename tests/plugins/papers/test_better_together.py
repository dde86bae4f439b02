"""Tables and logs of BetterTogether: read, matched with the schedules that they are of, and predicted."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from tests.support.better_together import TABLE, write_board
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.errors import ProfileError
from tvm_pipeline_papers.better_together import LOGS, corrected, matched, read_log, read_table, stages_s, ten_best


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_board(tmp_path_factory.mktemp("board"), slower=0.7)


def test_a_table_has_the_times_beside_the_others(board):
    problem = read_table(board / "board.raw")
    assert [device.name for device in problem.platform.devices] == list(TABLE)
    for name, (_, busy_ms) in TABLE.items():
        seconds = list(problem.profile.devices[name].seconds.values())
        assert seconds == pytest.approx([ms / 1e3 for ms in busy_ms])


def test_the_ten_best_are_those_of_all_assignments(board):
    """Each stage gets any processor; an assignment in which a processor has two runs is no schedule."""
    values = []
    for chosen in itertools.product(TABLE, repeat=5):
        runs = [(name, list(stages)) for name, stages in itertools.groupby(range(5), key=chosen.__getitem__)]
        if len({name for name, _ in runs}) == len(runs):
            values.append(max(sum(TABLE[name][1][stage] for stage in stages) for name, stages in runs) / 1e3)
    problem = read_table(board / "board.raw")
    assert [max(stages_s(problem, stages)) for stages in ten_best(problem)] == pytest.approx(sorted(values)[:10])


def test_each_log_is_of_its_schedule_and_corrects_the_others(board):
    problem = read_table(board / "board.raw")
    files = sorted(board.glob(LOGS), key=lambda path: (len(path.name), path))
    mixed = random.Random(1).sample(list(zip(ten_best(problem), files, strict=True)), len(files))
    logs = [read_log(path) for _, path in mixed]
    assert matched(problem, logs) == [stages for stages, _ in mixed]
    assert matched(problem, logs[3:6]) == [stages for stages, _ in mixed[3:6]]
    runs = list(zip(matched(problem, logs), logs, strict=True))
    for stages, log in runs:
        assert max(stages_s(corrected(problem, runs, len(stages)), stages)) == pytest.approx(log.period_s, rel=1e-6)
    whole = (Stage(("Big",), tuple(problem.graph.operator_names)),)
    assert stages_s(corrected(problem, runs, 1), whole) == stages_s(problem, whole)  # no log has one processor


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "each processor twice for each stage"),
        ("PROCESSOR=Big|AVG=1.0\nPROCESSOR=Big|AVG=1.0\nPROCESSOR=Big|AVG=1.0", "each processor twice for each stage"),
        ("PROCESSOR=Big|AVG=1.0\nPROCESSOR=Little|AVG=1.0", "each processor twice for each stage"),
        (
            "PROCESSOR=Big|AVG=1.0\nPROCESSOR=Big|AVG=one",
            "line 2 is no time of BetterTogether: 'PROCESSOR=Big|AVG=one'",
        ),
        ("PROCESSOR=Big|AVG=nan", "line 1 is no time"),
        ("hello", "line 1 is no time of BetterTogether: 'hello'"),
    ],
)
def test_other_tables_are_refused(tmp_path, text, told):
    (tmp_path / "bad.raw").write_text(text)
    with pytest.raises(ProfileError, match=told) as error:
        read_table(tmp_path / "bad.raw")
    assert str(tmp_path / "bad.raw") in str(error.value)


@pytest.mark.parametrize("text", ["", "Chunk 0 (Big):\n Start: 1 cycles\n End: 2 cycles\n"])
def test_other_logs_are_refused(tmp_path, text):
    (tmp_path / "BM_best_raw_stage_1.txt").write_text(text)
    with pytest.raises(ProfileError, match=r"BM_best_raw_stage_1.txt: no log of BetterTogether, or one of fewer"):
        read_log(tmp_path / "BM_best_raw_stage_1.txt")


def test_a_log_of_none_of_the_ten_is_refused(tmp_path, board):
    (tmp_path / "BM_best_raw_stage_1.txt").write_text(
        "".join(f"Chunk 0 (Other):\n Start: {2 * n + 1} cycles\n End: {2 * n + 2} cycles\n" for n in range(3))
    )
    with pytest.raises(ProfileError, match="the 1 logs are not of the ten best schedules of board"):
        matched(read_table(board / "board.raw"), [read_log(tmp_path / "BM_best_raw_stage_1.txt")])
