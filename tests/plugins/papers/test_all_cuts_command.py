"""The command `all-cuts`: every cut of two devices runs, and what makes no sweep is refused."""

from __future__ import annotations

import pytest
from PIL import Image

from tests.cli.conftest import bundle, cli, model  # noqa: F401


def test_it_runs_every_cut_of_two_devices(cli, bundle, tmp_path):  # noqa: F811
    cores = [device["name"] for device in cli("devices", "--json").json["devices"] if len(device["cores"]) == 1][:2]
    if len(cores) < 2:
        pytest.skip("this machine has one core")
    picture = tmp_path / "cuts.png"
    arguments = ["--seconds", 0.02, "--rounds", 1, "--draw", picture, "--json"]
    outcome = cli("all-cuts", bundle, ",".join(cores), *arguments)
    assert outcome.code == 0, outcome.err
    cuts = outcome.json["cuts"]
    total = sum(cuts[0]["operators"])
    assert [cut["operators"][0] for cut in cuts] == [*range(1, total + 1)] * 2
    assert all(cut["predicted"]["throughput_fps"] > 0 and cut["measured"]["throughput_fps"] > 0 for cut in cuts)
    assert outcome.json["predicted_best"]["predicted"]["throughput_fps"] == max(
        cut["predicted"]["throughput_fps"] for cut in cuts
    )
    assert outcome.json["measured_best"] in cuts
    assert outcome.json["ratio"] >= 1
    with Image.open(picture) as image:
        assert image.format == "PNG"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["cpu0"], "all cuts of cpu0: give two devices, as cpu0,cpu1"),
        (["cpu0,cpu0"], "all cuts of cpu0,cpu0: a sweep needs two devices that can work at the same time"),
        (["cpu0,cpu1", "--draw", "cuts.pdf"], "pictures are .png or .svg"),
        (["cpu0,cpu1", "--seconds", 0], "--seconds must be positive"),
    ],
)
def test_what_makes_no_sweep_is_refused(cli, bundle, arguments, error):  # noqa: F811
    outcome = cli("all-cuts", bundle, *arguments)
    assert outcome.code == 2
    assert error in outcome.err
