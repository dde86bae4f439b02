"""fleet.toml is read as written, and each mistake is told with its line."""

from __future__ import annotations

import pytest

from tvm_pipeline.errors import OptionError
from tvm_pipeline_hosts.fleet.description import Camera
from tvm_pipeline_hosts.fleet.fleet_file import read_fleet
from tvm_pipeline_video.service.settings import MODEL_KINDS

GOOD = """\
spare = 1
beat = "200ms"
late = "2s"
alone = "stop"

[[host]]
name = "attic"
platform = "attic.toml"
profiles = { faces = "attic.json" }

[[host]]
name = "barn"
bundles = { faces = "barn.tar" }
[host.fps]
plates = 12

[[model]]
name = "faces"
file = "faces.onnx"
decoder = "yolo"
labels = "names.txt"
threshold = 0.5

[[model]]
name = "plates"
file = "plates.tar"

[[camera]]
name = "gate"
source = "rtsp://gate/1"
models = ["faces@10", "plates@2.5"]
hosts = ["barn"]

[[camera]]
name = "yard"
source = "yard.mp4"
models = ["faces@5"]
"""


def written(tmp_path, text):
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    return path


def test_all_keys_are_read(tmp_path):
    (tmp_path / "names.txt").write_text("cat")
    (tmp_path / "yard.mp4").write_text("")
    file = read_fleet(written(tmp_path, GOOD))
    assert (file.spare, file.beat_s, file.late_s, file.alone) == (1, 0.2, 2.0, "stop")
    attic, barn = file.hosts
    assert (attic.platform, attic.profiles) == (tmp_path / "attic.toml", {"faces": tmp_path / "attic.json"})
    assert (barn.bundles, barn.fps) == ({"faces": tmp_path / "barn.tar"}, {"plates": 12.0})
    settings = {"decoder": "yolo", "labels": str(tmp_path / "names.txt"), "threshold": 0.5}
    assert file.find_model("faces").settings == settings
    assert file.cameras == (
        Camera("gate", "rtsp://gate/1", {"faces": 10.0, "plates": 2.5}, ("barn",)),
        Camera("yard", str(tmp_path / "yard.mp4"), {"faces": 5.0}),
    )


def test_a_model_takes_the_settings_of_run_that_are_of_a_model(tmp_path):
    settings = {key: 0.25 if kind is float else "some" for key, kind in MODEL_KINDS.items()}
    lines = "".join(f"{key} = {value!r}\n" for key, value in settings.items())
    text = GOOD.replace('decoder = "yolo"\nlabels = "names.txt"\nthreshold = 0.5\n', lines)
    assert read_fleet(written(tmp_path, text)).find_model("faces").settings == settings


def test_a_host_runs_its_own_bundle_or_that_of_the_model(tmp_path):
    file = read_fleet(written(tmp_path, GOOD))
    attic, barn = file.hosts
    assert file.bundle(barn, "faces") == tmp_path / "barn.tar"
    assert file.bundle(attic, "faces") is None
    assert file.bundle(attic, "plates") == tmp_path / "plates.tar"


def test_the_fleet_has_the_hosts_works(tmp_path):
    fleet = read_fleet(written(tmp_path, GOOD)).fleet({"attic": {"faces": 0.01}})
    assert [dict(host.work_s) for host in fleet.hosts] == [{"faces": 0.01}, {}]
    assert (fleet.spare, fleet.beat_s, fleet.late_s, fleet.alone) == (1, 0.2, 2.0, "stop")


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ('hosts = ["barn"]', 'hosts = ["bran"]', 32, "camera gate: hosts names bran, .* did you mean barn?"),
        ('"faces@5"', '"face@5"', 37, "camera yard: models names face, .* did you mean faces?"),
        ('"faces@5"', '"faces"', 37, "'faces', which does not say a rate"),
        ('"faces@5"', '"faces@-1"', 37, "'faces@-1', which does not say a rate"),
        ('"faces@5"', '"faces@nan"', 37, "'faces@nan', which does not say a rate"),
        ('["faces@5"]', "[]", 37, "models is empty"),
        ('"plates@2.5"', '"faces@2.5"', 31, "models has faces twice"),
        ('name = "barn"', 'name = "attic"', 12, "two of kind host are called attic, the first at line 7"),
        ('name = "yard"', 'name = "the yard"', 35, "'the yard'; its name must be one word"),
        ('name = "yard"\n', "", 34, "camera number 2: it has no name"),
        ('source = "yard.mp4"', 'sorce = "yard.mp4"', 36, "there is no key sorce; did you mean source?"),
        ("spare = 1", "sapre = 1", 1, "there is no key sapre; did you mean spare?"),
        ("spare = 1", "spare = 2", 1, "spare is 2, and the fleet has 2 hosts"),
        ("spare = 1", 'spare = "one"', 1, "spare: Expected `int`"),
        ('late = "2s"', 'late = "0.3s"', 3, "late is from 3 beats"),
        ('late = "2s"', 'late = "2 days"', 3, "late is '2 days'; write it as"),
        ('alone = "stop"', 'alone = "go"', 4, "alone is 'go'; it is one of keep, stop"),
        ("plates = 12", "plates = 0", 14, "host barn: fps of plates is 0"),
        ("plates = 12", "plate = 12", 14, "fps names plate, .* did you mean plates"),
        ("threshold = 0.5", 'threshold = "low"', 22, "model faces: threshold: Expected `float`"),
        ("threshold = 0.5", "threshold = ", 22, "it is no TOML"),
    ],
)
def test_a_mistake_is_told_with_its_line(tmp_path, old, new, line, words):
    assert GOOD.count(old) == 1
    path = written(tmp_path, GOOD.replace(old, new))
    with pytest.raises(OptionError, match=f"^{path}, line {line}: .*{words}"):
        read_fleet(path)


def test_a_fleet_without_cameras_is_none(tmp_path):
    with pytest.raises(OptionError, match=r"it has no camera; a fleet needs at least one \[\[camera\]\]"):
        read_fleet(written(tmp_path, GOOD[: GOOD.index("[[camera]]")]))


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(OptionError, match=r"cannot read .*none\.toml"):
        read_fleet(tmp_path / "none.toml")
