"""Whatever is wrong gets one line that names it, the right exit code, and leaves nothing half written."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from tests.support.onnx_models import write_picture_net


def test_usage_errors_end_with_2(cli, bundle, model):
    assert cli("plan").code == 2
    assert cli("fly").code == 2
    assert cli("plan", bundle, "--stages", 0).code == 2
    assert cli("plan", bundle, "--objective", "beauty").code == 2
    assert cli("plan", bundle, "--scheduler", "dice").code == 2
    assert cli("profile", model, "--input-shapes", "picture=[1,2]").code == 2


def fails(outcome, *words: str) -> None:
    assert outcome.code == 1, (outcome.out, outcome.err)
    assert outcome.out == ""
    for word in words:
        assert word in outcome.err


def test_more_stages_than_operators(cli, bundle):
    fails(cli("plan", bundle, "--stages", 99), "99 stages", "operators")


def test_missing_and_truncated_models(cli, model, tmp_path):
    fails(cli("plan", tmp_path / "no.onnx"), "no.onnx", "no such file")
    cut = tmp_path / "cut.onnx"
    cut.write_bytes(model.read_bytes()[:-100])
    fails(cli("plan", cut), "cut.onnx", "cut short")
    (tmp_path / "bad.tflite").write_bytes(b"\0" * 64)
    fails(cli("plan", tmp_path / "bad.tflite"), "bad.tflite", "TFL3")


def test_wrong_input_name_and_open_shape(cli, model, tmp_path):
    outcome = cli("plan", model, "--input-shapes", "image:[1,3,32,32]")
    assert (outcome.code, "no input image" in outcome.err) == (2, True)
    fails(cli("plan", write_picture_net(tmp_path / "open.onnx", batch="n")), "picture", "--input-shapes")


def test_nan_in_a_profile(cli, model, bundle, tmp_path):
    profile = tmp_path / "profile.json"
    assert cli("profile", model, "-o", profile, "--repeats", 2).code == 0
    content = json.loads(profile.read_text())
    first = next(iter(content["devices"]))
    content["devices"][first]["seconds"][0] = float("nan")
    profile.write_text(json.dumps(content))
    fails(cli("plan", bundle, "--profile", profile), "profile.json")


def test_cores_that_do_not_exist(cli, model, tmp_path):
    platform = tmp_path / "platform.toml"
    platform.write_text('name = "x"\n[[device]]\nname = "far"\ncores = [4096]\n')
    fails(cli("plan", model, "--platform", platform), "far", "4096")


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda text: text.replace("\n  ", "\n  no_such_", 1), "no_such_"),
        (lambda text: "\n".join(text.splitlines()[:-1]) + "\n", "is in no stage"),
        (lambda text: text[: text.index("stage ")], "no stages"),
        (lambda text: text.replace("objective", "objektive"), "line 2"),
    ],
)
def test_plans_that_do_not_fit(cli, bundle, tmp_path, change, word):
    plan = tmp_path / "plan.txt"
    assert cli("plan", bundle, "--scheduler", "single", "-o", plan).code == 0
    plan.write_text(change(plan.read_text()))
    fails(cli("bench", bundle, "--plan", plan), word)


@pytest.mark.needs("two cores")
def test_a_plan_with_a_cycle_between_its_stages(cli, bundle, tmp_path):
    plan = tmp_path / "plan.txt"
    assert cli("plan", bundle, "--stages", 2, "--verify", 0, "-o", plan).code == 0
    head, first, second = plan.read_text().partition("stage ")[0], *plan.read_text().split("stage ")[1:]
    plan.write_text(f"{head}stage {second}stage {first}")
    fails(cli("bench", bundle, "--plan", plan), "cycle")


def rewritten(bundle: Path, target: Path, change) -> Path:
    """The bundle with its manifest changed."""
    with tarfile.open(bundle) as old, tarfile.open(target, "w") as new:
        for member in old.getmembers():
            content = old.extractfile(member).read()
            if member.name == "manifest.json":
                manifest = json.loads(content)
                change(manifest)
                content = json.dumps(manifest).encode()
                member.size = len(content)
            new.addfile(member, io.BytesIO(content))
    return target


def test_bundles_of_another_version(cli, bundle, tmp_path):
    other = rewritten(bundle, tmp_path / "other.tar", lambda manifest: manifest["versions"].update(tvm="0.18.0"))
    fails(cli("plan", other), "tvm 0.18.0", "compile the model again here")
    newer = rewritten(bundle, tmp_path / "newer.tar", lambda manifest: manifest.update(format=99))
    fails(cli("plan", newer), "format 99")


def test_a_manifest_with_a_path_outside(cli, bundle, tmp_path):
    def escape(manifest):
        manifest["sha256"]["../../evil"] = "0" * 64

    fails(cli("plan", rewritten(bundle, tmp_path / "evil.tar", escape)), "outside")
    assert not (tmp_path.parent / "evil").exists()


def test_a_bundle_of_another_machine(cli, bundle, tmp_path):
    """Its cores are not here: nothing of its code is loaded."""
    other = tmp_path / "other.tar"
    with tarfile.open(bundle) as old, tarfile.open(other, "w") as new:
        contents = {member.name: old.extractfile(member).read() for member in old.getmembers()}
        platform = json.loads(contents["platform.json"])
        for device in platform["devices"]:
            device["cores"] = [core + 4096 for core in device["cores"]]
        contents["platform.json"] = json.dumps(platform).encode()
        manifest = json.loads(contents["manifest.json"])
        manifest["sha256"]["platform.json"] = hashlib.sha256(contents["platform.json"]).hexdigest()
        contents["manifest.json"] = json.dumps(manifest).encode()
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            new.addfile(member, io.BytesIO(content))
    fails(cli("bench", other), "other.tar", "another machine", "4096")


def test_damaged_and_truncated_bundles(cli, bundle, tmp_path):
    def spoil(manifest):
        manifest["sha256"]["plan.txt"] = "0" * 64

    fails(cli("plan", rewritten(bundle, tmp_path / "spoilt.tar", spoil)), "plan.txt", "damaged")
    cut = tmp_path / "cut.tar"
    cut.write_bytes(bundle.read_bytes()[: bundle.stat().st_size // 2])
    fails(cli("bench", cut), "cut.tar")
    (tmp_path / "empty.tar").write_bytes(b"")
    fails(cli("plan", tmp_path / "empty.tar"), "empty.tar")
    fails(cli("plan", tmp_path / "absent.tar"), "absent.tar")


@pytest.mark.thorough
def test_no_space_and_read_only_places(cli, bundle, model):
    fails(cli("plan", bundle, "--verify", 0, "-o", "/proc/plan.txt"), "/proc/plan.txt")
    fails(cli("compile", model, "-o", "/proc/net.tar", "--scheduler", "single"), "/proc/net.tar")


def test_traceback_is_shown_when_asked_for(cli, tmp_path):
    assert "Traceback" not in cli("plan", tmp_path / "no.onnx").err
    assert "Traceback" in cli("plan", tmp_path / "no.onnx", "--traceback").err


def test_a_name_that_is_no_text_is_refused(cli, tmp_path):
    outcome = cli("plan", tmp_path / "na\udcefve.onnx")
    assert outcome.code == 2
    assert r"na\udcefve.onnx' is no text in UTF-8: rename the file" in outcome.err
