"""Trees and a program that stand in for the power modes of a Jetson, which no test machine has.

The files of `nvpmodel` are shortened from what public copies of them document: the parameters, clocks and modes are
those of the board, most lines that limit nothing here are left out. Nothing was recorded on a board by us.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Jetson TX2, L4T 32 (two Denver cores 1-2, four A57), after a copy of /etc/nvpmodel.conf that has no CORE_0.
TX2 = """\
# FORMAT:
# < PARAM TYPE=PARAM_TYPE NAME=PARAM_NAME >
< PARAM TYPE=FILE NAME=CPU_ONLINE >
CORE_1 /sys/devices/system/cpu/cpu1/online
CORE_2 /sys/devices/system/cpu/cpu2/online
CORE_3 /sys/devices/system/cpu/cpu3/online
CORE_4 /sys/devices/system/cpu/cpu4/online
CORE_5 /sys/devices/system/cpu/cpu5/online

< PARAM TYPE=CLOCK NAME=CPU_A57 >
FREQ_TABLE /sys/devices/system/cpu/cpu0/cpufreq/scaling_available_frequencies
MAX_FREQ /sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq
MIN_FREQ /sys/devices/system/cpu/cpu0/cpufreq/scaling_min_freq

< PARAM TYPE=CLOCK NAME=GPU >
MAX_FREQ /sys/devices/17000000.gp10b/devfreq/17000000.gp10b/max_freq

# MAXN is the NONE power model to release all constraints
< POWER_MODEL ID=0 NAME=MAXN >
CPU_ONLINE CORE_1 1
CPU_ONLINE CORE_2 1
CPU_ONLINE CORE_3 1
CPU_ONLINE CORE_4 1
CPU_ONLINE CORE_5 1
CPU_A57 MIN_FREQ 0
CPU_A57 MAX_FREQ -1
CPU_DENVER MAX_FREQ -1
GPU MIN_FREQ 0
GPU MAX_FREQ -1
EMC MAX_FREQ 0

< POWER_MODEL ID=1 NAME=MAXQ >
CPU_ONLINE CORE_1 0
CPU_ONLINE CORE_2 0
CPU_ONLINE CORE_3 1
CPU_ONLINE CORE_4 1
CPU_ONLINE CORE_5 1
CPU_A57 MIN_FREQ 0
CPU_A57 MAX_FREQ 1200000
GPU MIN_FREQ 0
GPU MAX_FREQ 850000000
EMC MAX_FREQ 1331200000

< POWER_MODEL ID=2 NAME=MAXP_CORE_ALL >
CPU_ONLINE CORE_1 1
CPU_ONLINE CORE_2 1
CPU_A57 MAX_FREQ 1400000
CPU_DENVER MAX_FREQ 1400000
GPU MAX_FREQ 1120000000
EMC MAX_FREQ 1600000000

# mandatory section to configure the default mode
< PM_CONFIG DEFAULT=1 >
"""

# Jetson Nano, L4T 32; a user's copy with a comment behind a value, as in public notes.
NANO = """\
< PARAM TYPE=FILE NAME=CPU_ONLINE >
CORE_0 /sys/devices/system/cpu/cpu0/online
CORE_1 /sys/devices/system/cpu/cpu1/online
CORE_2 /sys/devices/system/cpu/cpu2/online
CORE_3 /sys/devices/system/cpu/cpu3/online

< POWER_MODEL ID=0 NAME=MAXN >
CPU_ONLINE CORE_0 1
CPU_ONLINE CORE_1 1
CPU_ONLINE CORE_2 1
CPU_ONLINE CORE_3 1
CPU_A57 MIN_FREQ  0
CPU_A57 MAX_FREQ -1\t# 1479000
GPU_POWER_CONTROL_ENABLE GPU_PWR_CNTL_EN on
GPU MIN_FREQ  0
GPU MAX_FREQ -1
GPU_POWER_CONTROL_DISABLE GPU_PWR_CNTL_DIS auto
EMC MAX_FREQ 0

