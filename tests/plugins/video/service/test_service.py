"""`run --config`: everything from a file, said with its line where it is wrong, and read anew on SIGHUP."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.parts import needs
from tvm_pipeline_video.service.file import read_service

FILM = "synthetic:64x48@30:300"


def decoder(path: Path, label: str) -> str:
    """What finds this label in every frame, and takes its time."""
    path.write_text(
        "import time\n"
        "from tvm_pipeline_video import Annotation\n"
        "def decode(outputs, transform):\n"
        "    time.sleep(0.005)\n"
        f"    return [Annotation({label!r})]\n"
    )
    return f"{path.name}:decode"


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def count(path: Path) -> int:
    """Whole lines, while another thread or process adds to them."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


@contextmanager
def meanwhile(act: Callable[[], None], lines: Path, least: int) -> Iterator[None]:
    """Does something while a run is on, once its results have so many lines."""

    def wait() -> None:
        until_s = time.monotonic() + 60
        while count(lines) < least and time.monotonic() < until_s:
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join()


def service(folder: Path, text: str) -> Path:
    (folder / "service.toml").write_text(text)
    return folder / "service.toml"


def test_a_file_says_it_all_and_the_command_line_wins(cli, bundle, tmp_path):
    (tmp_path / "net.tar").symlink_to(bundle)
    config = service(
        tmp_path,
        f'bundle = "net.tar"\nsource = "synthetic:64x48@30:40"\nresults = "lines.jsonl"\n'
        f'decoder = "{decoder(tmp_path / "found.py", "thing")}"\nlimit = 9\nevents = "events.jsonl"\njson = true\n',
    )
    outcome = cli("run", "--config", config, "--limit", 5)
    assert outcome.code == 0, outcome.err
    assert outcome.json["measured"]["frames"] == 5
    assert [row["annotations"][0]["label"] for row in rows(tmp_path / "lines.jsonl")] == ["thing"] * 5
    assert [row["kind"] for row in rows(tmp_path / "events.jsonl")] == ["start"]
    cli("run", "--config", config, "--limit", 3)  # a service's results are a log
    assert [row["frame"] for row in rows(tmp_path / "lines.jsonl")] == [*range(5), *range(3)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('bundle = "n.tar"\nsource = ["camera:0"\nlimit = 3', "line 3: it is no TOML"),
        ('bundle = "n.tar"\n\nsorce = "camera:0"', "line 3: there is no key sorce; did you mean source?"),
        (
            'bundle = "n.tar"\n[video]\nsource = "camera:0"',
            "line 2: there is no key video; it takes adapt, allow-power-modes",
        ),
        ('limit = "ten"', "line 1: limit: Expected `int`, got `str`"),
        ("limit = true", "line 1: limit: Expected `int`, got `bool`"),
        ("# no path\nbundle = 3", "line 2: bundle: Expected a path as `str`, got `int`"),
        ('bundle = "n.tar"\nsource = "camera:0"\nlimit = 0', "line 3: limit 0: at least one frame"),
        (
            'bundle = "n.tar"\nsource = "camera:0"\npolicy = "block,latest"',
            "line 3: policy block,latest: block keeps every frame, latest lets some go",
        ),
        (
            'bundle = "n.tar"\nsource = ["camera:0", "camera:1", "camera:2"]\npolicy = ["block", "latest"]',
            "line 3: policy is given 2 times for 3 sources",
        ),
        (
            'bundle = "n.tar"\nsource = "camera:0"\nadapt = "always"',
            "line 3: adapt always: there is no strategy always; there are off, replan",
        ),
        ('bundle = "n.tar"\nsource = "camera:0"\nwatch = "here"', "line 3: watch here: give it as PORT"),
        ('bundle = "n.tar"', "give a model file, or a bundle of `compile`, and at least one --source"),
        (
            'bundle = ["n.tar", "m.tar"]\nsource = "camera:0"',
            "line 2: source is given 1 times for 2 models; each takes one",
        ),
        (
            'bundle = ["n.tar", "m.tar"]\nsource = ["camera:0", "camera:0"]',
            "line 2: source names camera:0 twice; a camera can be opened once",
        ),
        (
            'bundle = "n.tar"\nsource = "a.mp4"\noutput = "b.mp4"\nsupervise = true',
            "line 3: output with supervise: a video cannot go on where a crash broke it off; give segment",
        ),
        ('bundle = "n.tar"\nsource = "a.mp4"\noutput = "b.mp4"\nsegment = 0', "line 4: segment 0: it must be positive"),
        (
            'bundle = "n.tar"\nsource = "a.mp4"\nwatchdog = 1e308',
            "line 3: watchdog 1e+308: it must be positive, and up to 1e+09 seconds",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_line(cli, tmp_path, text, said):
    outcome = cli("run", "--config", service(tmp_path, text))
    assert outcome.code == 2
    assert said in outcome.err
    if "line" in said:
        assert "service.toml, line" in outcome.err


def test_what_contradicts_the_model_is_said_with_its_line(cli, bundle, tmp_path):
    config = service(tmp_path, f'bundle = "{bundle}"\nsource = "{FILM}"\nmin-throughput = 3')
    outcome = cli("run", "--config", config)
    assert (outcome.code, "line 3: min-throughput goes with objective latency" in outcome.err) == (2, True)
    config = service(tmp_path, f'bundle = "{bundle}"\nsource = "{FILM}"\n\ndecoder = "none.py:decode"')
    outcome = cli("run", "--config", config)
    assert (outcome.code, "line 4: decoder" in outcome.err) == (2, True)


def test_a_missing_file(cli, tmp_path):
    outcome = cli("run", "--config", tmp_path / "none.toml")
    assert (outcome.code, "none.toml: No such file" in outcome.err) == (2, True)


@pytest.mark.parametrize(
    "line", ['results = "mqtt://me:hush@h/t"', 'source = ["rtsp://gate/user=me_password=hush_channel=1"]']
)
def test_an_address_with_a_password_that_others_can_read(line, cli, bundle, tmp_path):
    config = service(tmp_path, f'bundle = "{bundle}"\n{line}\n' + ("" if "source" in line else f'source = "{FILM}"\n'))
    config.chmod(0o644)
    outcome = cli("run", "--config", config)
    assert outcome.code == 2
    assert f"line 2: others can read this file, and {line.split()[0]} is or has a secret: `chmod 600" in outcome.err
    assert "hush" not in outcome.err


def test_a_password_on_the_command_line_is_warned_of_and_not_shown(cli, bundle, tmp_path):
    outcome = cli("run", bundle, "--source", "rtsp://me:hush@127.0.0.1:9/gate", "--stall", "0.5")
    assert "every user of this machine can see the secret of --source in the list of processes" in outcome.err
    assert "hush" not in outcome.err


def test_two_streams_that_are_shown_alike_need_tags(cli, bundle):
    outcome = cli("run", bundle, "--source", "http://h/?token=1", "--source", "http://h/?token=2")
    assert outcome.code == 2
    assert "two sources are shown as http://h/?token=***" in outcome.err


def test_an_output_that_is_read_is_refused(cli, bundle, tmp_path):
    film, link = tmp_path / "film.mp4", tmp_path / "link.mp4"
    film.write_bytes(b"precious")
    link.symlink_to(film)
    for options in (("--output", film), ("--results", link), ("--events", film)):
        outcome = cli("run", bundle, "--source", film, *options)
        assert outcome.code == 2
        assert f"{film}: the same command reads or writes it" in outcome.err
    assert film.read_bytes() == b"precious"


@pytest.mark.parametrize("content", [b'{"precious": "without an end"}', bytes(3_000_000), b"a,b\n1,2"])
def test_results_are_not_appended_to_a_file_of_another_kind(content, cli, bundle, tmp_path):
    results = tmp_path / "results"
    results.write_bytes(content)
    config = service(tmp_path, f'bundle = "{bundle}"\nsource = "{FILM}"\nlimit = 3\nresults = "{results}"\n')
    outcome = cli("run", "--config", config)
    assert outcome.code == 2
    assert f"results {results} does not end as results do, and is left as it is" in outcome.err
    assert results.read_bytes() == content


def test_a_line_that_a_crash_cut_short_is_cut_off_and_said(cli, bundle, tmp_path):
    results = tmp_path / "results"
    results.write_bytes(b'{"frame":1,"source":"a"}\n{"frame":2,"sou')
    config = service(tmp_path, f'bundle = "{bundle}"\nsource = "{FILM}"\nlimit = 3\nresults = "{results}"\n')
    outcome = cli("run", "--config", config)
    assert outcome.code == 0, outcome.err
    assert "15 bytes of a line that a crash cut short are cut off" in outcome.err
    assert [row["frame"] for row in rows(results)] == [1, 0, 1, 2]


@pytest.mark.thorough
def test_a_token_that_others_can_read(cli, bundle, tmp_path, monkeypatch):
    needs("prometheus_client")
    secret = "0123456789-secret-0123456789"
    text = f'bundle = "{bundle}"\nsource = "{FILM}"\nlimit = 3\nwatch = 0\ntoken = "{secret}"\n'
    config = service(tmp_path, text)
    config.chmod(0o644)
    outcome = cli("run", "--config", config)
    assert outcome.code == 2
    assert f"line 5: others can read this file, and token is or has a secret: `chmod 600 {config}`" in outcome.err
    assert "TVM_PIPELINE_TOKEN" in outcome.err
    assert secret not in outcome.err
    config.chmod(0o600)
    assert cli("run", "--config", config).code == 0
    service(tmp_path, text.rpartition("token")[0]).chmod(0o644)
    monkeypatch.setenv("TVM_PIPELINE_TOKEN", "short")
    assert "--token: give 16 characters" in cli("run", "--config", config).err


def test_a_password_in_an_address_is_not_printed(cli, bundle):
    outcome = cli("run", bundle, "--source", "rtsp://me:hush@127.0.0.1:9/gate", "--stall", 1, "--watch", 0)
    assert outcome.code == 1
    assert "rtsp://me:***@127.0.0.1:9/gate" in outcome.err
    assert "hush" not in outcome.err + outcome.out


def test_settings_read_anew_while_a_file_plays(cli, bundle, tmp_path):
    """Bad settings change nothing; good ones take over, and not a frame is lost or seen twice."""
    lines = tmp_path / "lines.jsonl"

    def text(name: str) -> str:
        found = decoder(tmp_path / f"{name}.py", name)
        return f'bundle = "{bundle}"\nsource = "{FILM}"\nresults = "lines.jsonl"\ndecoder = "{found}"\n'

    config = service(tmp_path, text("before"))

    def change() -> None:
        for bad in ("limit = 0", None, 'bundle = "gone.tar"'):
            if bad is None:
                config.unlink()
            else:
                service(
                    tmp_path, text("never").replace("bundle =", "# ") + bad if "gone" in bad else text("never") + bad
                )
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.3)
        service(tmp_path, text("after"))
        os.kill(os.getpid(), signal.SIGHUP)

    with meanwhile(change, lines, 20):
        outcome = cli("run", "--config", config)
    assert outcome.code == 0, outcome.err
    assert "line 5: limit 0: at least one frame must run; it runs on as before" in outcome.err
    assert "service.toml: No such file or directory; it runs on as before" in outcome.err
    assert "gone.tar: No such file or directory; back to the settings before" in outcome.err
    assert "the settings were read anew" in outcome.err
    found = rows(lines)
    assert [row["frame"] for row in found] == list(range(300))
    assert list(dict.fromkeys(row["annotations"][0]["label"] for row in found)) == ["before", "after"]


@pytest.mark.thorough
def test_several_files_go_on_each_where_it_was(cli, bundle, tmp_path):
    lines, films = tmp_path / "lines.jsonl", ["synthetic:64x48@30:120", "synthetic:32x32@30:90"]
    found = decoder(tmp_path / "found.py", "thing")
    config = service(
        tmp_path,
        f'bundle = "{bundle}"\nsource = {films}\nresults = "lines.jsonl"\ndecoder = "{found}"\n'
        'policy = ["block", "every=4"]\n',
    )
    with meanwhile(lambda: os.kill(os.getpid(), signal.SIGHUP), lines, 10):
        outcome = cli("run", "--config", config)
    assert outcome.code == 0, outcome.err
    frames = {name: [row["frame"] for row in rows(lines) if row["source"] == name] for name in films}
    assert frames == {films[0]: list(range(120)), films[1]: list(range(0, 90, 4))}


@pytest.mark.thorough
def test_another_source_begins_at_its_beginning(cli, bundle, tmp_path):
    lines, other = tmp_path / "lines.jsonl", "synthetic:32x32@30:40"
    rest = f'bundle = "{bundle}"\nresults = "lines.jsonl"\ndecoder = "{decoder(tmp_path / "found.py", "thing")}"\n'
    config = service(tmp_path, f'source = "{FILM}"\n{rest}')

    def change() -> None:
        service(tmp_path, f'source = "{other}"\n{rest}')
        os.kill(os.getpid(), signal.SIGHUP)

    with meanwhile(change, lines, 20):
        outcome = cli("run", "--config", config)
    assert outcome.code == 0, outcome.err
    frames = {name: [row["frame"] for row in rows(lines) if row["source"] == name] for name in (FILM, other)}
    assert frames == {FILM: list(range(len(frames[FILM]))), other: list(range(40))}


@pytest.mark.thorough
def test_a_control_file_that_comes_goes_wrong_and_vanishes(cli, bundle, tmp_path):
    lines, control = tmp_path / "lines.jsonl", tmp_path / "control.toml"
    config = service(
        tmp_path,
        f'bundle = "{bundle}"\nsource = "{FILM}"\nresults = "lines.jsonl"\nadapt = "off"\nevents = "events.jsonl"\n'
        f'decoder = "{decoder(tmp_path / "found.py", "thing")}"\ncontrol = "control.toml"\n',
    )

    def objectives() -> list[str]:
        return [row["reason"] for row in rows(tmp_path / "events.jsonl") if row["kind"] == "objective"]

    def change() -> None:
        texts = 'objective = "latency"\n', 'objective = "late', 'objective = "beauty"', "max-latency = 9\n"
        for text, least in zip(texts, (1, 1, 1, 2), strict=True):
            control.write_text(text)
            time.sleep(0.6)
            while len(objectives()) < least and threading.main_thread().is_alive():
                time.sleep(0.05)  # planning takes a while on a machine that is busy
        control.unlink()
        time.sleep(0.6)
        os.kill(os.getpid(), signal.SIGTERM)

    with meanwhile(change, lines, 1):
        outcome = cli("run", "--config", config, "--source", "synthetic:64x48")
    assert outcome.code == 0, outcome.err
    assert [row["frame"] for row in rows(lines)] == list(range(len(rows(lines))))
    assert [reason.split()[0].strip(",") for reason in objectives()] == ["latency", "throughput"]
    assert "control.toml, line 1: it is no TOML" in outcome.err
    assert "control.toml, line 1: there is no objective 'beauty'" in outcome.err


def test_the_example_is_a_service():
    example = Path(__file__).parents[4] / "examples" / "service" / "service.toml"
    values = read_service(example).tables
    assert values["bundle"] == [example.parent / "model.tar"]
    assert values["supervise"]


def test_a_long_address_is_no_file(tmp_path):
    """A signed one may be longer than any name of a file."""
    address = f"https://camera/live?signature={'a' * 300}"
    path = service(tmp_path, f'bundle = "model.tar"\nsource = "{address}"\nlabels = "{"a" * 300}"\n')
    path.chmod(0o600)
    assert read_service(path).tables["source"] == [address]
