"""Trees of sysfs with sensors of power, as documented: none was copied from a machine but where a comment names it.

Paths and rails: NVIDIA's developer guides of Jetson Linux r32.7, r35.6, r36.4 and r38, "Software-Based Power
Consumption Modeling", and the README of alumet's plugin nvidia-jetson, which ran on JetPack 4.6 to 6. Zones of RAPL:
Documentation/power/powercap/powercap.rst of Linux, and issue 13 of powerapi-ng/pyJoules.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

I2C = "sys/devices/platform/bus@0/c240000.i2c/i2c-{bus}/{address}"


def write_tree(root: Path, files: Mapping[str, object]) -> Path:
    """Write files below `root`, each with its line, and return `root`."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def hwmon_chip(root: Path, address: str, number: int, files: Mapping[str, object]) -> Path:
    """Write a chip on an I2C bus, with the links of `class/hwmon`, and return the folder of its files."""
    device = root / I2C.format(bus=address[0], address=address)
    folder = device / f"hwmon/hwmon{number}"
    write_tree(folder, files)
    (folder / "device").symlink_to(device)
    link = root / f"sys/class/hwmon/hwmon{number}"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder)
    return folder


def ina3221(rails: Mapping[str, tuple[int, int]]) -> dict[str, object]:
    """Return the files of an INA3221 with rails of so many millivolts and milliamperes."""
    files: dict[str, object] = {"name": "ina3221", "update_interval": 8}
    for number, (label, (millivolts, milliamperes)) in enumerate(rails.items(), start=1):
        files[f"in{number}_label"] = label
        files[f"in{number}_enable"] = 1
        files[f"in{number}_input"] = millivolts
        files[f"curr{number}_input"] = milliamperes
        files[f"in{number + 3}_input"] = milliamperes * 2  # microvolts at its shunt
    # The sum of the shunts, which is no rail.
    files |= {"in7_label": "sum of shunt voltages", "in7_input": 760, "curr4_input": 360}
    return files


def iio_chip(root: Path, address: str, number: int, rails: Mapping[str, int]) -> None:
    """Write an INA3221 as the kernel 4.9 of JetPack 4 shows it, with rails of so many milliwatts."""
    folder = f"sys/bus/i2c/drivers/ina3221x/{address}/iio:device{number}"
    files: dict[str, object] = {f"{folder}/name": "ina3221x"}
    for channel, (label, milliwatts) in enumerate(rails.items()):
        files[f"{folder}/rail_name_{channel}"] = label
        files[f"{folder}/in_power{channel}_input"] = milliwatts
        files[f"{folder}/in_voltage{channel}_input"] = 5000
        files[f"{folder}/in_current{channel}_input"] = milliwatts // 5
    write_tree(root, files)


def tx2(root: Path) -> dict[str, float]:
    """Write a TX2 with JetPack 4.6; return the watts by sensor, as in the other functions."""
    iio_chip(root, "0-0040", 0, {"VDD_SYS_GPU": 152, "VDD_SYS_SOC": 533, "VDD_4V0_WIFI": 19})
    iio_chip(root, "0-0041", 1, {"VDD_IN": 3264, "VDD_SYS_CPU": 457, "VDD_SYS_DDR": 768})
    return {
        "ina3221:VDD_IN": 3.264,
        "ina3221:VDD_SYS_GPU": 0.152,
        "ina3221:VDD_SYS_SOC": 0.533,
        "ina3221:VDD_4V0_WIFI": 0.019,
        "ina3221:VDD_SYS_CPU": 0.457,
        "ina3221:VDD_SYS_DDR": 0.768,
    }


def nano(root: Path) -> dict[str, float]:
    """Write a Nano with JetPack 4.6."""
    iio_chip(root, "6-0040", 0, {"POM_5V_IN": 2170, "POM_5V_GPU": 82, "POM_5V_CPU": 410})
    return {"ina3221:POM_5V_IN": 2.17, "ina3221:POM_5V_GPU": 0.082, "ina3221:POM_5V_CPU": 0.41}


def agx_xavier(root: Path) -> dict[str, float]:
    """Write an AGX Xavier with JetPack 4.6, which has no rail of its input."""
    iio_chip(root, "1-0040", 0, {"GPU": 464, "CPU": 774, "SOC": 1239})
    iio_chip(root, "1-0041", 1, {"CV": 0, "VDDRQ": 309, "SYS5V": 1804})
    return {
        "ina3221:GPU+CPU+SOC+CV+VDDRQ+SYS5V": 4.59,
        "ina3221:GPU": 0.464,
        "ina3221:CPU": 0.774,
        "ina3221:SOC": 1.239,
        "ina3221:CV": 0.0,
        "ina3221:VDDRQ": 0.309,
        "ina3221:SYS5V": 1.804,
    }


