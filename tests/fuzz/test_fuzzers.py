"""Fixed seeds of every fuzzer, and the seeds that found something once."""

from __future__ import annotations

import pytest

from tests.fuzz import feed, fuzzers
from tests.support.examples import seeds

NEEDS_RELAY = pytest.mark.needs("Relay")
# (fuzzer, seed): what the fuzzer found with it is mended.
FOUND = [
    pytest.param(
        "settings", 972876002, marks=pytest.mark.needs("tvm_pipeline_video")
    ),  # an address that is longer than the name of a file can be
    ("onnx files", 9758),
    ("onnx files", 13640),
    ("onnx files", 1153872800),  # an input of 20 GB that becomes a constant
    ("onnx files", 1153889132),  # the name of an extent is no text
    ("tflite files", 12475),
    pytest.param("relay json", 100297, marks=NEEDS_RELAY),
    pytest.param("relay json", 1153871522, marks=NEEDS_RELAY),  # attributes that are no dictionary
    pytest.param("relay json", 1153873101, marks=NEEDS_RELAY),  # TVM dies of the module after it was read
]


@pytest.mark.parametrize("name", fuzzers())
def test_fixed_seeds(name):
    for seed in seeds(24):
        feed(name, seed)


@pytest.mark.parametrize(("name", "seed"), FOUND)
def test_what_was_found_stays_mended(name, seed):
    feed(name, seed)
