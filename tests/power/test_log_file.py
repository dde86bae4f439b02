"""Logs of meters: columns and units, files that grow and are torn at any byte, and lines that make no sense."""

from __future__ import annotations

import os
import time
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tvm_pipeline.errors import PowerError
from tvm_pipeline.power import Meter, Survey, chosen_sensor
from tvm_pipeline.power.log_file import LogFile

ZONE = timezone(timedelta(hours=2))


def iso(moment_s: float) -> str:
    return datetime.fromtimestamp(moment_s, ZONE).isoformat()


def log_of(path: Path, text: str) -> LogFile:
    path.write_bytes(text.encode())
    return LogFile(path)


def append(path: Path, text: str) -> None:
    with path.open("ab") as file:
        file.write(text.encode())


@pytest.mark.parametrize(
    ("header", "first", "second", "joules"),
    [
        ("time,power_w", "{},2.5", "{},3.5", 3.0),
        ("Timestamp;Power (mW);Temperature", "{};2500;31", "{};3500;31", 3.0),
        ("time\tvoltage_v\tcurrent_ma", "{}\t5.0\t500", "{}\t5.0\t700", 3.0),
        ("V,A,time", "5,0.5,{}", "5,0.7,{}", 3.0),
        ("time,Watts", "{},2.5", "{},3.5", 3.0),
        ("time,energy_j", "{},1000", "{},1003.5", 3.5),
        ("time,Energy [mWh]", "{},500", "{},501", 3.6),
        ("time,energy_wh", "{},0.5", "{},0.501", 3.6),
        # A counter of the meter's own knows more than two values of power.
        ("time,power_w,energy_j", "{},9,10", "{},9,13", 3.0),
    ],
)
def test_the_columns_decide(header: str, first: str, second: str, joules: float, tmp_path: Path) -> None:
    now_s = time.time() - 1
    log = log_of(tmp_path / "meter.csv", f"\ufeff{header}\r\n{first.format(iso(now_s))}\r\n")
    before = log.read()
    append(tmp_path / "meter.csv", f"\r\n{second.format(iso(now_s + 1))}\r\n")
    after = log.read()
    assert len(before) == len(after) == 1
    assert after[0].energy_j - before[0].energy_j == pytest.approx(joules)
    assert after[0].time_s - before[0].time_s == pytest.approx(1, abs=1e-5)


