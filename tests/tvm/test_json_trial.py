"""Relay JSON that ends the process of its reader ends a copy of it, and an error says so."""

from __future__ import annotations

import json

import pytest

from tests.support.parts import needs

needs("tvm")

from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import ModelError
from tvm_pipeline_tvm.relay.importer import import_model

import tvm  # isort: skip
from tvm import relay  # isort: skip


def saved() -> dict:
    x = relay.var("x", shape=(1, 4))
    return json.loads(tvm.ir.save_json(tvm.IRModule.from_expr(relay.Function([x], relay.tanh(x)))))


def test_a_module_whose_reader_dies_is_refused() -> None:
    content = saved()
    sound = Model("net", "relay.json", json.dumps(content).encode())
    assert "tanh" in str(import_model(sound)[0])
    call = next(node for node in content["nodes"] if node["type_key"] == "relay.Call")
    call["attrs"]["args"] = "0"  # which is no list
    with pytest.raises(ModelError, match=r"net: a process in which TVM read .* was killed by SIG\w+: .*save_json"):
        import_model(Model("net", "relay.json", json.dumps(content).encode()))
