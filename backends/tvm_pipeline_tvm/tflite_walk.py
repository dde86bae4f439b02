"""Walk a TFLite file before TVM imports it, and name each operator that will not work: which, why, and what to do.

TVM's own messages name no operator of the file, or stop at the first kind. Next: `relay/tflite_repairs.py` and
`relax/tflite_importer.py`, whose converters decide what is known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import tvm

from tvm_pipeline_tvm.mediapipe import TRANSPOSE_BIAS

_SHOWN = 3  # operators that a message names for each reason
_CONTROL = ("IF", "WHILE", "CALL_ONCE")
_STATE = ("VAR_HANDLE", "READ_VARIABLE", "ASSIGN_VARIABLE")
_CUSTOM = ("TFLite_Detection_PostProcess", TRANSPOSE_BIAS)  # those that TVM, or our converter, imports


def obstacles(parsed: Any, known: Collection[str]) -> str:
    """Return what TVM's importer cannot take of a parsed TFLite file, with the next step; empty where all is known.

    Operators have the names of the operator graph: the kind and the index in the file, such as `rfft2d_12`.

    Args:
        known: the kinds of operators that it imports.
    """
    import tflite

    kinds = {number: name for name, number in vars(tflite.BuiltinOperator).items() if name.isupper()}
    graph = parsed.Subgraphs(0)
    found: dict[str, list[str]] = {}
    for index in range(graph.OperatorsLength()):
        operator = graph.Operators(index)
        code = parsed.OperatorCodes(operator.OpcodeIndex())
        number = max(code.BuiltinCode(), code.DeprecatedBuiltinCode())
        kind = kinds.get(number, f"number {number}")
        custom = (code.CustomCode() or b"").decode(errors="replace")
        name = f"{kind.lower()}_{index} ({custom})" if kind == "CUSTOM" else f"{kind.lower()}_{index}"
        if reason := _reason(kind, custom, known):
            found.setdefault(reason, []).append(name)
        for tensor in _variables(graph, operator):
            reason = f"keeps a state between frames in the tensor {tensor}; {_WITHOUT_STATE}"
            found.setdefault(reason, []).append(name)
    if not found and parsed.SubgraphsLength() != 1:
        return f"it has {parsed.SubgraphsLength()} subgraphs, and TVM imports one; export the one that is to run alone"
    return "; ".join(f"{_listed(names)} {reason}" for reason, names in found.items())


_WITHOUT_STATE = "export the model with its state as an input and an output"


def _reason(kind: str, custom: str, known: Collection[str]) -> str:
    """Return why an operator of this kind cannot be imported; empty where it can."""
    if kind in _STATE:
        return f"keeps a state between frames ({kind}); {_WITHOUT_STATE}"
    if kind in _CONTROL:
        return f"runs other subgraphs of the file, by what was computed ({kind}); export it without control flow"
    if kind == "CUSTOM" and custom not in _CUSTOM:
        return (
            "is a custom operator, which only the program that it was made for has; convert the model without it, and "
            "compute that part outside"
        )
    if kind != "CUSTOM" and kind not in known:
        version = ".".join(tvm.__version__.split(".")[:2])
        return f"is {kind}, which TVM {version} does not import; convert the model without it"
    return ""


def _variables(graph: Any, operator: Any) -> Iterator[str]:
    """Yield the names of the state tensors that an operator reads."""
    for position in range(operator.InputsLength()):
        index = operator.Inputs(position)
        if index >= 0 and graph.Tensors(index).IsVariable():
            yield graph.Tensors(index).Name().decode(errors="replace")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    shown = ", ".join(names[:_SHOWN])
    return f"operator {shown}{more}" if len(names) == 1 else f"each of the operators {shown}{more}"
