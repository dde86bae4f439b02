"""The reference pages are made of the code: all commands with their options, and the keys of TOML files.

After a change: python -c "from tests.test_reference_pages import *; write()"
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import typer

from tests.support.parts import needs

needs("tvm_pipeline_video")

from tests.plugins.video.service.test_settings import WORDS, takes
from tvm_pipeline.cli import app
from tvm_pipeline.core.device_model import DeviceModel, KindFactor
from tvm_pipeline.core.platform import Device, Link, Platform
from tvm_pipeline.core.power_mode import PowerMode
from tvm_pipeline_video import Preprocessing

DOCS = Path(__file__).parents[1] / "docs"
COMMANDS = """\
# Commands

All commands and options, as `tvm-pipeline COMMAND --help` prints them. `tvm-pipeline --install-completion` teaches your
shell to complete them. The exit code is 0 for success, 2 for wrong usage and 1 for a failure. `tvm-pipeline --traceback
COMMAND ...` shows where a failure happened.
"""
FILES = """\
# Files of settings

The keys of the TOML files that commands read. A key that is not here is refused with its line, and with the key that
was probably meant. A path in a file is relative to the file's folder. The keys of a service's file are in
[Settings of a run](settings.md), and those of a fleet's file in [Fleets](fleet.md).
"""
# Keys that a file does not have, since a command finds them out.
FOUND_OUT = {"stand_in", "r2"}
TABLES: tuple[tuple[str, str, type, tuple[str, ...]], ...] = (
    ("platform.toml", "", Platform, ("name", "idle_w")),
    ("platform.toml", "[[device]]", Device, ()),
    ("platform.toml", "[device.model]", DeviceModel, ()),
    ("platform.toml", "[[device.model.kind]]", KindFactor, ()),
    ("platform.toml", "[[link]]", Link, ()),
    ("platform.toml", "[[power_mode]]", PowerMode, ()),
    ("model.toml", "", Preprocessing, ()),
)
ABOUT = {
    "platform.toml": "What a machine has, for `--platform`. `tvm-pipeline devices -o platform.toml` writes one.",
    "model.toml": "How a picture becomes the model's input: beside MODEL.onnx as MODEL.toml, or for `--preprocessing`.",
}
ALSO = {"name": "the name in messages"}  # of fields without a docstring


def commands_page() -> str:
    """The page of all commands."""
    return COMMANDS + "".join(part for name, command in commands() for part in _command(name, command))


def commands() -> Iterator[tuple[str, Any]]:
    """Yield each command with its name, a group before those in it."""
    group: Any = typer.main.get_command(app)
    for name in group.commands:
        command = group.loaded(name)
        yield name, command
        yield from ((f"{name} {inner}", found) for inner, found in getattr(command, "commands", {}).items())


def _command(name: str, command: Any) -> Iterator[str]:
    summary, *rest = re.split(r"\n\s*\n", (command.help or "").strip())
    yield f"\n## {name}\n\n{_prose(summary)}\n"
    examples = [_prose(part) for part in rest if "tvm-pipeline " in part]
    for part in rest:
        if "tvm-pipeline " not in part:
            yield f"\n{_prose(part)}\n"
    if examples:
        yield "\n```sh\n" + "".join(f"{line.partition(': ')[2]}\n" for line in examples) + "```\n"
    if hasattr(command, "commands"):
        return
    rows = [_row(one) for one in command.params if not getattr(one, "hidden", False) and one.name != "help"]
    yield "\n| Option | Takes | Without it | What it is |\n|---|---|---|---|\n" + "".join(rows)


def _row(parameter: Any) -> str:
    is_option = parameter.param_type_name == "option"
    name = ", ".join([*parameter.opts, *parameter.secondary_opts]) if is_option else parameter.name.upper()
    is_flag = getattr(parameter, "is_flag", False)
    kind = "" if is_flag else parameter.metavar or takes(parameter.type_descriptor.annotation)
    default = parameter.default
    usual = "required" if parameter.required else "" if default in (None, False, "", []) else f"`{default}`"
    return f"| `{name}` | {kind} | {usual} | {_prose(parameter.help or '').replace('|', chr(92) + '|')} |\n"


def _prose(text: str) -> str:
    return " ".join(text.split())


def files_page() -> str:
    """The page of the keys of TOML files."""
    parts, last = [FILES], ""
    for file, table, kind, only in TABLES:
        if file != last:
            parts.append(f"\n## {file}\n\n{ABOUT[file]}\n")
            last = file
        parts.append(f"\n### {table or 'At the top'}\n\n| Key | Takes | Without it | What it is |\n|---|---|---|---|\n")
        told, hints = attributes(kind), get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if field.name in FOUND_OUT or (only and field.name not in only):
                continue
            about = re.sub(r"\bNone\b", "left out", told.get(field.name) or ALSO[field.name])
            usual = "required" if field.default is dataclasses.MISSING else _usual(field.default)
            parts.append(
                f"| `{field.name}` | {_kind(hints[field.name])} | {usual} | {about.replace('|', chr(92) + '|')} |\n"
            )
    return "".join(parts)


def attributes(kind: type) -> dict[str, str]:
    """What the docstring of a class says of each attribute."""
    section = re.split(r"\n *\n", (kind.__doc__ or "").partition("Attributes:\n")[2])[0]
    told: dict[str, str] = {}
    for names, text in re.findall(r"(?m)^ {8}(\w[\w, ]*): ((?:.*\n?)(?: {12,}.*\n?)*)", section):
        told |= dict.fromkeys(names.split(", "), _prose(text))
    return told


def _kind(hint: Any) -> str:
    inner = [one for one in get_args(hint) if one is not type(None)]
    if hint in WORDS:
        return WORDS[hint]
    if dataclasses.is_dataclass(hint):
        return "a table"
    origin = str(get_origin(hint))
    if "Literal" in origin:
        return ", ".join(map(str, inner))
    if origin in ("<class 'tuple'>", "<class 'list'>"):
        return f"a list: {_kind(inner[0])}" if not dataclasses.is_dataclass(inner[0]) else "tables"
    if "Mapping" in origin or "dict" in origin:
        return "a table of numbers"
    return _kind(inner[0]) if inner else str(hint)


def _usual(default: Any) -> str:
    return "" if default in (None, "", ()) else f"`{default}`"


def write() -> None:
    """Write both pages."""
    (DOCS / "commands.md").write_text(commands_page())
    (DOCS / "files.md").write_text(files_page())


@pytest.mark.parametrize("name", ["commands", "files"])
def test_the_page_is_that_of_the_code(name: str) -> None:
    """The commands of guests that are not installed here are left out, so all guests must be."""
    for part in ("tvm_pipeline_papers", "tvm_pipeline_hosts"):
        pytest.importorskip(part)
    made = {"commands": commands_page, "files": files_page}[name]()
    assert (DOCS / f"{name}.md").read_text() == made


def test_documented_options_exist() -> None:
    """No page names an option of a command that the command does not have."""
    known = {name: {option for one in command.params for option in one.opts} for name, command in commands()}
    wrong = []
    for page in [DOCS.parent / "README.md", *DOCS.rglob("*.md")]:
        for line in re.findall(r"tvm-pipeline ([a-z][^\n`]*)", page.read_text().replace("\\\n", " ")):
            words = line.partition("  #")[0].partition(" | ")[0].split()
            command = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
            if command in known:
                given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z][\w-]*$", word)}
                wrong += [
                    f"{page.name}: {command} {option}" for option in given - known[command] - {"--help", "--json"}
                ]
    assert wrong == []
