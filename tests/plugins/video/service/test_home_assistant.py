"""Cameras as devices of Home Assistant: messages that it takes, and nothing lost by a restart of broker or service."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.parts import needs

needs("paho-mqtt")

from tests.support.mqtt import Broker, Reader
from tests.support.waiting import until
from tvm_pipeline.errors import OptionError
from tvm_pipeline_video import Annotation
from tvm_pipeline_video.service import home_assistant
from tvm_pipeline_video.service.home_assistant import Camera, HomeAssistant
from tvm_pipeline_video.service.mqtt_results import parse_broker
from tvm_pipeline_video.service.result_lines import ResultLine
from tvm_pipeline_video.service.settings import Settings

CONFIG, STATUS = "homeassistant/device/", "cameras/home_assistant/status"
# What the pages of Home Assistant say of a component: https://www.home-assistant.io/integrations/binary_sensor.mqtt and
# sensor.mqtt, with the classes of integrations/binary_sensor and integrations/sensor.
KEYS = {"name", "value_template", "platform", "unique_id", "device_class", "entity_category"}
# image.mqtt has an image_topic, whose pictures are JPEG where nothing else is given.
MORE = {"binary_sensor": set(), "sensor": {"state_class", "unit_of_measurement"}, "image": {"image_topic"}}
CLASSES = {"binary_sensor": {"occupancy", "running"}, "sensor": {"duration"}, "image": set()}


def line(*labels: str, tag: str = "gate") -> ResultLine:
    found = [Annotation(label, 0.9) for label in labels]
    return ResultLine(frame=1, time_s=0.0, latency_s=0.03, source="rtsp://gate/stream", tag=tag, annotations=found)


def check_discovery(topic: str, payload: bytes) -> dict[str, Any]:
    """Return a device's message; fail where Home Assistant would refuse it."""
    assert topic.removeprefix(CONFIG).replace("/config", "").replace("_", "").isalnum()
    message: dict[str, Any] = msgspec.json.decode(payload)
    assert message["device"]["identifiers"]
    assert message["origin"]["name"]
    parts = message["components"]
    assert len({part["unique_id"] for part in parts.values()}) == len(parts)
    for part in parts.values():
        kind = part["platform"]
        needed = {"name", "image_topic" if kind == "image" else "value_template", "platform", "unique_id"}
        assert needed <= part.keys() <= KEYS | MORE[kind]
        assert part.get("device_class") in (CLASSES[kind] | {None})
        assert part.get("state_class", "measurement") == "measurement"
        if part.get("device_class") == "duration":
            assert part["unit_of_measurement"] in ("d", "h", "min", "s", "ms", "µs")
    return message


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_assistant, "PERIOD_S", 0.02)
    monkeypatch.setattr(home_assistant, "RETAINED_S", 0.3)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    needs("mosquitto")
    with Broker(tmp_path, keeps=False) as found:
        yield found


def devices(broker: Broker) -> HomeAssistant:
    return HomeAssistant(parse_broker(broker.address("cameras")))


