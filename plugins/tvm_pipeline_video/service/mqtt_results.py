"""Results as MQTT messages: each line once, in order, through restarts of the broker and of the network.

A line waits in memory until the broker has confirmed it. Lines are published with QoS 2 in one session of MQTT 5 that
outlives connections, so the broker passes each on once. Where the broker has forgotten the session, what it had not
confirmed is published again: such a line may come twice, and none is lost. When the memory for waiting lines is full,
`write` waits, and so do the frames. Read next: result_lines.py (a line), result_files.py (where else lines go).
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from tvm_pipeline import PipelineError
from tvm_pipeline.addresses import shown
from tvm_pipeline.errors import OptionError, RunError

if TYPE_CHECKING:
    from paho.mqtt.client import Client, ConnectFlags, DisconnectFlags
    from paho.mqtt.properties import Properties
    from paho.mqtt.reasoncodes import ReasonCode

_log = logging.getLogger(__name__)

SCHEMES = {"mqtt": 1883, "mqtts": 8883}  # and their usual ports
MOST_WAITING = 32 << 20  # bytes of lines that wait for the broker: an hour of short lines at 30 frames a second
WINDOW = 20  # lines on their way at once, as many as most brokers allow
KEEP_ALIVE_S = 15  # a silent connection is given up after one and a half times this
CONNECT_S = 10.0
SESSION_S = 3600  # for which the broker keeps the session of a run that broke off
RETRY_S = (1, 10)  # the shortest and the longest wait between two attempts to connect
CERTIFICATE = "TVM_PIPELINE_MQTT_CERTIFICATE"  # a PEM file with the certificate of this user and its key, for mqtts://
LAST_WORDS_S = 2.0  # for the lines that wait when a run ends by an error


class Broker(NamedTuple):
    """Where messages go. `name` is the address for people, its password hidden."""

    name: str
    host: str
    port: int
    tls: bool
    user: str | None
    password: str | None
    topic: str

    def topic_of(self, model: str) -> str:
        """Return the topic of a model's results; the label is empty where the run has one model."""
        label = "".join("_" if letter in "/+#\0" else letter for letter in model)
        return f"{self.topic}/{label}" if label else self.topic


def is_broker(results: str | None) -> bool:
    """Return whether results go to a broker."""
    return results is not None and results.partition("://")[0].lower() in SCHEMES and "://" in results


def parse_broker(address: str) -> Broker:
    """Return the parts of `mqtt://[user[:password]@]host[:port]/topic`; mqtts:// is the same with TLS.

    A user, password or topic with other characters than an address may hold has them as %XX.

    Raises:
        OptionError: it is not of this form, or nobody can publish to this topic.

    Examples:
        >>> broker = parse_broker("mqtt://gate:hush@10.0.0.2/cameras/gate")
        >>> broker.name, broker.port, broker.topic
        ('mqtt://gate:***@10.0.0.2/cameras/gate', 1883, 'cameras/gate')
    """
    name = shown(address)

    def refused(reason: str) -> OptionError:
        return OptionError(f"`results` {name}: {reason}", option="results", value=name)

    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise refused(f"{error}; the form is mqtt://user:password@host:port/topic") from None
    topic = unquote(parts.path[1:])
    if not host or not topic:
        raise refused("give a host and a topic, as in mqtt://localhost/cameras/gate")
    if set("?#") & set(address) or set("+#\0") & set(topic) or topic.startswith("$"):
        raise refused("nobody can publish to a topic with +, # or ?, or one that begins with $; give another")
    user, password = (None if part is None else unquote(part) for part in (parts.username, parts.password))
    scheme = parts.scheme.lower()
    return Broker(name, host, port or SCHEMES[scheme], scheme == "mqtts", user or None, password, topic)


def client_of(broker: Broker) -> Client:
    """Return a client with the broker's user and TLS, which is not connected yet, and then connects again and again.

    Raises:
        OptionError: the certificate of this user, which the environment names, cannot be used.
        PipelineError: the extra `mqtt` is not installed.
    """
    try:
        from paho.mqtt.client import Client, MQTTv5
        from paho.mqtt.enums import CallbackAPIVersion
    except ImportError as error:
        raise PipelineError(
            f"`results` {broker.name} needs an extra: pip install 'tvm-pipeline[mqtt]' ({error})"
        ) from error
    client = Client(CallbackAPIVersion.VERSION2, f"tvm-pipeline-{secrets.token_hex(8)}", protocol=MQTTv5)
    client.reconnect_delay_set(*RETRY_S)
    if broker.user is not None:
        client.username_pw_set(broker.user, broker.password)
    if broker.tls:
        own = os.environ.get(CERTIFICATE) or None
        try:
            client.tls_set(certfile=own)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise OptionError(
                f"{CERTIFICATE} {own}: {error}; name a PEM file with a certificate and its key", option="results"
            ) from error
    return client


