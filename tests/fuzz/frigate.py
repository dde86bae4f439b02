"""Requests that Frigate does not send: each gets an answer that Frigate takes."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import numpy as np
import zmq  # noqa: F401 -- the fuzzer is left out without it

from tests.support.mutations import flipped, spliced
from tvm_pipeline_video import Interpretation, Preprocessing
from tvm_pipeline_video.service.frigate import Detector

SHAPE = (1, 8, 16, 3)
VALUES: list[Any] = [
    *(SHAPE, [1, 3, 8, 16], [], [0], [-1, 2], [1 << 70], 1e999, None, True, "uint8", "float32"),
    "O",
    {},
]
KEYS = ("shape", "dtype", "model_request", "model_data", "model_name", "model_type")


@cache
def detector() -> Detector:
    return Detector(Interpretation(Preprocessing(size=(16, 8)), lambda *_: [], "", ()), "net")


def frigate(rng: random.Random) -> None:
    about = {"shape": SHAPE, "dtype": rng.choice(("uint8", "float32"))}
    about |= {rng.choice(KEYS): rng.choice(VALUES) for _ in range(rng.choice((0, 0, 1, 3)))}
    header = json.dumps(about).encode()
    for _ in range(rng.choice((0, 0, 1, 3))):
        header = rng.choice((flipped, spliced))(header, rng)
    sizes = rng.choices((384, 1536, 0, 1, 385), (9, 9, 1, 1, 1), k=rng.choice((1, 1, 1, 0, 2)))
    found = detector().prepared([header, *map(rng.randbytes, sizes)])
    if not isinstance(found, list):
        assert found.shape == (1, 3, 8, 16)
        assert found.dtype == np.float32
        found = detector().answer({})
    first, *rest = found
    told = json.loads(first)
    if rest:
        assert np.frombuffer(rest[0], told["dtype"]).reshape(told["shape"]).shape == (20, 6)
    else:
        assert told["model_loaded"]


FUZZERS = {"frigate": frigate}
