"""The host backend: which devices it finds, for which target, and which it refuses."""

from __future__ import annotations

import os
import platform
import threading
from pathlib import Path

import pytest

from tests.support.parts import needs

needs("tvm")

from tests.support.board_trees import CPUS, TREES, cores_off, write
from tests.support.onnx_networks import onnx_network
from tvm_pipeline.backends.registry import find_backend
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import PlatformError
from tvm_pipeline.testing import check_backend
from tvm_pipeline_tvm.host import backend, detection
from tvm_pipeline_tvm.host.core_kinds import KINDS
from tvm_pipeline_tvm.host.host import bind
from tvm_pipeline_tvm.target_text import tvm_target

x86_only = pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86")


def sysfs(folder: Path, capacities: dict[int, int | str | None]) -> Path:
    """Make a tree like /sys/devices/system/cpu; None leaves the capacity out, as most x86 kernels do."""
    for core, capacity in capacities.items():
        (folder / f"cpu{core}").mkdir()
        if capacity is not None:
            (folder / f"cpu{core}" / "cpu_capacity").write_text(f"{capacity}\n")
    return folder


def test_llvm_knows_every_kind_of_core() -> None:
    from tvm.target import codegen

    known = set(map(str, codegen.llvm_get_cpu_archlist(tvm_target("llvm -mtriple=aarch64-linux-gnu"))))
    assert {kind.processor for kind in KINDS.values()} <= known


