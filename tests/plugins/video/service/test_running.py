"""A service from Python: the same runs as those of the command line, without it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from tests.support.board_trees import TREES, write
from tvm_pipeline.errors import OptionError
from tvm_pipeline_video.service.listener import Listener
from tvm_pipeline_video.service.running import Service
from tvm_pipeline_video.service.settings import Settings


class Heard(Listener):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.begun: list[Settings] = []
        self.looks = self.ends = 0
        self.frames_came = threading.Event()

    def say(self, line):
        self.lines.append(line)

    warn = say

    def begin(self, settings):
        self.begun.append(settings)

    def look(self, reports):
        seen = reports()
        self.looks += len(seen)
        if any(report.statistics.frames for report in seen):
            self.frames_came.set()

    def end(self, reports):
        self.ends += len(reports)


def test_a_run_from_python(bundle, tmp_path):
    """On a board that is too hot, which is told once."""
    root = TREES["Orin Nano Super, JetPack 6"].write(tmp_path / "root")
    write(root, "sys/class/thermal/cooling_device4/cur_state", "1\n")
    lines, heard = tmp_path / "lines.jsonl", Heard()
    settings = Settings(bundle=[bundle], source=["synthetic:64x48@30:20"], results=str(lines), adapt="off", verify=0)
    (report,) = Service(settings, listener=heard, root=root).run()
    assert report.statistics.frames == 20
    assert (report.source, report.frame, report.label) == ("synthetic:64x48@30:20", 19, "")
    [event] = report.events
    assert event.kind == "throttled"
    assert event.reason.startswith("the machine is throttled: gpu-throttle-alert is at step 1; tj-thermal has 52.0 °C")
    assert heard.lines.count(event.reason) == 1
    assert [json.loads(line)["frame"] for line in lines.read_text().splitlines()] == list(range(20))
    assert report.to_json()["measured"]["frames"] == 20
    assert (heard.begun, heard.ends) == ([settings], 1)
    assert heard.looks >= 1


@pytest.mark.thorough
def test_a_run_in_another_thread_can_be_stopped(bundle):
    """Signals belong to the main thread, so that such a run leaves them alone."""
    reports = []
    sources = ["synthetic:64x48", "synthetic:32x32"]
    heard = Heard()
    service = Service(
        Settings(bundle=[bundle], source=sources, limit=10**6, objective="latency", verify=0), listener=heard
    )
    thread = threading.Thread(target=lambda: reports.extend(service.run()))
    thread.start()
    assert heard.frames_came.wait(60)
    service.stop()
    thread.join(60)
    assert not thread.is_alive()
    (report,) = reports
    assert report.statistics.frames > 0
    assert list(report.sources) == sources


def test_an_error_names_the_field(bundle):
    with pytest.raises(OptionError, match="`limit` 0: at least one frame must run") as caught:
        Service(Settings(bundle=[bundle], source=["synthetic"], limit=0))
    assert (caught.value.option, caught.value.value) == ("limit", 0)
    with pytest.raises(OptionError, match="`min_throughput_fps` goes with objective latency") as caught:
        Service(Settings(bundle=[bundle], source=["synthetic"], min_throughput=3.0)).run()
    assert caught.value.option == "min_throughput_fps"


def test_a_service_knows_no_command_line():
    """It is used where typer and the commands are not."""
    code = (
        "import sys, tvm_pipeline_video.service.running, tvm_pipeline_video.service.supervisor\n"
        "sys.exit(any(name.startswith(('tvm_pipeline.cli', 'typer')) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("arguments", [["run", "net.tar", "--source", "camera:0"], ["plan", "--help"]])
def test_without_the_extra_video_only_run_fails_and_says_what_to_install(arguments):
    code = "import sys\nsys.modules['av'] = None\nfrom tvm_pipeline.cli import main\nmain()\n"
    outcome = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert (outcome.returncode, "pip install 'tvm-pipeline[video]'" in outcome.stderr) == (
        (1, True) if arguments[0] == "run" else (0, False)
    )
