"""What a model's file says about itself: its labels, its task, the pictures that it takes. Untrusted, and only text.

    ONNX      the properties of the model, such as Ultralytics' `names`, `task`, `stride` and `imgsz`
    TFLite    the files of the archive that follows the model (labels, Ultralytics' metadata.json), and the
              normalisation of TensorFlow's TFLITE_METADATA

All values are text. Keys besides the file's own: `producer_name` (ONNX), `labels` (lines), `input_mean` and `input_std`
(numbers with blanks between them); `input_quantization` and `output_quantization` (scale and zero point of each tensor,
commas between tensors, empty for one that is not quantised). Read next: decoders/choice.py, which reads them.
"""

from __future__ import annotations

import ast
import io
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

_INDEX = re.compile(r"[0-9]{1,9}")
MOST_BYTES = 1 << 20  # of all texts in an archive
MOST_FILES = 100
MOST_CHARACTERS = 1 << 19  # of a table in Python's notation, whose parser takes 500 bytes for each
LARGEST = 1 << 15  # pixels along a side of a picture


def onnx_metadata(proto: Any) -> dict[str, str]:
    """Return the properties of an ONNX model."""
    found = {entry.key: entry.value for entry in proto.metadata_props}
    return {"producer_name": proto.producer_name, **found} if proto.producer_name else found


