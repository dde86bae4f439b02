"""`run --wait`: a model that is ready, and sources that come and go while it runs."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.video.service.test_running import Heard
from tests.plugins.video.test_sources import encode
from tests.support.onnx_models import write_remembering_net
from tests.support.parts import needs
from tvm_pipeline import Bundle, Problem, open_bundle, write_bundle
from tvm_pipeline import plan as planned
from tvm_pipeline.core.state_loops import parse_carry
from tvm_pipeline.errors import OptionError
from tvm_pipeline.workflow.steps import compile_source, measured_profile
from tvm_pipeline_video import Kind, Source, SourceOptions, host_graph, kinds, open_source
from tvm_pipeline_video.errors import VideoError
from tvm_pipeline_video.service import changing_inputs, deadline_guard
from tvm_pipeline_video.service.changing_inputs import ChangingInputs
from tvm_pipeline_video.service.file import SettingsReader
from tvm_pipeline_video.service.model_plan import plan_alone
from tvm_pipeline_video.service.progress import FrameCounts
from tvm_pipeline_video.service.running import Service
from tvm_pipeline_video.service.settings import Settings

HALL, GATE, YARD = "synthetic:64x48@50", "synthetic:32x32@60", "synthetic:48x48@40"


def until(true: Callable[[], object], while_: Callable[[], bool] = lambda: True) -> None:
    until_s = time.monotonic() + 60
    while not true():
        assert while_()
        assert time.monotonic() < until_s
        time.sleep(0.01)


class Run:
    """A run in another thread, whose file of settings is written again."""

    def __init__(self, folder: Path, bundle: Path, more: str = "", counts: FrameCounts | None = None) -> None:
        self.folder, self.more, self.heard, self.reports = folder, more, Heard(), []
        self.bundle = bundle
        self.write()
        reader = SettingsReader(folder / "run.toml")
        self.service = Service(reader.read(), reader=reader, listener=self.heard, counts=counts)
        self.thread = threading.Thread(target=lambda: self.reports.extend(self.service.run()))

    def write(self, **sources: str) -> None:
        """Write the settings with sources by their tags."""
        (self.folder / "run.toml").write_text(
            f'bundle = "{self.bundle}"\nwait = true\nresults = "lines.jsonl"\nevents = "events.jsonl"\n'
            f'status = "status.json"\nsource = {json.dumps(list(sources.values()))}\n'
            f"tag = {json.dumps([tag.replace('_', '@') for tag in sources])}\n{self.more}\n"
        )

    def change(self, **sources: str) -> None:
        said = len(self.heard.lines)
        self.write(**sources)
        self.service.reread()
        self.until(lambda: any("come," in line or "read anew" in line for line in self.heard.lines[said:]))

    def until(self, true: Callable[[], object]) -> None:
        until(true, self.thread.is_alive)

    def rows(self, name: str, **fields: object) -> list[dict[str, Any]]:
        path = self.folder / f"{name}.jsonl"
        text = path.read_text() if path.exists() else ""
        found = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [row for row in found if all(row.get(key) == value for key, value in fields.items())]

    def frames(self, tag: str) -> list[int]:
        return [row["frame"] for row in self.rows("lines", tag=tag)]

    def events(self, kind: str) -> list[tuple[str, str]]:
        return [(row["tag"], row["source"]) for row in self.rows("events", kind=kind)]

    @property
    def status(self) -> dict[str, Any]:
        return json.loads((self.folder / "status.json").read_text())

    def source(self, tag: str) -> dict[str, Any]:
        return self.status["tags"].get(tag, {})

    def stop(self) -> None:
        self.service.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()


@contextmanager
def running(folder: Path, bundle: Path, more: str = "", counts: FrameCounts | None = None) -> Iterator[Run]:
    run = Run(folder, bundle, more, counts)
    run.thread.start()
    try:
        run.until(lambda: (folder / "status.json").exists() and run.status["ready"])
        yield run
    finally:
        run.stop()


def test_a_source_that_would_break_the_deadline_is_not_taken_until_another_one_goes(bundle, tmp_path):
    with open_bundle(bundle) as opened:
        most_fps = plan_alone(Settings([bundle]), opened).plan.predicted.throughput_fps
    own_fps = round(0.4 * most_fps, 3)
    more = f'policy = "fps={own_fps}"\ndeadline = "100s"\nadapt = "off"'
    with running(tmp_path, bundle, more) as run:
        run.change(hall=HALL, gate=GATE, yard=YARD)
        run.until(lambda: run.source("hall").get("opened") and run.source("gate").get("opened"))
        assert run.source("yard")["refused"]
        assert re.search(
            r"yard: it is not taken, since `deadline` .* would be missed: the plan takes", "\n".join(run.heard.lines)
        )
        assert run.events("source-refused") == [("yard", YARD)]
        run.change(gate=GATE, yard=YARD)
        run.until(lambda: run.source("yard").get("opened"))
        assert "refused" not in run.source("yard")
    assert [row["tag"] for row in run.rows("events", kind="source-refused")] == ["yard"]


@pytest.mark.thorough
def test_the_source_that_came_last_is_let_go_where_frames_are_late_and_tried_again_later(bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(deadline_guard, "SETTLES_S", 0.1)
    monkeypatch.setattr(changing_inputs, "RETRY_S", 1.0)
    (tmp_path / "slow.py").write_text(
        "import time\ndef decode(outputs, transform):\n    time.sleep(0.1)\n    return []\n"
    )
    more = f'policy = "fps=20"\ndeadline = "80ms"\nadapt = "off"\ndecoder = "{tmp_path / "slow.py"}:decode"'
    with running(tmp_path, bundle, more) as run:
        run.change(hall=HALL, gate=GATE)
        run.until(lambda: run.source("gate").get("refused"))
        assert run.source("hall")["opened"]  # one is never let go
        assert "frames took longer than 80 ms at 40 a second" in run.source("gate")["problem"]
        run.until(lambda: run.events("source-refused").count(("gate", GATE)) > 1)


def test_a_deadline_needs_the_rates_of_sources(bundle, tmp_path):
    with pytest.raises(OptionError, match="each source needs a `policy` with fps=N"):
        Settings([bundle], ["camera:0"], wait=True, deadline="50ms", policy=["latest"]).check()


@pytest.mark.thorough
def test_sources_come_and_go_by_signals(cli, bundle, tmp_path):
    """From no source to none again; one that stays loses no frame, and one that went gives none."""
    run = Run(tmp_path, bundle)
    gone: list[int] = []
    failed: list[BaseException] = []

    def hang_up(**sources: str) -> None:
        run.write(**sources)
        os.kill(os.getpid(), signal.SIGHUP)

    def act() -> None:
        try:
            until(lambda: (tmp_path / "status.json").exists() and run.status["ready"])
            assert (run.status["tags"], run.rows("lines")) == ({}, [])
            hang_up(hall=HALL, gate=GATE)
            until(lambda: len(run.frames("hall")) > 10 and run.frames("gate"))
            for _ in range(2):
                hang_up(hall=HALL, yard=YARD)
                until(lambda: run.events("source-closed").count(("gate", GATE)) > len(gone))
                gone.append(len(run.frames("gate")))
                seen = len(run.frames("hall"))
                until(lambda: len(run.frames("hall")) > seen + 10)  # noqa: B023
                assert len(run.frames("gate")) == gone[-1]
                hang_up(hall=HALL, gate=GATE)
                until(lambda: len(run.frames("gate")) > gone[-1] + 3)
            hang_up()
            until(lambda: len(run.events("source-closed")) == 6)
        except BaseException as error:
            failed.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=act)
    thread.start()
    outcome = cli("run", "--config", tmp_path / "run.toml")
    thread.join()
    assert not failed, (failed, outcome.err)
    assert outcome.code == 0, outcome.err
    assert "is in no plan: --wait has no source to measure it on" in outcome.err
    assert run.frames("hall") == list(range(len(run.frames("hall"))))
    assert run.frames("gate") == sorted(set(run.frames("gate"))), "no index twice, though it came again"
    assert run.frames("yard") == sorted(set(run.frames("yard")))
    assert all(tag in ("hall", "gate", "yard") for tag, _ in run.events("source-opened"))
    assert len(run.events("source-opened")) == 6
    assert all(row["seconds"] > 0 for row in run.rows("events", kind="source-opened"))
    assert run.status["ready"] is False
    assert run.status["frames"] == len(run.rows("lines"))
    assert run.status["pid"] == os.getpid()


@pytest.mark.thorough
def test_one_that_is_not_there_holds_up_nobody_and_is_opened_when_it_comes(bundle, tmp_path):
    film = tmp_path / "late.mp4"
    with running(tmp_path, bundle) as run:
        run.change(hall=HALL, late=str(film))
        run.until(lambda: len(run.frames("hall")) > 20 and run.events("source-failed"))
        run.until(lambda: run.source("late").get("problem"))
        assert "there is no file or folder" in run.source("late")["problem"]
        assert not run.source("late")["opened"]
        encode(film, frames=10)
        run.until(lambda: run.events("source-ended"))
        run.until(lambda: run.source("late")["ended"])
        seen = len(run.frames("hall"))
        run.until(lambda: len(run.frames("hall")) > seen + 5)  # the end of a file ends nothing else
    assert run.frames("late") == list(range(10))
    assert run.frames("hall") == list(range(len(run.frames("hall"))))
    assert run.events("source-failed") == [("late", str(film))]  # once, however often it is tried
    assert run.events("source-opened").count(("late", str(film))) == 1
    assert sum("there is no file or folder" in line and "tried again" in line for line in run.heard.lines) == 1


@pytest.fixture
def cameras(monkeypatch) -> dict[str, Any]:
    """Kinds of cameras: one that can be opened once at a time, and one that hangs when it is opened."""
    books: dict[str, Any] = {"open": 0, "refused": 0, "hang": threading.Event()}

    def open_once(spec: str, opening: SourceOptions) -> Source:
        if books["open"]:
            books["refused"] += 1
            raise VideoError(f"{spec} is busy")
        books["open"] += 1
        source = open_source("synthetic:16x16@50")
        close = source.close

        def closed() -> None:
            time.sleep(0.05)  # a driver takes its time
            books["open"] -= 1
            close()

        source.close = closed
        return source

    def open_hanging(spec: str, opening: SourceOptions) -> Source:
        books["hang"].wait(60)
        raise VideoError(f"{spec} was switched off")

    found = [
        Kind("once", lambda spec: spec.startswith("once:"), open_once, live=True, exclusive=True, help=""),
        Kind("hangs", lambda spec: spec.startswith("hangs:"), open_hanging, live=True, exclusive=False, help=""),
    ]
    monkeypatch.setattr(kinds, "KINDS", (*found, *kinds.KINDS))
    yield books
    books["hang"].set()


@pytest.mark.thorough
def test_another_tag_is_another_source(bundle, tmp_path, cameras):
    """One that can be opened once only is closed before; each counts from 0, and the tag alone tells them apart."""
    with running(tmp_path, bundle) as run:
        for epoch in range(3):
            run.change(**{f"gate_{epoch}": "once:0", f"hall_{epoch}": HALL})
            run.until(lambda: len(run.frames(f"gate@{epoch}")) > 3 and len(run.frames(f"hall@{epoch}")) > 3)  # noqa: B023
        run.until(lambda: {"gate@1", "gate@2"} <= run.status["tags"].keys())
        run.until(lambda: run.source("gate@1")["closed"])
        assert run.source("gate@1")["gone"]
        assert run.source("gate@1")["frames"] == len(run.frames("gate@1"))
        assert "gone" not in run.status["tags"]["gate@2"]
    for epoch in range(3):
        assert run.frames(f"hall@{epoch}") == list(range(len(run.frames(f"hall@{epoch}"))))
        assert run.frames(f"gate@{epoch}")[0] <= 3  # `latest` may let some go
    assert cameras["refused"] == 0
    assert {row["source"] for row in run.rows("lines", tag="gate@1")} == {"once:0"}
    tags = [row["tag"] for row in run.rows("lines")]
    for epoch in range(2):
        last_of_old = max(index for index, tag in enumerate(tags) if tag == f"gate@{epoch}")
        assert last_of_old < tags.index(f"gate@{epoch + 1}")


@pytest.mark.thorough
def test_no_frame_waits_inside_while_it_warms_up(bundle, tmp_path):
    """The first line is of a new frame, so that none lacks between it and the next one."""
    asked, goes = tmp_path / "asked", tmp_path / "goes"
    (tmp_path / "slow.py").write_text(
        "import time\nfrom pathlib import Path\ndef decode(outputs, transform):\n"
        f"    Path({str(asked)!r}).touch()\n"
        f"    while not Path({str(goes)!r}).exists():\n        time.sleep(0.01)\n    return []\n"
    )
    run = Run(tmp_path, bundle, f'policy = "fps=50"\ndecoder = "{tmp_path / "slow.py"}:decode"\nwatchdog = 60.0')
    run.thread.start()
    try:
        run.until(asked.exists)  # for the noise
        run.change(hall=HALL)
        run.until(lambda: run.source("hall").get("dropped", {}).get("latest", 0) > 20)
        assert not run.status["ready"]
        goes.touch()
        run.until(lambda: run.frames("hall"))
    finally:
        goes.touch()
        run.stop()
    assert run.frames("hall")[0] > 20


@pytest.mark.thorough
def test_one_that_hangs_holds_up_nobody(bundle, tmp_path, cameras):
    with running(tmp_path, bundle, "stall = 0.2") as run:
        run.change(stuck="hangs:0", hall=HALL)
        run.until(lambda: len(run.frames("hall")) > 10)
        run.change(stuck="hangs:0", hall=HALL, gate=GATE)
        run.until(lambda: run.frames("gate") and run.events("source-failed"))
        run.change(hall=HALL)
        run.until(lambda: ("gate", GATE) in run.events("source-closed"))
        seen = len(run.frames("hall"))
        run.until(lambda: len(run.frames("hall")) > seen + 5)
    assert run.frames("hall") == list(range(len(run.frames("hall"))))


@pytest.mark.thorough
def test_only_the_rate_changes(bundle, tmp_path):
    """It keeps its reader; what the policy drops is counted, in the file of the status too."""
    with running(tmp_path, bundle) as run:
        run.change(hall=HALL)
        run.until(lambda: len(run.frames("hall")) > 5)
        run.more = 'policy = "fps=10"'
        run.change(hall=HALL)
        run.until(lambda: run.source("hall").get("dropped", {}).get("fps", 0) > 20)
        opened = run.events("source-opened")
    assert opened == [("hall", HALL)]
    later = run.frames("hall")[-3:]
    assert later[2] - later[0] >= 8


@pytest.mark.thorough
def test_other_settings_begin_again_and_a_tag_goes_on(bundle, tmp_path):
    counts = FrameCounts(tmp_path / "counts")
    (tmp_path / "counts").mkdir()
    with running(tmp_path, bundle, counts=counts) as run:
        run.change(hall=HALL)
        run.until(lambda: len(run.frames("hall")) > 5)
        run.more = "stall = 7.0"
        run.change(hall=HALL)
        begun = len(run.frames("hall"))
        run.until(lambda: len(run.frames("hall")) > begun + 5)
        assert len(run.heard.begun) == 2
        run.more = "stall = -1.0"
        run.write(gate=GATE)
        run.service.reread()
        run.until(lambda: any("it runs on as before" in line for line in run.heard.lines))
    assert run.frames("hall") == list(range(len(run.frames("hall"))))
    assert run.frames("gate") == []
    assert FrameCounts(tmp_path / "counts").of("", "hall").tolist() == [len(run.frames("hall"))] * 2


@pytest.mark.thorough
def test_without_a_source_it_is_healthy(bundle, tmp_path):
    needs("prometheus_client")

    def health() -> int:
        try:
            return urllib.request.urlopen(f"{url}health", timeout=10).status
        except urllib.error.HTTPError as error:
            return error.code

    with running(tmp_path, bundle, "watch = 0\nunhealthy-after = 0.3") as run:
        (url,) = (line.rpartition(" ")[2] for line in run.heard.lines if line.startswith("watch it at"))
        time.sleep(0.4)
        assert health() == 200
        run.change(none=str(tmp_path / "none.mp4"))
        run.until(lambda: health() == 503)
        run.change(gate_1=GATE)
        run.until(lambda: health() == 200)
        state = json.load(urllib.request.urlopen(f"{url}state", timeout=10))
        assert state["sources"]["gate@1"]["source"] == GATE


def test_the_plan_of_an_application_is_that_of_its_model(bundle):
    with open_bundle(bundle) as opened:
        whole = host_graph(opened.compiled.graph, 64, 48, draws=False, writes=True)
        names = whole.operator_names
        device = opened.platform.devices[0].name
        first, last = opened.plan.stages[0], opened.plan.stages[-1]
        stages = [
            replace(first, devices=(device,), operators=tuple(names[:2])),
            *opened.plan.stages,
            replace(last, devices=(device,), operators=tuple(names[-2:])),
        ]
        given = replace(opened, graph=whole, plan=replace(opened.plan, stages=tuple(stages)))
        found = plan_alone(Settings(wait=True), given, None)
        assert not found.has_host
        assert found.plan.stages == opened.plan.stages
        asked = plan_alone(Settings(wait=True, objective="latency"), given, None)
        assert (asked.plan.objective, asked.has_host) == ("latency", False)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"bundle": [Path("a.tar"), Path("b.tar")]}, "`wait` is of one model"),
        ({"output": Path("out.mp4")}, "`output` with `wait`: a video is of one source"),
        ({"limit": 3}, "`limit` with `wait`: such a run ends when"),
        ({"rate": 3.0}, "`rate` with `wait`: .* fps=10"),
        ({"wait": False, "status": Path("s.json"), "source": ["a.mp4"]}, "`status` goes with `wait`"),
        ({"tag": ["one"]}, "`tag` is given 1 times for 0 sources"),
        ({"source": ["a", "b"], "tag": ["one", "one"]}, "`tag` one is given twice"),
        ({"source": ["a"], "tag": ["line\nbreak"]}, "characters that can be printed"),
        ({"source": ["a"], "tag": ["x" * 201]}, "1 to 200 characters"),
        ({"source": ["a"], "tag": [""]}, "1 to 200 characters"),
        ({"source": ["a", "a"]}, "`source` names one source twice"),
        ({"source": ["camera:0", "camera:0"], "tag": ["x", "y"]}, "a camera can be opened once only"),
        ({}, "`wait` needs `config`"),
    ],
)
def test_what_does_not_go_with_it(changed, said):
    settings = replace(Settings(bundle=[Path("net.tar")], wait=True), **changed)
    with pytest.raises(OptionError, match=said):
        Service(settings)


@pytest.mark.thorough
def test_one_source_under_two_tags(bundle, tmp_path):
    """Also where a run does not wait."""
    settings = Settings(
        bundle=[bundle], source=["synthetic:16x16@30:9"] * 2, tag=["a", "b"], results=str(tmp_path / "lines.jsonl")
    )
    (report,) = Service(replace(settings, verify=0)).run()
    rows = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    for tag in "ab":
        assert [row["frame"] for row in rows if row["tag"] == tag] == list(range(9))
    assert list(report.sources) == ["a", "b"]


def test_without_a_file_of_settings(cli, bundle):
    outcome = cli("run", bundle, "--wait")
    assert (outcome.code, "--wait needs --config: sources come and go" in outcome.err) == (2, True)


@pytest.mark.thorough
def test_no_state_goes_from_one_source_into_the_other(tmp_path):
    """A model that carries a state begins again with each change of its source, of which there is one at most."""
    model = write_remembering_net(tmp_path / "remembering.onnx")
    made = compile_source(model, carry=(parse_carry("state:state_next"),))
    profile = measured_profile(made, repeats=2)
    plan = planned(Problem(made.compiled.graph, made.platform, profile), "single").plan
    write_bundle(tmp_path / "net.tar", Bundle(made.compiled.graph, made.platform, profile, plan, made.compiled))
    film = "synthetic:32x32@60:12"
    with running(tmp_path, tmp_path / "net.tar") as run:
        run.change(a=film)
        run.until(lambda: run.events("source-ended"))
        run.change(b=film)
        run.until(lambda: len(run.events("source-ended")) == 2)
        run.change(c=film, d=HALL)
        run.until(lambda: any("several sources in turn would mix" in line for line in run.heard.lines))
    seen = {tag: [row["outputs"] for row in run.rows("lines", tag=tag)] for tag in "abcd"}
    assert len(seen["a"]) == 12
    assert seen["a"] == seen["b"]
    assert seen["a"][3] != seen["a"][11]
    assert not seen["c"]


def test_a_tag_that_comes_again_gives_no_number_twice():
    """Also while results of what it gave before are still inside."""
    settings = Settings(bundle=[Path("net.tar")], wait=True, source=[HALL], tag=["hall"])
    inputs = ChangingInputs(settings, FrameCounts())
    inputs.change(settings)
    frames = iter(inputs.frames)
    before = [next(frames).index for _ in range(3)]
    inputs.change(replace(settings, source=[], tag=[]))
    inputs.change(settings)
    assert before + [next(frames).index for _ in range(3)] == list(range(6))
    for index in range(6):
        inputs.count("hall", index)
    until(lambda: not any(one.get("gone") for one in inputs.status().values()))
    assert inputs.status()["hall"]["frames"] == inputs.written == 6
    inputs.close()
    assert list(frames) == []


def test_the_last_line_of_a_tag_is_that_of_its_source(tmp_path):
    """A process may have died between a line and its count."""
    counts = FrameCounts(tmp_path)
    counts.last = {"source": HALL, "tag": "gate@2", "frame": 7}
    assert counts.of("", "gate@2").tolist() == [8, 1]
    assert counts.of("", HALL).tolist() == [0, 0]