def found(folder: Path, cores: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {device.name: device.cores for device in detection.host_devices(cores, "llvm", folder)}


def test_big_and_little_clusters_biggest_first(tmp_path: Path) -> None:
    # The Jetson TX2: four A57 around two Denver cores.
    tree = sysfs(tmp_path, {0: 600, 1: 1024, 2: 1024, 3: 600, 4: 600, 5: 600})
    assert found(tree, tuple(range(6))) == {"cpu0": (1, 2), "cpu1": (0, 3, 4, 5), "cpu": (0, 1, 2, 3, 4, 5)}


def test_the_kind_of_core_tells_clusters_of_one_capacity_apart(tmp_path: Path) -> None:
    """NVIDIA's kernel of a TX2 tells one capacity for Denver and A57 ("CPUs do not have asymmetric capacities")."""
    system = TREES["TX2, JetPack 4"].write(tmp_path / "root") / CPUS
    for core in range(6):
        write(system, f"cpu{core}/cpu_capacity", "1024\n")
    assert found(system, tuple(range(6))) == {"cpu0": (0, 3, 4, 5), "cpu1": (1, 2), "cpu": (0, 1, 2, 3, 4, 5)}
    devices = detection.host_devices(tuple(range(6)), "llvm", system)
    assert [detection.described(device, system) for device in devices] == [
        "4 Cortex-A57",
        "2 Denver 2",
        "4 Cortex-A57, 2 Denver 2",
    ]
    assert {name for device in devices for name in detection.processors(device.cores, system)} == {"cortex-a57"}


@pytest.mark.parametrize(("known", "target"), [(["cortex-a57"], "cortex-a57"), (["generic"], "generic")])
def test_a_core_that_llvm_cannot_name_gets_code_of_its_kind_where_llvm_knows_that(
    known: list[str], target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tvm.target import codegen

    system = TREES["TX2, JetPack 4"].write(tmp_path / "root") / CPUS
    monkeypatch.setattr(codegen, "llvm_get_system_cpu", lambda: "generic")
    monkeypatch.setattr(codegen, "llvm_get_cpu_archlist", lambda _: known)
    monkeypatch.setattr(codegen, "llvm_get_system_triple", lambda: "aarch64-unknown-linux-gnu")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert detection.host_target(system) == f"llvm -keys=cpu -mtriple=aarch64-linux-gnu -mcpu={target}"


def test_cores_that_a_power_mode_switches_off_are_told(tmp_path: Path) -> None:
    root = TREES["TX2, JetPack 4"].write(tmp_path / "root")
    assert detection.left_out_cores(root / CPUS) == []
    cores_off(root, "0,3-5", 1, 2)
    assert found(root / CPUS, (0, 3, 4, 5)) == {"cpu0": (0, 3), "cpu1": (4, 5), "cpu": (0, 3, 4, 5)}
    [line] = detection.left_out_cores(root / CPUS)
    assert line.startswith("cores 1-2 are switched off, so no device has them; on a Jetson another power mode may have")
    assert detection.left_out_cores(tmp_path / "missing") == []


def test_equal_clusters_are_two_halves(tmp_path: Path) -> None:
    system = TREES["Orin Nano Super, JetPack 6"].write(tmp_path / "root") / CPUS
    assert found(system, tuple(range(6))) == {"cpu0": (0, 1, 2), "cpu1": (3, 4, 5), "cpu": (0, 1, 2, 3, 4, 5)}


def test_three_clusters(tmp_path: Path) -> None:
    tree = sysfs(tmp_path, {0: 300, 1: 300, 2: 700, 3: 700, 4: 1024})
    assert found(tree, tuple(range(5))) == {"cpu0": (4,), "cpu1": (2, 3), "cpu2": (0, 1), "cpu": (0, 1, 2, 3, 4)}


def test_equal_cores_are_two_halves_and_the_whole(tmp_path: Path) -> None:
    tree = sysfs(tmp_path, dict.fromkeys(range(5), 1024))
    assert found(tree, (0, 1, 2, 3, 4)) == {"cpu0": (0, 1), "cpu1": (2, 3, 4), "cpu": (0, 1, 2, 3, 4)}


@pytest.mark.parametrize("capacity", [None, "", "many"])
def test_a_kernel_that_tells_no_capacity(capacity: str | None, tmp_path: Path) -> None:
    tree = sysfs(tmp_path, dict.fromkeys(range(2), capacity))
    assert found(tree, (0, 1)) == {"cpu0": (0,), "cpu1": (1,), "cpu": (0, 1)}


def test_only_cores_that_this_process_may_use(tmp_path: Path) -> None:
    tree = sysfs(tmp_path, {0: 600, 1: 1024, 2: 1024, 3: 600})
    assert found(tree, (0, 3)) == {"cpu0": (0,), "cpu1": (3,), "cpu": (0, 3)}
    assert found(tree, (2,)) == {"cpu0": (2,)}


def test_this_machine() -> None:
    devices = backend.detect()
    cores = set(detection.available_cores())
    assert {core for device in devices for core in device.cores} == cores
    assert all(detection.missing_features(device.target) == [] for device in devices)
    assert [backend.settle(device) for device in devices] == list(devices)
    assert find_backend("host") is backend


@x86_only
def test_the_family_is_the_target_only_where_its_instructions_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from tvm.target import codegen

    monkeypatch.setattr(codegen, "llvm_get_system_cpu", lambda: "znver4")
    every = {
        detection._kernel_name(str(name)) for name in codegen.llvm_get_cpu_features(tvm_target("llvm -mcpu=znver4"))
    }
    # The flags that a hypervisor may leave, and the code that may then be made.
    for hidden, expected in (
        (set(), "llvm -mcpu=znver4"),
        ({"avx512_bf16"}, "llvm -mcpu=x86-64-v4"),
        ({name for name in every if name.startswith("avx512")}, "llvm -mcpu=x86-64-v3"),
        ({"avx2"} | {name for name in every if name.startswith("avx512")}, "llvm -mcpu=x86-64-v2"),
    ):
        monkeypatch.setattr(detection, "_x86_flags", lambda left=every - hidden: frozenset(left))
        assert detection.host_target() == expected


@x86_only
def test_an_arm_board_is_never_taken_for_the_x86_that_emulates_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """QEMU shows its programs /proc/cpuinfo of the machine that it runs on; the target says all to another machine."""
    from tvm.target import codegen

    assert detection._x86_flags()
    monkeypatch.setattr(platform, "machine", lambda: "armv7l")
    monkeypatch.setattr(codegen, "llvm_get_system_cpu", lambda: "cortex-a72")
    monkeypatch.setattr(codegen, "llvm_get_system_triple", lambda: "armv7l-unknown-linux-gnueabihf")
    assert not detection._x86_flags()
    target = detection.host_target()
    assert target == "llvm -keys=cpu -mtriple=armv7l-linux-gnueabihf -mcpu=cortex-a72"
    # What decides on schedules: the first key.
    assert str(tvm_target(target).keys[0]) == "cpu"


@x86_only
def test_missing_instructions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "_x86_flags", lambda: frozenset({"sse4_2", "avx"}))
    assert {"avx2", "fma"} <= set(detection.missing_features("llvm -mcpu=x86-64-v3"))
    device = Device("cpu0", "host", (detection.available_cores()[0],), "llvm -mcpu=x86-64-v3")
    with pytest.raises(
        PlatformError, match=r"device cpu0 is for 'llvm -mcpu=x86-64-v3', .*avx2.*compile the model again"
    ):
        backend.settle(device)


@x86_only
def test_code_of_another_kind_of_processor_is_refused() -> None:
    cores = (detection.available_cores()[0],)
    for options in ("", " -mcpu=cortex-a72"):
        device = Device("cpu0", "host", cores, f"llvm -mtriple=aarch64-linux-gnu{options}")
        with pytest.raises(
            PlatformError, match=r"device cpu0 is for .* code for aarch64, and this machine is x86_64: "
        ):
            backend.settle(device)
    own = Device("cpu0", "host", cores, "llvm -mtriple=x86_64-linux-gnu")
    assert backend.settle(own) == own


def test_a_processor_that_tells_nothing_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "_x86_flags", frozenset)
    assert detection.missing_features("llvm -mcpu=x86-64-v4") == []
    assert detection.missing_features("llvm") == []


