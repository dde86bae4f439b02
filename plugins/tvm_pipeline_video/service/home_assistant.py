"""Cameras as devices of Home Assistant: retained messages of its MQTT discovery, and each camera's state once a second.

A device has a binary sensor and a count for each label that was found, and for each label in a zone; its rate, its
latency, whether frames come, and the picture of the object that appeared last. Its labels are those that this run has
found and those of the retained message, so that nothing goes when a run or the broker starts again.
https://www.home-assistant.io/integrations/mqtt/#device-discovery-payload (since 2024.11).
Read next: mqtt_results.py, which publishes the lines themselves.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

import tvm_pipeline
from tvm_pipeline_video.service.mqtt_results import KEEP_ALIVE_S, LAST_WORDS_S, Broker, client_of
from tvm_pipeline_video.service.result_lines import ResultLine

if TYPE_CHECKING:
    from paho.mqtt.client import Client, MQTTMessage
    from paho.mqtt.properties import Properties
    from paho.mqtt.reasoncodes import ReasonCode

_log = logging.getLogger(__name__)

PREFIX = "homeassistant"
PERIOD_S = 1.0  # between two states of a camera
HOLD_S = 5.0  # for which a label counts as found after a frame that had it
RETAINED_S = 1.0  # for the broker to send the retained message of a device


def slug(text: str) -> str:
    """Return a text as identifiers of Home Assistant may have it: letters of ASCII, digits and underscores."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_") or "unnamed"


@dataclass
class Camera:
    """What Home Assistant is told of a source of a model.

    Attributes:
        name: for people.
        key: identifies the device; it stays the same from run to run.
        labels: those that were ever found, by slug.
        frames: that came since the last state.
        seen_s: by the slug of a label, when it was last found.
        counts: by the slug of a label, how many the last frame had.
        snapshot: the picture of the object that appeared last, as JPEG; None where this run has none yet.
        has_image: whether any run has had one.
        known_from_s: from when on the retained message counts as received.
        sent: the configuration and the state that the broker has.
    """

    name: str
    key: str
    labels: dict[str, str] = field(default_factory=dict)
    frames: int = 0
    latency_s: float = 0.0
    seen_s: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    snapshot: bytes | None = None
    has_image: bool = False
    known_from_s: float = 0.0
    sent: dict[str, bytes] = field(default_factory=dict)

    def see(self, line: ResultLine, now_s: float) -> None:
        """Count a frame."""
        self.frames += 1
        self.latency_s = line.latency_s
        self.counts = {}
        for annotation in line.annotations:
            for label in (annotation.label, *(f"{annotation.label} in {zone}" for zone in annotation.zones)):
                key = slug(label)
                self.labels.setdefault(key, " ".join(label.split()))
                self.counts[key] = self.counts.get(key, 0) + 1
                self.seen_s[key] = now_s

    def state(self, elapsed_s: float, now_s: float) -> dict[str, Any]:
        """Return the state after so many seconds since the last one; the next one counts frames anew."""
        frames, self.frames = self.frames, 0
        if not frames:
            self.counts = {}
        return {
            "running": bool(frames),
            "rate": round(frames / elapsed_s, 1),
            "latency_ms": round(self.latency_s * 1e3, 1),
            "found": {key: now_s - self.seen_s.get(key, -HOLD_S) < HOLD_S for key in self.labels},
            "count": {key: self.counts.get(key, 0) for key in self.labels},
        }

    def config(self, topic: str) -> dict[str, Any]:
        """Return the discovery message of the device, whose state and availability are below a topic."""
        parts: dict[str, dict[str, Any]] = {
            "running": _sensor("Running", "{{ 'ON' if value_json.running else 'OFF' }}", device_class="running"),
            "rate": _sensor("Rate", "{{ value_json.rate }}", unit_of_measurement="fps"),
            "latency": _sensor(
                "Latency", "{{ value_json.latency_ms }}", unit_of_measurement="ms", device_class="duration"
            ),
        }
        for part in parts.values():
            part["entity_category"] = "diagnostic"
        for key, label in self.labels.items():
            found = f"{{{{ 'ON' if value_json.found['{key}'] else 'OFF' }}}}"
            parts[f"{key}_found"] = _sensor(label, found, device_class="occupancy")
            parts[f"{key}_count"] = _sensor(f"{label} count", f"{{{{ value_json.count['{key}'] }}}}")
        if self.has_image:
            parts["snapshot"] = {"platform": "image", "name": "Snapshot", "image_topic": f"{topic}/{self.key}/snapshot"}
        for name, part in parts.items():
            part["unique_id"] = f"{self.key}_{name}"
        return {
            "device": {"identifiers": [self.key], "name": self.name, "model": "tvm-pipeline"},
            "origin": {"name": "tvm-pipeline", "sw_version": tvm_pipeline.__version__},
            "state_topic": f"{topic}/{self.key}",
            "availability_topic": f"{topic}/status",
            "components": parts,
        }

    def remember(self, config: bytes) -> None:
        """Take the parts of a retained discovery message; one that is not ours changes nothing."""
        try:
            parts = msgspec.json.decode(config, type=_Retained).components
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        self.has_image = self.has_image or "snapshot" in parts
        for name, part in parts.items():
            if name.endswith("_found"):
                self.labels.setdefault(name.removesuffix("_found"), part.name)


