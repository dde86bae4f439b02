"""How fast hosts are, from each kind of file that fleet.toml may name."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from tests.support.log_lines import log_lines
from tvm_pipeline.backends.bundle import write_bundle
from tvm_pipeline.core.platform_text import platform_toml
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.errors import OptionError, PipelineError
from tvm_pipeline.planning import plan
from tvm_pipeline.testing import example_backend, example_bundle, example_problem, installed
from tvm_pipeline_hosts.fleet.fleet_file import read_fleet
from tvm_pipeline_hosts.fleet.host_works import host_works, together
from tvm_pipeline_hosts.fleet.placement import place

CAMERAS = """
[[camera]]
name = "gate"
source = "synthetic"
models = ["net@2"]
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with the files of one machine: its platform, a graph, a profile, and a bundle."""
    problem = example_problem()
    (tmp_path / "attic.toml").write_text(platform_toml(problem.platform))
    (tmp_path / "net.json").write_bytes(msgspec.json.encode(problem.graph))
    (tmp_path / "attic.json").write_bytes(msgspec.json.encode(problem.profile))
    with installed(example_backend()):
        write_bundle(tmp_path / "net.tar", example_bundle())
    return tmp_path


def works(folder, hosts, model='[[model]]\nname = "net"\nfile = "net.json"\n', cameras=CAMERAS):
    (folder / "fleet.toml").write_text(hosts + model + cameras)
    file = read_fleet(folder / "fleet.toml")
    heard = log_lines("INFO")
    return file, host_works(file), heard


def test_a_profile_is_planned_for_once_for_equal_hosts(folder):
    hosts = "".join(
        f'[[host]]\nname = "{name}"\nplatform = "attic.toml"\nprofiles = {{ net = "attic.json" }}\n'
        for name in ("attic", "barn")
    )
    _, found, heard = works(folder, hosts)
    best = plan(example_problem()).plan.predicted.throughput_fps
    assert found.work_s == {"attic": {"net": 1 / best}, "barn": {"net": 1 / best}}
    assert [line for line in heard if line.startswith("planning net on")] == ["planning net on attic"]


def test_the_plan_of_a_bundle_counts(folder):
    _, found, _ = works(folder, '[[host]]\nname = "attic"\n', '[[model]]\nname = "net"\nfile = "net.tar"\n')
    bundle = example_bundle()
    fps = judged(example_problem(), bundle.plan).predicted.throughput_fps
    assert found.work_s == {"attic": {"net": 1 / fps}}


def test_given_frames_a_second_count_first_and_what_is_not_known_is_told(folder):
    hosts = '[[host]]\nname = "attic"\nfps = { net = 50 }\nbundles = { net = "none.tar" }\n[[host]]\nname = "barn"\n'
    _, found, _ = works(folder, hosts)
    assert found.work_s == {"attic": {"net": 0.02}, "barn": {}}
    assert found.missing["barn"] == {"net": "fleet.toml gives no fps, no profile and no bundle of it"}


ATTIC = '[[host]]\nname = "attic"\nplatform = "attic.toml"\nprofiles = { net = "attic.json" }\n'
NET = '[[model]]\nname = "net"\nfile = "net.json"\n'


def test_a_host_has_no_more_cameras_than_keep_the_deadline(folder):
    """The pipeline takes 50 frames a second, each 40 ms: cameras of 2 frames a second meet one another at times."""
    counts = {}
    for deadline in ('"41ms"', '"60ms"', "0.2"):
        file, found, _ = works(folder, ATTIC, f"{NET}deadline = {deadline}\nmiss = 0.1\n")
        counts[deadline] = round(1 / (2 * found.work_s["attic"]["net"]))
    assert 1 <= counts['"41ms"'] < counts['"60ms"'] < counts["0.2"] <= 24
    fleet = file.fleet(found.work_s)
    gate = fleet.cameras[0]
    many = replace(fleet, cameras=tuple(replace(gate, name=f"c{number}") for number in range(30)))
    assert len(place(many, 0.1).host_of) == counts["0.2"]


def test_a_deadline_that_no_camera_keeps_is_told(folder):
    _, found, _ = works(folder, ATTIC, f'{NET}deadline = "39ms"\n')
    assert found.missing["attic"]["net"] == (
        "its plan does not keep `deadline` 39 ms for all but 0.01 of the frames at 2 a second: a frame that is alone "
        "takes 40 ms"
    )


def test_frames_a_second_alone_tell_no_latency(folder):
    _, found, _ = works(folder, '[[host]]\nname = "attic"\nfps = { net = 50 }\n', f'{NET}deadline = "1s"\n')
    assert found.missing["attic"]["net"] == "fleet.toml gives no profile and no bundle of it"


@pytest.mark.parametrize(
    ("line", "keys", "told"),
    [
        (7, 'deadline = "soon"', "deadline is 'soon'; write it as \"250ms\""),
        (7, "deadline = 0", "deadline 0: it must be positive"),
        (8, 'deadline = "1s"\nmiss = 0.7', "miss 0.7: it is a share of the frames from 0.001"),
    ],
)
def test_a_deadline_that_makes_no_sense_is_told_with_its_line(folder, line, keys, told):
    with pytest.raises(OptionError, match=rf"fleet\.toml, line {line}:") as raised:
        works(folder, ATTIC, f"[[model]]\nname = 'net'\n{keys}\n")
    assert told in str(raised.value)


def test_a_profile_needs_a_platform_and_a_file_of_the_model(folder):
    with pytest.raises(OptionError, match="host attic has a profile of net and no platform"):
        works(folder, '[[host]]\nname = "attic"\nprofiles = { net = "attic.json" }\n')
    host = '[[host]]\nname = "attic"\nplatform = "attic.toml"\nprofiles = { net = "attic.json" }\n'
    with pytest.raises(OptionError, match="model net has no file"):
        works(folder, host, '[[model]]\nname = "net"\n')
    (folder / "attic.json").write_text("{}")
    with pytest.raises(PipelineError, match=r"attic\.json"):
        works(folder, host)


@pytest.mark.thorough
def test_models_of_a_host_are_planned_together(folder):
    """Two models that are each best on both devices; together they can do no worse than one after the other."""
    host = '[[host]]\nname = "attic"\nplatform = "attic.toml"\nprofiles = { net = "attic.json", same = "attic.json" }\n'
    models = "".join(f'[[model]]\nname = "{name}"\nfile = "net.json"\n' for name in ("net", "same"))
    file, found, _ = works(folder, host, models, CAMERAS.replace('["net@2"]', '["net@2", "same@2"]'))
    fleet = file.fleet(found.work_s)
    placement = place(fleet, 1.0)
    mixed = together(fleet, placement, found)
    assert 0 < mixed["attic"] <= placement.utilisation["attic"] + 1e-9
