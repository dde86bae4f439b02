"""`tvm-pipeline memory`: orders beside each other, what is alive at the fullest, and what is wrong with bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.onnx_networks import Net
from tools.check_memory import check


def branches(count: int = 3) -> dict:
    """All wide operators before the narrow ones that end them: listed, all the wide tensors are alive at once."""
    nodes = [{"name": "image", "output_bytes": 10}]
    nodes += [{"name": f"wide{i}", "output_bytes": 1000, "param_bytes": 5} for i in range(count)]
    nodes += [{"name": f"narrow{i}", "output_bytes": 10} for i in range(count)]
    nodes += [{"name": "add", "output_bytes": 10}]
    edges = [["image", f"wide{i}"] for i in range(count)] + [[f"wide{i}", f"narrow{i}"] for i in range(count)]
    return {"name": "net", "nodes": nodes, "edges": edges + [[f"narrow{i}", "add"] for i in range(count)]}


@pytest.fixture
def net(tmp_path) -> Path:
    (tmp_path / "net.json").write_text(json.dumps(branches()))
    return tmp_path / "net.json"


PLAN = """plan net by hand
objective throughput
status feasible
predicted
stage a
  image
  wide0
  wide1
  wide2
stage b c
  narrow0
  narrow1
  narrow2
  add
