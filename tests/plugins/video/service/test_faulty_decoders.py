"""A decoder that ends its thread, hangs, or finds nonsense: the run ends with its name and the frame, and keeps lines.

There are two ways to call a decoder: in a stage of the plan, and in the thread of the results where no device is a CPU.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tvm_pipeline.errors import OptionError, RunError
from tvm_pipeline_video import find_decoder
from tvm_pipeline_video.service import model_plan
from tvm_pipeline_video.service.running import Service
from tvm_pipeline_video.service.settings import Settings

HEAD = "import time\nfrom tvm_pipeline_video import Annotation\ncalls = []\n"


def decoder(path: Path, does: str, at: int) -> str:
    """A decoder that finds a thing in each frame, and does something else from the call of that number on."""
    path.write_text(
        f"{HEAD}def decode(outputs, transform):\n    calls.append(1)\n    if len(calls) > {at}:\n        {does}\n"
        "    return [Annotation('thing')]\n"
    )
    return f"{path}:decode"


@pytest.fixture(scope="module")
def known(bundle, tmp_path_factory) -> Settings:
    """Settings of a run that was planned before, so that only the run itself calls its decoder."""
    folder = tmp_path_factory.mktemp("faulty")
    settings = Settings(
        bundle=[bundle],
        source=["synthetic:64x48@30:60"],
        decoder=[decoder(folder / "found.py", "pass", 0)],
        results=str(folder / "lines.jsonl"),
        verify=0,
        limit=1,
    )
    Service(settings).run()
    return replace(settings, limit=None)


@pytest.fixture(params=["in a stage", "in the thread of the results"])
def settings(request, known, tmp_path, monkeypatch):
    """Settings of a run whose decoder fails at frame 11."""
    if request.param != "in a stage":
        monkeypatch.setattr(model_plan, "host_devices", lambda platform, profile: [])

    def made(does: str, **options: object) -> Settings:
        decoder(Path(known.decoder[0].removesuffix(":decode")), does, 11)
        return replace(known, results=str(tmp_path / "lines.jsonl"), **options)

    return made


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("does", "told"),
    [
        (
            "raise SystemExit(3)",
            "failed at frame 11 of synthetic:64x48@30:60: SystemExit: 3 .*found.py, line 7.*; mend",
        ),
        (
            "raise KeyboardInterrupt",
            "failed at frame 11 of synthetic:64x48@30:60: KeyboardInterrupt: .*found.py, line 7.*; mend",
        ),
        ("raise GeneratorExit", "failed at frame 11 of .*: GeneratorExit"),
        ("return [Annotation('x', box=(1, float('nan'), 3, 4))]", "frame 11 of .* whose box is .*nan.*finite numbers"),
        ("return [Annotation('x', score=float('inf'))]", "at frame 11 of .* whose score is 'inf'; give a finite"),
        ("return [Annotation('x', box=('1', 2, 3, 4))]", "at frame 11 of .* no numbers"),
        ("return [Annotation('x', box=(1, 2, 3))]", "at frame 11 of .* whose box is"),
        ("return [Annotation(7)]", "at frame 11 of .* whose label is '7', a int; give text"),
    ],
)
def test_a_decoder_that_ends_its_thread_or_finds_nonsense(settings, tmp_path, does, told):
    with pytest.raises(RunError, match=rf"the decoder found:decode .*{told}"):
        Service(settings(does)).run()
    lines = [json.loads(line)["frame"] for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert lines == list(range(11))


@pytest.mark.quick_cases(1)
def test_a_decoder_that_hangs_is_named(settings, tmp_path):
    with pytest.raises(
        RunError,
        match=r"frame 11.* found:decode did not end within 0.5 s|:decode did not return within 0.5 s after frame 10",
    ):
        Service(settings("time.sleep(30)", watchdog=0.5)).run()
    lines = [json.loads(line)["frame"] for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert lines == list(range(11))


@pytest.mark.parametrize(
    ("text", "name", "told"),
    [
        ("def decode(:", "decode", "line 1: "),
        ("raise KeyError('cfg')", "decode", "raised KeyError: 'cfg'; a file with a decoder only defines functions"),
        ("raise SystemExit(3)", "decode", "raised SystemExit: 3"),
        ("decode = 5", "decode", "decode is a int, not a function"),
        ("", "decode", "has no attribute 'decode'"),
        ("", "", "give it as file.py:function"),
    ],
)
def test_a_file_that_holds_no_decoder(tmp_path, text, name, told):
    (tmp_path / "found.py").write_text(text)
    with pytest.raises(OptionError, match=told) as caught:
        find_decoder(f"{tmp_path / 'found.py'}:{name}")
    assert caught.value.option == "decoder"
    assert "found.py" in str(caught.value)


def test_a_file_that_is_changed_within_a_second_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "found.py"
    for number in (1, 2):
        file.write_text(f"def decode(outputs, transform):\n    return {number}\n")
        os.utime(file, (1e9, 1e9))
        assert find_decoder(f"{file}:decode")(None, None) == number
    assert [path.name for path in tmp_path.iterdir()] == ["found.py"]


@pytest.mark.parametrize("name", [":", ".:f", "decode", "found.py", "a.b:"])
def test_what_is_no_name_of_a_decoder(name):
    with pytest.raises(OptionError, match=r"give it as file.py:function or package.module:function"):
        find_decoder(name)
