"""A fuzzer of modules of Relay as JSON: for `load` and TVM's reader, which a copy of the process tries first."""

from __future__ import annotations

import random
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import tvm.relay
from tvm import relay

from tests.support.mutations import mutated
from tvm_pipeline.errors import PipelineError
from tvm_pipeline.frontends import load
from tvm_pipeline_tvm.relay.importer import import_model


def fuzz_relay_json(draw: random.Random) -> None:
    """Read a damaged module of Relay, as JSON."""
    with tempfile.TemporaryDirectory() as folder, suppress(PipelineError):
        path = Path(folder) / "net.json"
        path.write_bytes(mutated("net.json", _relay_json(), draw))
        import_model(load(path))


FUZZERS = {"relay json": fuzz_relay_json}


@cache
def _relay_json() -> bytes:
    x = relay.var("x", shape=(1, 3, 8, 8))
    convolved = relay.nn.conv2d(x, relay.const(np.ones((4, 3, 3, 3), "float32")))
    pair = relay.split(relay.nn.relu(convolved), 2, axis=1)
    joined = relay.concatenate([pair[1], pair[0]], axis=1)
    return str(tvm.ir.save_json(tvm.IRModule.from_expr(relay.Function([x], joined)))).encode()
