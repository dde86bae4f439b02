"""Trees of files like those of Jetsons of each generation, as documented by public sources; none is a copy of a board.

Names, numbers and forms are those of the sources that each tree names. Temperatures, clocks and counts are made up
where the test needs a value.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CPUS = "sys/devices/system/cpu"
A57, DENVER2, CARMEL, A78AE, V3AE = 0x411FD073, 0x4E0F0030, 0x4E0F0040, 0x410FD421, 0x410FD830


Trip = tuple[str, float, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Tree:
    """What a board shows.

    Attributes:
        cores: MIDR_EL1 of each core.
        policies: the cores of each cpufreq policy.
        trips: of zones, the kind of each trip point, its temperature in degrees, and the cooling devices bound to it.
        told: what `devices` is to say of the board.
        named: the kinds of its cores.
    """

    compatible: Sequence[str]
    model: str
    release: str
    cores: Sequence[int]
    policies: Sequence[Sequence[int]]
    limit_khz: int
    memory_kb: int
    gpu: str
    gpu_hz: int
    zones: Mapping[str, int]
    coolers: Sequence[str]
    told: str
    named: str
    mode: int | None = None
    modes: Sequence[str] = ()
    trips: Mapping[str, Sequence[Trip]] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)

    def write(self, root: Path) -> Path:
        """Write the tree into a folder that does not exist yet, and return it."""
        files = {
            "proc/device-tree/compatible": "\0".join(self.compatible) + "\0",
            "proc/device-tree/model": self.model + "\0",
            "proc/meminfo": f"MemTotal:       {self.memory_kb} kB\nMemFree:         1024 kB\n",
            "etc/nv_tegra_release": self.release,
            f"{CPUS}/present": f"0-{len(self.cores) - 1}\n",
            f"{CPUS}/online": f"0-{len(self.cores) - 1}\n",
        }
        for core, midr in enumerate(self.cores):
            files[f"{CPUS}/cpu{core}/regs/identification/midr_el1"] = f"0x{midr:016x}\n"
        for policy in self.policies:
            folder = f"{CPUS}/cpufreq/policy{policy[0]}"
            files[f"{folder}/related_cpus"] = " ".join(map(str, policy)) + "\n"
            files[f"{folder}/scaling_cur_freq"] = files[f"{folder}/scaling_max_freq"] = f"{self.limit_khz}\n"
        for name in ("cur_freq", "max_freq"):
            files[f"sys/class/devfreq/{self.gpu}/{name}"] = f"{self.gpu_hz}\n"
        for number, (name, temp) in enumerate(self.zones.items()):
            files[f"sys/class/thermal/thermal_zone{number}/type"] = f"{name}\n"
            files[f"sys/class/thermal/thermal_zone{number}/temp"] = f"{temp}\n"
        for number, name in enumerate(self.coolers):
            files[f"sys/class/thermal/cooling_device{number}/type"] = f"{name}\n"
            files[f"sys/class/thermal/cooling_device{number}/cur_state"] = "0\n"
        if self.mode is not None:
            files["var/lib/nvpmodel/status"] = f"pmode:{self.mode:04d}"
            files["etc/nvpmodel.conf"] = "".join(
                f"< POWER_MODEL ID={number} NAME={name} >\nCPU_ONLINE CORE_0 1\n"
                for number, name in enumerate(self.modes)
            )
        for path, text in {**files, **self.others}.items():
            write(root, path, text)
        for number, zone in enumerate(self.zones):
            bind_trips(root, f"sys/class/thermal/thermal_zone{number}", self.trips.get(zone, ()))
        return root


def bind_trips(root: Path, zone: str, trips: Sequence[Trip]) -> None:
    """Write the trip points of a thermal zone, and a link to each cooling device that is bound to one.

    The form is that of Linux, Documentation/driver-api/thermal/sysfs-api.rst: `cdevN` is the link, and
    `cdevN_trip_point` the number of the trip point.
    """
    coolers = {path.read_text().strip(): path.parent for path in root.glob("sys/class/thermal/cooling_device*/type")}
    bound = [(number, name) for number, (_, _, names) in enumerate(trips) for name in names]
    for number, (kind, celsius, _) in enumerate(trips):
        write(root, f"{zone}/trip_point_{number}_type", f"{kind}\n")
        write(root, f"{zone}/trip_point_{number}_temp", f"{celsius * 1000:.0f}\n")
    for index, (number, name) in enumerate(bound):
        write(root, f"{zone}/cdev{index}_trip_point", f"{number}\n")
        (root / f"{zone}/cdev{index}").symlink_to(Path("..") / coolers[name].name, target_is_directory=True)


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def replace_by_folder(root: Path, path: str) -> None:
    """Put a folder in the place of a file: reading it fails, also for root, as a sensor that is switched off does."""
    (root / path).unlink()
    (root / path).mkdir()


def cores_off(root: Path, online: str, *gone: int) -> None:
    """Switch cores off, as nvpmodel does: the kernel then shows no registers of theirs."""
    write(root, f"{CPUS}/online", f"{online}\n")
    for core in gone:
        shutil.rmtree(root / f"{CPUS}/cpu{core}/regs")


def release(major: int, revision: str, board: str) -> str:
    """Return /etc/nv_tegra_release, in the form that JetPack 4 to 7 have."""
    return f"# R{major} (release), REVISION: {revision}, GCID: 1, BOARD: {board}, EABI: aarch64, DATE: Mon Jan 1 2024\n"


_ORIN_ALERTS = ("cpu", "gpu", "cv0", "cv1", "cv2", "soc0", "soc1", "soc2")
_ORIN_COOLERS = (
    "cpufreq-cpu0",
    "cpufreq-cpu4",
    "devfreq-17000000.gpu",
    *(f"{name}-throttle-alert" for name in _ORIN_ALERTS),
    "hot-surface-alert",
    "pwm-fan",
)
# As measured on an Orin NX with R36.3 (zone `cpu-thermal`, which cooling device is bound to which trip point), and as
# other public notes of Orins say: 70 degrees switch an alert on for fingers that touch the case, 99 degrees slow down.
_ORIN_TRIPS: Mapping[str, Sequence[Trip]] = {
    f"{part}{suffix}": (
        ("passive", 99, ("cpufreq-cpu0", "cpufreq-cpu4", f"{part.lower()}-throttle-alert", "devfreq-17000000.gpu")),
        ("critical", 104.5, ()),
        ("passive", 70, ("hot-surface-alert",)),
    )
    for part, suffix in (("cpu", "-thermal"), ("gpu", "-thermal"), ("CPU", "-therm"), ("GPU", "-therm"))
}


def _xavier_trips(clusters: int, hot: Sequence[str], **zones_c: tuple[float, float]) -> Mapping[str, Sequence[Trip]]:
    """Return the trip points of a Xavier, by the temperatures from which on each zone slows it down, and ends it.

    As NVIDIA's device trees have them: tegra194-thermal.dtsi, tegra194-thermal-userspace-alert.dtsi, and those of the
    modules p2888 and p3668. Cooling devices of clocks have their names by Linux 4.9 and 5.10.
    """
    slow = (*(f"thermal-cpufreq-{number}" for number in range(clusters)), "thermal-devfreq-0")
    return {"AO-therm": [("active", 85, ["bwmgr-therm-handler"])]} | {
        f"{part}-therm": [
            ("critical", end, []),
            ("passive", slows, [*slow, f"{part.lower()}-throttle-alert"]),
            ("active", 70, hot),
        ]
        for part, (slows, end) in zones_c.items()
    }


def _xavier_coolers(clusters: int) -> tuple[str, ...]:
    alerts = (f"{part}-throttle-alert" for part in ("cpu", "gpu", "aux"))
    clocks = (*(f"thermal-cpufreq-{number}" for number in range(clusters)), "thermal-devfreq-0")
    return (*clocks, *alerts, "bwmgr-therm-handler", "pwm-fan")


# NVIDIA's device trees: of the module p3310, tegra186-quill-thermal.dtsi (madisongh/linux-tegra, 36a358c1), with the
# alerts of tegra186-thermal-userspace-alert.dtsi (alliedvision/linux_nvidia_jetson, 81d4b552).
_TX2_TRIPS: Mapping[str, Sequence[Trip]] = {
    **{
        f"{part}-therm": (("critical", 101, ()), ("passive", 95.5, (cooler, f"{part.lower()}-throttle-alert")))
        for part, cooler in (("BCPU", "cpu-balanced"), ("MCPU", "cpu-balanced"), ("GPU", "gpu-balanced"))
    },
    "Tboard_tegra": (("critical", 107, ()),),
    "Tdiode_tegra": (("critical", 107, ()),),
}

# tegra210-porg-thermal.dtsi (OE4T/linux-tegra-4.9, 5ea18682), with tegra210-thermal.dtsi, tegra210-bthrot-cdev.dtsi and
# tegra210-porg-thermal-fan-est.dtsi there. `gpu-scaling`, `gpu-vmax` and `dfll-floor` are labels: the names of these
# cooling devices are in none of the files. They set voltages by temperature, and `tegra-dram` refreshes memory faster.
_NANO_TRIPS: Mapping[str, Sequence[Trip]] = {
    "AO-therm": (
        ("critical", 110, ()),
        *(("active", celsius, ("gpu-scaling",)) for celsius in (15, 30, 50, 70, 105)),
        ("active", 83, ("gpu-vmax",)),
        ("active", 15, ("CORE-floor",)),
        ("active", 85, ("CORE-cap",)),
        ("active", 15, ("dfll-floor",)),
    ),
    "CPU-therm": (("critical", 102, ()), ("hot", 100.5, ("tegra_heavy",)), ("passive", 97, ("cpu-balanced",))),
    "GPU-therm": (("critical", 102.5, ()), ("hot", 101, ("tegra_heavy",)), ("passive", 97.5, ("gpu-balanced",))),
    "PLL-therm": (("passive", 70, ("tegra-dram",)),),
    "thermal-fan-est": tuple(("active", celsius, ("pwm-fan",)) for celsius in (63, 65, 79)),
}

# As measured on an AGX Thor with R38.4.0 (swsususu/ThorFAN, f889012a): the zones, the cooling devices, the critical
# temperature, and that the GPU is slowed down from about 109 degrees on. No device tree of a Thor with trip points is
# public: those of its other zones that slow it down are missing here.
_THOR_TRIPS: Mapping[str, Sequence[Trip]] = {
    f"{part}-thermal": (
        ("critical", 114.5, ()),
        *([("passive", 109, ("gpu-throttle-alert", "devfreq-gpu-gpc-0"))] if part == "gpu" else []),
    )
    for part in ("tj", "gpu", "cpu", "soc012", "soc345")
}

_CURRENT = {
    "sys/class/hwmon/hwmon3/name": "soctherm_oc\n",
    **{f"sys/class/hwmon/hwmon3/oc{number}_event_cnt": "0\n" for number in (1, 2, 3)},
}

TREES: dict[str, Tree] = {
    # Names: notes of a TX2 with R32.7.6 (model, compatible, TNSPEC), NVIDIA's cpufreq (MIDR), nvpmodel_t186.conf.
    "TX2, JetPack 4": Tree(
        compatible=("nvidia,p2597-0000+p3310-1000", "nvidia,tegra186"),
        model="quill",
        release=release(32, "7.6", "t186ref"),
        cores=(A57, DENVER2, DENVER2, A57, A57, A57),
        policies=((0, 3, 4, 5), (1, 2)),
        limit_khz=2035200,
        memory_kb=8048048,
        gpu="17000000.gp10b",
        gpu_hz=1300500000,
        zones={
            "BCPU-therm": 38000,
            "MCPU-therm": 38500,
            "GPU-therm": 36500,
            "PLL-therm": 38000,
            "Tboard_tegra": 36000,
            "Tdiode_tegra": 35000,
            "PMIC-Die": 100000,
            "thermal-fan-est": 37600,
        },
        coolers=(
            *("cpu-balanced", "gpu-balanced", "bcpu-throttle-alert", "mcpu-throttle-alert", "gpu-throttle-alert"),
            "pwm-fan",
        ),
        trips=_TX2_TRIPS,
        mode=3,
        modes=("MAXN", "MAXQ", "MAXP_CORE_ALL", "MAXP_CORE_ARM", "MAXP_CORE_DENVER"),
        others={
            "etc/nv_boot_control.conf": "TNSPEC 3310-B02-1000-E.0-1-0-jetson-tx2-devkit-mmcblk0p1\n",
            "sys/class/hwmon/hwmon2/name": "soctherm_oc\n",  # by NVIDIA's driver tegra-oc-event for TX2 and Xavier
            "sys/class/hwmon/hwmon2/oc1_irq_cnt": "0\n",
            "sys/class/hwmon/hwmon2/oc1_priority": "0\n",
        },
        told="NVIDIA Jetson TX2 (p3310-1000), L4T 32.7.6 (JetPack 4.6.6), power mode 3 (MAXP_CORE_ARM)",
        named="4 Cortex-A57, 2 Denver 2",
    ),
    # Names: Jetson.GPIO and jetson_stats (compatible, dtsfilename), output of a Nano (zones), nvpmodel_t210.conf.
    "Nano, JetPack 4": Tree(
        compatible=("nvidia,p3449-0000-b00+p3448-0000-b00", "nvidia,jetson-nano", "nvidia,tegra210"),
        model="NVIDIA Jetson Nano Developer Kit",
        release=release(32, "7.1", "t210ref"),
        cores=(0x411FD071,) * 4,
        policies=((0, 1, 2, 3),),
        limit_khz=1479000,
        memory_kb=4059412,
        gpu="57000000.gpu",
        gpu_hz=921600000,
        zones={
            "AO-therm": 41500,
            "CPU-therm": 34000,
            "GPU-therm": 31000,
            "PLL-therm": 33500,
            "PMIC-Die": 100000,
            "thermal-fan-est": 33000,
        },
        coolers=(
            *("cpu-balanced", "gpu-balanced", "tegra_heavy", "tegra-dram", "CORE-floor", "CORE-cap"),
            *("gpu-scaling", "gpu-vmax", "dfll-floor", "pwm-fan"),
        ),
        trips=_NANO_TRIPS,
        mode=0,
        modes=("MAXN", "5W"),
        others={"proc/device-tree/nvidia,dtsfilename": "/dvs/tegra210-p3448-0000-p3449-0000-b00.dts\0"},
        told="NVIDIA Jetson Nano (p3448-0000), L4T 32.7.1 (JetPack 4.6.1), power mode 0 (MAXN)",
        named="4 Cortex-A57",
    ),
    # Names: meta-tegra (compatible of the kernel 5.10), the Developer Guide R35.4.1.
    "Xavier NX 16 GB, JetPack 5": Tree(
        compatible=("nvidia,p3449-0000+p3668-0001", "nvidia,p3509-0000+p3668-0001", "nvidia,tegra194"),
        model="NVIDIA Jetson Xavier NX Developer Kit",
        release=release(35, "4.1", "t186ref"),
        cores=(CARMEL,) * 6,
        policies=((0, 1), (2, 3), (4, 5)),
        limit_khz=1907200,
        memory_kb=15820000,
        gpu="17000000.gv11b",
        gpu_hz=1109250000,
        zones={"CPU-therm": 40000, "GPU-therm": 39000, "AUX-therm": 38000, "AO-therm": 38500},
        coolers=(*_xavier_coolers(3), "hot-surface-alert"),
        trips=_xavier_trips(3, ["hot-surface-alert"], CPU=(90.5, 96), GPU=(91.5, 97), AUX=(90, 95.5)),
        told="NVIDIA Jetson Xavier NX 16GB, L4T 35.4.1 (JetPack 5.1.2), power mode unknown "
        "(no /var/lib/nvpmodel/status)",
        named="6 Carmel",
    ),
    # Names: NVIDIA's device tree tegra194-p2888-0001-p2822-0000.dts, nvpmodel_t194.conf.
    "AGX Xavier, JetPack 4": Tree(
        compatible=("nvidia,p2822-0000+p2888-0001", "nvidia,tegra194"),
        model="Jetson-AGX",
        release=release(32, "7.1", "t186ref"),
        cores=(CARMEL,) * 8,
        policies=((0, 1), (2, 3), (4, 5), (6, 7)),
        limit_khz=1190400,
        memory_kb=32692948,
        gpu="17000000.gv11b",
        gpu_hz=670650000,
        zones={"CPU-therm": 41000, "GPU-therm": 40000, "AUX-therm": 39500, "AO-therm": 39000, "Tboard_tegra": 38000},
        coolers=_xavier_coolers(4),
        trips=_xavier_trips(4, [], CPU=(90, 95.5), GPU=(92.5, 98), AUX=(89, 94.5)),
        mode=2,
        modes=("MAXN", "MODE_10W", "MODE_15W", "MODE_30W_ALL"),
        told="NVIDIA Jetson AGX Xavier, L4T 32.7.1 (JetPack 4.6.1), power mode 2 (MODE_15W)",
        named="8 Carmel",
    ),
    # Names: Linux, tegra234-p3737-0000+p3701-0000.dts and its like; jetson_stats (devfreq).
    "AGX Orin, JetPack 5": Tree(
        compatible=("nvidia,p3737-0000+p3701-0005", "nvidia,tegra234"),
        model="NVIDIA Jetson AGX Orin Developer Kit",
        release=release(35, "3.1", "t186ref"),
        cores=(A78AE,) * 12,
        policies=((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)),
        limit_khz=2201600,
        memory_kb=64349424,
        gpu="17000000.ga10b",
        gpu_hz=1300500000,
        zones={"CPU-therm": 48000, "GPU-therm": 44000, "tj-therm": 48500},
        coolers=_ORIN_COOLERS,
        mode=0,
        modes=("MAXN", "15W", "30W", "50W"),
        trips=_ORIN_TRIPS,
        others=_CURRENT,
        told="NVIDIA Jetson AGX Orin 64GB (p3701-0005), L4T 35.3.1 (JetPack 5.1.1), power mode 0 (MAXN)",
        named="12 Cortex-A78AE",
    ),
    # Names: a course's public notes (`ls /proc/device-tree`, model, compatible, nvpmodel -q), jetson_stats (devfreq).
    "Orin Nano Super, JetPack 6": Tree(
        compatible=("nvidia,p3768-0000+p3767-0005-super", "nvidia,p3767-0005", "nvidia,tegra234"),
        model="NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
        release=release(36, "4.3", "generic"),
        cores=(A78AE,) * 6,
        policies=((0, 1, 2, 3), (4, 5)),
        limit_khz=1728000,
        memory_kb=7802932,
        gpu="17000000.gpu",
        gpu_hz=1020000000,
        zones={"cpu-thermal": 51700, "gpu-thermal": 48500, "tj-thermal": 52000},
        coolers=_ORIN_COOLERS,
        mode=2,
        modes=("15W", "25W", "MAXN_SUPER", "7W"),
        trips=_ORIN_TRIPS,
        others={
            **_CURRENT,
            "etc/nv_boot_control.conf": "TNSPEC 3767-300-0005-S.1-1-1-jetson-orin-nano-devkit-super-\n",
        },
        told="NVIDIA Jetson Orin Nano 8GB (p3767-0005, Super), L4T 36.4.3 (JetPack 6.2), power mode 2 (MAXN_SUPER)",
        named="6 Cortex-A78AE",
    ),
    # Names: Linux, tegra264-p4071-0000+p3834-0008.dts; the notes of ThorFAN (zones, cooling devices, devfreq, hwmon).
    "Thor, JetPack 7": Tree(
        compatible=("nvidia,p4071-0000+p3834-0008", "nvidia,p3834-0008", "nvidia,tegra264"),
        model="NVIDIA Jetson AGX Thor Developer Kit",
        release=release(38, "4.0", "generic"),
        cores=(V3AE,) * 14,
        policies=tuple((core, core + 1) for core in range(0, 14, 2)),
        limit_khz=2601000,
        memory_kb=128825804,
        gpu="gpu-gpc-0",
        gpu_hz=1575000000,
        zones={
            "tj-thermal": 59800,
            "gpu-thermal": 58000,
            "cpu-thermal": 59000,
            "soc012-thermal": 57000,
            "soc345-thermal": 57500,
        },
        coolers=(
            *(f"cpufreq-cpu{core}" for core in range(0, 14, 2)),
            "pwm-fan",
            *(f"{part}-throttle-alert" for part in ("cpu", "gpu", "soc012", "soc345")),
            *("devfreq-gpu-gpc-0", "devfreq-gpu-nvd-0"),
        ),
        trips=_THOR_TRIPS,
        mode=0,
        modes=("MAXN", "120W"),
        others={**_CURRENT, "sys/class/devfreq/gpu-nvd-0/cur_freq": "1\n"},
        told="NVIDIA Jetson T5000 (p3834-0008), L4T 38.4.0 (JetPack 7.1), power mode 0 (MAXN)",
        named="14 Neoverse-V3AE",
    ),
}
