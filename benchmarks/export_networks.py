"""Write the networks that benchmarks measure as ONNX files, for engines and environments without Relay.

    python benchmarks/export_networks.py FOLDER [NAME ...]

It runs in an environment with Relay, whose `relay.testing` has most of them. Built-in networks get the weights under
which outputs differ (`networks.load_lively`). A file that is there already is kept. Shapes that a file leaves open
are fixed to those of networks.py.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import onnx
from networks import MODELS, load_lively
from peers import network_file

from tvm_pipeline.files import write_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=list(MODELS), help="as networks.py knows them")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        file = options.folder / f"{name}.onnx"
        if file.exists():
            continue
        with tempfile.TemporaryDirectory() as folder:
            proto = onnx.load(network_file(load_lively(name), Path(folder)))
        write_bytes(file, onnx.shape_inference.infer_shapes(proto).SerializeToString())


if __name__ == "__main__":
    main()