def xavier_nx(root: Path) -> dict[str, float]:
    """Write a Xavier NX with JetPack 5."""
    rails = {"VDD_IN": (4960, 920), "VDD_CPU_GPU_CV": (4952, 180), "VDD_SOC": (4952, 240)}
    hwmon_chip(root, "7-0040", 6, ina3221(rails))
    return {"ina3221:VDD_IN": 4.5632, "ina3221:VDD_CPU_GPU_CV": 0.89136, "ina3221:VDD_SOC": 1.18848}


def agx_orin(root: Path) -> dict[str, float]:
    """Write an AGX Orin with JetPack 5, whose figures are those of a recorded one.

    Source: the tests of a public reader of rails, "test_power_status_reads_platform_hwmon_and_skips_non_rails", and
    issue 212 of alumet-dev/alumet, which shows that the channels without a rail cannot be read.
    """
    rails = {"VDD_GPU_SOC": (12008, 280), "VDD_CPU_CV": (12008, 40), "VIN_SYS_5V0": (4968, 980)}
    hwmon_chip(root, "1-0040", 3, ina3221(rails))
    folder = hwmon_chip(root, "1-0041", 4, ina3221({"NC": (0, 0), "VDDQ_VDD2_1V8AO": (4968, 80)}))
    (folder / "in1_input").unlink()
    (folder / "in1_input").mkdir()
    return {
        "ina3221:VDD_GPU_SOC+VDD_CPU_CV+VIN_SYS_5V0": 8.7112,
        "ina3221:VDD_GPU_SOC": 3.36224,
        "ina3221:VDD_CPU_CV": 0.48032,
        "ina3221:VIN_SYS_5V0": 4.86864,
        "ina3221:VDDQ_VDD2_1V8AO": 0.39744,
    }


def orin_nano(root: Path) -> dict[str, float]:
    """Write an Orin Nano with JetPack 6."""
    rails = {"VDD_IN": (5024, 1008), "VDD_CPU_GPU_CV": (5016, 112), "VDD_SOC": (5016, 304)}
    hwmon_chip(root, "1-0040", 1, ina3221(rails))
    return {"ina3221:VDD_IN": 5.064192, "ina3221:VDD_CPU_GPU_CV": 0.561792, "ina3221:VDD_SOC": 1.524864}


def agx_thor(root: Path) -> dict[str, float]:
    """Write an AGX Thor with JetPack 7: its carrier has an INA238, and its GPU sleeps at -392 mW, as one was seen."""
    rails = {"VDD_GPU": (19600, -20), "VDD_CPU_SOC_MSS": (19600, 200), "VIN_SYS_5V0": (5000, 1304)}
    hwmon_chip(root, "2-0040", 2, ina3221(rails))
    chip = {"name": "ina238", "label": "VIN", "in0_input": 3, "in1_input": 19600, "curr1_input": 1173}
    hwmon_chip(root, "2-0044", 5, chip | {"power1_input": 23_000_000})
    return {
        "ina238:VIN": 23.0,
        "ina3221:VDD_GPU": 0.0,
        "ina3221:VDD_CPU_SOC_MSS": 3.92,
        "ina3221:VIN_SYS_5V0": 6.52,
    }


def rapl_zone(root: Path, zone: str, name: str, energy_uj: int, range_uj: int) -> Path:
    """Write one zone of RAPL, and return its counter."""
    folder = f"sys/class/powercap/{zone}"
    write_tree(
        root,
        {f"{folder}/name": name, f"{folder}/energy_uj": energy_uj, f"{folder}/max_energy_range_uj": range_uj},
    )
    return root / folder / "energy_uj"


INTEL_RANGE_UJ = 262_143_328_850
AMD_RANGE_UJ = 65_532_610_987


def intel_laptop(root: Path) -> None:
    """Write a laptop of Intel's, whose platform and package each have a counter, the package's behind two doors."""
    rapl_zone(root, "intel-rapl:0", "package-0", 1_000_000, INTEL_RANGE_UJ)
    rapl_zone(root, "intel-rapl:0:0", "core", 400_000, INTEL_RANGE_UJ)
    rapl_zone(root, "intel-rapl:0:1", "uncore", 100_000, INTEL_RANGE_UJ)
    rapl_zone(root, "intel-rapl:1", "psys", 7_000_000, INTEL_RANGE_UJ)
    rapl_zone(root, "intel-rapl-mmio:0", "package-0", 1_000_000, INTEL_RANGE_UJ)


def intel_server(root: Path) -> None:
    """Write a server of Intel's with two sockets, whose memory has counters of its own."""
    for socket in (0, 1):
        rapl_zone(root, f"intel-rapl:{socket}", f"package-{socket}", 5_000_000, INTEL_RANGE_UJ)
        rapl_zone(root, f"intel-rapl:{socket}:0", "dram", 2_000_000, 65_712_999_613)


def amd_desktop(root: Path) -> None:
    """Write a Ryzen: its zones are called intel-rapl, too."""
    rapl_zone(root, "intel-rapl:0", "package-0", 3_000_000, AMD_RANGE_UJ)
    rapl_zone(root, "intel-rapl:0:0", "core", 1_000_000, AMD_RANGE_UJ)
