"""Which Jetson this is, by trees of files of each generation. What is none says nothing; broken files break nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.board_trees import CPUS, TREES, Tree, release, replace_by_folder, write
from tests.support.examples import examples
from tvm_pipeline.profiling.throttling import clocks, gpu_clock_folder
from tvm_pipeline_boards.jetson import read_jetson
from tvm_pipeline_boards.mode_switch import BoardModes
from tvm_pipeline_tvm.host.core_kinds import core_names

boards = pytest.mark.parametrize("tree", [pytest.param(tree, id=name) for name, tree in TREES.items()])


@boards
def test_module_release_and_mode(tree: Tree, tmp_path: Path) -> None:
    jetson = read_jetson(tree.write(tmp_path / "root"))
    assert str(jetson) == tree.told


@boards
def test_its_cores_are_those_of_the_table(tree: Tree, tmp_path: Path) -> None:
    root = tree.write(tmp_path / "root")
    jetson = read_jetson(root)
    assert jetson
    assert jetson.module
    assert core_names(range(len(tree.cores)), root / CPUS) == tree.named
    assert dict(jetson.module.clusters) == {
        part.partition(" ")[2]: int(part.partition(" ")[0]) for part in tree.named.split(", ")
    }
    assert 0.7 <= tree.memory_kb * 1024 / jetson.module.memory_bytes <= 1


@boards
def test_the_clocks_of_cores_and_gpu(tree: Tree, tmp_path: Path) -> None:
    root = tree.write(tmp_path / "root")
    folder = gpu_clock_folder(root)
    assert folder
    assert folder.name == tree.gpu
    *cores, gpu = clocks(root)
    assert len(cores) == len(tree.policies)
    assert {clock.current_hz() for clock in cores} == {tree.limit_khz * 1000}
    assert (gpu.name, gpu.limit_hz()) == ("GPU", tree.gpu_hz)
    assert 1e8 < tree.limit_khz * 1000 < 1e10


@boards
def test_whether_jetson_clocks_fixes_the_clocks(tree: Tree, tmp_path: Path) -> None:
    root = tree.write(tmp_path / "root")
    said = "jetson_clocks is off: clocks follow the load; run `sudo jetson_clocks` before you profile"
    assert said not in list(BoardModes(root).described())  # nothing tells it
    least = [f"{CPUS}/cpufreq/policy{policy[0]}/scaling_min_freq" for policy in tree.policies]
    for path in least:
        write(root, path, f"{tree.limit_khz}\n")
    write(root, f"sys/class/devfreq/{tree.gpu}/min_freq", "114750000\n")
    assert said in list(BoardModes(root).described())
    write(root, f"sys/class/devfreq/{tree.gpu}/min_freq", f"{tree.gpu_hz}\n")
    assert said not in list(BoardModes(root).described())
    write(root, least[0], "729600\n")
    assert said in list(BoardModes(root).described())


def test_a_profile_keeps_the_board(tmp_path: Path) -> None:
    root = TREES["Orin Nano Super, JetPack 6"].write(tmp_path / "root")
    assert BoardModes(root).environment() == {
        "board": "NVIDIA Jetson Orin Nano 8GB (p3767-0005, Super)",
        "l4t": "36.4.3",
        "power mode": "2 (MAXN_SUPER)",
    }


@pytest.mark.parametrize("compatible", [None, "", "raspberrypi,4-model-b\0brcm,bcm2711\0", "nvidia,tegra30\0", "\xff"])
def test_what_is_no_jetson(compatible: str | None, tmp_path: Path) -> None:
    if compatible is not None:
        write(tmp_path, "proc/device-tree/compatible", compatible)
    assert read_jetson(tmp_path) is None
    assert BoardModes(tmp_path).environment() == {}


def test_memory_tells_modules_of_one_device_tree_apart(tmp_path: Path) -> None:
    """The device tree of every AGX Xavier names the module of 16 GB; NVIDIA's tools write which it is elsewhere."""
    write(tmp_path, "proc/device-tree/compatible", "nvidia,p2822-0000+p2888-0001\0nvidia,tegra194\0")
    for memory_kb, name in ((16_000_000, "AGX Xavier 16GB"), (32_692_948, "AGX Xavier"), (65_000_000, "64GB")):
        write(tmp_path, "proc/meminfo", f"MemTotal: {memory_kb} kB\n")
        assert name in str(read_jetson(tmp_path))
    write(tmp_path, "etc/nv_boot_control.conf", "TNSPEC 2888-600-0008-A.0-1-2-jetson-agx-xavier-industrial-\n")
    write(tmp_path, "proc/meminfo", "MemTotal: 32692948 kB\n")
    assert "AGX Xavier Industrial (p2888-0008)" in str(read_jetson(tmp_path))


