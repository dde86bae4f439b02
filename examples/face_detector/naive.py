"""The loop that one would write first: read a frame, run the model on all cores, draw, write; then the next frame."""

from __future__ import annotations

import time

from tvm_pipeline.core.platform import Platform
from tvm_pipeline.core.tensor_layout import to_logical
from tvm_pipeline.profiling.bound import in_bound_thread
from tvm_pipeline.runtime.host_work import HostWork, stage_work
from tvm_pipeline_video.application import Payload

COLD_FRAMES = 5


def naive_fps(compiled, platform: Platform, host: HostWork, frames: int) -> float:
    """Return the frames a second of the loop, over so many frames."""
    device = max(platform.devices, key=lambda device: len(device.cores))
    work = stage_work(host.graph.operator_names, host)
    runner = compiled.stage(work.model, device)
    ports = {port.name: port for port in (*runner.inputs, *runner.outputs)}
    arrays = {name: port.buffer() for name, port in ports.items()}

    def tensor(name: str):
        return to_logical(arrays[name], ports[name].layout)

    def loop() -> float:
        began_s = 0.0
        for frame in range(COLD_FRAMES + frames):
            began_s = time.perf_counter() if frame == COLD_FRAMES else began_s
            passage = Payload()
            for name in work.before:
                host.functions[name](passage, tensor)
            runner.run([arrays[port.name] for port in runner.inputs], [arrays[port.name] for port in runner.outputs])
            for name in work.after:
                host.functions[name](passage, tensor)
        return frames / (time.perf_counter() - began_s)

    try:
        return in_bound_thread(runner, loop)
    finally:
        runner.close()
