"""What an open shape of an ONNX input is told as, and what to write in its place. Next: `onnx.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_BATCH = re.compile(r"(?i).*batch.*|n|b|bs")
_NAME = re.compile(r"[A-Za-z_]\w*")
_WORDS = {"H": "height", "W": "width"}


def advice(inputs: Mapping[str, Sequence[Any]]) -> str:
    """Return what shapes inputs have in the file, and the option that fixes them.

        images: [batch,3,height,width]  ->  "images:[1,3,height,width]" with numbers for height and width
        x:      [?,3,?,?]               ->  "x:[1,3,H,W]" with numbers for H (height) and W (width)

    Args:
        inputs: the protocol buffer's dimensions; one without a positive `dim_value` is open, and may have a name.
    """
    shown, given = [], []
    missing: dict[str, None] = {}
    for name, extents in inputs.items():
        known = [str(extent.dim_value) if extent.dim_value > 0 else _named(extent) or "?" for extent in extents]
        shown.append(f"input {name} has the shape [{','.join(known)}]")
        letters = _letters([extent.dim_value for extent in extents])
        for index, extent in enumerate(extents):
            own = _named(extent)
            if extent.dim_value > 0:
                continue
            if _BATCH.fullmatch(own) or (index == 0 and len(extents) > 1 and not own):
                known[index] = "1"
            else:
                known[index] = own if own and known.count(own) == 1 else letters[index]
                missing[known[index]] = None
        given.append(f"{name}:[{','.join(known)}]")
    text = f'{", ".join(shown)}; fix {"it" if len(given) == 1 else "them"} with `input_shapes` "{" ".join(given)}"'
    words = [f"{label} ({_WORDS[label]})" if label in _WORDS else label for label in missing]
    return f"{text} and numbers for {' and '.join(words)}, as the model was made for" if words else text


def _named(extent: Any) -> str:
    """Return the name of an open extent, where it has one that can stand in a shape."""
    name = extent.dim_param  # protobuf gives bytes where it is no text
    return name if isinstance(name, str) and _NAME.fullmatch(name) else ""


def _letters(extents: Sequence[int]) -> list[str]:
    """Return what axes are called that have no name: H and W in a picture, else by their number."""
    letters = [f"D{index}" for index in range(len(extents))]
    if len(extents) == 4:
        channels_last = extents[3] in (1, 3, 4) and extents[1] not in (1, 3, 4)
        letters[1 if channels_last else 2], letters[2 if channels_last else 3] = "H", "W"
    return letters
