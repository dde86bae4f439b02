"""The log of a meter that stands outside of the machine: a CSV file that grows while it is read.

A USB meter, a smart plug or a laboratory's instrument writes a line for each value. The names of the columns decide
what they are; a unit is never guessed:

    time,power_w                        time,voltage_v,current_ma             Timestamp;Energy (Wh)
    2026-05-01T12:00:00.0+02:00,7.31    1777629600.25,5.104,1432              2026-05-01T10:00:00Z;12.0511

Moments are of the clock of the meter's computer, which must be this machine's, or as right. A line counts once its end
is written. The first reading is the last line that is there: what was drawn before is not ours.
"""

from __future__ import annotations

import csv
import math
import os
import re
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import median

from tvm_pipeline.errors import PowerError
from tvm_pipeline.power.sensor import Reading, Scope, Sensor

MOST_W = 10_000.0  # more than a socket gives
KEPT_LINES = 100  # of those that were there before; they tell how often the meter has a value
STALE_S = 30.0  # since the last line: the logger has ended, or its clock is wrong
AHEAD_S = 2.0  # of this machine's clock
EARLIEST_S = 1e9  # the year 2001: less is seconds since something else than 1970
LATEST_S = 1e10


def _columns(names: Sequence[str], units: dict[str, float]) -> dict[str, float]:
    """Return the scale of each name that a column can have: a unit, or a name and a unit."""
    return units | {f"{name}_{unit}": scale for name in names for unit, scale in units.items()}


MOMENTS = {"time": 1.0, "timestamp": 1.0, "datetime": 1.0, "date": 1.0, "epoch": 1.0, "unix_time": 1.0}
MOMENTS |= {f"{name}_{unit}": scale for name in MOMENTS for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))}
COLUMNS = {
    "moment": MOMENTS,
    "energy": _columns(
        ("energy", "counter"), {"j": 1.0, "joules": 1.0, "mj": 1e-3, "wh": 3600.0, "mwh": 3.6, "kwh": 3.6e6}
    ),
    "power": _columns(("power", "p"), {"w": 1.0, "watt": 1.0, "watts": 1.0, "mw": 1e-3}),
    "voltage": _columns(("voltage", "u", "vbus"), {"v": 1.0, "volt": 1.0, "volts": 1.0, "mv": 1e-3}),
    "current": _columns(("current", "i", "ibus"), {"a": 1.0, "amps": 1.0, "ampere": 1.0, "amperes": 1.0, "ma": 1e-3}),
}
WANTED = "a time, and power_w, or energy_j or energy_wh, or voltage_v and current_a (or with milli: power_mw)"