class Seen:
    """What a reader has seen: the last message of each topic."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def of(self, topic: str) -> bytes | None:
        return next((payload for name, payload in self._reader.seen[::-1] if name == topic), None)

    @property
    def config(self) -> dict[str, Any]:
        """The last discovery message; empty while there is none."""
        found = [(name, payload) for name, payload in self._reader.seen if name.startswith(CONFIG)]
        return check_discovery(*found[-1]) if found else {"components": {}}

    @property
    def state(self) -> dict[str, Any]:
        return msgspec.json.decode(self.of(self.config.get("state_topic", "")) or b"{}")


def test_a_state_counts_what_the_last_frame_had_and_holds_what_was_found() -> None:
    camera = Camera("gate", "gate_1")
    camera.see(line("person", "person", "Traffic light"), 100.0)
    camera.see(line("person"), 100.1)
    assert camera.state(0.5, 100.2) == {
        "running": True,
        "rate": 4.0,
        "latency_ms": 30.0,
        "found": {"person": True, "traffic_light": True},
        "count": {"person": 1, "traffic_light": 0},
    }
    idle = camera.state(1.0, 105.05)
    assert (idle["running"], idle["rate"]) == (False, 0.0)
    assert idle["found"] == {"person": True, "traffic_light": False}
    assert idle["count"] == {"person": 0, "traffic_light": 0}


def test_a_camera_is_a_device_with_its_labels(broker: Broker) -> None:
    with Reader(broker) as reader, devices(broker) as home:
        seen = Seen(reader)
        home.see(line("person"), "")
        assert until(lambda: "person_found" in seen.config["components"] and seen.state)
        assert seen.config["device"]["name"] == "gate"
        assert seen.config["components"]["person_found"]["name"] == "person"
        assert until(lambda: seen.state["found"] == {"person": True})
        assert seen.of(STATUS) == b"online"
        home.see(line("dog", tag="yard"), "faces")
        assert until(lambda: seen.config["device"]["name"] == "yard, faces")
    assert until(lambda: seen.of(STATUS) == b"offline")


def test_zones_have_sensors_and_the_last_snapshot_is_an_image(broker: Broker) -> None:
    inside = Annotation("person", 0.9, track=1, zones=("drive",))
    seen_now = ResultLine(frame=1, time_s=0.0, latency_s=0.03, source="gate", annotations=[inside])
    with Reader(broker) as reader, devices(broker) as home:
        seen = Seen(reader)
        home.see(seen_now, "", b"a picture")
        assert until(lambda: "snapshot" in seen.config["components"])
        parts = seen.config["components"]
        assert parts["person_in_drive_found"]["name"] == "person in drive"
        assert until(lambda: seen.of(parts["snapshot"]["image_topic"]) == b"a picture")
        assert until(lambda: seen.state["found"] == {"person": True, "person_in_drive": True})
    with Reader(broker) as reader, devices(broker) as home:  # another run, without a picture so far
        home.see(line("dog", tag="gate"), "")
        seen = Seen(reader)
        assert until(lambda: "dog_found" in seen.config["components"])
        assert {"snapshot", "person_in_drive_found"} <= seen.config["components"].keys()


def test_a_service_that_starts_again_keeps_the_labels(broker: Broker) -> None:
    with Reader(broker) as reader:
        seen = Seen(reader)
        with devices(broker) as home:
            home.see(line("person"), "")
            assert until(lambda: "person_found" in seen.config["components"])
        with devices(broker) as home:
            home.see(line("dog"), "")
            assert until(lambda: "dog_found" in seen.config["components"])
            assert "person_found" in seen.config["components"]
            assert until(lambda: seen.state.get("found") == {"person": False, "dog": True})


def test_a_broker_that_forgets_is_told_again(broker: Broker) -> None:
    with devices(broker) as home:
        with Reader(broker) as reader:
            home.see(line("person"), "")
            assert until(lambda: "person_found" in Seen(reader).config["components"])
        broker.stop(signal.SIGKILL)
        broker.start()
        with Reader(broker) as reader:
            assert until(lambda: "person_found" in Seen(reader).config["components"])
            assert until(lambda: Seen(reader).of(STATUS) == b"online")


def test_a_run_that_dies_is_unavailable(broker: Broker) -> None:
    with Reader(broker) as reader, devices(broker) as home:
        assert until(lambda: Seen(reader).of(STATUS) == b"online")
        home._client.loop_stop()
        home._client.socket().close()
        assert until(lambda: Seen(reader).of(STATUS) == b"offline")


def test_it_needs_a_broker(tmp_path: Path) -> None:
    settings = Settings(bundle=[tmp_path], source=["camera:0"], results="-", home_assistant=True)
    with pytest.raises(OptionError, match="`home_assistant` needs `results` of a broker"):
        settings.check()
