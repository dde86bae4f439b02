"""Write the operator graphs of SwiftNet and of its three cells from its .tflite file.

    python benchmarks/export_swiftnet.py submission-uint8.lite profiles/swiftnet

The file is `vwwc-224/submission-uint8.lite` of github.com/newwhitecheng/vwwc19-submission at b3be9a7; no other one is
accepted. The graphs have its operators and shapes, and none of its weights. Operators and tensors are renamed by their
place in the file.
"""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import replace
from pathlib import Path

import msgspec

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.errors import ModelError
from tvm_pipeline.files import read_bytes, write_bytes
from tvm_pipeline_edgetpu.model import parse_model

SHA256 = "716f619d4685182d73163bb781cd362b80804299e91c517dae876eeded58ee82"
# The first and the last operator of each cell: from behind the pooling that makes its input to the sum at its end.
CELLS = {"swiftnet-cell-a": (5, 32), "swiftnet-cell-b": (34, 56), "swiftnet-cell-c": (58, 81)}


def renamed(graph: OperatorGraph) -> OperatorGraph:
    """Return the graph with the input called `image`, and with the output of operator 7 called `t7`."""
    names = {graph.inputs[0].name: "image"}
    names |= {operator.outputs[0].name: f"t{index}" for index, operator in enumerate(graph.operators)}
    operators = tuple(
        replace(
            operator,
            inputs=tuple(names[read] for read in operator.inputs),
            outputs=tuple(replace(tensor, name=names[tensor.name]) for tensor in operator.outputs),
        )
        for operator in graph.operators
    )
    inputs = tuple(replace(tensor, name=names[tensor.name]) for tensor in graph.inputs)
    return OperatorGraph("swiftnet", inputs, operators, tuple(names[output] for output in graph.outputs))


def cell(graph: OperatorGraph, name: str, first: int, last: int) -> OperatorGraph:
    """Return the operators from `first` to `last` as a graph of their own."""
    operators = graph.operators[first : last + 1]
    written = {tensor.name for operator in operators for tensor in operator.outputs}
    given = dict.fromkeys(read for operator in operators for read in operator.inputs if read not in written)
    later = {read for operator in graph.operators[last + 1 :] for read in operator.inputs}
    return OperatorGraph(name, tuple(graph.tensors[read] for read in given), operators, tuple(sorted(written & later)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    content = read_bytes(options.file, ModelError)
    if (found := hashlib.sha256(content).hexdigest()) != SHA256:
        parser.error(f"{options.file} has the SHA-256 {found}, and {SHA256} is needed; take the file that --help names")
    whole = renamed(parse_model(options.file, content).graph)
    options.folder.mkdir(parents=True, exist_ok=True)
    for graph in (whole, *(cell(whole, name, *ends) for name, ends in CELLS.items())):
        write_bytes(options.folder / f"{graph.name}.json", msgspec.json.encode(graph) + b"\n")


if __name__ == "__main__":
    main()
