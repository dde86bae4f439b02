"""What each IR does, with the test that shows it: the table in docs/relax.md is made of these rows.

After a change: python -c "from tests.test_ir_matrix import *; PAGE.write_text(page())".
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/relax.md"
BEGIN, END = "<!-- rows of tests/test_ir_matrix.py -->\n", "<!-- end of the rows -->\n"


class Row(NamedTuple):
    """One thing that an IR can do.

    Attributes:
        relay, relax: the test that shows it, `folder/file.py::test`; empty where the IR does not do it.
        note: what is different.
    """

    what: str
    relay: str
    relax: str
    note: str = ""


ROWS = (
    Row(
        "ONNX files",
        "tvm/test_importer.py::test_an_operator_that_is_refused_is_named_with_its_node",
        "relax/test_onnx_operators.py::test_operators_compute_what_they_do_in_onnxruntime",
        "[each operator](onnx-coverage.md)",
    ),
    Row(
        "TFLite files",
        "tvm/test_tflite_repairs.py::test_it_computes_what_tflite_computes",
        "relax/test_tflite_importer.py::test_it_computes_what_tflite_computes",
        "`RFFT2D` with Relax only",
    ),
    Row("Relay files, networks of `relay.testing`", "tvm/test_slicing.py::test_every_cut_is_bit_exact", ""),
    Row(
        "slices equal the whole bit for bit",
        "tvm/test_slicing.py::test_every_cut_is_bit_exact",
        "relax/test_slices.py::test_every_cut_is_equal_bit_for_bit",
    ),
    Row(
        "float32 kernels for AVX-512, AVX2, SSE",
        "plugins/kernels/relay/test_schedules.py::test_random_convolutions_have_the_bits_of_topi",
        "plugins/kernels/relax/test_conv2d.py::test_convolutions_of_any_shape",
    ),
    Row(
        "elementary functions in vectors",
        "plugins/kernels/relay/test_elementary.py::test_functions_are_right",
        "plugins/kernels/relax/test_elementary.py::test_functions_call_no_library",
    ),
    Row(
        "Winograd's algorithm within a tolerance",
        "plugins/kernels/relay/test_winograd.py::test_values_are_within_the_stated_tolerance",
        "plugins/kernels/relax/test_conv2d_winograd.py::test_values_are_those_of_a_direct_convolution",
    ),
    Row(
        "int8 kernels for VNNI, AVX2, SSE",
        "plugins/kernels/relay/test_schedules_int8.py::test_sums_are_exact",
        "relax/test_integer_layers.py::test_a_real_network_has_the_bits_of_xnnpack",
        "Relax has the bits of XNNPACK, Relay is some steps off after 50 layers",
    ),
    Row(
        "int8 in integers on aarch64",
        "tvm/test_int8.py::test_numbers_are_rounded_once_on_arm",
        "relax/test_integer_layers.py::test_aarch64_has_the_operators_of_x86_in_integers",
        "Relax has the bits of x86 on an emulated processor",
    ),
    Row(
        "weights in 16 bits",
        "",
        "plugins/kernels/relax/test_half_weights.py::test_values_are_those_of_rounded_weights_bit_for_bit",
    ),
    Row(
        "tuning on CPU cores",
        "plugins/kernels/relay/test_tuned_builds.py::test_every_choice_has_the_bits_of_the_rule",
        "plugins/kernels/relax/test_tuning.py::test_every_tile_has_the_bits_of_the_rule",
    ),
    Row(
        "results over inputs that nothing reads any more",
        "tvm/test_overwriting.py::test_kernels_of_relay",
        "relax/test_overwriting_relax.py::test_kernels_that_overwrite_have_the_same_bits",
    ),
    Row(
        "order of kernels of the least memory",
        "tvm/test_memory_order.py::test_no_order_needs_less",
        "relax/test_slices.py::test_memory_order_needs_no_more",
    ),
    Row(
        "concatenations in parts (`--memory-rewrite`)",
        "tvm/test_rewrite_concat.py::test_equal_outputs",
        "relax/test_rewrite_concat.py::test_every_network_computes_the_same_with_any_choice_in_parts",
    ),
    Row(
        "code for another processor",
        "tvm/test_linking.py::test_a_linker_alone_makes_a_library_for_another_processor",
        "relax/test_linking_relax.py::test_a_linker_alone_makes_a_library_for_another_processor",
    ),
    Row(
        "CUDA",
        "gpu/test_device_slices.py::test_stages_on_cpu_and_gpu_in_turn",
        "relax/test_device_slices.py::test_stages_on_cpu_and_gpu_in_turn",
        "Relax has fast convolutions without tuning",
    ),
    Row(
        "OpenCL",
        "gpu/test_pocl.py::test_slices_equal_the_unsplit_model",
        "relax/test_device_slices.py::test_stages_on_cpu_and_gpu_in_turn",
        "both ran on PoCL only; Relax by pyopencl",
    ),
    Row(
        "tuning on GPUs",
        "plugins/kernels/gpu/test_device_tuning.py::test_choices_have_the_bits_of_the_default",
        "plugins/kernels/relax/test_gpu_tuning.py::test_what_is_found_is_kept_and_used",
        "Relay's of TVM's schedules by AutoTVM, Relax's of our convolutions; neither ran on a real GPU",
    ),
    Row(
        "passes for scripts: extract, order, partition",
        "tvm/test_partition_pipeline.py::test_built_by_relay_it_computes_the_same_bits",
        "relax/test_partition_pipeline.py::test_stages_chain_to_the_bits_of_the_module",
    ),
    Row(
        "a pipeline of passes for TVM's own compile",
        "",
        "plugins/kernels/relax/test_cpu_pipeline.py::test_a_network_computes_the_same_by_fused_kernels_of_ours",
        "`cpu_pipeline`",
    ),
    Row(
        "Edge TPU regions of a file",
        "edgetpu/test_byoc.py",
        "relax/test_edgetpu_regions.py",
        "by BYOC (`relay.ext`) with Relay, by files with Relax",
    ),
)


def page() -> str:
    """Return docs/relax.md with the table of the rows."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    lines = ["| What | Relay | Relax | |", "|---|---|---|---|"]
    lines += [f"| {row.what} | {_yes(row.relay)} | {_yes(row.relax)} | {row.note} |" for row in ROWS]
    return head + BEGIN + "\n" + "\n".join(lines) + "\n\n" + END + rest.partition(END)[2]


def _yes(test: str) -> str:
    return "yes" if test else "no"


def test_the_page_is_made_of_the_rows() -> None:
    assert PAGE.read_text() == page()


@pytest.mark.parametrize("row", ROWS, ids=[row.what for row in ROWS])
def test_what_an_ir_does_is_shown_by_a_test(row: Row) -> None:
    assert row.relay or row.relax
    for test in filter(None, (row.relay, row.relax)):
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert not name or name in functions, test
