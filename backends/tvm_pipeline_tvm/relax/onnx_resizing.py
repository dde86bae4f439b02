"""Resize and Upsample of ONNX as TVM 0.27 computes them rightly.

TVM takes sizes and computes scales of its own from them. Where a scale is given that leads to no whole number of rows
(0.6 of 4), where axes other than rows and columns are resized, or where it has no such mode (antialias), resizing is a
product with a matrix for each axis: it is linear, and onnx's own implementation says which matrix. Next:
`onnx_nodes.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from tvm_pipeline_tvm.relax.onnx_site import NodeSite, Rewrite


def _resize(site: NodeSite) -> list[Any] | None:
    """Resize(x, roi, scales) -> Resize(x, "", "", sizes), as opset 18 has it, or products with matrices."""
    node, attributes = site.node, site.attributes
    is_old = node.op_type == "Upsample" or site.opset < 11
    if is_old:
        attributes |= {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        scales, sizes = site.value(1), None
        if "scales" in attributes:
            scales = np.array(attributes.pop("scales"))
    else:
        scales, sizes = site.value(2), site.value(3)
    shape = site.look(node.input[0]).shape
    axes = [int(axis) % len(shape) for axis in attributes.pop("axes", range(len(shape)))]
    policy = attributes.pop("keep_aspect_ratio_policy", "stretch")
    if scales is not None and scales.size:
        factors = dict(zip(axes, scales.astype("float64").tolist(), strict=True))
        target = [math.floor(extent * factors.get(axis, 1.0) + 1e-5) for axis, extent in enumerate(shape)]
    elif sizes is not None and sizes.size:
        wanted = dict(zip(axes, sizes.tolist(), strict=True))
        if policy != "stretch":
            choose = min if policy == "not_larger" else max
            scale = choose(size / shape[axis] for axis, size in wanted.items())
            wanted = {axis: math.floor(scale * shape[axis] + 0.5) for axis in wanted}
        target = [wanted.get(axis, extent) for axis, extent in enumerate(shape)]
        factors = {axis: target[axis] / shape[axis] for axis in axes}
        if policy != "stretch":
            factors = dict.fromkeys(axes, scale)
    else:
        raise ValueError("its scales and sizes are no constants; export the model with fixed shapes")
    crops = attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    if crops and (len(axes) < len(shape) or target[:2] != list(shape[:2])):
        raise ValueError("TVM crops and resizes rows and columns alone, with a region for all axes")
    if target == list(shape) and not crops:
        return [helper.make_node("Identity", [node.input[0]], node.output)]
    if not crops and not _is_tvms(attributes, shape, target, factors):
        if policy != "stretch":
            raise ValueError(f"TVM keeps no ratio of sides ({policy}); export the model with the sizes that it gives")
        return _by_matrices(site, attributes, target, factors)
    for name in ("antialias", "width_scale", "height_scale"):
        attributes.pop(name, None)
    inputs = [node.input[0], site.input(1) if crops else "", "", site.name("sizes")]
    made = helper.make_node("Resize", inputs, node.output, node.name, **attributes)
    return [site.constant("sizes", np.array(target, "int64")), made]


def _is_tvms(attributes: dict[str, Any], shape: Sequence[int], target: list[int], factors: dict[int, float]) -> bool:
    """Return whether TVM resizes as ONNX does: it knows sizes alone, from which it computes scales anew."""
    mode = attributes.get("coordinate_transformation_mode", "half_pixel")
    if attributes.get("antialias") or mode == "half_pixel_symmetric" or target[:2] != list(shape[:2]):
        return False
    if mode == "align_corners" and min(target[2:]) == 1:
        return False
    return len(shape) in (3, 4, 5) and all(
        abs(shape[axis] * factor - target[axis]) < 1e-3 for axis, factor in factors.items()
    )


def _by_matrices(site: NodeSite, attributes: dict[str, Any], target: list[int], factors: dict[int, float]) -> list[Any]:
    """Resize one axis after another by a matrix: that which onnx's own implementation makes of the unit matrix."""
    shape, nodes, data = site.look(site.node.input[0]).shape, [], site.node.input[0]
    dtype = site.look(site.node.input[0]).dtype
    changed = [axis for axis, extent in enumerate(target) if extent != shape[axis] or factors.get(axis, 1.0) != 1.0]
    for axis in changed:
        resize = helper.make_node("Resize", ["x", "", "scales"], ["y"], **attributes)
        graph = helper.make_graph(
            [resize],
            "one axis",
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "scales")],
            [helper.make_empty_tensor_value_info("y")],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)])
        given = {"x": np.eye(shape[axis], dtype="float32"), "scales": np.array([1, factors[axis]], "float32")}
        matrix = np.asarray(ReferenceEvaluator(model).run(None, given)[0])[:, : target[axis]].astype(dtype)
        order = [each for each in range(len(shape)) if each != axis] + [axis]
        moved, product, back = (site.name(f"{name}/{axis}") for name in ("moved", "product", "back"))
        nodes += [
            site.constant(f"matrix/{axis}", matrix),
            helper.make_node("Transpose", [data], [moved], perm=order),
            helper.make_node("MatMul", [moved, site.name(f"matrix/{axis}")], [product]),
            helper.make_node("Transpose", [product], [back], perm=np.argsort(order).tolist()),
        ]
        data = back
    return [*nodes, helper.make_node("Identity", [data], site.node.output, site.node.name)]


RESIZING: dict[str, Rewrite] = {"Resize": _resize, "Upsample": _resize}
