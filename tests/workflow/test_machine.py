"""The door to other machines: which installed package an address is given to, and what is said without one."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from importlib.metadata import EntryPoint

import pytest

from tests.cli.conftest import cli
from tests.support.log_lines import log_lines
from tvm_pipeline.errors import OptionError
from tvm_pipeline.workflow import machine as door
from tvm_pipeline.workflow.machine import GROUP, HERE, opened_machine

__all__ = ["cli"]


@contextmanager
def echoing(address):
    logging.getLogger(door.__name__).info(f"reached {address}")
    yield address


def reachable(monkeypatch: pytest.MonkeyPatch, *values: str) -> None:
    """Let packages with these functions be the ones that reach machines."""
    entries = [EntryPoint("any", value, GROUP) for value in values]
    monkeypatch.setattr(door, "entry_points", lambda group: entries if group == GROUP else [])


def test_without_an_address_it_is_this_machine(monkeypatch):
    reachable(monkeypatch)
    with opened_machine(None) as machine:
        assert machine is HERE


def test_a_package_is_given_the_address(monkeypatch):
    reachable(monkeypatch, f"{__name__}:echoing", f"{__name__}:echoing")  # a package that is installed twice
    told = log_lines("INFO")
    with opened_machine("attic:9190") as machine:
        assert machine == "attic:9190"
    assert told == ["reached attic:9190"]


def test_two_packages_are_refused(monkeypatch):
    reachable(monkeypatch, f"{__name__}:echoing", "other:reached")
    with pytest.raises(OptionError, match="other:reached"), opened_machine("attic:9190"):
        pass


@pytest.mark.parametrize("command", ["profile", "plan", "bench", "tune"])
def test_without_the_part_the_option_names_it(cli, monkeypatch, command):
    reachable(monkeypatch)
    outcome = cli(command, "model.onnx", "--remote", "attic:9190")
    assert outcome.code == 2
    assert "--remote attic:9190" in outcome.err
    assert "tvm_pipeline_hosts" in outcome.err
