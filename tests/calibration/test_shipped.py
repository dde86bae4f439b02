"""The shipped models are those of the platform files, and of the CPUs that were measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tvm_pipeline.backends.registry import find_backend
from tvm_pipeline.calibration.shipped import CPU_CORE, GPU, shipped_model
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.platform import Device, read_platform
from tvm_pipeline.cost.modelled_stage import WorkTable
from tvm_pipeline.profiling.layer_times import read_layer_times
from tvm_pipeline_edgetpu.edgetpu import MODELS

PROFILES = Path(__file__).parents[2] / "profiles"


@pytest.mark.parametrize(("name", "model"), [("coral-pcie-8", MODELS["pci"]), ("coral-usb-2", MODELS["usb"])])
def test_edge_tpus_are_those_of_the_platform_files(name: str, model: DeviceModel) -> None:
    assert read_platform(PROFILES / "platforms" / f"{name}.toml").devices[0].model == model


@pytest.mark.parametrize(
    ("name", "macs_per_s", "bytes_per_s"),
    [("amd-epyc-haswell-1-core", 5.3e10, 7.5e10), ("amd-epyc-znver5-1-core", 1.06e11, 1.08e11)],
)
def test_the_factors_of_kinds_hold_on_the_cpus_that_were_measured(
    name: str, macs_per_s: float, bytes_per_s: float
) -> None:
    """With a CPU's own rates, the shipped factors predict half of its layers within 15 %."""
    networks = read_layer_times(PROFILES / f"layer_times/{name}.json").networks
    layers = [layer for found in networks.values() for layer in found]
    seconds, table = np.array([layer.seconds for layer in layers]), WorkTable.of([layer.work for layer in layers])
    rates = replace(CPU_CORE, macs_per_s=macs_per_s, bytes_per_s=bytes_per_s)
    assert np.median(np.abs(table.seconds(rates) / seconds - 1)) < 0.15
    assert set(table.kinds) == {kind.name for kind in CPU_CORE.kind}


def test_a_device_begins_with_its_own_model() -> None:
    own = DeviceModel(macs_per_s=1e9)
    assert shipped_model(Device("tpu0", "edgetpu", model=own)) == own
    assert shipped_model(find_backend("edgetpu").settle(Device("tpu0", "edgetpu", target="pci:1"))) == MODELS["pci"]
    assert shipped_model(Device("gpu", "gpu", target="cuda")) == GPU
    assert shipped_model(Device("cpu0", cores=(0,))) == CPU_CORE
    assert GPU.is_roofline
