"""Stands in for Google's edgetpu_compiler: gives the files back, with a report as version 16 prints it.

Inputs and outputs come back in the reverse order, since nothing promises theirs. Versions of operators that version 16
does not know are refused with its words; google-coral/edgetpu issues 631 and 845 and google-coral/libedgetpu issue 71
have the logs.

The environment says what goes wrong: FAKE_EDGETPU_COMPILER is `crash` (SIGSEGV), `silent` (exit 0, no file), `partial`
(the last file is missing), `hang` (with a child, as the real one has) or `fail` (exit 1). Every compilation adds a line
to the file that FAKE_EDGETPU_CALLS names. FAKE_EDGETPU_COMPILER_VERSION is another version, without the options of 16.
"""

# ruff: noqa: T201

import argparse
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

VERSION = f"Edge TPU Compiler version {os.environ.get('FAKE_EDGETPU_COMPILER_VERSION', '16.0.384591198')}"
CACHE_BYTES = 8 * 2**20
KNOWN = {"CONV_2D": 5, "EXP": 1, "FULLY_CONNECTED": 9, "TRANSPOSE_CONV": 3}  # the highest versions


def size(count: int) -> str:
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.2f}{name}"
    return f"{count:.2f}B"


def parsed(content: bytes) -> tuple:
    """Return the file as objects, and the kind and version of each of its operators."""
    from ai_edge_litert import schema_py_generated as schema

    names = {number: name for name, number in vars(schema.BuiltinOperator).items() if name.isupper()}
    model = schema.ModelT.InitFromPackedBuf(content, 0)
    codes = [(names[max(c.builtinCode, c.deprecatedBuiltinCode)], c.version) for c in model.operatorCodes]
    return model, [codes[operator.opcodeIndex] for operator in model.subgraphs[0].operators]


def reversed_ends(model: object, content: bytes) -> bytes:
    import flatbuffers

    graph = model.subgraphs[0]
    graph.inputs, graph.outputs = list(graph.inputs)[::-1], list(graph.outputs)[::-1]
    builder = flatbuffers.Builder(len(content))
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--out_dir", type=Path, default=Path())
    if "version 16" in VERSION:
        parser.add_argument("-t", "--timeout_sec", type=int, default=180)
        parser.add_argument("-d", "--search_delegate", action="store_true")
    parser.add_argument("-s", "--show_operations", action="store_true")
    parser.add_argument("-v", "--version", action="store_true")
    parser.add_argument("models", nargs="*", type=Path)
    options = parser.parse_args()
    print(VERSION, flush=True)
    if options.version:
        return 0
    if calls := os.environ.get("FAKE_EDGETPU_CALLS"):
        with open(calls, "a") as file:
            file.write(" ".join(path.name for path in options.models) + "\n")
    if "version 16" in VERSION:  # no log of 2.1 to 15.0 has this line
        print(f"Started a compilation timeout timer of {options.timeout_sec} seconds.", flush=True)
    mode = os.environ.get("FAKE_EDGETPU_COMPILER", "")
    if mode == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if mode == "silent":
        return 0
    if mode == "hang":
        if child := os.fork():
            print(f"child {child}", flush=True)
        time.sleep(600)
    if mode == "fail":
        print("ERROR: Attempting to use a delegate that only supports static-sized tensors", file=sys.stderr)
        print("Compilation failed: Model failed in Tflite interpreter.\nCompilation failed! ")
        return 1
    files = {path: parsed(path.read_bytes()) for path in options.models}
    for path, (_, operators) in files.items():
        for kind, version in operators:
            if version > KNOWN.get(kind, version):
                print(
                    f"ERROR: Didn't find op for builtin opcode '{kind}' version '{version}'. An older version of this "
                    "builtin might be supported. Are you using an old TFLite binary with a newer model?\n\n"
                    f"ERROR: Registration failed.\n\nInvalid model: {path}\nModel could not be parsed"
                )
                return 1
    if mode == "partial":
        files.popitem()
    compile_all(options, files)
    print("Compilation child process completed within timeout period.\nCompilation succeeded! ")
    return 0


def compile_all(options: argparse.Namespace, files: dict[Path, tuple]) -> None:
    contents = [path.read_bytes() for path in files]
    left = CACHE_BYTES
    cached = []
    for content in contents:
        cached.append(min(left, len(content)))
        left -= cached[-1]
    print(f"\nModel{'s' if len(files) > 1 else ''} compiled successfully in 35 ms.")
    for (path, (model, operators)), content, used in zip(files.items(), contents, cached, strict=True):
        compiled = options.out_dir / f"{path.stem}_edgetpu.tflite"
        compiled.write_bytes(reversed_ends(model, content))
        kinds = Counter(kind for kind, _ in operators)
        rows = "\n".join(f"{kind:<31}{count:<11}Mapped to Edge TPU" for kind, count in kinds.items())
        table = f"\nOperator                       Count      Status\n\n{rows}\n"
        compiled.with_suffix(".log").write_text(f"{VERSION}\nInput: {path}\nOutput: {compiled}\n{table}")
        print(
            f"\nInput model: {path}\nInput size: {size(len(content))}\n"
            f"Output model: {compiled}\nOutput size: {size(len(content))}\n"
            f"On-chip memory used for caching model parameters: {size(used)}\n"
            f"On-chip memory remaining for caching model parameters: {size(left)}\n"
            f"Off-chip memory used for streaming uncached model parameters: {size(len(content) - used)}\n"
            f"Number of Edge TPU subgraphs: 1\nTotal number of operations: {sum(kinds.values())}\n"
            f"Operation log: {compiled.with_suffix('.log')}"
        )
        print(table if options.show_operations else "See the operation log file for individual operation details.")


sys.exit(main())