def test_moments_are_of_the_clock_of_this_process(tmp_path: Path) -> None:
    """Seconds and milliseconds since 1970, and a time with a zone, are the same moment."""
    moment_s = float(int(time.time()))
    expected_s = time.perf_counter() - (time.time() - moment_s)
    for index, row in enumerate([f"time,w\n{moment_s},1\n", f"time_ms,w\n{moment_s:.0f}000,1\n"]):
        (reading,) = log_of(tmp_path / f"{index}.csv", row).read()
        assert reading.time_s == pytest.approx(expected_s, abs=0.1)
    utc = datetime.fromtimestamp(moment_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    (reading,) = log_of(tmp_path / "utc.csv", f"time,w\n{utc},1\n").read()
    assert reading.time_s == pytest.approx(expected_s, abs=0.1)


def test_a_meter_reads_a_log_while_it_grows(tmp_path: Path) -> None:
    """What was drawn before the run does not count, and a log's sensor is chosen by its path."""
    path = tmp_path / "usb.csv"
    begin_s = time.time()
    path.write_text("time,power_w\n" + "".join(f"{begin_s - 20 + step},50\n" for step in range(20)))
    log = chosen_sensor(Survey([], {}), str(path))
    assert log is not None
    assert (log.name, log.period_s) == (str(path), pytest.approx(1))
    log.period_s = 0.01
    with Meter(log) as meter:
        append(path, "".join(f"{begin_s + step / 100},8\n" for step in range(1, 11)))
        start_s = time.perf_counter() - (time.time() - begin_s)
        energy = meter.energy(start_s + 0.05, start_s + 0.06)
    assert energy is not None
    assert energy.watts == pytest.approx(8)
    whole = meter.since_start
    assert whole is not None
    assert (whole.readings, whole.seconds) == (11, pytest.approx(1.1))
    assert whole.energy_j == pytest.approx(1.01 * (50 + 8) / 2 + 0.09 * 8)


@examples(60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 99_999)), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 400), max_size=6),
)
def test_a_log_torn_at_any_byte_gives_no_wrong_sum(
    rows: list[tuple[int, int]], cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """However the file grows, each reading is the trapezoidal sum up to a complete line, and none is lost.

    A moment since 1970 is a multiple of 0.24 us as a float, which is less than 0.5 mJ of these rows.
    """
    path = tmp_path_factory.mktemp("log") / "meter.csv"
    first_ms = int(time.time() * 1000) - 8000
    moments, watts, moment_ms = [first_ms], [3.5], first_ms
    for gap_ms, milliwatts in rows:
        moment_ms += gap_ms
        moments.append(moment_ms)
        watts.append(milliwatts / 1000)
    sums = [0.0]
    for (before_ms, after_ms), (before_w, after_w) in zip(pairwise(moments), pairwise(watts), strict=True):
        sums.append(sums[-1] + (after_ms - before_ms) / 1000 * (before_w + after_w) / 2)
    lines = [f"{moment / 1000:.3f},{power:.3f}\n" for moment, power in zip(moments, watts, strict=True)]
    whole = "".join(lines[1:]).encode()
    log = log_of(path, "time,power_w\n" + lines[0])
    readings = list(log.read())
    written = 0
    for cut in [*sorted(cuts), len(whole)]:
        end = min(cut, len(whole))
        with path.open("ab") as file:
            file.write(whole[written:end])
        written = end
        readings += log.read()
        complete = 1 + whole[:written].count(b"\n")
        assert [reading.energy_j for reading in readings] == pytest.approx(sums[:complete], abs=5e-4)
    assert [round((reading.time_s - readings[0].time_s) * 1000) for reading in readings] == [
        moment - first_ms for moment in moments
    ]


NOW = 1_777_629_600


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no line is complete; its first one must name the columns"),
        ("time,power_w", "no line is complete"),
        ("time,power\n", "line 1: the columns time, power; needed are a time, and power_w"),
        ("time,voltage_v\n", "line 1: the columns time, voltage_v"),
        ("power_w,current_a\n", "needed are a time"),
        ("time,power_w,p_mw\n", "line 1: two columns are a power"),
        (f"time,w\n{NOW},1\n{NOW},2\n", "line 3: its time is not after that of the line before"),
        (f"time,w\n{NOW},1\n{NOW - 1},2\n", "line 3: its time is not after"),
        (f"time,w\n{NOW},nan\n", "line 2: a power of nan"),
        (f"time,w\n{NOW},inf\n", "line 2: a power of inf"),
        (f"time,w\n{NOW},1\n\n{NOW + 1},-2\n", "line 4: a power of -2"),
        (f"time,w\n{NOW},2500000\n", "line 2: 2.5e.06 W are more than 10000 W; is the unit"),
        (f"time;w\n{NOW};2,5\n", "line 2: '2,5' is no power; a fraction is written with a point"),
        (f"time,w\n{NOW}\n", "line 2: it has 1 columns, and its power is column 2"),
        (f"time,j\n{NOW},5\n{NOW + 1},4\n", "line 3: its counter is less than in the line before; was the meter reset"),
        (f"time,j\n{NOW},5\n{NOW + 1},50000\n", "line 3: more than 10000 W since the line before"),
        ("time,w\n2026-05-01T12:00:00,1\n", "line 2: '2026-05-01T12:00:00' has no zone"),
        ("time,w\nnoon,1\n", "line 2: 'noon' is no time"),
        (f"time,w\n{NOW}000,1\n", "not in seconds since 1970; a column of milliseconds is called time_ms"),
        ("time,w\n12.5,1\n", "12.5 is not in seconds since 1970"),
    ],
)
def test_a_line_that_makes_no_sense_is_named(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "meter.csv"
    with pytest.raises(PowerError, match=f"meter.csv: .*{said}"):
        log_of(path, text)


def test_a_line_that_makes_no_sense_later_is_named_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "meter.csv"
    log = log_of(path, f"time,w\n{time.time()},5\n")
    append(path, "rubbish\n")
    for _ in range(2):
        with pytest.raises(PowerError, match=r"meter\.csv: line 3: 'rubbish' is no time|line 3: it has 1 columns"):
            log.read()


def test_lines_of_long_ago_are_not_judged(tmp_path: Path) -> None:
    """A meter that was reset yesterday, in the same file, is no reason to refuse it; lines are counted all the same."""
    now_s = time.time()
    rows = ["0,rubbish", *(f"{now_s - 200 + step},5" for step in range(200))]
    log = log_of(tmp_path / "meter.csv", "time,w\n" + "".join(f"{row}\n" for row in rows))
    assert len(log.read()) == 1
    append(tmp_path / "meter.csv", "0,5\n")
    with pytest.raises(PowerError, match="line 203: 0 is not in seconds since 1970"):
        log.read()


@pytest.mark.parametrize(
    ("late_s", "said"), [(3600, "its last line is 3600 s old; is the logger running"), (-60, "60 s ahead of this")]
)
def test_a_log_that_ended_or_is_of_another_clock(late_s: float, said: str, tmp_path: Path) -> None:
    log = log_of(tmp_path / "meter.csv", f"time,w\n{time.time() - late_s},5\n")
    with pytest.raises(PowerError, match=said):
        log.read()


def test_a_log_without_values(tmp_path: Path) -> None:
    with pytest.raises(PowerError, match="it has no values yet; start the logger"):
        log_of(tmp_path / "meter.csv", "time,w\n").read()


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_log_that_was_cut_or_replaced(is_cut: bool, tmp_path: Path) -> None:
    path = tmp_path / "meter.csv"
    text = f"time,w\n{time.time()},5\n"
    log = log_of(path, text)
    log.read()
    if is_cut:
        path.write_text("time,w\n")
    else:
        other = tmp_path / "other.csv"
        other.write_text(text)
        other.replace(path)
    with pytest.raises(PowerError, match=r"meter\.csv: it was cut or replaced"):
        log.read()
    log.close()


def test_a_pipe_is_no_log(tmp_path: Path) -> None:
    """To open one would wait for a writer, maybe for ever."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(PowerError, match="it is no regular file"):
            chosen_sensor(Survey([], {}), str(path))


def test_neither_a_sensor_nor_a_file(tmp_path: Path) -> None:
    missing = tmp_path / "missing.csv"
    with pytest.raises(PowerError, match="no sensor of this machine has this name, and no file is there; it has no"):
        chosen_sensor(Survey([], {}), str(missing))
    with pytest.raises(PowerError, match="No such file"):
        LogFile(missing)
    assert chosen_sensor(Survey([], {})) is None
