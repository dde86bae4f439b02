"""The cut drawn on the operator graph, as SVG for a page: a colour for each stage, and the name under the pointer.

The layout is that of `report/layered.py`. matplotlib, which draws it for reports, is not used here: it is an optional
dependency, and needs seconds of processor time for 1000 operators, which would slow the running pipeline.
"""

from __future__ import annotations

from dataclasses import replace
from xml.etree.ElementTree import Element, SubElement, tostring

from tvm_pipeline import Operator, OperatorGraph, Plan, Stage
from tvm_pipeline.report.drawing import CUT, INK, MARGIN, PALE, PALETTE
from tvm_pipeline.report.layered import BOX, Sheet, Vertex, folded_sheet, layered, legend, tensor_paths

UNITS = 100  # an inch; coordinates are whole
LEGEND_LINE = 0.2  # inches
LONGEST_KIND = 12


def cut_svg(graph: OperatorGraph, plan: Plan) -> bytes:
    """Return the graph as `plan` splits it: a box for each operator, in its stage's colour; crossing tensors are red.

    A box shows the operator's kind and its index in the graph, its tooltip the name. Drawing takes 30 ms of processor
    time for 100 operators, 0.4 s for 1000.

    Raises:
        PlanError: the plan is of another graph.
    """
    labels = {_label(operator, index): operator for index, operator in enumerate(graph.operators)}
    sheet = folded_sheet(layered(*_renamed(graph, plan, {operator.name: label for label, operator in labels.items()})))
    lines = legend(graph, plan)
    top = MARGIN + LEGEND_LINE * len(lines)
    width, height = sheet.width + 2 * MARGIN, sheet.height + top + MARGIN
    view = f"{_units(-MARGIN)} {_units(-top)} {_units(width)} {_units(height)}"
    svg = Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=view, width=_units(width), height=_units(height))
    svg.set("font-family", "sans-serif")
    svg.set("font-size", "9")
    _rectangle(svg, -MARGIN, -top, width, height, fill="white")
    for index, line in enumerate(lines):
        y = LEGEND_LINE * (index + 1) - top
        _rectangle(svg, 0, y - 0.07, 0.28, 0.14, fill=PALETTE[index % len(PALETTE)], stroke=INK)
        _text(svg, 0.38, y, line, INK, "start")
    _draw_links(svg, sheet)
    for vertex, (x, y) in sheet.at.items():
        if vertex.kind != "thread":
            _draw_vertex(svg, sheet, vertex, x, y, labels, plan)
    return tostring(svg)


def _label(operator: Operator, index: int) -> str:
    """Return the text of an operator's box, which no other box has."""
    if operator.is_host:
        return operator.name.removeprefix("host/")
    kind = "".join(filter(str.isprintable, operator.kind.partition("+")[0]))[:LONGEST_KIND].strip(" #")
    return f"{kind} {index}".lstrip()


def _renamed(graph: OperatorGraph, plan: Plan, names: dict[str, str]) -> tuple[OperatorGraph, Plan]:
    """Return graph and plan with other names of operators; names that the graph does not know stay."""
    operators = tuple(replace(operator, name=names[operator.name]) for operator in graph.operators)
    stages = tuple(Stage(s.devices, tuple(names.get(name, name) for name in s.operators)) for s in plan.stages)
    return replace(graph, operators=operators), replace(plan, stages=stages)


def _draw_links(svg: Element, sheet: Sheet) -> None:
    head = {"id": "head", "refX": "5", "refY": "3", "markerWidth": "6", "markerHeight": "6", "orient": "auto"}
    marker = SubElement(SubElement(svg, "defs"), "marker", head, markerUnits="userSpaceOnUse")
    SubElement(marker, "path", d="M0 0L6 3L0 6Z", fill=INK)
    for crosses, colour, breadth in ((False, INK, "0.8"), (True, CUT, "1.6")):
        group = SubElement(svg, "g", {"fill": "none", "stroke": colour, "stroke-width": breadth})
        for way in tensor_paths(sheet):
            if way.crosses == crosses:
                points = [f"{_units(x)} {_units(y)}" for x, y in way.points]
                path = f"M{points[0]} {'C' if len(points) == 4 else 'L'}{' '.join(points[1:])}"
                SubElement(group, "path", {"d": path, **({"marker-end": "url(#head)"} if way.arrives else {})})


def _draw_vertex(
    svg: Element, sheet: Sheet, vertex: Vertex, x: float, y: float, labels: dict[str, Operator], plan: Plan
) -> None:
    if vertex.kind == "cut":
        left, right = sheet.spans[sheet.column[vertex]]
        line = {"d": f"M{_units(left)} {_units(y)}H{_units(right)}", "stroke": CUT, "stroke-dasharray": "5 3"}
        SubElement(svg, "path", line)
    box = SubElement(svg, "g")
    colour, edge = "white", {"cut": "white", "terminal": PALE}.get(vertex.kind, INK)
    if vertex.kind == "operator":
        operator = labels[vertex.label]
        devices = " + ".join(plan.stages[vertex.stage].devices)
        title = f"{operator.name}: {operator.kind}; stage {vertex.stage} on {devices}"
        SubElement(box, "title").text = _printable(title)
        colour = PALETTE[vertex.stage % len(PALETTE)]
    _rectangle(box, x - vertex.width / 2, y - BOX / 2, vertex.width, BOX, fill=colour, stroke=edge, rx="4")
    _text(box, x, y, vertex.label, CUT if vertex.kind == "cut" else INK)


def _rectangle(parent: Element, x: float, y: float, width: float, height: float, **look: str) -> None:
    position = {"x": _units(x), "y": _units(y), "width": _units(width), "height": _units(height)}
    SubElement(parent, "rect", {**position, **look})


def _text(parent: Element, x: float, y: float, text: str, colour: str, anchor: str = "middle") -> None:
    look = {"x": _units(x), "y": _units(y + 0.03), "fill": colour, "text-anchor": anchor}
    SubElement(parent, "text", look).text = _printable(text)


def _printable(text: str) -> str:
    """Return the text without characters that XML does not allow, which names of tensors may contain."""
    return "".join(character if character.isprintable() else "�" for character in text)


def _units(inches: float) -> str:
    return str(round(UNITS * inches))
