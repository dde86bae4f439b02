"""A real MQTT broker, mosquitto, to be stopped and started again, and a reader of a topic."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path

from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion

from tests.support.parts import MOSQUITTO
from tests.support.waiting import until


class Broker:
    """A mosquitto on a free port of this machine.

    Args:
        folder: for its files.
        keeps: whether it remembers sessions and what waits when it starts again.
        settings: more lines of its file of settings.

    Attributes:
        log: the file that it writes each packet and connection to.
    """

    def __init__(self, folder: Path, *, keeps: bool = True, settings: str = "allow_anonymous true") -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._file, self.log = folder / "mosquitto.conf", folder / "mosquitto.log"
        lines = [f"listener {self.port} 127.0.0.1", settings, "user root", "max_queued_messages 0"]
        lines += [f"log_dest file {self.log}", "log_type all"]
        # Mosquitto 2.0.11 repeats to a reader after a restart what is on its way beyond this limit (of 20 by default).
        lines += ["max_inflight_messages 1000"]
        lines += ["persistence true", f"persistence_location {folder}/"] if keeps else []
        self._file.write_text("\n".join(lines) + "\n")
        self.start()

    def start(self) -> None:
        """Start it, and return when it answers."""
        self.process = subprocess.Popen(
            [str(MOSQUITTO), "-c", str(self._file)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        assert until(self._answers), f"{MOSQUITTO} -c {self._file} does not answer"

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it by a signal."""
        self.process.send_signal(number)
        self.process.wait(20)

    def address(self, topic: str, user: str = "") -> str:
        """Return the address of a topic as `--results` takes it; `user` is NAME:PASSWORD."""
        return f"mqtt://{user + '@' if user else ''}127.0.0.1:{self.port}/{topic}"

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.stop(signal.SIGKILL)


class Reader:
    """Reads all topics of a broker with QoS 2, in a session that outlives connections.

    Attributes:
        seen: the topic and the payload of each message, as they come.
    """

    def __init__(self, broker: Broker) -> None:
        self.seen: list[tuple[str, bytes]] = []
        # MQTT 3: mosquitto 2.0.11 repeats messages to readers by MQTT 5 that lag behind when it starts again.
        self._client = Client(CallbackAPIVersion.VERSION2, "reader", clean_session=False)
        self._client.reconnect_delay_set(0.05, 0.05)
        self.connections = 0
        self._client.on_connect = lambda client, *_: client.subscribe("#", 2)
        self._client.on_subscribe = self._subscribed
        self._client.on_message = lambda _, __, message: self.seen.append((message.topic, message.payload))
        self._client.connect("127.0.0.1", broker.port)
        self._client.loop_start()
        assert until(lambda: self.connections == 1)

    def _subscribed(self, *_: object) -> None:
        self.connections += 1

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.disconnect()
        self._client.loop_stop()