"""


def test_the_orders_of_a_graph(cli, net):
    """Listed, three wide tensors are alive, the image no more, and the first narrow one is written. One by one, it is
    the image, two narrow ones, a wide one and its own narrow one."""
    outcome = cli("memory", net, "--json")
    assert outcome.code == 0, outcome.err
    (found,) = outcome.json["parts"]
    assert found["peak_bytes"] == {"listed": 3010, "kahn": 3010, "least": 1030}
    assert (found["status"], found["bound_bytes"], found["gap"]) == ("optimal", 1030, 0.0)
    assert found["free_concatenations"] is None
    assert sorted(found["order"]) == sorted(node["name"] for node in branches()["nodes"])
    for step in found["fullest"]:
        assert sum(tensor["bytes"] for tensor in step["alive"]) == 1030
        assert step["alive"][0]["bytes"] == 1000
    # Each tensor of an arena takes a multiple of 64 bytes.
    assert found["arena_bytes"] == {"listed": 3136, "greedy": 1216, "exact": 1216, "bound": 1216}


def test_a_certificate_is_checked_by_the_program_of_tools(cli, net, tmp_path):
    outcome = cli("memory", net, "--certificate", tmp_path / "memory.cert")
    assert outcome.code == 0, outcome.err
    assert "written: " in outcome.out
    assert check((tmp_path / "memory.cert").read_bytes()) == (
        "net: an order of 1030 bytes, and none has less than 1030; "
        "an arena of 1216, and none of this order has less than 1216"
    )
    refused = cli("memory", net, "--certificate", net)
    assert refused.code == 2
    assert str(net) in refused.err


def test_concatenations_are_counted_as_copies_and_as_free(cli, tmp_path, monkeypatch):
    """Both parts with their copy; without it, the parts with what reads them. Inputs and outputs stay to the end."""
    sizes = {"image": 10, "left": 100, "right": 60, "concat": 160, "conv": 20}
    kinds = {"concat": "concatenation"}
    nodes = [{"name": n, "op": kinds.get(n, "conv2d"), "output_bytes": size} for n, size in sizes.items()]
    edges = [["image", "left"], ["image", "right"], ["left", "concat"], ["right", "concat"], ["concat", "conv"]]
    (tmp_path / "joined.json").write_text(json.dumps({"name": "joined", "nodes": nodes, "edges": edges}))
    (found,) = cli("memory", tmp_path / "joined.json", "--json").json["parts"]
    free = found["free_concatenations"]
    assert (found["operators"], free["operators"]) == (5, 4)
    assert found["peak_bytes"] == {"listed": 320, "kahn": 320, "least": 320}
    assert free["peak_bytes"] == {"listed": 180, "kahn": 180, "least": 180}
    assert sorted(free["order"]) == ["conv", "image", "left", "right"]
    monkeypatch.setenv("COLUMNS", "160")
    assert "joined, concatenations free" in cli("memory", tmp_path / "joined.json").out


@pytest.mark.thorough
def test_the_stages_of_a_plan_and_a_picture(cli, net, tmp_path):
    (tmp_path / "plan.txt").write_text(PLAN)
    picture = tmp_path / "memory.svg"
    outcome = cli("memory", net, "--plan", tmp_path / "plan.txt", "--plot", picture, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["plot"] == str(picture)
    names = [part["name"] for part in outcome.json["parts"]]
    assert names == ["net", "stage 0 on a", "stage 1 on b, c"]
    # What the first stage writes leaves it, and stays while the second one runs.
    assert [part["peak_bytes"]["least"] for part in outcome.json["parts"]] == [1030, 3010, 3040]
    assert picture.read_text().count("<svg") == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    (tmp_path / "plan.txt").write_text(PLAN.replace("wide1", "wide9"))
    assert f"{tmp_path / 'plan.txt'}: stage" in cli("memory", net, "--plan", tmp_path / "plan.txt").err


def test_people_read_tables(cli, net, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    outcome = cli("memory", net, "--on-chip", 1024)
    assert outcome.code == 0, outcome.err
    for text in ("3,010 (+192.2%)", "1,030", "optimal", "narrow2", "1,000", "Traffic of an on-chip memory of 1,024"):
        assert text in outcome.out


def test_traffic_is_listed_for_an_on_chip_memory(cli, net):
    moved = cli("memory", net, "--on-chip", 1100, "--json").json["parts"][0]["traffic_bytes"]
    # All fits, branch by branch: the one output is written.
    assert (moved["least"], moved["least_traffic"], moved["bound"]) == (10, 10, 10)
    assert moved["listed"] > 1000


def test_a_model_is_compiled_and_a_bundle_has_stages(cli, model, bundle):
    outcome = cli("memory", model, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["parts"][0]["peak_bytes"]["least"] > 0
    whole, *stages = cli("memory", bundle, "--json").json["parts"]
    assert whole["peak_bytes"] == outcome.json["parts"][0]["peak_bytes"]
    assert sum(stage["operators"] for stage in stages) == whole["operators"]


def test_compiled_stages_say_which_concatenations_they_copy(cli, tmp_path):
    net = Net()
    x = net.conv(net.input("data", 1, 16, 8, 8), 16, 16)
    joined = net.op("Concat", net.conv(x, 16, 16), net.conv(x, 16, 32, 1), axis=1)
    path = tmp_path / "joined.onnx"
    path.write_bytes(net.model("joined", net.conv(joined, 48, 16)).content)
    [whole] = cli("memory", path, "--json").json["compiled"]
    assert whole["stage"] == "stage 0 on cpu0"
    assert (whole["in_place"], whole["copied"]) == (1, 0)
    assert 0 < whole["arena_bytes"] <= whole["apart_bytes"]


def test_a_plan_lists_what_its_stages_need(cli, net, tmp_path, monkeypatch):
    """By parameters alone the whole model fits; with activations too, in the order of least memory only."""
    platform = 'name = "box"\n[[device]]\nname = "a"\nmemory_bytes = {}\n[device.model]\nmacs_per_s = 1e9\n'
    (tmp_path / "box.toml").write_text(platform.format(1045))
    arguments = ("plan", net, "--platform", tmp_path / "box.toml")
    outcome = cli(*arguments, "--json")
    assert outcome.code == 0, outcome.err
    (row,) = outcome.json["memory"]
    assert (row["parameter_bytes"], row["activation_bytes"], row["listed_bytes"]) == (15, 1030, 3010)
    assert row["memory_bytes"] == 1045
    monkeypatch.setenv("COLUMNS", "160")
    assert "marked: fits in the order of least memory only" in cli(*arguments).out
    (tmp_path / "box.toml").write_text(platform.format(1044))
    outcome = cli(*arguments)
    assert outcome.code == 1
    assert "15 bytes of parameters and at least 1030 of activations at operators " in outcome.err
    assert "(3010 in the listed order) are more than its 1044" in outcome.err


@pytest.mark.parametrize(
    ("spoil", "code", "said"),
    [
        (lambda net: net["edges"].append(["add", "wide0"]), 1, ["is cyclic", "narrow0 -> add -> wide0"]),
        (lambda net: net["nodes"][2].update(output_bytes=-1), 1, ["output_bytes of operator wide1 is -1"]),
        (lambda net: net["nodes"][2].pop("output_bytes"), 1, ["operator wide1 has neither output_bytes nor"]),
        (
            lambda net: net["nodes"][2].update(output_bytes=2**63),
            1,
            ["tensor wide1 has 9223372036854775808 bytes, and none has more than"],
        ),
        (lambda net: net["nodes"][2].update(output_bytes=0), 0, ["tensors of no bytes: wide1"]),
    ],
)
def test_bad_graphs(cli, net, spoil, code, said):
    spoiled = branches()
    spoil(spoiled)
    net.write_text(json.dumps(spoiled))
    outcome = cli("memory", net)
    assert outcome.code == code
    for text in said:
        assert text in outcome.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--on-chip", 0], "--on-chip 0"),
        (["--plot", "memory.pdf"], "--plot memory.pdf: pictures are .png or .svg"),
        (["--plan", "nowhere.txt"], "cannot read nowhere.txt"),
    ],
)
def test_bad_options(cli, net, options, said):
    outcome = cli("memory", net, *options)
    assert outcome.code in (1, 2)
    assert said in outcome.err