< POWER_MODEL ID=1 NAME=5W >
CPU_ONLINE CORE_0 1
CPU_ONLINE CORE_1 1
CPU_ONLINE CORE_2 0
CPU_ONLINE CORE_3 0
CPU_A57 MIN_FREQ  0
CPU_A57 MAX_FREQ 918000
GPU_POWER_CONTROL_ENABLE GPU_PWR_CNTL_EN on
GPU MIN_FREQ 0
GPU MAX_FREQ 640000000
GPU_POWER_CONTROL_DISABLE GPU_PWR_CNTL_DIS auto
EMC MAX_FREQ 1600000000

< PM_CONFIG DEFAULT=0 >
"""

# Jetson AGX Xavier, L4T 32 and 35 (four pairs of cores), with the mode that MLPerf's copies add.
XAVIER = """\
< PARAM TYPE=FILE NAME=CPU_ONLINE >
CORE_0 /sys/devices/system/cpu/cpu0/online
CORE_1 /sys/devices/system/cpu/cpu1/online
CORE_2 /sys/devices/system/cpu/cpu2/online
CORE_3 /sys/devices/system/cpu/cpu3/online
CORE_4 /sys/devices/system/cpu/cpu4/online
CORE_5 /sys/devices/system/cpu/cpu5/online
CORE_6 /sys/devices/system/cpu/cpu6/online
CORE_7 /sys/devices/system/cpu/cpu7/online

< PARAM TYPE=CLOCK NAME=DLA_CORE >
MAX_FREQ /sys/kernel/nvpmodel_emc_cap/nafll_dla
MAX_FREQ_KNEXT /sys/kernel/nvpmodel_emc_cap/nafll_dla

< POWER_MODEL ID=0 NAME=MAXN >
CPU_ONLINE CORE_0 1
CPU_ONLINE CORE_7 1
TPC_POWER_GATING TPC_PG_MASK 0
GPU_POWER_CONTROL_ENABLE GPU_PWR_CNTL_EN on
CPU_DENVER_0 MIN_FREQ 1200000
CPU_DENVER_0 MAX_FREQ -1
GPU MIN_FREQ 318750000
GPU MAX_FREQ -1
GPU_POWER_CONTROL_DISABLE GPU_PWR_CNTL_DIS auto
EMC MAX_FREQ 0
DLA_CORE MAX_FREQ -1

< POWER_MODEL ID=8 NAME=MODE_MLPERF_V1_MAXQ >
CPU_ONLINE CORE_0 1
CPU_ONLINE CORE_1 1
CPU_ONLINE CORE_2 0
CPU_ONLINE CORE_3 0
CPU_ONLINE CORE_4 0
CPU_ONLINE CORE_5 0
CPU_ONLINE CORE_6 0
CPU_ONLINE CORE_7 0
TPC_POWER_GATING TPC_PG_MASK 0
CPU_DENVER_0 MIN_FREQ 1190400
CPU_DENVER_0 MAX_FREQ 1190400
GPU MAX_FREQ 520000000
EMC MAX_FREQ 1065600000
DLA_CORE MAX_FREQ 550000000

< PM_CONFIG DEFAULT=0 >
< FAN_CONFIG DEFAULT=quiet >
"""

# Jetson Orin Nano, L4T 36: power gates of the GPU differ between modes, so that some changes take a reboot.
ORIN = """\
< PARAM TYPE=FILE NAME=CPU_ONLINE >
CORE_0 /sys/devices/system/cpu/cpu0/online
CORE_1 /sys/devices/system/cpu/cpu1/online
CORE_2 /sys/devices/system/cpu/cpu2/online
CORE_3 /sys/devices/system/cpu/cpu3/online
CORE_4 /sys/devices/system/cpu/cpu4/online
CORE_5 /sys/devices/system/cpu/cpu5/online

< POWER_MODEL ID=0 NAME=15W >
CPU_ONLINE CORE_4 1
CPU_ONLINE CORE_5 1
FBP_POWER_GATING FBP_PG_MASK 2
TPC_POWER_GATING TPC_PG_MASK 240
CPU_A78_0 MIN_FREQ 729600
CPU_A78_0 MAX_FREQ 1510400
CPU_A78_4 MAX_FREQ 1510400
GPU MIN_FREQ 0
GPU MAX_FREQ 612000000
EMC MAX_FREQ 2133000000

