"""Each setting of a run is declared once: its option, its key in a file and the page of all settings come from that."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_origin

import typer

from tvm_pipeline.option_names import OTHER_NAMES, SAME_NAMES, long_name, translated
from tvm_pipeline_video.commands.run import command
from tvm_pipeline_video.service.settings import KINDS, MODEL_KINDS, Settings

PAGE = Path(__file__).parents[4] / "docs/settings.md"
TOP = """\
# Settings of a run

Each is an option of `tvm-pipeline run` under its name behind two dashes, and a key of the file of `--config`
([Running as a service](service.md)); bundles are the arguments of the command. Several are a list in the file, and an
option that is given several times. Those with (fleet) are also keys of a model in [fleet.toml](fleet.md).

"""
HEAD = """
| Setting | Takes | Without it | What it is |
|---|---|---|---|
"""
WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Path: "a file"}


def takes(kind: Any) -> str:
    """The type of a setting in words."""
    first = get_args(kind)[0] if get_args(kind) else kind
    return f"{WORDS[first]}, several" if get_origin(kind) is list else WORDS[first]


def page() -> str:
    """The page of all settings."""
    rows: dict[str, list[str]] = {}
    for key, setting in zip(KINDS, fields(Settings), strict=True):
        help = translated(setting.metadata["help"], lambda name: f"`{name}`").replace("|", "\\|")
        variable = setting.metadata.get("variable")
        help += f" Also from `{variable}`." if variable else ""
        fleet = " (fleet)" if key in MODEL_KINDS else ""
        default = getattr(Settings(), setting.name)
        usual = "" if default in (None, [], "") else f"`{str(default).lower() if default is False else default}`"
        row = f"| `{key}`{fleet} | {takes(KINDS[key])} | {usual} | {help} |\n"
        rows.setdefault(setting.metadata.get("panel", "Most used"), []).append(row)
    return TOP + "".join(f"\n## {panel}\n{HEAD}{''.join(listed)}" for panel, listed in rows.items())


def test_the_page_has_each_setting():
    """After a change: python -c "from tests.plugins.video.service.test_settings import *; PAGE.write_text(page())"."""
    assert PAGE.read_text() == page()


def test_every_setting_is_an_option_of_run_with_the_same_default():
    app = typer.Typer(add_completion=False)
    app.command()(command)
    options = {option.name: option for option in typer.main.get_command(app).params if option.name != "help"}
    assert options.keys() - {"config", "inputs", "outputs", "worker"} == {field.name for field in fields(Settings)}
    for field in fields(Settings):
        default = getattr(Settings(), field.name)
        assert options[field.name].default == (None if default == [] else default), field.name
        assert field.name == "bundle" or options[field.name].opts[0] == f"--{long_name(field.name)}"


def test_the_keys_of_files_are_the_options():
    assert list(KINDS) == [long_name(field.name) or "bundle" for field in fields(Settings)]
    assert MODEL_KINDS.keys() == {"classes", "decoder", "input-shapes", "labels", "preprocessing", "threshold"}


def test_a_field_has_one_name_outside():
    assert not SAME_NAMES & OTHER_NAMES.keys()
    assert long_name("time_limit_s") == "time-limit"
    assert long_name("compile") is None
