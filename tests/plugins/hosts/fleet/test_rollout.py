"""What `fleet run` makes of a file before it asks the fleet, and what it tells of events."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_pipeline.errors import OptionError, PipelineError
from tvm_pipeline_hosts.commands.fleet_run import new_events
from tvm_pipeline_hosts.fleet.description import Camera, Placement
from tvm_pipeline_hosts.fleet.fleet_file import read_fleet
from tvm_pipeline_hosts.fleet.rollout import bundles_of, not_joined, reach_of, said_of

FLEET = """
[[host]]
name = "attic"
bundles = { faces = "attic.tar" }

[[host]]
name = "barn"

[[model]]
name = "faces"
file = "faces.tar"

[[camera]]
name = "gate"
source = "synthetic"
models = ["faces@5"]
"""


def written(tmp_path: Path, text: str) -> Path:
    (tmp_path / "fleet.toml").write_text(text)
    return tmp_path / "fleet.toml"


def test_a_host_has_its_own_bundle_or_that_of_the_model(tmp_path: Path) -> None:
    """What the host names counts more."""
    found = bundles_of(read_fleet(written(tmp_path, FLEET)))
    assert {host: models["faces"].name for host, models in found.items()} == {"attic": "attic.tar", "barn": "faces.tar"}


def test_a_model_without_a_bundle_is_told(tmp_path: Path) -> None:
    """Before anything starts."""
    text = FLEET.replace('"faces.tar"', '"faces.json"').replace('bundles = { faces = "attic.tar" }', "")
    with pytest.raises(OptionError, match=r"fleet\.toml: no host has a bundle of faces; name the model"):
        bundles_of(read_fleet(written(tmp_path, text)))


def test_a_model_that_one_kind_of_host_runs_is_placed_there_alone(tmp_path: Path) -> None:
    """A host without a bundle of a model is not in the reach of its cameras."""
    bundles = bundles_of(read_fleet(written(tmp_path, FLEET.replace('"faces.tar"', '"faces.onnx"'))))
    assert reach_of(Camera("gate", "synthetic", {"faces": 5.0}), bundles) == ("attic",)
    assert reach_of(Camera("gate", "synthetic", {"faces": 5.0}, ("barn",)), bundles) == ()


def test_hosts_that_have_not_joined_are_told(tmp_path: Path) -> None:
    """Some of them are a warning, and none of them is an error."""
    file = read_fleet(written(tmp_path, FLEET))
    assert not_joined(file, ["attic", "barn", "cellar"]) == ""
    assert "barn has not joined" in not_joined(file, ["attic"])
    with pytest.raises(PipelineError, match=r"none of the hosts .* has joined \(attic, barn\)"):
        not_joined(file, [])


def test_a_demand_that_no_host_meets_is_told() -> None:
    """Cameras that starve now, and those that would."""
    placement = Placement({"gate": "attic"}, {"attic": 0.5}, 0.5, {"yard": "no host has room"}, {"attic": ("gate",)})
    said = said_of(placement)
    assert "camera yard starves: no host has room" in said
    assert any("attic is lost" in line and "gate" in line for line in said)


EVENTS = st.lists(st.tuples(st.just("lost"), st.sampled_from("ab")), max_size=8)


@given(EVENTS, EVENTS, st.integers(0, 8))
def test_each_event_is_told(before: list[tuple[str, str]], added: list[tuple[str, str]], forgotten: int) -> None:
    """Whatever was forgotten meanwhile. Of equal events in a row, one may be taken for one that was told before."""
    held = [(5.0, *event) for event in before]
    now = [(6.0, *event) for event in (before + added)[min(forgotten, len(before)) :]]
    told = [event[1:] for event in new_events(held, now)]
    assert told == added[len(added) - len(told) :]
    if not forgotten:
        assert told == added


def test_events_are_told_once() -> None:
    """Nothing new, nothing told."""
    held = [(1.0, "lost", "attic"), (0.5, "back", "attic")]
    assert new_events(held, [(2.0, "lost", "attic"), (1.5, "back", "attic")]) == []
    assert new_events([], held) == held
