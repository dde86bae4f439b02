"""Commands come in by entry points: the list imports none of them, and a broken one breaks no other."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
import typer

from tests.cli.test_commands import COMMANDS
from tests.support.command import run_command
from tvm_pipeline.cli import app
from tvm_pipeline.cli.commands import docstring

ENGINE = "import sys; sys.argv[1:] = ['--help']\nfrom tvm_pipeline.cli import main\n"
LOADED = "import atexit; atexit.register(lambda: print(*sorted(sys.modules), file=sys.stderr))\n"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package of one module with commands: install("guest", "def hello(): ...", hello="guest:hello")."""

    def make(package: str, source: str, **commands: str) -> None:
        folder = tmp_path / f"{package}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {package}\nVersion: 1\n")
        lines = [f"{name} = {value}\n" for name, value in commands.items()]
        (folder / "entry_points.txt").write_text("[tvm_pipeline.commands]\n" + "".join(lines))
        (tmp_path / f"{package}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, package, raising=False)

    return make


@pytest.mark.parametrize("command", COMMANDS)
def test_the_list_reads_what_the_command_says(command):
    group = typer.main.get_group(app)
    [entry] = group.entries.select(name=command)
    assert docstring(entry).strip() == group.loaded(command).help.strip() != ""


def test_the_list_imports_no_command_and_no_library_that_commands_need():
    program = ENGINE + LOADED + "main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert "Find the order of operators that needs the least memory" in done.stdout
    assert {name for name in loaded if name.startswith("tvm_pipeline.cli.")} == {
        *("tvm_pipeline.cli.commands", "tvm_pipeline.cli.output"),
    }
    assert not loaded & {"numpy", "msgspec", "tvm", "tvm_pipeline.planning", "tvm_pipeline.runtime", "rich.markdown"}


def test_a_plug_in_brings_a_command_and_a_group(cli, install):
    source = (
        '"""Greet others.\n\nExample: tvm-pipeline greet hello"""\n'
        "import typer\n"
        "greet = typer.Typer(help=__doc__)\n"
        "@greet.command()\ndef hello(name: str): print('hello', name)\n"
        "@greet.command()\ndef bye(): ...\n"
        "def wave(times: int = 2):\n    'Wave.'\n    print('~' * times)\n"
    )
    install("guest", source, greet="guest:greet", wave="guest:wave")
    listed = [line.strip("│ \n") for line in cli("--help").out.splitlines()]
    assert [line for line in listed if line.startswith(("greet", "wave"))] == [
        "greet        Greet others.",
        "wave         Wave.",
    ]
    assert cli("wave", "--times", "3").out == "~~~\n"
    assert cli("greet", "hello", "you").out == "hello you\n"
    assert "Greet others." in cli("greet", "--help").out


@pytest.mark.parametrize(
    ("source", "value", "reason"),
    [
        ("import no_such_library\ndef hello(): ...", "guest:hello", "No module named 'no_such_library'"),
        ("def hello(:", "guest:hello", "SyntaxError: invalid syntax"),
        ("raise RuntimeError('built for another numpy')", "guest:hello", "RuntimeError: built for another numpy"),
        ("", "guest:hello", "has no attribute 'hello'"),
        ("hello = 1", "guest:hello", "TypeError"),
        ("", "no_such_guest:hello", "No module named 'no_such_guest'"),
    ],
)
def test_a_command_that_cannot_be_imported_breaks_no_other(cli, install, source, value, reason):
    install("guest", source, hello=value)
    assert cli("--help").code == 0
    assert cli("plan", "--help").code == 0
    outcome = cli("hello")
    assert outcome.code == 1
    assert f"error: the command hello of guest ({value}) cannot be loaded: " in outcome.err
    assert reason in outcome.err


def test_a_plug_in_does_not_replace_a_command(cli, install):
    install("guest", "def plan(): ...", plan="guest:plan")
    outcome = cli("plan", "net.tar")
    assert outcome.code == 1
    assert "two packages bring a command called plan: " in outcome.err
    assert "guest (guest:plan)" in outcome.err
    assert "tvm-pipeline (tvm_pipeline.cli.plan:command)" in outcome.err


def test_a_file_that_is_missing_has_a_line_that_says_so():
    entry = EntryPoint("hello", "no_such_guest.commands:hello", "tvm_pipeline.commands")
    assert docstring(entry) == "Cannot be loaded; `tvm-pipeline hello` says why."


def test_an_unknown_command_is_answered_with_one_like_it(cli):
    outcome = cli("simulte")
    assert outcome.code == 2
    assert "No such command 'simulte'. Did you mean 'simulate'" in outcome.err


@pytest.mark.parametrize(("typed", "expected"), [("pro", "profile"), ("plan --sch", "--scheduler")])
def test_shells_complete_commands_and_options(capfd, monkeypatch, typed, expected):
    monkeypatch.setenv("_TVM_PIPELINE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"tvm-pipeline {typed}")
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split())))
    assert run_command(capfd, monkeypatch).out.split() == [expected]
