"""A fleet on Ray, as a user begins it: a head and a host of this machine, with TLS and a token."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.plugins.hosts.fleet_host import write_service_bundle
from tests.plugins.hosts.ray_fleet import HEAD, LocalFleet, local_fleet, wait_for
from tests.support.onnx_models import write_picture_net
from tests.support.parts import needs
from tvm_pipeline_hosts.fleet.host_processes import processes_of
from tvm_pipeline_hosts.fleet.messages import FleetStatus

pytestmark = [pytest.mark.needs("ray"), pytest.mark.together]

FLEET = """
[[host]]
name = "attic"
fps = { means = 100 }

[[model]]
name = "means"
file = "means.tar"

[[camera]]
name = "gate"
source = "synthetic:64x64@10"
models = ["means@10"]
"""
AT = ("--address", "127.0.0.2")
SECRET = "only-for-services"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    """A head, and a host that has joined and runs a camera."""
    with local_fleet(tmp_path_factory.mktemp("fleet")) as made:
        made.environment["CAMERA_PASSWORD"] = SECRET
        made.up()
        made.join("attic")
        write_service_bundle(made.folder / "means.tar", "1")
        (made.folder / "fleet.toml").write_text(FLEET)
        rolled_out(made)
        yield made


def rolled_out(fleet: LocalFleet) -> str:
    """Run the file of the fleet, and return what was said."""
    words = ("--key", str(fleet.key), "--results", str(fleet.folder / "all.jsonl"), *AT)
    done = fleet.ask("run", str(fleet.folder / "fleet.toml"), "--detach", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def lines(fleet: LocalFleet) -> list[dict]:
    path = fleet.folder / "all.jsonl"
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def status(fleet: LocalFleet) -> FleetStatus:
    done = fleet.ask("status", "--json", "--key", str(fleet.key), *AT)
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout, type=FleetStatus)


def served(url: str) -> FleetStatus:
    with urllib.request.urlopen(f"{url}state", timeout=10.0) as answer:
        return msgspec.json.decode(answer.read(), type=FleetStatus)


def wait_for_lines(fleet: LocalFleet) -> None:
    """Wait for lines that were made from now on."""
    before = len(lines(fleet))
    wait_for(lambda: len(lines(fleet)) > before + 5, 60.0, f"lines: {fleet.said('attic')}")


def check_lines(fleet: LocalFleet, since: int | None = None) -> None:
    """Each frame of each epoch came once and in order.

    Of an epoch that ran at the line `since` no more lack than its service dropped, as it does on a busy machine.
    """
    found: dict[tuple[str, int], list[int]] = {}
    for line in lines(fleet):
        found.setdefault((line["camera"], line["epoch"]), []).append(line["frame"])
    for frames in found.values():
        assert frames == sorted(set(frames))
    if since is not None:
        at = lines(fleet)[since]
        frames = [frame for frame in found[at["camera"], at["epoch"]] if frame >= at["frame"]]
        assert len(frames) > 5
        missing = frames[-1] + 1 - frames[0] - len(frames)
        wait_for(lambda: missing <= dropped(fleet), 60.0, f"{missing} dropped frames in the status")


def dropped(fleet: LocalFleet) -> int:
    """Return how many frames the services say that they have dropped."""
    lost = [duty.lost.items() for duty in status(fleet).duties]
    return sum(frames for counts in lost for reason, frames in counts if reason not in ("host lost", "late"))


@pytest.mark.thorough
def test_services_share_a_busy_host_as_any_other_program(fleet: LocalFleet) -> None:
    """Ray would give its actors, and so what they start, the niceness 15, and have the kernel end them first."""
    wait_for_lines(fleet)
    (service,) = [process for _, process in processes_of(fleet.state("attic"))]
    assert os.getpriority(os.PRIO_PROCESS, service.pid) == os.getpriority(os.PRIO_PROCESS, 0)
    own, its = (Path("/proc", str(pid), "oom_score_adj").read_text() for pid in (os.getpid(), service.pid))
    assert its == own


@pytest.mark.thorough
def test_the_environment_of_a_host_stays_there(fleet: LocalFleet) -> None:
    """Its services have it; what the head keeps of the host's actors does not."""
    wait_for_lines(fleet)
    (service,) = [process for _, process in processes_of(fleet.state("attic"))]
    assert SECRET.encode() in Path("/proc", str(service.pid), "environ").read_bytes()
    for path in fleet.state(HEAD).rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    (kept,) = [path for path in fleet.state("attic").iterdir() if path.name == "environment"]
    assert kept.stat().st_mode & 0o777 == 0o600


@pytest.mark.thorough
def test_what_dies_comes_again_and_the_service_is_adopted(fleet: LocalFleet) -> None:
    """The agent, then Ray of the host, then all of the head: the service lives through it, and no line is lost."""
    wait_for_lines(fleet)
    (service,) = [process for _, process in processes_of(fleet.state("attic"))]
    os.kill(json.loads((fleet.state("attic") / "actor.json").read_bytes())[0], signal.SIGKILL)
    wait_for_lines(fleet)
    wait_for_lines(fleet)
    since = len(lines(fleet)) - 1
    fleet.send(signal.SIGKILL, HEAD, "ray")
    wait_for_lines(fleet)
    check_lines(fleet, since)
    fleet.send(signal.SIGKILL, "attic", "ray")
    wait_for_lines(fleet)
    assert [process for _, process in processes_of(fleet.state("attic"))] == [service]
    check_lines(fleet)
    assert "Ray has ended" in fleet.said("attic")
    assert "Ray has ended" in fleet.said(HEAD)


