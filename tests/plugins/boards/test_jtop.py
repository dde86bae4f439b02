"""The service of jtop, by a class with the documented interface of its client in place of it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from tests.plugins.boards import power_trees as trees
from tests.plugins.boards.surveys import surveyed
from tvm_pipeline.errors import PowerError
from tvm_pipeline.power import chosen_sensor


class Client:
    """What jetson_stats 4 to 7 document of its class `jtop`; the package itself is not here."""

    power: ClassVar[dict[str, Any]] = {"rail": {}, "tot": {"power": 5210, "avg": 5100}}
    is_alive = True
    opened = 0

    def __init__(self) -> None:
        self._started = False

    def start(self) -> None:
        if self._started:
            raise RuntimeError("threads can only be started once")
        self._started = True
        Client.opened += 1

    def close(self) -> None:
        Client.opened -= 1

    def ok(self, spin: bool = False) -> bool:
        return spin and Client.is_alive  # it waits for the next value without `spin`


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a machine on which the service runs."""
    package = ModuleType("jtop")
    package.jtop = Client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jtop", package)
    monkeypatch.setattr(Client, "opened", 0)
    return trees.write_tree(tmp_path, {"run/jtop.sock": ""})


def test_the_total_is_read_in_milliwatts(service: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sensor = chosen_sensor(surveyed(service))
    assert sensor is not None
    assert (sensor.name, sensor.scope, Client.opened) == ("jtop", "board", 0)
    assert sensor.period_s == 1.0  # `jtop(interval=1.0)`: to read more often gives each value twice
    first, second = sensor.read()[-1], sensor.read()[-1]
    assert second.energy_j == pytest.approx(5.21 * (second.time_s - first.time_s))
    assert Client.opened == 1
    monkeypatch.setattr(Client, "is_alive", False)
    with pytest.raises(PowerError, match="jtop: its service has ended"):
        sensor.read()
    sensor.close()
    assert Client.opened == 0


@pytest.mark.parametrize(
    ("power", "said"),
    [({}, "KeyError: 'tot'"), ({"tot": {"power": -1}}, "a power of -1 mW"), ({"tot": {"power": "?"}}, "'[?]' mW")],
)
def test_a_board_that_it_does_not_know(
    power: dict[str, Any], said: str, service: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "power", power)
    with pytest.raises(PowerError, match=said):
        chosen_sensor(surveyed(service), "jtop")


def test_rails_are_read_without_it(service: Path) -> None:
    trees.xavier_nx(service)
    best = chosen_sensor(surveyed(service))
    assert best is not None
    assert best.name == "ina3221:VDD_IN"


def test_its_package_may_be_missing(service: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jtop", None)
    assert "pip install 'tvm-pipeline[jetson]'" in surveyed(service).obstacles["jtop"]
