"""`compile --carry`, and `run` of what it writes: the state goes from frame to frame, and the bundle keeps that."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.onnx_models import write_remembering_net
from tvm_pipeline import open_bundle
from tvm_pipeline.backends.carried import CarriedModel
from tvm_pipeline_video import open_source, preprocess, preprocessing_for

FILM = "synthetic:32x32@30:12"


@pytest.fixture(scope="module")
def remembering(tmp_path_factory) -> Path:
    return write_remembering_net(tmp_path_factory.mktemp("model") / "remembering.onnx")


def plain_loop(bundle: Path) -> list[dict[str, tuple[int, float]]]:
    """What a line says of each frame, by the unsplit model of the file in a loop that hands the state on."""
    found = []
    with open_bundle(bundle) as opened, open_source(FILM) as film:
        assert isinstance(opened.compiled, CarriedModel)
        model, settings = opened.compiled.inner, preprocessing_for(opened.graph)
        names = model.graph.operator_names
        with closing(model.stage(names, opened.platform.devices[0])) as whole:
            arrays = {port.name: port.buffer() for port in (*whole.inputs, *whole.outputs)}
            state, state_next = arrays["state"], arrays[model.graph.outputs[1]]
            state[...] = 0
            for frame in film:
                preprocess(frame.image, settings, arrays["picture"])
                whole.run([arrays[port.name] for port in whole.inputs], [arrays[port.name] for port in whole.outputs])
                found.append(
                    {name: (int(arrays[name].argmax()), float(arrays[name].max())) for name in model.graph.outputs}
                )
                state[...] = state_next
    return found


def test_a_bundle_carries_the_state_through_a_run(cli, remembering, tmp_path):
    bundle, lines = tmp_path / "net.tar", tmp_path / "lines.jsonl"
    assert cli("compile", remembering, "-o", bundle, "--carry", "state:state_next", "--verify", 0).code == 0
    outcome = cli("run", bundle, "--source", FILM, "--results", lines)
    assert outcome.code == 0, outcome.err
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    found = [{name: (seen["argmax"], seen["max"]) for name, seen in row["outputs"].items()} for row in rows]
    assert found == plain_loop(bundle)
    assert found[3] != found[11]  # it is no still picture
    refused = cli("run", bundle, "--source", FILM, "--source", "synthetic:32x32@30:13")
    assert refused.code == 2
    assert (
        "carries a state (state) from frame to frame, which several sources in turn would mix; give it one"
        in refused.err
    )


def test_a_pair_that_does_not_exist_is_told(cli, remembering, tmp_path):
    outcome = cli("compile", remembering, "-o", tmp_path / "net.tar", "--carry", "state:nothing")
    assert outcome.code == 2
    assert "--carry state:nothing: remembering has no output nothing; its outputs are " in outcome.err
    assert not (tmp_path / "net.tar").exists()
