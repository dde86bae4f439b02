"""The models with which a calibration begins, for devices whose platform file has none.

- CPUs: a roofline that was fitted to the layer times of two CPUs, one core each (`profiles/layer_times/`), which
  `benchmarks/calibration.py` repeats. The two differ by 2 in multiply-accumulates a second and by 1.4 in bytes, and in
  the factors of kinds by up to 1.5, so the factors say more of a third CPU than the rates.
- GPUs: the same kinds. Launching a kernel takes some microseconds. No GPU was ever measured here, so these are guesses,
  for a board with a small GPU.
- Edge TPUs have the model that their backend gives them (`settle`), which is that of `profiles/platforms/`.

Next: `constants.py`, how far from these a device is thought to be.
"""

from __future__ import annotations

from dataclasses import replace

from tvm_pipeline.core.device_model import DeviceModel, KindFactor
from tvm_pipeline.core.platform import Device

_KINDS = (
    ("avg_pool2d", 1.25),
    ("conv2d 1x1", 1.0),
    ("conv2d kxk", 1.0),
    ("conv2d depthwise", 1.9),
    ("conv2d grouped", 1.8),
    ("copy", 1.25),
    ("dense", 4.0),
    ("elementwise", 1.0),
    ("global_avg_pool2d", 1.8),
    ("lrn", 57.0),
    ("max_pool2d", 1.25),
    ("softmax", 58.0),
)
FACTORS = tuple(KindFactor(f"{kind} float32", factor) for kind, factor in _KINDS)

CPU_CORE = DeviceModel(macs_per_s=7.5e10, bytes_per_s=9e10, call_s=1.3e-5, operator_s=7e-7, kind=FACTORS)
GPU = DeviceModel(
    macs_per_s=4e11,
    bytes_per_s=4e10,
    call_s=3e-5,
    operator_s=1e-5,
    input_bytes_per_s=5e9,
    output_bytes_per_s=5e9,
    kind=tuple(
        KindFactor(kind.name, kind.factor if kind.name.startswith(("conv2d", "dense")) else 1.0) for kind in FACTORS
    ),
)


def shipped_model(device: Device) -> DeviceModel:
    """Return the model with which the calibration of a settled device begins: its own, else that of its family.

    A device without cores counts as a GPU: it has its own memory, and each call takes time to launch.

    Examples:
        >>> shipped_model(Device("cpu", cores=(0, 1))).macs_per_s
        150000000000.0
    """
    if device.model is not None:
        return device.model
    if not device.cores:
        return GPU
    cores = len(device.cores)
    return replace(CPU_CORE, macs_per_s=7.5e10 * cores, bytes_per_s=9e10 * cores)