def stated_extents(metadata: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the height and the width that Ultralytics writes as `imgsz`; None without them.

    Examples:
        >>> stated_extents({"imgsz": "[320, 640]"})
        (320, 640)
    """
    match literal(metadata.get("imgsz", "")):
        case [int(height), int(width)] if min(height, width) > 0 and max(height, width) <= LARGEST:
            return height, width
    return None


def literal(text: str, longest: int = 100) -> Any:
    """Return the value of a text in Python's notation; None where it is none, or of more than `longest` characters.

    Examples:
        >>> literal("[17, 3]"), literal("17 and 3"), literal("-" * 1000)
        ([17, 3], None, None)
    """
    try:
        return ast.literal_eval(text) if len(text) <= longest else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def stated_shape(metadata: Mapping[str, str], extents: list[int]) -> tuple[int, ...] | None:
    """Return the shape of a picture whose batch, height and width are open (0), where the metadata states a size.

    Examples:
        >>> stated_shape({"imgsz": "[320, 640]"}, [0, 3, 0, 0])
        (1, 3, 320, 640)
        >>> stated_shape({"imgsz": "[320, 640]"}, [1, 3, 224, 224])
    """
    stated = stated_extents(metadata)
    if stated is None or len(extents) != 4 or extents[0] > 1 or extents[1] not in (1, 3) or all(extents):
        return None
    height, width = stated
    return (1, extents[1], extents[2] or height, extents[3] or width)


def tflite_metadata(content: bytes, parsed: Any) -> dict[str, str]:
    """Return what a TFLite file says: the texts of its archive, normalisation of its first input, quantisation.

    Args:
        content: the bytes of the file.
        parsed: the model, as the package tflite reads it.
    """
    found: dict[str, str] = {}
    for name, text in _texts(content).items():
        table = _table(text)
        if table is not None:  # Ultralytics' metadata.json or temp_meta.txt
            found |= table
        elif name.endswith(".txt"):
            found.setdefault("labels", text)
    if parsed.SubgraphsLength():
        found |= _quantization(parsed.Subgraphs(0))
    for index in range(min(parsed.MetadataLength(), MOST_FILES)):
        entry = parsed.Metadata(index)
        if entry.Name() == b"TFLITE_METADATA":
            try:
                found |= _normalisation(parsed.Buffers(entry.Buffer()).DataAsNumpy().tobytes())
            except (struct.error, IndexError, ValueError, TypeError, AttributeError):
                continue  # a damaged description of a sound model
    return found


def _quantization(graph: Any) -> dict[str, str]:
    """Return scale and zero point of the inputs and the outputs, where one of them is quantised."""
    found = {}
    for key, of, count in (
        ("input_quantization", graph.Inputs, graph.InputsLength()),
        ("output_quantization", graph.Outputs, graph.OutputsLength()),
    ):
        pairs = []
        for index in range(count):
            how = graph.Tensors(of(index)).Quantization()
            whole = how is not None and how.ScaleLength() == how.ZeroPointLength() == 1
            pairs.append(f"{float(how.Scale(0))!r} {int(how.ZeroPoint(0))}" if whole else "")
        if any(pairs):
            found[key] = ",".join(pairs)
    return found


def quantization_of(text: str) -> list[tuple[float, int] | None]:
    """Return scale and zero point of each tensor, None for one that is not quantised, or whose text is damaged.

    Examples:
        >>> quantization_of("0.5 -3,,0.25 0")
        [(0.5, -3), None, (0.25, 0)]
    """
    found: list[tuple[float, int] | None] = []
    for pair in text.split(","):
        try:
            scale, zero = pair.split()
            found.append((float(scale), int(zero)) if 0 < float(scale) < float("inf") else None)
        except ValueError:
            found.append(None)
    return found


def _texts(content: bytes) -> dict[str, str]:
    """Return the small texts of the archive after the model, by name; nothing is unpacked to a file."""
    found: dict[str, str] = {}
    left = MOST_BYTES
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for entry in archive.infolist()[:MOST_FILES]:
                if entry.filename.lower().endswith((".txt", ".json")) and entry.file_size <= left:
                    with archive.open(entry) as file:
                        text = file.read(left)
                    left -= len(text)
                    found[entry.filename.lower()] = text.decode(errors="replace")
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError, zlib.error):
        pass  # no archive, or one that is damaged: the model is sound without it
    return found


def _table(text: str) -> dict[str, str] | None:
    """Return a table of texts from a table in JSON or in Python's notation; None where the text is neither."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        table = literal(text, MOST_CHARACTERS)
    return {str(key): _text(value) for key, value in table.items()} if isinstance(table, dict) else None


def _text(value: Any) -> str:
    if isinstance(value, dict):  # JSON has texts for keys: {"0": "person"}
        value = {int(key) if _INDEX.fullmatch(str(key)) else key: entry for key, entry in value.items()}
    return str(value)


def _normalisation(description: bytes) -> dict[str, str]:
    """Return mean and std of the first input, by the flatbuffer schema of TFLite's metadata (metadata_schema.fbs)."""
    from flatbuffers.number_types import Float32Flags, UOffsetTFlags
    from flatbuffers.table import Table

    root = Table(description, struct.unpack_from("<I", description)[0])

    def tables(table: Any, field: int) -> list[Any]:
        """Return the tables of a vector."""
        offset = table.Offset(4 + 2 * field)
        if not offset:
            return []
        start, length = table.Vector(offset), min(table.VectorLen(offset), MOST_FILES)
        return [Table(description, table.Indirect(start + 4 * index)) for index in range(length)]

    def numbers(table: Any, field: int) -> str:
        offset = table.Offset(4 + 2 * field)
        length = min(table.VectorLen(offset), 4) if offset else 0
        start = table.Vector(offset) if offset else 0
        return " ".join(repr(table.Get(Float32Flags, start + 4 * index)) for index in range(length))

    for subgraph in tables(root, 3)[:1]:
        for tensor in tables(subgraph, 2)[:1]:
            for unit in tables(tensor, 4):
                kind, options = unit.Offset(4), unit.Offset(6)
                if kind and options and description[kind + unit.Pos] == 1:  # NormalizationOptions
                    offset = unit.Get(UOffsetTFlags, options + unit.Pos)
                    chosen = Table(description, options + unit.Pos + offset)
                    return {"input_mean": numbers(chosen, 0), "input_std": numbers(chosen, 1)}
    return {}
