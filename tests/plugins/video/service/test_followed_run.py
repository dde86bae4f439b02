"""`run --tracking`: events in place of frames, numbers in the lines of frames, pictures, and a broker."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from tests.support.parts import needs

needs("av")
needs("tracking")

from tests.plugins.video.service.test_service import rows, service
from tests.support.waiting import until
from tvm_pipeline_video.service.mqtt_results import MqttResults, parse_broker

TRACKING = """
appears-after = 0
snapshots = "."
results = "{results}"
[[zone]]
name = "right"
polygon = [[0.5, 0], [1, 0], [1, 1], [0.5, 1]]
source = "synthetic:64x48@30:40"
"""
MOVING = """
import threading
from tvm_pipeline_video import Annotation
own = threading.local()  # the application is measured first, in other threads
def decode(outputs, transform):
    x = own.x = getattr(own, "x", 9) + 1
    return [Annotation("face", 0.9, (x - 8, 8, x + 8, 40))]
"""


def run(cli, bundle: Path, folder: Path, results: str, *options: object):
    (folder / "tracking.toml").write_text(TRACKING.format(results=results))
    (folder / "found.py").write_text(MOVING)
    decoder = f"{folder / 'found.py'}:decode"
    source = ("--adapt", "off", "--source", "synthetic:64x48@30:40", "--decoder", decoder)
    return cli(
        "run", bundle, *source, "--tracking", folder / "tracking.toml", "--results", folder / "lines.jsonl", *options
    )


def test_events_in_place_of_frames(cli, bundle, tmp_path: Path) -> None:
    outcome = run(cli, bundle, tmp_path, "events")
    assert outcome.code == 0, outcome.err
    lines = rows(tmp_path / "lines.jsonl")
    assert [line["event"] for line in lines if line["event"] != "moves"] == ["appears", "enters", "exits", "leaves"]
    enters = next(line for line in lines if line["event"] == "enters")
    assert (enters["frame"], enters["zone"], enters["object"]["track"]) == (22, "right", 1)
    assert Path(lines[0]["snapshot"]).read_bytes()[:2] == b"\xff\xd8"
    assert len(list(tmp_path.glob("*.jpg"))) == 1


def test_a_line_of_an_event_that_a_crash_cut_short_is_cut_off(cli, bundle, tmp_path: Path) -> None:
    """Such a file is one of results, and the next run of the same settings goes on behind it."""
    (tmp_path / "model.tar").write_bytes(bundle.read_bytes())
    (tmp_path / "tracking.toml").write_text(TRACKING.format(results="events"))
    (tmp_path / "found.py").write_text(MOVING)
    service(
        tmp_path,
        'bundle = "model.tar"\nsource = "synthetic:64x48@30:40"\ntracking = "tracking.toml"\nadapt = "off"\n'
        'decoder = "found.py:decode"\nresults = "lines.jsonl"\n',
    )
    lines = tmp_path / "lines.jsonl"
    assert cli("run", "--config", tmp_path / "service.toml").code == 0
    lines.write_bytes(lines.read_bytes()[:-40])
    assert cli("run", "--config", tmp_path / "service.toml").code == 0
    kinds = [row["event"] for row in rows(lines)]
    assert (kinds.count("appears"), kinds.count("leaves")) == (2, 1)


def test_frames_with_the_numbers_of_their_objects(cli, bundle, tmp_path: Path) -> None:
    assert run(cli, bundle, tmp_path, "frames").code == 0
    lines = rows(tmp_path / "lines.jsonl")
    assert [line["frame"] for line in lines] == list(range(40))
    assert {line["annotations"][0]["track"] for line in lines[1:]} == {1}
    assert [line["frame"] for line in lines if line["annotations"][0]["zones"]] == list(range(22, 40))


def test_a_mistake_is_said_with_its_file_and_line(cli, bundle, tmp_path: Path) -> None:
    assert "tracking.toml, line 4: results: Invalid enum value 'all'" in run(cli, bundle, tmp_path, "all").err
    (tmp_path / "tracking.toml").write_text(TRACKING.format(results="events"))
    (tmp_path / "model.tar").write_bytes(bundle.read_bytes())
    settings = service(tmp_path, 'bundle = "model.tar"\nsource = "camera:0"\ntracking = "tracking.toml"\n')
    outcome = cli("run", "--config", settings or tmp_path / "service.toml")
    assert "service.toml, line 3: tracking: right is of the source synthetic:64x48@30:40" in outcome.err


def test_a_frame_without_events_counts_when_the_broker_has_all_before_it(tmp_path: Path) -> None:
    needs("paho-mqtt")
    needs("mosquitto")
    from tests.support.mqtt import Broker

    counted: list[int] = []
    with Broker(tmp_path, keeps=False) as broker:
        with MqttResults(parse_broker(broker.address("cameras")), patience_s=10.0) as results:
            results.write([], "", lambda: counted.append(0))
            assert counted == [0]
            held = threading.Event()
            results.write([b"{}"], "", lambda: (held.wait(10), counted.append(1)))
            waits = threading.Thread(target=lambda: results.write([], "", lambda: counted.append(2)))
            waits.start()
            held.set()
            waits.join()
            assert until(lambda: counted == [0, 1, 2])
            results.write([b"{}", b"{}"], "", lambda: counted.append(3))
        assert counted == [0, 1, 2, 3]
        assert json.dumps(counted)
