"""What tuning found on a board serves later compilations for the board on another machine, and no others."""

from __future__ import annotations

import pytest

from tests.support.parts import needs

needs("tvm")
needs("onnx")

from tests.plugins.kernels.cli.test_tuned_command import _tune_by_hand
from tests.support.onnx_models import write_picture_net
from tvm_pipeline.core.platform import Device
from tvm_pipeline.frontends import load
from tvm_pipeline_kernels.tuning.tuning_records import records_file
from tvm_pipeline_tvm.host import backend
from tvm_pipeline_tvm.host.detection import host_target


@pytest.mark.thorough
def test_records_of_a_board(own_cache, tmp_path):
    path, device = write_picture_net(tmp_path / "net.onnx"), Device("cpu0", "host", (0,), host_target())

    def tuned(processor: str, *, is_tuned: bool = True) -> list[int]:
        made = backend.compile_elsewhere(load(path), [device], tuned=is_tuned, processor=processor)
        return [kernels.tuned for kernels in made.tuned() if kernels.tuned]

    assert backend.tuning_records(device) == []
    _tune_by_hand(path)
    lines = backend.tuning_records(device)
    records_file(host_target()).unlink()  # which were the board's
    assert lines
    assert tuned("Cortex of a board") == []
    assert backend.take_tuning_records(device, "Cortex of a board", lines) == len(lines)
    assert backend.take_tuning_records(device, "Cortex of a board", [*lines, "broken"]) == 1
    assert tuned("Cortex of a board") == [len(lines)]
    assert tuned("Cortex of a board", is_tuned=False) == []
    assert tuned("") == []
