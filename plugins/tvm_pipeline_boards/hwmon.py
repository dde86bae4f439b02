"""Chips that measure power, as the kernel shows them: INA3221, INA226, INA238 and others; the rails of Jetson boards.

`/sys/class/hwmon/hwmonN` holds a chip: `name`, and for each channel `power1_input` (microwatts), or with an INA3221
`in1_input` (millivolts), `curr1_input` (milliamperes) and `in1_label`, the rail's name. JetPack 4 has an INA3221 at
`/sys/bus/i2c/drivers/ina3221x/*/iio:device*` instead: `rail_name_0`, `in_power0_input` (milliwatts). Only an
INA3221's voltages belong to its currents by number, so no other chip's are multiplied.

Sources: Documentation/hwmon/{sysfs-interface,ina3221,ina2xx,ina238}.rst of Linux; NVIDIA's developer guides of Jetson
Linux r32.7 to r38, "Software-Based Power Consumption Modeling"; the tables of rails in energymon's
jetson/JetsonPowerRails.md; how `jtop` sums rails up (the module jtop.core.power of jetson_stats, and its pull request
900).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tvm_pipeline.errors import PowerError
from tvm_pipeline.power import PowerSensor, Scope, Sensor, Sum, Survey
from tvm_pipeline_boards.figure_files import number_of, text_of

PERIOD_S = 0.05  # a channel takes 1.1 ms to read over I2C, so that this costs little of what it measures
W_OF_UW = 1e-6
W_OF_MW = 1e-3
# An INA3221 without load shows a few steps of 40 uV / 2 mOhm = 20 mA on either side of 0.
OFFSET_MA = 100

# What the rails of Jetson boards supply. Those of `INPUTS` supply the rest of the module or board.
INPUTS = {
    "VIN": "the board with its carrier",  # AGX Thor
    "VDD_IN": "the module, without its carrier board",  # TX1, TX2, Xavier NX, Orin NX, Orin Nano
    "5V_IN": "the module, without its carrier board",  # Xavier NX, as its guide calls VDD_IN
    "POM_5V_IN": "the board",  # Nano
}
# Boards without such a rail: rails that stand side by side and make up the module. VDDQ_VDD2_1V8AO of an AGX Orin is
# left out, since VIN_SYS_5V0 supplies it.
SUMS = (
    ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"),  # AGX Xavier
    ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),  # AGX Orin
    ("VDD_GPU", "VDD_CPU_SOC_MSS", "VIN_SYS_5V0"),  # AGX Thor, where its carrier has no VIN
)
SUPPLIED = {
    "CPU": "CPU cores",
    "CV": "deep learning and vision accelerators",
    "GPU": "GPU",
    "POM_5V_CPU": "CPU cores",
    "POM_5V_GPU": "GPU",
    "SOC": "memory controller and engines of the SoC",
    "SYS5V": "5 V of the module: inputs, outputs, flash memory",
    "VDDQ_VDD2_1V8AO": "memory, which VIN_SYS_5V0 supplies",
    "VDDRQ": "memory",
    "VDD_4V0_WIFI": "wireless network",
    "VDD_CPU": "CPU cores",
    "VDD_CPU_CV": "CPU cores, deep learning and vision accelerators",
    "VDD_CPU_GPU": "CPU cores and GPU",
    "VDD_CPU_GPU_CV": "CPU cores, GPU, deep learning and vision accelerators",
    "VDD_CPU_SOC_MSS": "CPU cores, engines of the SoC and memory",
    "VDD_GPU": "GPU",
    "VDD_GPU_SOC": "GPU, memory controller and engines of the SoC",
    "VDD_MUX": "the carrier board",
    "VDD_SOC": "memory controller and engines of the SoC",
    "VDD_SYS_CPU": "CPU cores",
    "VDD_SYS_DDR": "memory",
    "VDD_SYS_GPU": "GPU",
    "VDD_SYS_SOC": "memory controller and engines of the SoC",
    "VIN_SYS_5V0": "5 V of the module: inputs, outputs, flash memory, memory",
}
# Drivers whose one channel is that of the whole machine.
WHOLE_MACHINE = {"power_meter": "the machine, as its firmware tells it"}  # drivers/hwmon/acpi_power_meter.c


class Channel(NamedTuple):
    """One channel of a chip: either a file of power, or one of millivolts and one of milliamperes.

    Attributes:
        chip: what its driver calls it.
        address: where it stands, such as `1-0040`: bus and address on it.
        label: the rail's name, or the channel's number.
        watts_file: holds its power.
        unit_w: watts of 1 in that file.
        current_file: milliamperes; then `watts_file` holds millivolts.
        enabled_file: holds 0 where the channel is switched off, if it exists.
    """

    chip: str
    address: str
    label: str
    watts_file: Path
    unit_w: float
    current_file: Path | None = None
    enabled_file: Path | None = None


class Rail(PowerSensor):
    """The power of one channel.

    Raises:
        PowerError: it cannot be read; the message names the file.
    """

    def __init__(self, channel: Channel, name: str, covers: str, scope: Scope, period_s: float) -> None:
        super().__init__()
        self.name, self.covers, self.scope, self.period_s = name, covers, scope, period_s
        self.channel = channel
        if channel.enabled_file and channel.enabled_file.exists() and number_of(channel.enabled_file) == 0:
            raise PowerError(f"{channel.enabled_file}: the channel is switched off; as root, write 1 to this file")
        self.watts()

    def watts(self) -> float:
        """Return the power that is drawn now."""
        watts = number_of(self.channel.watts_file) * self.channel.unit_w
        if self.channel.current_file:
            watts *= max(0, number_of(self.channel.current_file, least=-OFFSET_MA)) * 1e-3
        return watts


def hwmon_sensors(root: Path) -> Survey:
    """Return the channels of all chips below `root/sys`, and the sum of rails that make up a Jetson module."""
    found = Survey([], {})
    channels = [*_hwmon_channels(root, found), *_iio_channels(root, found)]
    names = Counter(f"{channel.chip}:{channel.label}" for channel in channels)
    rails: dict[str, Sensor] = {}
    for channel in channels:
        name = f"{channel.chip}:{channel.label}"
        if names[name] > 1:
            name = f"{channel.chip}@{channel.address}:{channel.label}"
        covers, scope = _meaning(channel)
        try:
            rail = Rail(channel, name, covers, scope, _period_s(channel))
        except PowerError as error:
            found.obstacles[name] = str(error)
        else:
            found.sensors.append(rail)
            rails[channel.label] = rail
    if not any(sensor.scope == "board" for sensor in found.sensors):
        found.sensors.extend(_sums(rails))
    return found


def _sums(rails: dict[str, Sensor]) -> Iterator[Sensor]:
    for labels in SUMS:
        if all(label in rails for label in labels):
            parts = [rails[label] for label in labels]
            yield Sum(f"ina3221:{'+'.join(labels)}", "the module, as the sum of its rails", parts, "board")


def _hwmon_channels(root: Path, found: Survey) -> Iterator[Channel]:
    for folder in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        if (folder / "device/type").exists():  # the battery, charger or USB port of class/power_supply
            continue
        address = (folder / "device").resolve().name
        try:
            chip = text_of(folder / "name")
            own_label = text_of(folder / "label") if (folder / "label").exists() else ""
            if chip.startswith("ina3221"):
                yield from _rails(folder, chip, address)
                continue
            for file in sorted((*folder.glob("power[0-9]*_input"), *folder.glob("power[0-9]*_average"))):
                channel = file.name.partition("_")[0]
                if file.name.endswith("_average") and (folder / f"{channel}_input").exists():
                    continue
                label_file = folder / f"{channel}_label"
                label = text_of(label_file) if label_file.exists() else own_label
                yield Channel(chip, address, label or channel, file, W_OF_UW)
        except PowerError as error:
            found.obstacles[folder.name] = str(error)


def _rails(folder: Path, chip: str, address: str) -> Iterator[Channel]:
    """Yield the channels of an INA3221 that are connected. Its channels 4 to 7 are voltages of shunts."""
    for number in (1, 2, 3):
        label_file, current_file = folder / f"in{number}_label", folder / f"curr{number}_input"
        label = text_of(label_file) if label_file.exists() else f"channel {number}"
        if current_file.exists() and _is_connected(label):
            yield Channel(
                chip, address, label, folder / f"in{number}_input", 1e-3, current_file, folder / f"in{number}_enable"
            )


def _iio_channels(root: Path, found: Survey) -> Iterator[Channel]:
    for file in sorted((root / "sys/bus/i2c/drivers").glob("ina3221*/*/iio:device*/rail_name_*")):
        number = file.name.rpartition("_")[2]
        try:
            label = text_of(file)
        except PowerError as error:
            found.obstacles[f"{file.parent.parent.name}/{file.name}"] = str(error)
            continue
        if _is_connected(label):
            yield Channel("ina3221", file.parent.parent.name, label, file.parent / f"in_power{number}_input", W_OF_MW)


def _is_connected(label: str) -> bool:
    return bool(label) and not re.fullmatch(r"NC\d*|<NA>", label)


def _meaning(channel: Channel) -> tuple[str, Scope]:
    """Return what a channel covers, in words, and its scope."""
    if channel.label in INPUTS and channel.chip.startswith("ina"):
        return INPUTS[channel.label], "board"
    if channel.chip in WHOLE_MACHINE:
        return WHOLE_MACHINE[channel.chip], "board"
    return SUPPLIED.get(channel.label, f"what {channel.chip} at {channel.address} measures"), "part"


def _period_s(channel: Channel) -> float:
    """Return the seconds between two reads, which are not less than those between two values of the chip."""
    channel_name = channel.watts_file.name.partition("_")[0]
    for name in (f"{channel_name}_average_interval", "update_interval"):
        file = channel.watts_file.parent / name
        if file.exists():
            return max(PERIOD_S, number_of(file) * 1e-3)  # milliseconds
    return PERIOD_S
