"""ONNX's own backend tests are right or refused by name; docs/onnx-coverage.md is made of their table.

After a change: python -c "from tests.test_onnx_coverage import *; PAGE.write_text(page())".
"""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.parts import needs

TABLE = Path(__file__).parents[1] / "docs/onnx-coverage.csv"
PAGE = TABLE.with_suffix(".md")
TITLES = {"relay": "Relay", "relax": "Relax", "onnxruntime": "onnxruntime", "openvino": "OpenVINO"}
TOP = """\
---
hide: [toc]
---

# Operators of ONNX

The package onnx brings tests for backends: a model, inputs, and the right outputs. Each runs here as a file of a user
does: it is read, compiled, and cut into two stages where it has several operators. Its outputs are compared within the
tolerance of the test. Every test is right, or refused before it runs by a message that names the file, and mostly the
operator. In eight tests onnxruntime gives other numbers, or fails when it runs, and does so without us, too; OpenVINO
does so in [nine](engines.md#what-openvino-computes-otherwise).

- **Relay** runs the tests of onnx 1.16, the newest that TVM 0.19 takes. **Relax**, **onnxruntime** and **OpenVINO** run
  those of onnx 1.23.
- Where a model is refused because axes, shapes or other settings are inputs, all inputs but the first become constants
  ([`--input-values`](commands.md)), and the test is right if it is right then.
- What TVM refuses runs on an [engine](engines.md#what-tvm-refuses): Relax or onnxruntime has 1902 of the 2024 tests
  right, and OpenVINO none besides. Refused everywhere are outputs whose extents depend on data, inputs and outputs that
  are texts, sequences or optional, and models without inputs.
- bfloat16, and the numbers of 8, 4 and 2 bits that the package ml_dtypes gives numpy, go into onnxruntime, across its
  cuts, and out. TVM refuses them.
- OpenVINO is not given float64, integers where it computes in float32, and a few settings that it ignores
  ([the list](engines.md#what-openvino-computes-otherwise)): 107 of the refused tests were right by it all the same.
- An operator that onnxruntime lacks is expanded where ONNX defines it by others, or taken as one of an older opset.
- Nine tests of onnx 1.16 expect results that onnx has corrected since, and are left out.
- A test that is off by rounding counts as right, such as 1e-5 in place of 0 between sums of 450.

The rows have the tests of one operator alone; `python benchmarks/onnx_suite.py --table docs/onnx-coverage.csv` makes
them.

"""
# What was wrong, or no refusal, before somebody ran these tests.
MENDED = [
    *("cast_DOUBLE_to_FLOAT16", "cast_FLOAT_to_INT4", "castlike_DOUBLE_to_FLOAT16"),
    *("dft_axis", "dft_axis_opset19", "gelu_tanh_2"),
    *("gridsample_bilinear", "dynamicquantizelinear_expanded", "lppool_1d_default"),
    *("matmulinteger", "maxpool_2d_ceil_output_size_reduce_by_one", "maxunpool_export_with_output_shape"),
    *("quantizelinear_int4", "qlinearmatmul_2D_uint8_float16", "reduce_l2_empty_set_expanded"),
    *("reduce_log_sum_asc_axes_expanded", "reduce_max_empty_set", "reduce_sum_square_keepdims_example"),
    *("resize_downsample_scales_linear", "roialign_mode_max", "sequence_model3"),
    *("slice_start_out_of_bounds", "split_to_sequence_nokeepdims", "transpose_all_permutations_0"),
    *(
        "attention_23_boolmask_fullymasked_row_nan_robustness_expanded",
        "mod_float_edge_cases_fmod_0_float32",
        "tril_zero",
    ),
    *("AvgPool1d", "PReLU_1d_multiparam", "castlike_DOUBLE_to_FLOAT"),
]


def page() -> str:
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [f"| Operator | {' | '.join(TITLES.values())} |", f"|---|{'---:|' * len(TITLES)}"]
    lines += [
        f"| {row['operator']} | {' | '.join(row[name].replace('/', ' of ') for name in TITLES)} |" for row in rows
    ]
    return TOP + "\n".join(lines) + "\n"


def test_the_page_is_made_of_the_table() -> None:
    assert PAGE.read_text() == page()


@pytest.fixture(params=["tvm", "onnxruntime", "openvino"])
def compiler(request: pytest.FixtureRequest) -> str:
    needs("onnx")
    needs(request.param)
    if request.param != "tvm":
        needs("Relax")  # whose environment has a newer onnx
    return str(request.param)


def test_a_few_tests_of_onnx(compiler: str) -> None:
    from tests.support.onnx_suite import cases, verdict

    names = "test_reduce_sum_do_not_keepdims_example", "test_resize_downsample_scales_linear_antialias"
    found = [verdict(cases()[name], compiler) for name in names]
    assert found[0].outcome == "right"  # of several axes, TVM would take the first
    assert found[1].outcome == "right" or (found[1].outcome == "refused" and "operator Resize" in found[1].message)


@pytest.mark.thorough
def test_onnx_tests_are_right_or_refused_by_name(compiler: str) -> None:
    from tests.support.onnx_suite import cases, verdicts
    from tvm_pipeline_tvm.installed_ir import installed_ir

    if compiler == "tvm" and installed_ir() == "relay":
        prove_types()
    step, least = {"tvm": (90, 0.4), "onnxruntime": (24, 0.75), "openvino": (60, 0.4)}[compiler]
    names = [f"test_{name}" for name in MENDED if f"test_{name}" in cases()] + sorted(cases())[::step]
    found = list(verdicts(dict.fromkeys(names), compiler, workers=1))
    counts = Counter(each.outcome for each in found)
    assert [each for each in found if each.outcome not in ("right", "rounded", "refused", "engine")] == []
    assert counts["right"] > least * len(found), counts  # most of MENDED are refused


def prove_types() -> None:
    """Compile a model of most types: Relay's first compile of a type that is new to the cache takes a child seconds."""
    from tests.tvm.test_build import text_model
    from tvm_pipeline_tvm.host.detection import host_target
    from tvm_pipeline_tvm.relay.build import build_library

    types = "bool", "int8", "uint8", "int16", "int32", "uint32", "int64", "float64"
    casts = ", ".join(f'cast(%x, dtype="{type_}")' for type_ in types)
    build_library(text_model(f"({casts}, exp(%x))"), host_target())


def test_what_is_wrong_or_ends_its_process_is_told() -> None:
    needs("tvm")
    from onnx import TensorProto, helper

    from tests.support.onnx_suite import verdict, verdicts

    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    x = np.array([-1, 2], "float32")
    right, rounded, wrong = (
        verdict(SimpleNamespace(name="relu", model=model, data_sets=[([x], [y])], rtol=0, atol=0), "tvm").outcome
        for y in (np.maximum(x, 0), np.array([1e-7, 2], "float32"), x)
    )
    assert (right, rounded, wrong) == ("right", "rounded", "wrong")
    assert [each.outcome for each in verdicts(["no test has this name"], "tvm")] == ["crashed"]
