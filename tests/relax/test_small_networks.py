"""What makes cutting hard, compiled by Relax for two targets: cuts on one are exact, and those across both agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from random import Random

import numpy as np
import onnxruntime
import pytest

from tests.relax.fused import MCPU, target_of
from tests.support.onnx_networks import onnx_network
from tests.support.stages import model_outputs, random_frame, random_stages, run_stages
from tvm_pipeline.core.platform import Device
from tvm_pipeline_tvm.relax.compiled import RelaxModel

Compiled = Callable[[str], RelaxModel]
DEVICES = [Device(f"of{lanes}", "host", (0,), f"llvm -mcpu={MCPU[lanes]}") for lanes in (8, 4)]
# A value that stands between two of int8 is rounded either way: two steps through the last addition.
TOLERANCE = {"branching": 1e-5, "splitting": 1e-5, "shapes": 1e-5, "int8": 0.1}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    target_of(8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TVM_PIPELINE_CACHE", str(tmp_path_factory.mktemp("cache")))

        @cache
        def compile_(name: str) -> RelaxModel:
            targets = [device.target for device in DEVICES]
            return RelaxModel.compile(onnx_network(name), targets, lambda _: None)

        yield compile_


@pytest.mark.parametrize("name", TOLERANCE)
def test_cuts_are_exact_on_one_target_and_agree_across_two(name: str, compiled: Compiled) -> None:
    model, draw = compiled(name), Random(0)
    frame = random_frame(model.graph.inputs)
    right = onnxruntime.InferenceSession(onnx_network(name).content).run(None, frame)
    names = model.graph.operator_names
    for device in DEVICES:
        whole = model_outputs(model, run_stages(model, [(names, device)], frame))
        for output, expected in zip(whole, right, strict=True):
            assert output.std() > 0.01  # a difference would be seen
            np.testing.assert_allclose(output.reshape(expected.shape), expected, atol=TOLERANCE[name] * expected.max())
        for stages in (2, 3, 4):
            cut = random_stages(model.graph, draw, stages)
            found = model_outputs(model, run_stages(model, [(stage, device) for stage in cut], frame))
            for output, expected in zip(found, whole, strict=True):
                np.testing.assert_array_equal(output, expected, str(cut))
    for _ in range(2):
        cut = random_stages(model.graph, draw, 4)
        stages = [(stage, DEVICES[index % 2]) for index, stage in enumerate(cut)]
        found = model_outputs(model, run_stages(model, stages, frame))
        for output, expected in zip(found, right, strict=True):
            atol = TOLERANCE[name] * expected.max()
            np.testing.assert_allclose(output.reshape(expected.shape), expected, atol=atol, err_msg=str(cut))


def test_every_operator_alone_is_a_stage(compiled: Compiled) -> None:
    for name in TOLERANCE:
        model = compiled(name)
        frame = random_frame(model.graph.inputs)
        names = model.graph.operator_names
        whole = model_outputs(model, run_stages(model, [(names, DEVICES[0])], frame))
        found = model_outputs(model, run_stages(model, [([each], DEVICES[0]) for each in names], frame))
        for output, expected in zip(found, whole, strict=True):
            np.testing.assert_array_equal(output, expected, name)
