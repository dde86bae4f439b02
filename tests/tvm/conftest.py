"""Networks compiled once for all tests of this room."""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache

import pytest

from tests.support.parts import needs

needs("tvm")

from tests.support.networks import as_model, relay_module
from tvm_pipeline.core.platform import Device
from tvm_pipeline_tvm.host.detection import host_target
from tvm_pipeline_tvm.relay.compiled import RelayModel


@pytest.fixture(scope="session")
def target() -> str:
    return host_target()


@pytest.fixture(scope="session")
def cpu(target: str) -> Device:
    return Device("cpu0", "host", (0,), target)


@pytest.fixture(scope="session")
def compiled(target: str) -> Callable[..., RelayModel]:
    """`compiled(name)`, or `compiled(name, target, ...)` for several targets, compiled when first asked for."""

    @cache
    def compile_(name: str, *targets: str) -> RelayModel:
        return RelayModel.compile(as_model(name, *relay_module(name)), targets or (target,), lambda _: None)

    return compile_


@pytest.fixture(scope="session")
def two_devices() -> tuple[Device, Device]:
    """One machine as two devices whose targets want different layouts."""
    from tvm_pipeline_tvm.host.detection import missing_features

    targets = "llvm -mcpu=x86-64-v3", "llvm -mcpu=x86-64-v2"
    if platform.machine() != "x86_64" or missing_features(targets[0]):
        pytest.skip("needs an x86-64 processor with AVX2")
    first, second = (Device(f"cpu{index}", "host", (index,), name) for index, name in enumerate(targets))
    return first, second