class _Part(msgspec.Struct):
    name: str


class _Retained(msgspec.Struct):
    components: dict[str, _Part]


def _sensor(name: str, template: str, **more: str) -> dict[str, Any]:
    """Return a component: a binary sensor where its template gives ON or OFF, else a measurement."""
    kind = {"platform": "binary_sensor"} if "'ON'" in template else {"platform": "sensor", "state_class": "measurement"}
    return {"name": name, "value_template": template, **kind, **more}


class HomeAssistant:
    """Publishes devices and their states, for a `with` block.

    Args:
        broker: where the lines go. States and availability are below its topic, in `home_assistant`.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker, self._topic = broker, f"{broker.topic}/home_assistant"
        self._cameras: dict[tuple[str, str], Camera] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._refused = False
        self._teller = threading.Thread(target=self._tell, name=f"devices {broker.name}", daemon=True)
        self._client = client_of(broker)
        self._client.will_set(f"{self._topic}/status", "offline", 1, retain=True)
        self._client.on_connect, self._client.on_message = self._connected, self._retained
        self._client.on_publish = self._published

    def __enter__(self) -> HomeAssistant:
        self._client.connect_async(self._broker.host, self._broker.port, KEEP_ALIVE_S)
        self._client.loop_start()
        self._teller.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._teller.join()
        with suppress(RuntimeError):  # the connection is lost: the broker publishes the last will
            self._client.publish(f"{self._topic}/status", "offline", 1, retain=True).wait_for_publish(LAST_WORDS_S)
        self._client.disconnect()
        self._client.loop_stop()

    def see(self, line: ResultLine, model: str, snapshot: bytes | None = None) -> None:
        """Take a frame of the model of that label, which is empty where the run has one.

        Args:
            snapshot: the picture of an object that appeared in it, as JPEG.
        """
        source = line.counted_as
        with self._lock:
            camera = self._cameras.get((model, source))
            if camera is None:
                where = f"{self._broker.topic} {model} {source}"
                key = f"{slug(f'{model} {source}')}_{hashlib.sha256(where.encode()).hexdigest()[:6]}"
                camera = Camera(f"{source}, {model}" if model else source, key)
                self._cameras[model, source] = camera
                self._ask(camera)
            camera.see(line, time.monotonic())
            camera.snapshot = snapshot or camera.snapshot
            camera.has_image = camera.has_image or snapshot is not None

    def _ask(self, camera: Camera) -> None:
        """Have the broker send the retained message of a device."""
        camera.known_from_s = time.monotonic() + RETAINED_S
        self._client.subscribe(_config_topic(camera), 1)

    def _tell(self) -> None:
        """Publish what has changed, once a second."""
        last_s = time.monotonic()
        while not self._ended.wait(PERIOD_S):
            now_s = time.monotonic()
            with self._lock:
                for camera in self._cameras.values():
                    state = camera.state(now_s - last_s, now_s)
                    if self._client.is_connected() and now_s >= camera.known_from_s:
                        state_topic = f"{self._topic}/{camera.key}"
                        self._send(camera, _config_topic(camera), msgspec.json.encode(camera.config(self._topic)))
                        self._send(camera, state_topic, msgspec.json.encode(state))
                        if camera.snapshot is not None:
                            self._send(camera, f"{state_topic}/snapshot", camera.snapshot)
            last_s = now_s

    def _send(self, camera: Camera, topic: str, payload: bytes) -> None:
        """Publish a retained message where the broker has another one."""
        if camera.sent.get(topic) != payload:
            camera.sent[topic] = payload
            self._client.publish(topic, payload, 1, retain=True)

    # The client's thread.

    def _connected(self, client: Client, _: Any, __: Any, reason: ReasonCode, ___: Properties | None) -> None:
        """Begin anew: a broker that was started again may have lost all that it retained."""
        if reason.is_failure:
            return  # the publisher of lines reports it
        client.publish(f"{self._topic}/status", "online", 1, retain=True)
        with self._lock:
            for camera in self._cameras.values():
                camera.sent.clear()
                self._ask(camera)

    def _retained(self, client: Client, _: Any, message: MQTTMessage) -> None:
        with self._lock:
            for camera in self._cameras.values():
                if message.topic == _config_topic(camera) and message.retain:
                    camera.remember(bytes(message.payload))

    def _published(self, client: Client, _: Any, packet: int, reason: ReasonCode, __: Properties | None) -> None:
        if reason.is_failure and not self._refused:
            self._refused = True
            _log.warning(
                f"{self._broker.name} refuses messages for Home Assistant: {reason}; let the user publish to "
                f"{PREFIX}/# and {self._topic}/#"
            )


def _config_topic(camera: Camera) -> str:
    return f"{PREFIX}/device/{camera.key}/config"