class LogFile(Sensor):
    """The log of a meter.

    Args:
        path: a CSV file whose first line names its columns, separated by commas, semicolons or tabs.

    Raises:
        PowerError: the file cannot be read, its columns are unknown, or a line is impossible; the message names the
            file and the line.

    Examples:
        >>> import tempfile, time
        >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        ...     start_s = time.time() - 2
        ...     _ = file.write(f"time,power_w\\n{start_s},5\\n{start_s + 1},7\\n")
        ...     file.flush()
        ...     log = LogFile(Path(file.name))
        ...     before = log.read()[-1]
        ...     _ = file.write(f"{start_s + 2},9\\n")
        ...     file.flush()
        ...     after = log.read()[-1]
        >>> after.energy_j - before.energy_j
        8.0
    """

    covers = "what the meter of the file measures"
    scope: Scope = "board"

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._number = 0  # of lines below the header that were read
        self._part = b""  # of a line whose end is not written
        self._last: tuple[float, float] | None = None  # moment since 1970, and watts or joules of the counter
        self._total_j = 0.0
        self._failure: PowerError | None = None
        # One difference of the clocks for all lines: a clock that is set meanwhile moves none of them.
        self._start_s = time.time() - time.perf_counter()
        if path.exists() and not path.is_file():  # a pipe would let us wait for its writer
            raise PowerError(f"{path}: it is no regular file; let the meter's logger write its lines to one")
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise PowerError(f"{path}: {error.strerror}") from error
        header = self._lines(1)
        if not header:
            raise PowerError(f"{path}: no line is complete; its first one must name the columns: {WANTED}")
        self._delimiter = max(",;\t", key=header[0].count)
        self._found = self._known(next(csv.reader(header, delimiter=self._delimiter)))
        lines = self._lines()
        self._number = max(0, len(lines) - KEPT_LINES)
        self._new = self._rows(lines[self._number :])
        gaps = [after.time_s - before.time_s for before, after in zip(self._new[:-1], self._new[1:], strict=True)]
        self.period_s = median(gaps) if gaps else 1.0
        self._new = self._new[-1:]

    def read(self) -> Sequence[Reading]:
        """Return the lines that are new; at first the last one.

        Raises:
            PowerError: the log has ended, was cut or replaced, or a line is impossible.
        """
        if self._failure:
            raise self._failure
        try:
            rows = [*self._new, *self._rows(self._lines())]
            self._new = []
            self._check_clock()
        except PowerError as error:
            self._failure = error
            raise
        return rows

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _known(self, header: list[str]) -> dict[str, tuple[int, float]]:
        """Return the index and the scale of each column that counts."""
        found: dict[str, tuple[int, float]] = {}
        for index, cell in enumerate(header):
            name = re.sub(r"[^a-z0-9]+", "_", cell.lower()).strip("_")
            for kind, scales in COLUMNS.items():
                if name in scales:
                    if kind in found:
                        raise PowerError(f"{self._path}: line 1: two columns are a {kind}; leave one of them out")
                    found[kind] = index, scales[name]
        if "moment" not in found or not ({"energy", "power"} & set(found) or {"voltage", "current"} <= set(found)):
            raise PowerError(f"{self._path}: line 1: the columns {', '.join(header)}; needed are {WANTED}")
        return found

    def _lines(self, most: int | None = None) -> list[str]:
        """Return the lines that are complete and not yet read."""
        try:
            status, size = os.stat(self._path), os.fstat(self._file.fileno())
            if (status.st_ino, status.st_dev) != (size.st_ino, size.st_dev) or size.st_size < self._file.tell():
                raise PowerError(f"{self._path}: it was cut or replaced while it was read; start again")
            lines: list[str] = []
            while most is None or len(lines) < most:
                self._part += self._file.readline()
                if not self._part.endswith(b"\n"):
                    break
                lines.append(self._part.decode("utf-8", errors="replace").strip())
                self._part = b""
        except OSError as error:
            raise PowerError(f"{self._path}: {error.strerror}") from error
        return lines

    def _rows(self, lines: Sequence[str]) -> list[Reading]:
        readings = []
        for line in lines:
            self._number += 1
            if line:
                readings.append(self._reading(next(csv.reader([line], delimiter=self._delimiter))))
        return readings

    def _reading(self, cells: list[str]) -> Reading:
        moment_s = self._moment_s(self._cell(cells, "moment"))
        is_counter = "energy" in self._found
        figure = self._figure(cells, "energy") if is_counter else self._watts(cells)
        if self._last is not None:
            before_s, before = self._last
            if moment_s <= before_s:
                raise self._wrong("its time is not after that of the line before")
            step_j = figure - before if is_counter else (moment_s - before_s) * (before + figure) / 2
            if step_j < 0:
                raise self._wrong("its counter is less than in the line before; was the meter reset?")
            if step_j > MOST_W * (moment_s - before_s):
                raise self._wrong(f"more than {MOST_W:.0f} W since the line before; is the unit of the column right?")
            self._total_j += step_j
        self._last = moment_s, figure
        return Reading(moment_s - self._start_s, self._total_j)

    def _watts(self, cells: list[str]) -> float:
        if "power" in self._found:
            watts = self._figure(cells, "power")
        else:
            watts = self._figure(cells, "voltage") * self._figure(cells, "current")
        if watts > MOST_W:
            raise self._wrong(f"{watts:g} W are more than {MOST_W:.0f} W; is the unit of the column right?")
        return watts

    def _figure(self, cells: list[str], kind: str) -> float:
        cell = self._cell(cells, kind)
        try:
            figure = float(cell) * self._found[kind][1]
        except ValueError:
            raise self._wrong(f"{cell!r} is no {kind}; a fraction is written with a point") from None
        if not math.isfinite(figure) or figure < 0:
            raise self._wrong(f"a {kind} of {cell}")
        return figure

    def _cell(self, cells: list[str], kind: str) -> str:
        index = self._found[kind][0]
        if index >= len(cells):
            raise self._wrong(f"it has {len(cells)} columns, and its {kind} is column {index + 1}")
        return cells[index].strip()

    def _moment_s(self, cell: str) -> float:
        """Return seconds since 1970."""
        try:
            moment_s = float(cell) * self._found["moment"][1]
        except ValueError:
            try:
                # Python before 3.11 reads no Z.
                moment = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", cell))
            except ValueError:
                raise self._wrong(f"{cell!r} is no time: seconds since 1970, or 2026-05-01T12:00:00+02:00") from None
            if moment.tzinfo is None:
                raise self._wrong(f"{cell!r} has no zone; write 2026-05-01T12:00:00+02:00, or Z for UTC") from None
            moment_s = moment.timestamp()
        if not EARLIEST_S < moment_s < LATEST_S:
            raise self._wrong(f"{cell} is not in seconds since 1970; a column of milliseconds is called time_ms")
        return moment_s

    def _wrong(self, reason: str) -> PowerError:
        return PowerError(f"{self._path}: line {self._number + 1}: {reason}")

    def _check_clock(self) -> None:
        if self._last is None:
            raise PowerError(f"{self._path}: it has no values yet; start the logger of the meter first")
        late_s = time.time() - self._last[0]
        if late_s > max(STALE_S, 10 * self.period_s):
            raise PowerError(
                f"{self._path}: its last line is {late_s:.0f} s old; is the logger running, and its clock right?"
            )
        if late_s < -AHEAD_S:
            raise PowerError(f"{self._path}: its last line is {-late_s:.0f} s ahead of this machine's clock")