@pytest.mark.parametrize("cores", [(4095,), ()])
def test_cores_that_are_not_there(cores: tuple[int, ...]) -> None:
    with pytest.raises(PlatformError, match=r"device denver names cores \[.*\]; this process may use .*Mend `cores`"):
        backend.settle(Device("denver", "host", cores))


@pytest.mark.parametrize("unknown", ["no-such-target", "llvm -mcpu=no-such-cpu", "llvm -no-such=1"])
def test_targets_that_tvm_does_not_know(unknown: str) -> None:
    with pytest.raises(PlatformError, match=f"device cpu0: TVM does not know the target '{unknown}'"):
        backend.settle(Device("cpu0", "host", detection.available_cores()[:1], unknown))


def test_an_open_target_is_this_machines() -> None:
    device = Device("cpu0", "host", detection.available_cores()[:1])
    assert backend.settle(device).target == detection.host_target()


@pytest.mark.usefixtures("own_cache")
def test_it_keeps_the_contract() -> None:
    """Branches, several outputs, and reshapes; on two cores, or the only one."""
    check_backend(backend, onnx_network("shapes"))


def test_a_thread_is_bound_to_its_cores() -> None:
    core = detection.available_cores()[-1]
    seen = []

    def bound() -> None:
        bind(Device("cpu0", "host", (core,)))
        seen.append(os.sched_getaffinity(0))

    before = os.sched_getaffinity(0)
    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    assert seen == [{core}]
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core is here")
def test_no_two_threads_of_a_device_may_meet_on_a_core() -> None:
    """The calling thread has the first core for itself, and TVM's own threads have one of the others each."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    found: list[list[set[int]]] = []

    def work() -> None:
        before = set(os.listdir("/proc/self/task"))
        bind(Device("cpu", "host", cores))
        own = {str(threading.get_native_id()), *os.listdir("/proc/self/task")} - before
        found.append([os.sched_getaffinity(0), *(os.sched_getaffinity(int(task)) for task in own)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    mine, *others = found[0]
    assert mine == {cores[0]}
    assert sorted(map(sorted, others)) == [[core] for core in cores[1:]]
