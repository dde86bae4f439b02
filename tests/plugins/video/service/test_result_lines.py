"""One schema for results: the page lists every field of it, the file beside the page is it, and lines keep it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tvm_pipeline.runtime import Result
from tvm_pipeline_video.service.result_lines import ObjectLine, ResultLine, result_line, schema
from tvm_pipeline_video.service.video_extra import Analysis, Annotation, Frame
from tvm_pipeline_video.sinks import json_line
from tvm_pipeline_video.sources import LiveFrame

DOCS = Path(__file__).parents[4] / "docs"
IMAGE = np.zeros((2, 2, 3), np.uint8)
SCORES = {"scores": np.array([[0.5, np.nan, 0.25]], np.float32), "boxes": np.arange(8).reshape(1, 2, 4)}


def line_of(annotations=(), *, decoded=True, frame=None, **options) -> dict:
    frame = frame or Frame(3, 0.12, IMAGE, "film")
    seen = Analysis(frame, Result(3, SCORES, 0.01, frame), annotations)
    return json.loads(json_line(result_line(seen, decoded=decoded, **options)))


def test_there_are_always_annotations() -> None:
    assert line_of() == {"frame": 3, "time_s": 0.12, "latency_s": 0.01, "source": "film", "annotations": []}
    undecoded = line_of(decoded=False)
    assert undecoded["annotations"] == []
    assert undecoded["outputs"] == {
        "scores": {"shape": [1, 3], "argmax": 1, "max": None},  # nan is no JSON
        "boxes": {"shape": [1, 2, 4], "argmax": 7, "max": 7.0},
    }


def test_fields_that_not_every_run_has() -> None:
    live = LiveFrame(3, 0.12, IMAGE, "camera:0", 0.0)
    line = line_of(frame=live, model="faces", stand_ins={"tpu0": "TFLite on the CPU"})
    assert set(line) - set(line_of()) == {"model", "age_s", "stand_ins"}
    assert (line["model"], line["stand_ins"]) == ("faces", ["tpu0"])
    assert line["age_s"] > 0


numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)
annotations = st.builds(
    Annotation,
    st.text(),
    st.none() | numbers | numbers.map(np.float32),
    st.none() | st.tuples(numbers, numbers, numbers.map(np.float32), st.integers(0, 99).map(np.int64)),
    st.lists(st.tuples(numbers, numbers.map(np.float64))).map(tuple),
)


@examples(40)
@given(st.lists(annotations), st.booleans(), st.sampled_from(["", "faces"]))
def test_every_line_keeps_the_schema(found, decoded, model) -> None:
    line = line_of(found, decoded=decoded, model=model)
    again = msgspec.convert(line, ResultLine)  # strictly: no type is changed
    assert [annotation.label for annotation in again.annotations] == [annotation.label for annotation in found]
    definitions = schema()["$defs"]
    assert set(line) <= set(definitions["ResultLine"]["properties"])
    assert all(set(one) == set(definitions["Annotation"]["properties"]) for one in line["annotations"])
    assert json_line(again) == json_line(msgspec.json.decode(json_line(again), type=ResultLine))


@pytest.mark.parametrize(
    "wrong", [{"annotations": None}, {"frame": "3"}, {"annotations": [{"label": "x", "box": [1, 2, 3]}]}]
)
def test_the_schema_refuses_what_is_no_line(wrong) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**line_of(), **wrong}, ResultLine)


def fields(name: str = "ResultLine", prefix: str = "") -> Iterator[str]:
    definitions = schema(ObjectLine if name == "ObjectLine" else ResultLine)["$defs"]
    for field, kind in definitions[name]["properties"].items():
        yield prefix + field
        parts = [("[]", kind.get("items", {})), (".*", kind.get("additionalProperties", {}))]
        for below, item in (*parts, *(("", option) for option in kind.get("anyOf", ()))):
            if isinstance(item, dict) and "$ref" in item:
                yield from fields(item["$ref"].rpartition("/")[2], f"{prefix}{field}{below}.")


def test_the_page_explains_every_field() -> None:
    page = (DOCS / "results.md").read_text()
    assert sorted(re.findall(r"^\| `([\w.\[\]*]+)` \|", page, re.MULTILINE)) == sorted(fields())
    (example,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert msgspec.json.decode(example, type=ResultLine).annotations[0].label == "face"


def test_the_page_of_objects_explains_every_field() -> None:
    page = (DOCS / "tracking.md").read_text()
    own = {field for field in fields("ObjectLine") if not field.startswith("object.")}
    assert own <= set(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE))
    (example,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert msgspec.json.decode(example, type=ObjectLine).object.track == 3


@pytest.mark.parametrize(("name", "kind"), [("results", ResultLine), ("objects", ObjectLine)])
def test_the_file_beside_the_page_is_the_schema(name, kind) -> None:
    """Write it anew: python -c "import json; from tvm_pipeline_video.service.result_lines import *;
    print(json.dumps(schema(ResultLine), indent=2))" > docs/results.schema.json"""
    assert json.loads((DOCS / f"{name}.schema.json").read_text()) == json.loads(json.dumps(schema(kind)))
