"""Results over MQTT: each line once, in order, through restarts of a real broker; what cannot be sent is said."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest

from tests.support.parts import needs

needs("paho-mqtt")

from tests.plugins.video.service.test_service import service
from tests.support.log_lines import log_lines
from tests.support.mqtt import Broker, Reader
from tests.support.waiting import until
from tvm_pipeline.errors import OptionError, PipelineError, RunError
from tvm_pipeline_video import VideoFile, open_source
from tvm_pipeline_video.hardware import hardware_decoders
from tvm_pipeline_video.service import mqtt_results
from tvm_pipeline_video.service.mqtt_results import MqttResults, is_broker, parse_broker
from tvm_pipeline_video.service.result_files import ResultFiles
from tvm_pipeline_video.service.result_lines import ResultLine
from tvm_pipeline_video.service.settings import Settings

# As `mosquitto_passwd` writes the password hush.
HUSH = (
    "$7$101$M9woF+zMr47YO8XQ$W8FurmRaOzTPx7E3kmO4M9Bm+GfjQtJEZJrMulWCHiwlw/ljROcqED0C1bx9vYtrfJnnXVP4auc7sz8DKL29zg=="
)


class Lines:
    """Numbered lines to publish, which of them are confirmed, and what was said meanwhile."""

    def __init__(self, broker: Broker, **options: object) -> None:
        self.said = log_lines("WARNING")
        self.confirmed: list[int] = []
        self.written = 0
        self.results = MqttResults(parse_broker(broker.address("gate")), **{"patience_s": 20.0, **options})

    def write(self, count: int) -> None:
        for _ in range(count):
            number = self.written
            self.results.write([b"%d" % number], "", lambda number=number: self.confirmed.append(number))
            self.written += 1

    def write_within(self, count: int, broker: Broker, error: Exception | None = None) -> None:
        """Write so many lines, and raise the error, in a block in which the broker stands still."""
        with self.results:
            broker.process.send_signal(signal.SIGSTOP)
            self.write(count)
            if error:
                raise error


@pytest.fixture
def broker(tmp_path) -> Iterator[Broker]:
    with Broker(tmp_path) as found:
        yield found


def numbers(reader: Reader) -> list[int]:
    return [int(payload) for _, payload in reader.seen]


# The address


def test_an_address_has_all_that_is_needed():
    broker = parse_broker("mqtts://me:p%40ss%2Fword@[::1]/a/b%20c")
    assert (broker.host, broker.port, broker.tls) == ("::1", 8883, True)
    assert (broker.user, broker.password, broker.topic) == ("me", "p@ss/word", "a/b c")
    assert broker.topic_of("") == "a/b c"
    assert broker.topic_of("net+1/x") == "a/b c/net_1_x"
    assert (parse_broker("MQTT://h:9/t").port, parse_broker("mqtt://h/t").user) == (9, None)
    assert not any(map(is_broker, (None, "-", "mqtt", "found.jsonl", "http://h/t")))


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("mqtt://h", "give a host and a topic"),
        ("mqtt:///t", "give a host and a topic"),
        ("mqtt://me:hush@h:port/t", "the form is mqtt://user:password@host:port/topic"),
        ("mqtt://me:hush@h:70000/t", "the form is mqtt://"),
        ("mqtt://me:hush@h/a/#", "nobody can publish"),
        ("mqtt://me:hush@h/a/%2B/b", "nobody can publish"),
        ("mqtt://h/$SYS/t", "nobody can publish"),
    ],
)
def test_an_address_that_is_none_is_refused_without_its_password(address, said):
    with pytest.raises(OptionError, match="`results` mqtt://") as refused:
        Settings(bundle=["n.tar"], source=["camera:0"], results=address).check()
    assert said in str(refused.value)
    assert "hush" not in str(refused.value) + str(refused.value.value)


@pytest.mark.thorough
def test_without_the_extra_it_is_named_and_only_a_broker_needs_it():
    program = (
        "import sys\n"
        "sys.modules['paho'] = None  # every import of it fails\n"
        "import tvm_pipeline_video.service.running\n"
        "from tvm_pipeline_video.service.mqtt_results import MqttResults, parse_broker\n"
        "from tvm_pipeline.errors import PipelineError\n"
        "try:\n"
        "    MqttResults(parse_broker('mqtt://me:hush@h/t'), patience_s=1)\n"
        "except PipelineError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert "`results` mqtt://me:***@h/t needs an extra: pip install 'tvm-pipeline[mqtt]'" in done.stdout


# The broker


@pytest.mark.needs("mosquitto")
def test_a_run_publishes_its_lines(cli, bundle, tmp_path, broker):
    """Another model of the run would have a topic of its own. What decodes the film is said, too."""
    with open_source("synthetic:64x48@30:40") as source, VideoFile(tmp_path / "film.mp4", 30) as video:
        for frame in source:
            video.write(frame.image)
    config = service(
        tmp_path, f'bundle = "{bundle}"\nsource = "film.mp4"\nresults = "{broker.address("cameras/gate", "me:hush")}"\n'
    )
    config.chmod(0o600)
    with Reader(broker) as reader:
        outcome = cli("run", "--config", config)
        assert outcome.code == 0, outcome.err
        assert f"written: {broker.address('cameras/gate', 'me:***')}" in outcome.err
        assert "hush" not in outcome.out + outcome.err
        kinds = hardware_decoders()
        working = [kind for kind, obstacle in kinds.items() if not obstacle]
        reasons = "; ".join(f"{kind}: {obstacle}" for kind, obstacle in kinds.items())
        by = f"by {working[0]}" if working else "in software" + (f" ({reasons})" if kinds else "")
        assert f"film.mp4: h264 is decoded {by}" in outcome.err
        other = ResultLine(frame=7, time_s=0.0, latency_s=0.0, source="film", annotations=[], model="net")
        with ResultFiles(Settings(results=broker.address("cameras/gate")), 25.0, keeps=False) as files:
            files.write(SimpleNamespace(frame=SimpleNamespace(clock_s=0.0), events=()), other, "net", None)
        assert until(lambda: len(reader.seen) == 41)
    # The first line of a topic has QoS 1, so it may overtake lines of another topic, which have QoS 2.
    lines, others = (
        [msgspec.json.decode(payload, type=ResultLine) for topic, payload in reader.seen if topic == where]
        for where in ("cameras/gate", "cameras/gate/net")
    )
    assert [line.frame for line in lines] == [*range(40)]
    assert all([output.shape for output in line.outputs.values()] == [[1, 10]] for line in lines)
    assert others == [other]
    assert not (tmp_path / "mqtt:").exists()


@pytest.mark.thorough
@pytest.mark.needs("mosquitto")
def test_each_line_comes_once_and_in_order_through_restarts(broker):
    lines = Lines(broker)
    with Reader(broker) as reader:
        with lines.results:
            for restart in (1, 2):
                lines.write(30)
                assert until(lambda: len(reader.seen) == lines.written)
                broker.process.send_signal(signal.SIGSTOP)
                lines.write(50)  # some are on their way when it ends, the others wait
                broker.process.send_signal(signal.SIGTERM)
                broker.stop(signal.SIGCONT)
                broker.start()
                assert until(lambda restart=restart: reader.connections == 1 + restart)
            lines.write(30)
        assert until(lambda: len(reader.seen) >= lines.written)
    assert numbers(reader) == lines.confirmed == list(range(lines.written))
    sessions = re.findall(r"connected from \S+ as (tvm-pipeline-\w+)", broker.log.read_text())
    assert (len(sessions), len(set(sessions))) == (3, 1)  # in one that the broker remembers
    assert [line.split(" (")[0].split(";")[0] for line in lines.said] == [
        f"{broker.address('gate')} is {how}" for how in ("gone", "back") * 2
    ]


@pytest.mark.thorough
@pytest.mark.needs("mosquitto")
def test_what_a_broker_that_forgets_had_not_confirmed_is_published_again(tmp_path, monkeypatch):
    monkeypatch.setattr(mqtt_results, "RETRY_S", (1.5, 1.5))  # the reader comes back first
    with Broker(tmp_path, keeps=False) as broker, Reader(broker) as reader:
        lines = Lines(broker)
        with lines.results:
            writer = threading.Thread(target=lines.write, args=(2000,))
            writer.start()
            assert until(lambda: len(reader.seen) > 100)
            broker.stop(signal.SIGKILL)  # with lines on their way
            writer.join()
            broker.start()
            assert until(lambda: reader.connections == 2)
            before = len(lines.confirmed)
            assert before < 2000
        assert until(lambda: 1999 in numbers(reader))
    assert lines.confirmed == list(range(2000))
    assert numbers(reader)[before - 2000 :] == list(range(before, 2000))  # some may have come before, too


@pytest.mark.needs("mosquitto")
def test_a_full_memory_makes_frames_wait_and_then_ends_the_run(broker):
    lines = Lines(broker, most_bytes=100, patience_s=20.0)
    with Reader(broker) as reader:
        with lines.results:
            broker.process.send_signal(signal.SIGSTOP)
            writer = threading.Thread(target=lines.write, args=(300,))
            writer.start()
            time.sleep(0.3)
            assert lines.written < 110  # the rest is held back
            broker.process.send_signal(signal.SIGCONT)
            writer.join()
        assert until(lambda: len(reader.seen) == 300)
    assert numbers(reader) == list(range(300))

    lines = Lines(broker, most_bytes=100, patience_s=0.2)
    try:
        with pytest.raises(RunError, match=r"confirmed the last \d+ lines; .*fit into 100 bytes"):
            lines.write_within(300, broker)
    finally:
        broker.process.send_signal(signal.SIGCONT)
    assert len(lines.said) <= 1  # the error is said once


@pytest.mark.needs("mosquitto")
def test_the_end_waits_for_the_broker_and_says_what_it_has_not_confirmed(broker):
    lines = Lines(broker, patience_s=0.3)
    with pytest.raises(RunError, match="has not confirmed the last 7 lines; check the broker"):
        lines.write_within(7, broker)
    assert lines.confirmed == []
    broker.process.send_signal(signal.SIGCONT)
    lines = Lines(broker, patience_s=0.3)
    with pytest.raises(KeyError):
        lines.write_within(3, broker, KeyError())  # the first error is the one to report
    broker.process.send_signal(signal.SIGCONT)
    assert "has not confirmed the last 3 lines" in lines.said[-1]


@pytest.mark.needs("mosquitto")
def test_a_broker_that_refuses_is_said(tmp_path):
    (tmp_path / "acl").write_text("user me\ntopic write mine/#\n")
    (tmp_path / "users").write_text(f"me:{HUSH}\n")
    settings = f"allow_anonymous false\npassword_file {tmp_path}/users\nacl_file {tmp_path}/acl"
    with Broker(tmp_path, settings=settings) as broker:
        for user, topic, said in (
            ("me:wrong", "mine/a", "the broker refuses the connection: Not authorized; check the user"),
            ("me:hush", "other", "the broker refuses messages to other: Not authorized; let the user publish"),
        ):
            address = parse_broker(broker.address(topic, user))
            results = MqttResults(address, patience_s=5)
            with pytest.raises(OptionError, match=said) as refused, results:
                results.write([b"{}"], "", lambda: None)
            assert user.partition(":")[2] not in str(refused.value)
        done = []
        with MqttResults(parse_broker(broker.address("mine/a", "me:hush")), patience_s=5) as results:
            results.write([b"{}"], "", lambda: done.append(1))
        assert done == [1]
    with pytest.raises(RunError, match=r"cannot reach .*Connection refused; start the broker"):
        MqttResults(address, patience_s=5).__enter__()


def test_a_broker_that_is_none_is_said(monkeypatch):
    monkeypatch.setattr(mqtt_results, "CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = parse_broker(f"mqtt://127.0.0.1:{silent.getsockname()[1]}/t")
        with pytest.raises(PipelineError, match=r"did not answer in 0.3 s; check that an MQTT 5 broker listens"):
            MqttResults(address, patience_s=5).__enter__()