@dataclass(frozen=True, slots=True)
class _Message:
    topic: str
    line: bytes
    confirmed: list[Callable[[], None]]


class MqttResults:
    """Publishes lines to a broker, for a `with` block, whose end waits until the broker has confirmed them all.

    Args:
        broker: where they go.
        patience_s: the longest wait for the broker, of `write` while the memory is full and at the end.
        most_bytes: of lines that wait; `write` waits while there are more.

    Raises:
        PipelineError: the extra `mqtt` is not installed.
        OptionError: the broker refuses the user, or this user may not publish to the topic.
        RunError: the broker cannot be reached when the block begins, or has not confirmed for too long.
    """

    def __init__(self, broker: Broker, *, patience_s: float, most_bytes: int = MOST_WAITING) -> None:
        self._broker = broker
        self._patience_s, self._most_bytes = patience_s, most_bytes
        self._changed = threading.Condition()
        self._waiting: deque[_Message] = deque()
        self._waiting_bytes = 0  # with those on their way
        self._unconfirmed = 0
        self._last: _Message | None = None  # of those that were to be published
        self._failure: PipelineError | None = None
        self._connected = self._ended = False  # it was connected once; the block ends
        self._is_away = self._may_publish = False
        self._qos, self._window = 2, WINDOW
        # What the client's thread reports. It holds locks of the client, so it must not wait for `_changed`.
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._sent: dict[int, _Message] = {}  # by their packets' numbers, in order; of the publisher's thread alone
        self._proven: set[str] = set()  # topics that the broker lets this user publish to
        self._publisher = threading.Thread(target=self._publish, name=f"publisher {broker.name}", daemon=True)
        self._client = self._made()
        if broker.password and not broker.tls and broker.host not in ("localhost", "127.0.0.1", "::1"):
            _log.warning(f"{broker.name}: the password crosses the network as it is, for all to read; use mqtts://")

    def __enter__(self) -> MqttResults:
        broker = self._broker
        try:
            self._connect(self._client, at_once=True)
        except OSError as error:
            raise RunError(
                f"cannot reach {broker.name}: {error}; start the broker, or mend the host, the port or the certificate"
            ) from error
        self._publisher.start()
        with self._changed:
            answered = self._changed.wait_for(lambda: self._connected or self._failure, CONNECT_S)
        if not answered:
            self._end()
            raise RunError(
                f"{broker.name} did not answer in {CONNECT_S:g} s; check that an MQTT 5 broker listens there, "
                f"{'with' if broker.tls else 'without'} TLS"
            )
        if self._failure:
            self._end()
            raise self._failure
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._flush(self._patience_s if error is None else min(LAST_WORDS_S, self._patience_s))
        except PipelineError as lost:
            if error is None:
                raise
            if lost is not error:  # the first error is the one to report
                _log.warning(str(lost))
        except BaseException:
            _log.warning(self._missing())
            raise
        finally:
            self._end()

    def write(self, lines: Sequence[bytes], model: str, confirmed: Callable[[], None]) -> None:
        """Publish lines of the model of that label; wait while too many wait.

        Args:
            confirmed: is called, in the order of calls, once the broker has these lines and those before, and at once
                where that is so already; in another thread, or in this one.

        Raises:
            RunError: the memory for waiting lines stayed full.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._failure or self._waiting_bytes < self._most_bytes, self._patience_s
            ):
                self._failure = RunError(f"{self._missing()}; no more lines fit into {self._most_bytes:,} bytes")
            if self._failure:
                raise self._failure
            for line in lines:
                self._last = _Message(self._broker.topic_of(model), line, [])
                self._waiting.append(self._last)
                self._waiting_bytes += len(line)
                self._unconfirmed += 1
            if self._last and self._unconfirmed:
                self._last.confirmed.append(confirmed)
            else:
                confirmed()
        self._news.put(lambda: None)

    def _flush(self, patience_s: float) -> None:
        """Wait until every line is confirmed; raise RunError where none was for that long."""
        with self._changed:
            while left := self._unconfirmed:
                if not self._changed.wait_for(lambda: self._failure or self._unconfirmed < left, patience_s):
                    raise RunError(self._missing())
                if self._failure:
                    raise self._failure

    def _missing(self) -> str:
        name, lines = self._broker.name, self._unconfirmed
        return f"{name} has not confirmed the last {lines} lines; check the broker and the network"

    def _end(self) -> None:
        """Close the connection, and let the broker forget the session."""
        from paho.mqtt.packettypes import PacketTypes
        from paho.mqtt.properties import Properties

        self._ended = True
        self._news.put(lambda: None)
        if self._publisher.ident is not None:
            self._publisher.join()
        forget = Properties(PacketTypes.DISCONNECT)  # type: ignore[no-untyped-call]
        forget.SessionExpiryInterval = 0
        client, over = self._client, threading.Event()
        client.on_disconnect = lambda *_: over.set()
        if client.disconnect(properties=forget) == 0:
            over.wait(LAST_WORDS_S)

    # The publisher's thread.

    def _publish(self) -> None:
        """Publish what waits, as many lines at once as the broker takes, until the end."""
        while not self._ended:
            self._news.get()()
            while self._may_publish and self._waiting and len(self._sent) < self._window and not self._failure:
                message = self._waiting.popleft()
                # Only the answer to QoS 1 says whether the user may publish there.
                qos = self._qos if message.topic in self._proven else 1
                self._sent[self._client.publish(message.topic, message.line, qos).mid] = message

    def _confirm(self, client: Client, packet: int, reason: ReasonCode) -> None:
        message = self._sent.pop(packet, None) if client is self._client else None
        if message is None:
            return
        if reason.is_failure:
            self._fail(
                OptionError(
                    f"`results` {self._broker.name}: the broker refuses messages to {message.topic}: {reason}; let the "
                    "user publish there, or give another topic",
                    option="results",
                    value=self._broker.name,
                )
            )
            return
        self._proven.add(message.topic)
        self._may_publish = self._may_publish or not (self._sent or self._is_away)
        with self._changed:
            for confirmed in message.confirmed:
                confirmed()
            self._waiting_bytes -= len(message.line)
            self._unconfirmed -= 1
            self._changed.notify_all()

    def _begin(self, client: Client, reason: ReasonCode, properties: Properties | None) -> None:
        """Go on with a connection; the first one says what the broker takes."""
        if client is not self._client:
            return
        if reason.is_failure:
            if not self._connected:
                self._fail(
                    OptionError(
                        f"`results` {self._broker.name}: the broker refuses the connection: {reason}; check the user "
                        "and the password, and that it speaks MQTT 5",
                        option="results",
                        value=self._broker.name,
                    )
                )
            return
        self._window = min(WINDOW, getattr(properties, "ReceiveMaximum", WINDOW))
        qos = min(2, getattr(properties, "MaximumQoS", 2))
        if qos < self._qos:
            self._qos = qos
            _log.warning(
                f"{self._broker.name} takes QoS {qos} at most; a line may come twice where the connection breaks"
            )
        if self._is_away:
            self._is_away = False
            _log.warning(f"{self._broker.name} is back; {self._unconfirmed} lines waited")
        # The client sends again what is on its way; to keep the order, other lines wait until that is confirmed.
        self._may_publish = not self._sent
        with self._changed:
            self._connected = True
            self._changed.notify_all()

    def _begin_anew(self, client: Client) -> None:
        """Publish again all that is not confirmed, with a new client: the broker has forgotten what it had of it."""
        if client is not self._client:
            return
        self._waiting.extendleft(reversed(self._sent.values()))
        self._sent.clear()
        self._may_publish = False
        self._client = self._made()
        self._connect(self._client, at_once=False)

    def _away(self, client: Client, reason: ReasonCode) -> None:
        if client is not self._client:
            return
        self._may_publish = False
        if self._connected and not self._is_away and not self._ended:
            self._is_away = True
            _log.warning(f"{self._broker.name} is gone ({reason}); lines wait, up to {self._most_bytes:,} bytes")

    def _fail(self, error: PipelineError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    # The client's thread.

    def _made(self) -> Client:
        """Return a client in a session of its own, which is not connected yet."""
        client = client_of(self._broker)
        client.max_inflight_messages_set(WINDOW)
        tell, began = self._news.put, False

        def on_connect(
            client: Client, _: Any, flags: ConnectFlags, reason: ReasonCode, properties: Properties | None
        ) -> None:
            nonlocal began
            forgotten = began and not flags.session_present
            if forgotten and not reason.is_failure:
                client.on_publish = None  # what it would send again now counts no more
                client.disconnect()
                tell(lambda: self._begin_anew(client))
                return
            began = began or not reason.is_failure
            tell(lambda: self._begin(client, reason, properties))

        def on_publish(client: Client, _: Any, packet: int, reason: ReasonCode, __: Properties) -> None:
            tell(lambda: self._confirm(client, packet, reason))

        def on_disconnect(
            client: Client, _: Any, __: DisconnectFlags, reason: ReasonCode, ___: Properties | None
        ) -> None:
            tell(lambda: self._away(client, reason))

        client.on_connect, client.on_publish, client.on_disconnect = on_connect, on_publish, on_disconnect
        return client

    def _connect(self, client: Client, *, at_once: bool) -> None:
        """Let a client connect, and again whenever the connection breaks; raise OSError where it cannot at once."""
        from paho.mqtt.packettypes import PacketTypes
        from paho.mqtt.properties import Properties

        session = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        session.SessionExpiryInterval = SESSION_S
        connect = client.connect if at_once else client.connect_async
        connect(self._broker.host, self._broker.port, KEEP_ALIVE_S, clean_start=False, properties=session)
        client.loop_start()