@pytest.mark.thorough
def test_another_bundle_is_shipped_and_takes_over(fleet: LocalFleet) -> None:
    """`run` again with another file of the same name and labels: another epoch, made by these, and nothing twice."""
    wait_for_lines(fleet)
    before = lines(fleet)[-1]["epoch"]
    write_service_bundle(fleet.folder / "means.tar", "2")
    (fleet.folder / "names.txt").write_text("colour of 0\ncolour of 1\ncolour of 2\n")
    settings = 'file = "means.tar"\ndecoder = "classification"\nthreshold = 0.001\nlabels = "names.txt"'
    (fleet.folder / "fleet.toml").write_text(FLEET.replace('file = "means.tar"', settings))
    rolled_out(fleet)
    wait_for(lambda: lines(fleet)[-1]["epoch"] > before, 60.0, "lines of the new bundle")
    assert "colour of" in json.dumps(lines(fleet)[-1])
    check_lines(fleet)
    (duty,) = status(fleet).duties
    assert (duty.camera, duty.host, duty.epoch > before) == ("gate", "attic", True)


@pytest.mark.thorough
def test_a_second_host_of_a_name_is_refused(fleet: LocalFleet) -> None:
    """And one with another token, at once and without trying again."""
    twin = LocalFleet(fleet.folder / "twin", first=20)
    try:
        with pytest.raises(AssertionError, match=r"another host is called attic, at 127\.0\.0\.3"):
            twin.join("attic", key=fleet.key)
        key = json.loads(fleet.key.read_bytes())
        (twin.folder / "other.key").write_text(json.dumps({**key, "token": "0" * 64}))
        done = twin.ask("join", str(twin.folder / "other.key"), "--name", "barn", "--address", "127.0.0.30")
        assert done.returncode == 1
        assert "does not take the token of this key" in done.stderr
    finally:
        twin.close()
    wait_for_lines(fleet)


@pytest.mark.thorough
def test_a_run_that_stays_watches_the_fleet(fleet: LocalFleet) -> None:
    """It serves the state of the fleet; on SIGHUP it reads the file again, and a mistake in it changes nothing."""
    words = ("run", str(fleet.folder / "fleet.toml"), "--key", str(fleet.key), "--watch", "0", *AT)
    with (fleet.folder / "run.log").open("wb") as log:
        command = fleet.command(*words, "--results", str(fleet.folder / "all.jsonl"))
        run = subprocess.Popen(command, env=fleet.environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: "watch the fleet at" in fleet.said("run"), 60.0, "the site")
        url = fleet.said("run").split("watch the fleet at ")[1].split(",")[0]
        assert list(served(url).hosts) == ["attic"]
        (fleet.folder / "fleet.toml").write_text(FLEET.replace('"gate"', '"gate yard"'))
        run.send_signal(signal.SIGHUP)
        wait_for(lambda: "its name must be one word" in fleet.said("run"), 30.0, "the mistake")
        (fleet.folder / "fleet.toml").write_text(FLEET.replace('"gate"', '"yard"'))
        run.send_signal(signal.SIGHUP)
        wait_for(lambda: lines(fleet)[-1]["camera"] == "yard", 30.0, "lines of the other camera")
        wait_for(lambda: [duty.camera for duty in served(url).duties] == ["yard"], 10.0, "the duty of the other camera")
        run.terminate()
        assert run.wait(30.0) == 0
    finally:
        run.kill()
        run.wait()
    check_lines(fleet)


@pytest.mark.thorough
def test_a_model_file_is_compiled_and_measured_on_its_host(fleet: LocalFleet) -> None:
    """It has no figures in the file; the camera before is left alone."""
    needs("tvm")
    needs("onnx")
    write_picture_net(fleet.folder / "net.onnx")
    more = '[[model]]\nname = "net"\nfile = "net.onnx"\n'
    more += '[[camera]]\nname = "hall"\nsource = "synthetic:64x64@10"\nmodels = ["net@10"]\n'
    before = {duty.camera: duty.host for duty in status(fleet).duties}
    with (fleet.folder / "fleet.toml").open("a") as file:
        file.write(more)
    said = rolled_out(fleet)
    assert "net is compiled for attic and measured there" in said
    assert "attic runs 1 cameras while net is measured there" in said
    assert not list((fleet.state("attic") / "measuring").iterdir())
    wait_for(lambda: any(line["camera"] == "hall" for line in lines(fleet)), 60.0, f"lines: {fleet.said('attic')}")
    assert {duty.camera: duty.host for duty in status(fleet).duties} == {**before, "hall": "attic"}
    check_lines(fleet)


@pytest.mark.thorough
def test_leaving_ends_all(fleet: LocalFleet, tmp_path: Path) -> None:
    """SIGTERM ends the host with its services, then the head; none of their processes live on."""
    pids = [*fleet.pids("attic"), *fleet.pids(HEAD)]
    assert len(pids) > 8
    for name in ("attic", HEAD):
        fleet.keepers[name].terminate()
        assert fleet.keepers[name].wait(30.0) == 0, fleet.said(name)
    wait_for(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()], 5.0, "nothing is left")
    assert "host attic has left" in fleet.said("attic")
