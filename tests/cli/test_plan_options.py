"""`tvm-pipeline plan` on an operator graph: objectives, limits, schedulers, and what is wrong with bad input."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.check_bound import check
from tvm_pipeline import read_graph
from tvm_pipeline.planning.registry import OWN

PROFILES = Path(__file__).parents[2] / "profiles"
RESNET = PROFILES / "keras" / "ResNet50.json"
CHECKER = Path(__file__).parents[2] / "tools/check_certificate.py"
SIX = PROFILES / "platforms" / "coral-usb-6.toml"
TWO = PROFILES / "platforms" / "coral-usb-2.toml"
LEXICOGRAPHIC = ["memory,communication", "memory,dram,communication", "dram,memory,communication"]
BY_EDGES = [objective.replace("communication", "edge_communication") for objective in LEXICOGRAPHIC]
CACHE_BYTES = 8 * 2**20


def figures_of(path: Path, stages: list[dict]) -> dict[str, int]:
    """Memory, overflow and communication of Yin et al., SEC 2022, from the file and the stages alone."""
    file = json.loads(path.read_text())
    stage_of = {name: index for index, stage in enumerate(stages) for name in stage["operators"]}
    nodes = file["nodes"]
    held = [sum(node["param_bytes"] for node in nodes if stage_of[node["name"]] == b) for b in range(len(stages))]
    last = {node["name"]: stage_of[node["name"]] for node in nodes}
    for source, reader in file["edges"]:
        writer, reads = nodes[source]["name"], stage_of[nodes[reader]["name"]]
        assert stage_of[writer] <= reads
        last[writer] = max(last[writer], reads)
    widest = [
        sum(node["output_bytes"] for node in nodes if stage_of[node["name"]] <= b < last[node["name"]])
        for b in range(len(stages) - 1)
    ]
    return {
        "memory_bytes": max(held),
        "dram_bytes": sum(max(0, size - CACHE_BYTES) for size in held),
        "communication_bytes": max(widest, default=0),
    }


@pytest.mark.parametrize("objective", LEXICOGRAPHIC)
def test_objectives_of_bytes_are_those_of_the_paper(cli, objective):
    outcome = cli("plan", RESNET, "--platform", SIX, "--stages", 4, "--objective", objective, "--json")
    assert outcome.code == 0, outcome.err
    planned = outcome.json
    assert planned["objectives"] == figures_of(RESNET, planned["stages"])
    assert planned["bound"] == [planned["objectives"][f"{part}_bytes"] for part in objective.split(",")]
    assert (planned["status"], planned["gap"], len(planned["stages"])) == ("optimal", 0, 4)


@pytest.mark.parametrize("objective", BY_EDGES)
def test_communication_by_edges_is_that_of_equations_9_and_10(cli, objective):
    outcome = cli("plan", RESNET, "--platform", SIX, "--stages", 4, "--objective", objective, "--json")
    assert outcome.code == 0, outcome.err
    planned = outcome.json
    file = json.loads(RESNET.read_text())
    stage_of = {name: index for index, stage in enumerate(planned["stages"]) for name in stage["operators"]}
    received = dict.fromkeys(range(4), 0)
    for source, reader in file["edges"]:
        writer, reads = file["nodes"][source], stage_of[file["nodes"][reader]["name"]]
        received[reads] += writer["output_bytes"] if stage_of[writer["name"]] != reads else 0
    figures = figures_of(RESNET, planned["stages"])
    assert planned["predicted"]["communication_bytes"] == figures.pop("communication_bytes")
    assert planned["objectives"] == {**figures, "edge_communication_bytes": max(received.values())}
    assert planned["bound"] == [planned["objectives"][f"{part}_bytes"] for part in objective.split(",")]
    assert (planned["status"], planned["gap"]) == ("optimal", 0)


def test_the_orders_disagree_as_they_should(cli):
    found = [
        cli("plan", RESNET, "--platform", SIX, "--stages", 4, "--objective", objective, "--json").json["objectives"]
        for objective in LEXICOGRAPHIC
    ]
    memory, memory_dram, dram = found
    assert memory["memory_bytes"] == memory_dram["memory_bytes"] <= dram["memory_bytes"]
    assert dram["dram_bytes"] <= memory_dram["dram_bytes"] <= memory["dram_bytes"]


def test_children_together(cli):
    objective = ("--objective", "memory,communication", "--stages", 4, "--json")
    free = cli("plan", RESNET, "--platform", SIX, *objective).json
    bound = cli("plan", RESNET, "--platform", SIX, "--children-together", *objective).json
    assert bound["objectives"]["memory_bytes"] >= free["objectives"]["memory_bytes"]
    stage_of = {name: index for index, stage in enumerate(bound["stages"]) for name in stage["operators"]}
    file = json.loads(RESNET.read_text())
    readers: dict[int, set[int]] = {}
    for source, reader in file["edges"]:
        readers.setdefault(source, set()).add(stage_of[file["nodes"][reader]["name"]])
    assert all(len(stages) == 1 for stages in readers.values())


@pytest.mark.parametrize("scheduler", [name for name in OWN if not (OWN[name].cut or name in ("cp-sat", "revisits"))])
def test_every_scheduler_can_be_asked_for(cli, scheduler):
    limit_s = 0.2 if scheduler == "local-search" else 2  # it takes all of it
    outcome = cli("plan", RESNET, "--platform", TWO, "--scheduler", scheduler, "--time-limit", limit_s, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["scheduler"] == scheduler
    names = [name for stage in outcome.json["stages"] for name in stage["operators"]]
    assert sorted(names) == sorted(operator.name for operator in read_graph(RESNET).operators)


def test_a_model_of_a_device_plans_time(cli):
    planned = cli("plan", RESNET, "--platform", TWO, "--json").json
    assert planned["objectives"]["throughput"] == planned["predicted"]["throughput_fps"] > 0
    best = planned["predicted"]["throughput_fps"]
    assert all(candidate["predicted"]["throughput_fps"] <= best for candidate in planned["candidates"])
    assert planned["why"]


def test_a_graph_alone_cannot_be_verified(cli):
    planned = cli("plan", RESNET, "--platform", TWO, "--json").json
    assert (planned["decided_by"], planned["verified"]) == ("prediction", [])
    assert cli("plan", RESNET, "--platform", TWO, "--verify", 0).code == 0
    refused(
        cli("plan", RESNET, "--platform", TWO, "--verify", 3), 2, "--verify 3", "operator graph alone", "leave it out"
    )
    refused(cli("plan", RESNET, "--platform", TWO, "--pareto", "--verify", 3), 2, "--verify 3", "compares none")
    refused(cli("plan", RESNET, "--platform", TWO, "--verify", -1), 2, "--verify -1.0: it must be a number of seconds")


def test_limits_are_kept(cli):
    fastest = cli("plan", RESNET, "--platform", TWO, "--json").json["predicted"]
    quickest = cli("plan", RESNET, "--platform", TWO, "--objective", "latency", "--json").json["predicted"]
    middle = (fastest["latency_s"] + quickest["latency_s"]) / 2
    limited = cli("plan", RESNET, "--platform", TWO, "--max-latency", middle, "--json").json["predicted"]
    assert limited["latency_s"] <= middle
    pace = fastest["throughput_fps"] * 0.9
    outcome = cli("plan", RESNET, "--platform", TWO, "--objective", "latency", "--min-throughput", pace, "--json")
    assert outcome.json["predicted"]["throughput_fps"] >= pace
    assert outcome.json["predicted"]["latency_s"] >= quickest["latency_s"]


@pytest.mark.parametrize("objective", ["throughput", "memory,dram,communication"])
def test_without_time_there_is_a_plan_with_its_gap(cli, objective):
    outcome = cli("plan", RESNET, "--platform", TWO, "--objective", objective, "--time-limit", 0, "--json")
    assert outcome.code == 0, outcome.err
    planned = outcome.json
    assert planned["status"] in ("optimal", "feasible")
    assert planned["bound"] is not None
    if planned["gap"] is None:
        assert 0 in planned["bound"]  # from which every gap is infinite, and JSON has no such number
    else:
        assert planned["gap"] >= 0


def test_the_pareto_front(cli):
    planned = cli("plan", RESNET, "--platform", TWO, "--pareto", "--json").json
    figures = [
        (-candidate["predicted"]["throughput_fps"], candidate["predicted"]["latency_s"])
        for candidate in planned["candidates"]
    ]
    assert figures == sorted(figures)
    assert not any(a != b and a[0] <= b[0] and a[1] <= b[1] for a in figures for b in figures)
    assert planned["why"].endswith("is beaten in everything by another") == (len(figures) > 1)


def test_the_plan_is_written_and_the_table_is_for_people(cli, tmp_path):
    outcome = cli("plan", RESNET, "--platform", TWO, "--objective", LEXICOGRAPHIC[0], "-o", tmp_path / "plan.txt")
    assert outcome.code == 0, outcome.err
    assert "ResNet50" in (tmp_path / "plan.txt").read_text()
    assert "has the best" in " ".join(outcome.out.split()) or "only plan" in outcome.out


def refused(outcome, code: int, *words: str) -> None:
    assert outcome.code == code, (outcome.out, outcome.err)
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in outcome.err


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--stages", 178], 1, ["178 stages", "only 177 operators"]),
        (["--stages", 3], 1, ["3 stages need as many devices that share no cores", "has 2"]),
        (["--stages", 0], 2, ["--stages 0"]),
        (["--scheduler", "dice"], 2, ["there is no scheduler dice", "ideals"]),
        (["--objective", "memory"], 2, ["there is no --objective 'memory'", "memory,communication"]),
        (["--objective", "communication,memory"], 2, ["there is no --objective"]),
        (["--time-limit", -1], 2, ["--time-limit -1: it must not be negative"]),
        (["--time-limit", "nan"], 2, ["--time-limit nan"]),
        (["--max-latency", 0], 2, ["--max-latency 0: it must be positive"]),
        (["--min-throughput", 10], 2, ["--min-throughput goes with objective latency or energy, not with throughput"]),
        (["--objective", "latency", "--max-latency", 1], 2, ["--max-latency goes with objective throughput"]),
        (["--max-latency", 1e-6], 1, ["--max-latency allows 1e-06"]),
        (["--objective", "latency", "--min-throughput", 1e9], 1, ["--min-throughput"]),
        (["--objective", "energy"], 1, ["nothing is known of the power of device", "active_w"]),
        (["--scheduler", "ideals", "--objective", BY_EDGES[0]], 2, ["ideals does not plan for", "use cp-sat or best"]),
        (["--scheduler", "revisits"], 1, ["no device can serve two of three or four stages", "cached_bytes"]),
        (
            ["--scheduler", "hybrid", "--objective", LEXICOGRAPHIC[0]],
            2,
            ["scheduler hybrid does not plan for objective memory,communication"],
        ),
        (["--scheduler", "single", "--stages", 2], 2, ["--stages 2: the plans of scheduler single have 1"]),
    ],
)
def test_options_that_cannot_be(cli, options, code, words):
    refused(cli("plan", RESNET, "--platform", TWO, *options), code, *words)


def written(path: Path, nodes: list[dict], edges: list[list[int]]) -> Path:
    path.write_text(json.dumps({"name": "net", "nodes": nodes, "edges": edges}))
    return path


def node(name: str, **figures: float) -> dict:
    return {"name": name, "output_bytes": 1, **figures}


@pytest.mark.parametrize(
    ("nodes", "edges", "words"),
    [
        ([node("a"), node("b"), node("c")], [[0, 1], [1, 2], [2, 1]], ["net.json", "cyclic", "c -> b -> c"]),
        ([node("a"), node("b"), node("c")], [[0, 1]], ["net.json", "in several parts", "c"]),
        ([node("a", macs=math.nan), node("b")], [[0, 1]], ["net.json", "macs", "a", "nan"]),
        ([node("a"), node("b", param_bytes=-3)], [[0, 1]], ["net.json", "param_bytes", "b", "-3"]),
        ([], [], ["net.json", "no nodes"]),
    ],
)
def test_graphs_that_cannot_be(cli, tmp_path, nodes, edges, words):
    refused(cli("plan", written(tmp_path / "net.json", nodes, edges), "--platform", TWO), 1, *words)


def test_a_platform_without_devices(cli, tmp_path):
    (tmp_path / "none.toml").write_text('name = "none"\ndevice = []\n')
    refused(cli("plan", RESNET, "--platform", tmp_path / "none.toml"), 1, "none.toml", "has no devices")


@pytest.mark.parametrize("objective", ["throughput", *LEXICOGRAPHIC])
def test_capacities_too_small(cli, tmp_path, objective):
    tight = TWO.read_text().replace("cache_bytes = 8388608", "cache_bytes = 8388608\nmemory_bytes = 3000000")
    (tmp_path / "tight.toml").write_text(tight)
    outcome = cli("plan", RESNET, "--platform", tmp_path / "tight.toml", "--objective", objective)
    refused(
        outcome, 1, "memory" if objective == "throughput" else "memory_bytes", "3000000" if "," in objective else ""
    )


def profile_of(graph: Path, seconds: list[float | None]) -> dict:
    read = read_graph(graph)
    return {
        "graph": read.name,
        "fingerprint": read.fingerprint,
        "devices": {"cpu": {"seconds": {o.name: s for o, s in zip(read.operators, seconds, strict=False)}}},
    }


@pytest.fixture
def chain_of_three(tmp_path) -> Path:
    return written(tmp_path / "net.json", [node("a"), node("b"), node("c")], [[0, 1], [1, 2]])


@pytest.fixture
def one_cpu(tmp_path) -> Path:
    (tmp_path / "cpu.toml").write_text('name = "box"\n[[device]]\nname = "cpu"\n')
    return tmp_path / "cpu.toml"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ([0.1, None, 0.1], ["no device can run operator b", "cpu"]),
        ([0.1, math.nan, 0.1], ["profile.json"]),
        ([0.1, -1.0, 0.1], ["profile.json", "-1.0", "measure again"]),
        ([0.1, 0.1], ["lists 2 operators", "the graph has 3"]),
    ],
)
def test_profiles_that_cannot_be(cli, chain_of_three, one_cpu, tmp_path, seconds, words):
    (tmp_path / "profile.json").write_text(json.dumps(profile_of(chain_of_three, seconds)))
    outcome = cli("plan", chain_of_three, "--platform", one_cpu, "--profile", tmp_path / "profile.json")
    refused(outcome, 1, *words)


def test_a_profile_of_another_graph(cli, chain_of_three, one_cpu, tmp_path):
    (tmp_path / "profile.json").write_text(json.dumps(profile_of(RESNET, [0.1] * 177)))
    outcome = cli("plan", chain_of_three, "--platform", one_cpu, "--profile", tmp_path / "profile.json")
    refused(outcome, 1, "was measured on ResNet50", "not on net")


def test_a_profile_of_an_earlier_version(cli, chain_of_three, one_cpu, tmp_path):
    """It listed its figures by position."""
    profile = profile_of(chain_of_three, [0.1] * 3) | {"devices": {"cpu": {"seconds": [0.1] * 3}}}
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    outcome = cli("plan", chain_of_three, "--platform", one_cpu, "--profile", tmp_path / "profile.json")
    refused(outcome, 1, "profile.json", "earlier version", "tvm-pipeline profile")


def test_nothing_says_how_fast_a_device_is(cli, chain_of_three, one_cpu):
    refused(cli("plan", chain_of_three, "--platform", one_cpu), 1, "nothing says how fast device cpu", "--profile")
    assert cli("plan", chain_of_three, "--platform", one_cpu, "--objective", LEXICOGRAPHIC[0]).code == 0


def test_a_limit_that_no_plan_keeps_is_answered_by_what_one_can_do(cli):
    best = cli("plan", RESNET, "--platform", TWO, "--json").json["predicted"]["throughput_fps"]
    told = cli("plan", RESNET, "--platform", TWO, "--objective", "latency", "--min-throughput", 1000)
    assert told.code == 1
    assert "--min-throughput" in told.err
    assert f"; the fastest plan makes {best:.4g} frames a second" in told.err
    told = cli("plan", RESNET, "--platform", TWO, "--max-latency", 1e-4)
    assert re.search("; the shortest latency of a plan is [0-9.e-]+ s$", told.err.strip()), told.err


def test_a_certificate_is_checked_by_a_program_that_trusts_nothing(cli, tmp_path):
    """The bounds are of modelled seconds, and of bytes. Other plans are refused before they are made."""
    platform = tmp_path / "no_bus.toml"
    platform.write_text(re.sub(r"(?m)^bus = .*\n", "", TWO.read_text()))
    files = [tmp_path / f"{objective}.cert" for objective in ("latency", "throughput", LEXICOGRAPHIC[1])]
    for file in files:
        planned = ("plan", RESNET, "--platform", platform, "--objective", file.stem, "--scheduler", "ideals")
        outcome = cli(*planned, "--certificate", file)
        assert outcome.code == 0, outcome.err
    ran = subprocess.run([sys.executable, "-I", "-S", CHECKER, *files], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.count(": checked: "), ran.stderr) == (0, 3, ""), ran.stdout
    bound = cli("plan", RESNET, "--platform", TWO, "--certificate", tmp_path / "bound.cert")
    assert bound.code == 0, bound.err
    assert check((tmp_path / "bound.cert").read_bytes()).startswith("ResNet50: no plan makes more than ")
    energy = ("--objective", "energy", "--certificate", tmp_path / "plan.cert")
    refused = cli("plan", RESNET, "--platform", TWO, *energy)
    assert refused.code == 2
    assert "there are certificates of plans by --scheduler ideals, cp-sat and chain" in " ".join(refused.err.split())
    assert not (tmp_path / "plan.cert").exists()
