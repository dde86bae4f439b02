"""Figures of a host for people, read so seldom and so cheaply that they cost nothing: services, memory, disk, heat."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tvm_pipeline.profiling.throttling import ThrottleWatch
from tvm_pipeline.system_files import file_text
from tvm_pipeline_hosts.fleet.service_process import ServiceProcess

PERIOD_S = 2.0  # between two readings


class HostFigures:
    """Reads the figures of a host, once in PERIOD_S at most.

    Attributes:
        disk_free_bytes: where the services write.

    Args:
        folder: of the services.
    """

    def __init__(self, folder: Path) -> None:
        self.disk_free_bytes = 0
        self._folder = folder
        self._throttling = ThrottleWatch()
        self._read_s = -PERIOD_S
        self._before: dict[int, tuple[float, float, int]] = {}  # pid -> when, seconds of work, frames
        self._figures: dict[str, Any] = {}

    def read(self, services: Iterable[ServiceProcess]) -> tuple[dict[str, Any], bool]:
        """Return the figures, and whether they were read just now."""
        now_s = time.monotonic()
        if now_s - self._read_s < PERIOD_S:
            return self._figures, False
        self._read_s = now_s
        found = os.statvfs(self._folder)
        self.disk_free_bytes = found.f_bavail * found.f_frsize
        self._throttling.look()
        before, self._before = self._before, {}
        self._figures = {
            "services": [self._service(one, now_s, before) for one in services],
            **self._memory(),
            "load": os.getloadavg()[0],
            "cores": os.cpu_count(),
            "disk_free_bytes": self.disk_free_bytes,
            "celsius": self._throttling.hottest_c(),
            "throttled": self._throttling.begun if self._throttling.is_throttled else "",
        }
        return self._figures, True

    def _service(self, service: ServiceProcess, now_s: float, before: dict[int, tuple[float, float, int]]) -> Any:
        status, process = service.status, service.process
        figures: dict[str, Any] = {"model": service.model, "bundle": service.bundle[:12], "ready": service.ready}
        if process is None:
            return figures
        (work_s, rss_bytes), frames = process.usage(), status.frames if status else 0
        self._before[process.pid] = now_s, work_s, frames
        figures |= {"pid": process.pid, "rss_bytes": rss_bytes, "frames": frames}
        if last := before.get(process.pid):
            past_s = now_s - last[0]
            figures |= {"cores_busy": (work_s - last[1]) / past_s, "fps": (frames - last[2]) / past_s}
        if status and status.statistics:
            figures["statistics"] = status.statistics
        return figures

    def _memory(self) -> dict[str, int]:
        lines = (line.split() for line in file_text(Path("/proc/meminfo")).splitlines())
        read = {words[0]: int(words[1]) << 10 for words in lines if len(words) == 3}
        names = {"memory_bytes": "MemTotal:", "memory_free_bytes": "MemAvailable:"}
        return {name: read[key] for name, key in names.items() if key in read}