def test_the_device_tree_alone_tells_super(tmp_path: Path) -> None:
    root = TREES["Orin Nano Super, JetPack 6"].write(tmp_path / "root")
    (root / "etc/nv_boot_control.conf").unlink()
    assert str(read_jetson(root)) == TREES["Orin Nano Super, JetPack 6"].told
    write(root, "proc/device-tree/compatible", "nvidia,p3768-0000+p3767-0005\0nvidia,tegra234\0")
    assert "Orin Nano 8GB (p3767-0005), L4T" in str(read_jetson(root))


def test_a_module_that_is_not_in_the_table(tmp_path: Path) -> None:
    write(tmp_path, "proc/device-tree/compatible", "acme,rover\0nvidia,p9999-0001\0nvidia,tegra234\0")
    write(tmp_path, "proc/device-tree/model", "ACME Rover\0")
    found = read_jetson(tmp_path)
    assert found
    assert found.module is None
    assert str(found) == (
        "ACME Rover (no known module: p9999-0001), L4T unknown (no /etc/nv_tegra_release; a container hides it), "
        "power mode unknown (no /var/lib/nvpmodel/status)"
    )


@pytest.mark.parametrize(
    ("major", "revision", "l4t", "jetpack"),
    [
        (32, "5.1", "32.5.1", "4.5.1"),
        (28, "2.1", "28.2.1", "3.3"),
        (35, "1", "35.1", "5.0.2"),
        (36, "0.0", "36.0.0", "6.0-EA"),
        (36, "4.0", "36.4.0", "6.1"),
        (38, "2.0", "38.2.0", "7.0"),
        (36, "9.7", "36.9.7", "6.x"),
        (77, "1.0", "77.1.0", ""),
    ],
)
def test_the_jetpack_of_a_release(major: int, revision: str, l4t: str, jetpack: str, tmp_path: Path) -> None:
    root = TREES["AGX Orin, JetPack 5"].write(tmp_path / "root")
    write(root, "etc/nv_tegra_release", release(major, revision, "generic"))
    found = read_jetson(root)
    assert found
    assert (found.l4t, found.jetpack) == (l4t, jetpack)


def test_the_package_tells_the_release_where_the_file_is_gone(tmp_path: Path) -> None:
    root = TREES["Orin Nano Super, JetPack 6"].write(tmp_path / "root")
    (root / "etc/nv_tegra_release").unlink()
    write(
        root,
        "var/lib/dpkg/status",
        "Package: nvidia-l4t-cuda\nVersion: 1.2.3-4\n\nPackage: nvidia-l4t-core\nStatus: install ok installed\n"
        "Version: 36.4.3-20250107174145\n\nPackage: zsh\nVersion: 5\n",
    )
    found = read_jetson(root)
    assert found
    assert (found.l4t, found.jetpack) == ("36.4.3", "6.2")


@boards
def test_broken_files_break_nothing(tree: Tree, tmp_path: Path) -> None:
    """Each file in turn is empty, binary, or a folder; what is left is read as before."""
    whole = tree.write(tmp_path / "whole")
    files = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
    assert len(files) > 20
    for path in files:
        kept = (whole / path).read_bytes()
        for broken in (b"", b"\xff\xfe\x00\x9c\x00pmode:\xff R\xff9"):
            (whole / path).write_bytes(broken)
            _read_all(whole)
        replace_by_folder(whole, str(path))
        _read_all(whole)
        (whole / path).rmdir()
        (whole / path).write_bytes(kept)
    assert str(read_jetson(whole)) == tree.told


@examples(30)
@given(st.dictionaries(st.sampled_from(["compatible", "release", "mode", "memory", "flashed", "online"]), st.binary()))
def test_any_bytes_are_read(tmp_path_factory: pytest.TempPathFactory, contents: dict[str, bytes]) -> None:
    root = tmp_path_factory.getbasetemp() / "any-bytes"
    names = {
        "compatible": "proc/device-tree/compatible",
        "release": "etc/nv_tegra_release",
        "mode": "var/lib/nvpmodel/status",
        "memory": "proc/meminfo",
        "flashed": "etc/nv_boot_control.conf",
        "online": f"{CPUS}/online",
    }
    write(root, "proc/device-tree/compatible", "nvidia,tegra234\0")
    for name, content in contents.items():
        write(root, names[name], "")
        (root / names[name]).write_bytes(content if name != "compatible" else b"nvidia,tegra234\0" + content)
    assert _read_all(root)
    shutil.rmtree(root)


def _read_all(root: Path) -> str:
    list(clocks(root))
    core_names((0, 1), root / CPUS)
    BoardModes(root).environment()
    return str(read_jetson(root))
