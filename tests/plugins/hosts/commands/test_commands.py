"""Each command of the package has a file and an example."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvm_pipeline_hosts import commands
from tvm_pipeline_hosts.commands.fleet import group

FLEET = sorted(str(command.name) for command in group.registered_commands)


def test_every_file_of_a_command_is_one():
    files = {path.stem for path in Path(commands.__file__).parent.glob("fleet_*.py")}
    assert {f"fleet_{command}" for command in FLEET} == files


@pytest.mark.parametrize("command", FLEET)
def test_every_command_of_a_fleet_has_an_example_in_its_help(cli, command):
    outcome = cli("fleet", command, "--help")
    assert outcome.code == 0
    assert f"Example: tvm-pipeline fleet {command}" in " ".join(outcome.out.split())
