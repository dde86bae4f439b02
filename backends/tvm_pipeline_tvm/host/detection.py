"""Find the CPU clusters of this machine, and the LLVM target that its cores really run.

A hypervisor or a container may hide cores and instructions, so both are checked here. Next: `host.py`.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

from tvm_pipeline.core.platform import Device, core_ranges
from tvm_pipeline_tvm.host.core_kinds import SYSTEM, core_names, kind_of_core, offline_cores, part_of
from tvm_pipeline_tvm.target_text import other_processor, tvm_target


def available_cores() -> tuple[int, ...]:
    """Return the cores that this process may use; a container or taskset may allow fewer than the machine has."""
    return tuple(sorted(os.sched_getaffinity(0)))


def clusters(cores: tuple[int, ...], system: Path = SYSTEM) -> list[tuple[int, ...]]:
    """Return the cores grouped by `cpu_capacity` and by their kind, the largest capacity first.

    The kernel tells the capacity on big.LITTLE machines, the kind on Arm. Only the kind tells the two Denver cores of a
    Jetson TX2 from its four A57.
    """
    groups: dict[tuple[int, object], list[int]] = {}
    for core in cores:
        try:
            capacity = int((system / f"cpu{core}" / "cpu_capacity").read_text())
        except (OSError, ValueError):
            capacity = 0
        groups.setdefault((capacity, part_of(core, system)), []).append(core)
    return [tuple(group) for _, group in sorted(groups.items(), key=lambda item: (-item[0][0], item[1]))]


def host_devices(cores: tuple[int, ...], target: str, system: Path = SYSTEM) -> list[Device]:
    """Return the devices of a machine with these cores: its clusters, or two halves of equal cores and the whole."""
    groups = clusters(cores, system)
    if len(groups) == 1 and len(cores) > 1:
        half = len(cores) // 2
        groups = [cores[:half], cores[half:]]
    devices = [Device(f"cpu{index}", "host", group, target) for index, group in enumerate(groups)]
    if len(groups) > 1:
        devices.append(Device("cpu", "host", cores, target))
    return devices


def host_target(system: Path = SYSTEM) -> str:
    """Return the target for this machine's cores.

    LLVM names the CPU by its family. A hypervisor may hide some of that family's instructions, and code for the name
    would then die with SIGILL. So the name is used only if every vector extension of the family is present; otherwise
    the target is the best generic level whose extensions are all present. A core that LLVM does not know, as the Denver
    of a Jetson TX2, runs the code of the kind that `core_kinds.py` names.

    On other processors than x86 the target has a triple, so that it means the same where it is compiled elsewhere. Its
    key `cpu` goes before the `arm_cpu` that TVM adds to such a triple: with it come the schedules of ours.
    """
    from tvm.target import codegen

    name = str(codegen.llvm_get_system_cpu())
    if name == "generic":
        known = set(map(str, codegen.llvm_get_cpu_archlist(tvm_target("llvm"))))
        name = next((processor for processor in processors(available_cores(), system) if processor in known), name)
    if not _is_x86():
        processor, *_, abi = str(codegen.llvm_get_system_triple()).split("-")
        return f"llvm -keys=cpu -mtriple={processor}-linux-{abi} -mcpu={name}"
    missing = missing_features(f"llvm -mcpu={name}")
    if not missing:
        return f"llvm -mcpu={name}"
    for level in ("x86-64-v4", "x86-64-v3", "x86-64-v2"):
        if not missing_features(f"llvm -mcpu={level}"):
            return f"llvm -mcpu={level}"
    return "llvm"


def processors(cores: tuple[int, ...], system: Path = SYSTEM) -> list[str]:
    """Return the names by which LLVM may know these cores, where their kinds are known."""
    return [kind.processor for core in cores if (kind := kind_of_core(core, system))]


def described(device: Device, system: Path = SYSTEM) -> str:
    """Return the kinds of a device's cores; empty where one of them is not known."""
    return core_names(device.cores, system)


def left_out_cores(system: Path = SYSTEM) -> list[str]:
    """Return a line where cores are switched off."""
    cores = core_ranges(offline_cores(system))
    return [
        f"cores {', '.join(cores)} are switched off, so no device has them; on a Jetson another power mode may have "
        "them (`nvpmodel -q`), elsewhere see /sys/devices/system/cpu/online"
        for _ in cores[:1]
    ]


def not_run_here(target: str) -> str:
    """Return why this processor does not run code for `target`; empty where it does.

    Raises:
        ValueError: TVM or LLVM does not know the target.
    """
    if other := other_processor(target):
        return f"it is code for {other}, and this machine is {platform.machine()}"
    missing = missing_features(target)
    return f"its code may use {', '.join(missing)}, which this processor has not" if missing else ""


def missing_features(target: str) -> list[str]:
    """Return the vector extensions that code for `target` may use and this processor lacks (x86 only).

    Raises:
        ValueError: TVM or LLVM does not know the target.
    """
    from tvm.target import codegen

    parsed = tvm_target(target)
    processor = str(parsed.attrs.get("mcpu") or "")
    if parsed.kind.name != "llvm" or not processor:
        return []
    if processor not in map(str, codegen.llvm_get_cpu_archlist(parsed)):
        raise ValueError(f"LLVM knows no processor {processor}")  # LLVM would compile for a default processor
    present = _x86_flags()
    if not present:
        return []
    vector = ("avx", "fma", "f16c", "bmi", "amx")
    required = [str(feature) for feature in codegen.llvm_get_cpu_features(parsed)]
    return sorted(f for f in required if f.startswith(vector) and _kernel_name(f) not in present)


def _kernel_name(feature: str) -> str:
    """Return LLVM's name of a feature as /proc/cpuinfo writes it: avx512_vnni for avx512vnni, bmi1 for bmi."""
    plain = feature.replace("-", "_").replace(".", "_")
    if plain == "bmi":
        return "bmi1"
    for newer in ("vnni", "bf16", "vbmi2", "bitalg", "vpopcntdq", "fp16", "vp2intersect"):
        if plain == f"avx512{newer}":
            return f"avx512_{newer}"
    return {"avxvnni": "avx_vnni"}.get(plain, plain)


def _is_x86() -> bool:
    return platform.machine() in ("x86_64", "i686")


def _x86_flags() -> frozenset[str]:
    if not _is_x86():  # QEMU shows its programs the file of the machine that it runs on
        return frozenset()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())
