"""Fixed seeds of every fuzzer, and the seeds that found something once."""

from __future__ import annotations

import pytest

from tests.fuzz import feed, fuzzers
from tests.support.examples import seeds

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
    ("relay json", 100297),
    ("relay json", 1153871522),  # attributes that are no dictionary
    ("relay json", 1153873101),  # TVM dies of the module after it was read
]


@pytest.mark.parametrize("name", fuzzers())
def test_fixed_seeds(name):
    for seed in seeds(24):
        feed(name, seed)


@pytest.mark.parametrize(("name", "seed"), FOUND)
def test_what_was_found_stays_mended(name, seed):
    feed(name, seed)
