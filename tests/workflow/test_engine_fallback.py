"""What TVM refuses runs on an engine, and `compile` says which operators, where, and why."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.support.log_lines import log_lines
from tests.support.parts import needs

needs("tvm")
needs("onnxruntime")
needs("ai_edge_litert")

import onnxruntime

from tests.edgetpu.networks import run
from tests.edgetpu.test_engine import running_sum, spectrum, written
from tests.support.fake_backend import make_plan
from tests.support.installed import install
from tests.support.onnx_unknown import UNKNOWN, write_determinants
from tvm_pipeline import Pipeline
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import ModelError, PlanError, PlatformError
from tvm_pipeline.workflow import engine_fallback
from tvm_pipeline.workflow import machine as machine_of
from tvm_pipeline.workflow.steps import Compiled, compile_source
from tvm_pipeline_edgetpu import backend as edgetpu
from tvm_pipeline_onnxruntime import backend as engine
from tvm_pipeline_tvm.host import backend as host
from tvm_pipeline_tvm.installed_ir import installed_ir

CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this machine one of two cores, which are the same one where there is no other."""
    install(monkeypatch, edgetpu, host, engine, own="host")
    devices = tuple(
        Device(f"cpu{index}", "host", (core,), host.detect()[0].target) for index, core in enumerate(CORES[:2])
    )
    monkeypatch.setattr(machine_of, "this_machine", lambda *_: Platform("desk", devices))


def compiled(path: Path) -> tuple[Compiled, list[str]]:
    warnings = log_lines("WARNING", of="tvm_pipeline.workflow")
    return compile_source(path), warnings


@pytest.mark.usefixtures("machine")
@pytest.mark.skipif(len(CORES) < 2, reason="on one core, one device has the whole model")
def test_operators_that_tvm_refuses_run_on_onnxruntime_beside_tvm(tmp_path: Path) -> None:
    """The plan goes from TVM over onnxruntime back to TVM; its results are those of onnxruntime."""
    path = write_determinants(tmp_path / "net.onnx")
    made, warnings = compiled(path)
    with closing(made.compiled):
        assert [device.name for device in made.platform.devices] == [
            "cpu0",
            "cpu1",
            "onnxruntime-cpu0",
            "onnxruntime-cpu1",
        ]
        [told] = warnings
        assert told.startswith("net: TVM cannot import it: ")
        assert UNKNOWN in told
        assert "onnxruntime runs det_2 of its 5 operators" in told
        assert "divides the other 4 between TVM and onnxruntime, on cpu0, cpu1" in told
        names = made.compiled.graph.operator_names
        assert names == ["conv_0", "tanh_1", "det_2", "gemm_3", "relu_4"]
        for device in made.platform.devices:
            left_out = [] if device.backend == "onnxruntime" else ["det_2"]
            assert made.compiled.computes(device) == [name for name in names if name not in left_out]
        with pytest.raises(PlanError, match=r"device cpu0 cannot compute operator det_2 of net: .*Det"):
            made.compiled.stage(["det_2"], made.platform.device("cpu0"))
        plan = make_plan(
            made.compiled.graph, (["cpu0"], names[:2]), (["onnxruntime-cpu1"], names[2:3]), (["cpu0"], names[3:])
        )
        frame = np.random.default_rng(0).standard_normal((1, 2, 6, 6)).astype(np.float32)
        [expected] = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": frame})
        with Pipeline(made.compiled, plan, made.platform) as pipeline:
            [result] = pipeline.map([frame])
        np.testing.assert_allclose(result.outputs["scores"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("limit", ["operators", "cores"])
def test_where_tvm_beside_it_does_not_pay_the_engine_runs_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    if limit == "operators":
        monkeypatch.setattr(engine_fallback, "MOST_OPERATORS", 3)
    else:
        one = Platform("desk", (Device("cpu0", "host", tuple(CORES[:1]), host.detect()[0].target),))
        monkeypatch.setattr(machine_of, "this_machine", lambda *_: one)
    made, [told] = compiled(write_determinants(tmp_path / "net.onnx"))
    with closing(made.compiled):
        assert {device.backend for device in made.platform.devices} == {"onnxruntime"}
        assert made.platform.devices[0].name == "cpu0"
        assert "onnxruntime runs all of it, on cpu0" in told
        assert made.compiled.computes(made.platform.devices[0]) == made.compiled.graph.operator_names


@pytest.mark.usefixtures("machine")
@pytest.mark.skipif(installed_ir() != "relay", reason="Relax imports RFFT2D, see tests/relax/test_tflite_importer.py")
def test_tflites_kernels_run_what_tvm_has_no_operator_for(tmp_path: Path) -> None:
    made, [told] = compiled(written(tmp_path, spectrum()))
    with closing(made.compiled):
        assert "operator rfft2d_2 is RFFT2D, which TVM 0.19 does not import" in told
        assert not made.platform.stand_ins
        whole = make_plan(
            made.compiled.graph,
            ([made.platform.devices[-1].name], made.compiled.graph.operator_names),
        )
        frame = np.random.default_rng(0).standard_normal((1, 8, 8)).astype(np.float32)
        with Pipeline(made.compiled, whole, made.platform) as pipeline:
            [result] = pipeline.map([frame])
        [expected] = run(spectrum(), {"tensor/0:0": frame}).values()
        np.testing.assert_array_equal(result.outputs["tensor/2:0"], expected)


@pytest.mark.usefixtures("machine")
def test_a_model_with_a_state_is_one_stage_on_tflites_kernels(tmp_path: Path) -> None:
    made, [told] = compiled(written(tmp_path, running_sum()))
    with closing(made.compiled):
        assert "operator call_once_0 runs other subgraphs of the file" in told
        assert "TFLite runs all of it, on cpu0" in told
        assert len(made.compiled.graph) == 1


@pytest.mark.usefixtures("machine")
def test_a_platform_that_was_given_is_kept(tmp_path: Path) -> None:
    platform = tmp_path / "desk.toml"
    platform.write_text(f'name = "desk"\n[[device]]\nname = "cpu0"\nbackend = "host"\ncores = [{CORES[0]}]\n')
    with pytest.raises(ModelError, match=UNKNOWN):
        compile_source(write_determinants(tmp_path / "net.onnx"), platform=platform)


@pytest.mark.usefixtures("machine")
def test_what_the_engine_refuses_as_well_has_both_reasons(tmp_path: Path) -> None:
    import onnx

    path = write_determinants(tmp_path / "net.onnx")
    proto = onnx.load(path)
    proto.graph.node[2].domain = "nobody"
    proto.opset_import.append(onnx.helper.make_opsetid("nobody", 1))
    onnx.save(proto, path)
    both = rf"TVM cannot import it: .*{UNKNOWN}.*onnxruntime cannot run it either: .*nobody"
    with pytest.raises(ModelError, match=both):
        compile_source(path)


@pytest.mark.usefixtures("machine")
def test_without_the_engine_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has TVM's reason as well; a platform that names the engine says the same."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    install_it = r"onnxruntime is not installed: run `pip install 'tvm-pipeline\[onnxruntime\]'`"
    with pytest.raises(ModelError, match=rf"{UNKNOWN}.*{install_it}"):
        compile_source(write_determinants(tmp_path / "net.onnx"))
    platform = tmp_path / "desk.toml"
    platform.write_text(f'name = "desk"\n[[device]]\nname = "cpu0"\nbackend = "onnxruntime"\ncores = [{CORES[0]}]\n')
    with pytest.raises(PlatformError, match=install_it):
        compile_source(write_determinants(tmp_path / "net.onnx"), platform=platform)