< POWER_MODEL ID=2 NAME=MAXN_SUPER >
CPU_ONLINE CORE_4 1
CPU_ONLINE CORE_5 1
FBP_POWER_GATING FBP_PG_MASK 2
TPC_POWER_GATING TPC_PG_MASK 240
CPU_A78_0 MAX_FREQ -1
GPU MAX_FREQ -1
EMC MAX_FREQ 0

< POWER_MODEL ID=3 NAME=7W >
CPU_ONLINE CORE_0 1
CPU_ONLINE CORE_4 0
CPU_ONLINE CORE_5 0
FBP_POWER_GATING FBP_PG_MASK 2
TPC_POWER_GATING TPC_PG_MASK 252
CPU_A78_0 MAX_FREQ 960000
GPU MAX_FREQ 408000000
EMC MAX_FREQ 2133000000

< PM_CONFIG DEFAULT=2 >
"""

# Stands in for the program of JetPack. What it says is as public logs of it have it.
PROGRAM = """\
#!/bin/sh
here={here}
if [ "$1" = -q ]; then
  echo "NV Power Mode: MODE_$(cat $here/mode)"
  cat $here/mode
  exit
fi
echo "$2" >> $here/asked
cp $here/state/power-mode.json $here/seen.json 2> /dev/null
if [ -e $here/reboot-$2 ]; then
  read answer
  echo "$answer" > $here/answer
  echo "NVPM WARN: Golden image context is already created"
  echo "NVPM WARN: Reboot required for changing to this power mode: $2"
  echo "NVPM WARN: DO YOU WANT TO REBOOT NOW? enter YES/yes to confirm:"
  echo "NVPM ERROR: optMask is 1, no request for power mode"
  exit 1
fi
if [ -e $here/slow ]; then
  sleep 0.5
fi
if [ -e $here/broken ]; then
  echo "NVPM ERROR: Error opening /var/lib/nvpmodel/status: 13"
  exit 1
fi
echo "$2" > $here/mode
"""


class FakeNvpmodel:
    """A program `nvpmodel` that changes a file, in place of clocks and cores.

    Attributes:
        folder: what must stand first on PATH.
        state: the folder for the record of `TVM_PIPELINE_STATE`; the program keeps a copy of what is in it when it is
            asked to set a mode, as `seen.json`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "state"
        self.state.mkdir(parents=True)
        (folder / "mode").write_text("0\n")
        program = folder / "nvpmodel"
        program.write_text(PROGRAM.format(here=folder))
        program.chmod(0o755)

    @classmethod
    def on_the_path(cls, folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvpmodel:
        """Make one that commands find, with an empty folder of records."""
        fake = cls(folder)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("TVM_PIPELINE_STATE", str(fake.state))
        return fake

    @property
    def mode(self) -> int:
        """The mode that is set."""
        return int((self.folder / "mode").read_text() or -1)

    @property
    def asked(self) -> list[int]:
        """The modes that it was asked to set, in order."""
        path = self.folder / "asked"
        return [int(line) for line in path.read_text().split()] if path.exists() else []


def board(root: Path) -> Path:
    """Make a tree with the clocks of a board of two clusters and a GPU, as Linux documents them."""
    for core in (0, 4):
        folder = root / f"sys/devices/system/cpu/cpu{core}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_max_freq").write_text("1510400\n")
        (folder / "scaling_available_frequencies").write_text("729600 1113600 1510400 \n")
    gpu = root / "sys/class/devfreq/17000000.gpu"
    gpu.mkdir(parents=True)
    (gpu / "max_freq").write_text("624750000\n")
    (root / "sys/class/devfreq/15340000.vic").mkdir()
    (root / "sys/class/devfreq/15340000.vic/max_freq").write_text("435200000\n")
    boot = root / "proc/sys/kernel/random"
    boot.mkdir(parents=True)
    (boot / "boot_id").write_text("first\n")
    return root
