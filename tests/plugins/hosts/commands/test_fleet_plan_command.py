"""`fleet plan` as a user meets it."""

from __future__ import annotations

import json

FLEET = """
spare = 1
[[host]]
name = "attic"
fps = { faces = 100, plates = 50 }
[[host]]
name = "barn"
fps = { faces = 100 }
[[model]]
name = "faces"
[[model]]
name = "plates"
[[camera]]
name = "gate"
source = "rtsp://user:secret@gate/1"
models = ["faces@10"]
[[camera]]
name = "road"
source = "rtsp://road/1"
models = ["plates@10"]
[[camera]]
name = "shed"
source = "rtsp://shed/1"
models = ["plates@10"]
hosts = ["barn"]
"""


def test_fleet_plan_places_cameras_and_says_who_starves(cli, tmp_path):
    fleet, placement = tmp_path / "fleet.toml", tmp_path / "placement.json"
    fleet.write_text(FLEET)
    fleet.chmod(0o600)
    told = cli("fleet", "plan", fleet, "--json", "-o", placement)
    assert told.code == 0
    assert told.json["host_of"] == {"gate": "barn", "road": "attic"}
    assert told.json["starving"] == {"shed": "none of its 1 hosts can run plates"}
    assert told.json["starving_without"] == {"attic": ["road"]}
    assert told.json["proven"]
    assert json.loads(placement.read_text()) == {"host_of": told.json["host_of"]}
    assert "plates is not on barn: fleet.toml gives no fps" in told.err
    assert "secret" not in told.out + told.err


def test_fleet_plan_moves_nobody_without_need(cli, tmp_path):
    fleet, placement = tmp_path / "fleet.toml", tmp_path / "placement.json"
    fleet.write_text(FLEET)
    fleet.chmod(0o600)
    placement.write_text('{"host_of": {"gate": "barn", "road": "attic"}}')
    out = " ".join(cli("fleet", "plan", fleet, "--before", placement).out.split())
    assert "0 cameras leave their hosts" in out
    assert "1 of 3 cameras starve; 1 hosts cannot be lost: without attic 1 camera starves" in out
    wrong = tmp_path / "wrong.json"
    wrong.write_text("[]")
    told = cli("fleet", "plan", fleet, "--before", wrong)
    assert (told.code, "wrong.json" in told.err) == (2, True)


def test_fleet_plan_names_the_line_of_a_mistake(cli, tmp_path):
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(FLEET.replace('hosts = ["barn"]', 'hosts = ["bran"]'))
    outcome = cli("fleet", "plan", fleet)
    assert "line 15: camera gate: others can read this file, and source holds a secret: `chmod 600" in outcome.err
    fleet.chmod(0o600)
    told = cli("fleet", "plan", fleet)
    assert told.code == 2
    assert "line 25: camera shed: hosts names bran, and no host is called so; did you mean barn?" in told.err
