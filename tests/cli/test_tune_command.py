"""`tune` on the command line: what it refuses."""

from __future__ import annotations

import pytest

from tests.support.parts import needs
from tvm_pipeline.core.platform import Device
from tvm_pipeline.testing import FakeBackend, installed

needs("Relay")


def test_objectives_of_bytes_are_refused(cli, model):
    outcome = cli("tune", model, "--objective", "memory,communication")
    assert outcome.code == 2
    assert "--objective memory,communication: it counts bytes, and tuning changes none" in outcome.err


def test_what_compiles_untuned_says_nothing_of_it(cli, bundle, tmp_path):
    shown = cli("show", bundle, "-o", tmp_path, "--format", "svg")
    assert "tuned for" not in shown.out


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
def test_a_time_that_is_none_is_refused(cli, model, seconds):
    outcome = cli("tune", model, "--seconds", seconds)
    assert outcome.code == 2
    assert f"--seconds {seconds}: give the time of the search, 0 or more" in outcome.err


def test_devices_that_cannot_be_tuned_are_refused(cli, model):
    with installed(FakeBackend([Device("gpu0", "fake")])):
        outcome = cli("tune", model)
    assert outcome.code == 1
    assert (
        "gpu0 (backend fake) cannot be tuned: `tune` measures CPU cores and GPUs (backends host and gpu)" in outcome.err
    )
    assert "leave --platform out" in outcome.err
