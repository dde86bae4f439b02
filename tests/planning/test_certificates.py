"""Certificates of plans, as `tools/check_certificate.py` checks them, against every plan that there is."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support import certificates
from tests.support.brute_force import every_plan
from tests.support.certificates import mutated
from tests.support.graphs import LEXICOGRAPHIC, Traits, lexicographic_problem, random_problem, randoms
from tools import check_certificate
from tvm_pipeline import planning
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.errors import InfeasibleError, OptionError, PipelineError
from tvm_pipeline.planning.certificate import certificate

Stated = dict[str, Any]


def certified(rng: random.Random) -> Stated:
    """Return the certificate of a small random problem that has a plan."""
    objective = rng.choice(("throughput", "latency", *LEXICOGRAPHIC))
    together = rng.random() < 0.3
    if objective in LEXICOGRAPHIC:
        problem = lexicographic_problem(rng, objective, operators=(2, 5), devices=(1, 3), children_together=together)
    else:
        traits = Traits(memory=False, joules=False, modelled=rng.random() < 0.5, copies=rng.random() < 0.5)
        problem = random_problem(rng, objective, operators=(1, 5), traits=traits, children_together=together)
    try:
        plan = planning.plan(problem, rng.choice(("ideals", "chain", "cp-sat"))).plan
    except InfeasibleError:
        assume(False)
    stated: Stated = json.loads(certificate(problem, plan))
    return stated


def is_checked(stated: Stated) -> bool:
    return certificates.is_checked(check_certificate, stated)


# What a certificate claims, computed from it in the plainest way.


def figures(stated: Stated, stages: tuple[Stage, ...]) -> list[float] | None:
    """Return the figures of a plan, the less the better; None if the certificate's instance does not allow the plan."""
    operators = {operator["name"]: operator for operator in stated["operators"]}
    devices = {device["name"]: device for device in stated["devices"]}
    used = [stage.devices[0] for stage in stages]
    stage_of = {name: index for index, stage in enumerate(stages) for name in stage.operators}
    writer = {tensor: name for name, operator in operators.items() for tensor in operator["writes"]}
    in_order = [stage_of[name] for name in operators] == sorted(stage_of.values())
    if stated["stages"] not in (None, len(stages)) or (stated["cuts"] == "order" and not in_order):
        return None
    after: dict[str, set[int]] = {}
    for name, operator in operators.items():
        for source in {writer[tensor] for tensor in operator["reads"] if tensor in writer}:
            after.setdefault(source, set()).add(stage_of[name])
    if stated["together"] and any(len(found) > 1 for found in after.values()):
        return None
    size = dict(stated["inputs"]) | {t: b for operator in operators.values() for t, b in operator["writes"].items()}

    def read_behind(tensor: str, boundary: int) -> bool:
        return any(tensor in o["reads"] and stage_of[n] >= boundary for n, o in operators.items())

    def there(boundary: int) -> list[str]:
        return [tensor for tensor in size if tensor not in writer or stage_of[writer[tensor]] < boundary]

    if stated["objective"] in LEXICOGRAPHIC:
        held = [sum(operators[name]["param_bytes"] for name in stage.operators) for stage in stages]
        caches = [devices[name]["cache_bytes"] or 0 for name in used]
        widest = [sum(size[t] for t in there(b) if t in writer and read_behind(t, b)) for b in range(1, len(stages))]
        found = {
            "memory": max(held),
            "dram": sum(max(0, a - b) for a, b in zip(held, caches, strict=True)),
            "communication": max(widest, default=0),
        }
        return [found[part] for part in stated["objective"].split(",")]
    if any(used.count(name) > 1 for name in used if devices[name]["once"]):
        return None
    links = {(link["source"], link["destination"]): link["cost"] for link in stated["links"]}
    position = {name: index for index, name in enumerate(operators)}
    taken = []
    for index, (stage, name) in enumerate(zip(stages, used, strict=True)):
        device = devices[name]
        seconds = [device["seconds"][position[operator]] for operator in stage.operators]
        if None in seconds:
            return None
        received, sent = (
            sum(size[t] for t in there(b) if t in stated["outputs"] or read_behind(t, b)) for b in (index, index + 1)
        )
        hop = links.get((used[index - 1], name), [0, 0]) if index else [0, 0]
        held = sum(operators[operator]["param_bytes"] for operator in stage.operators)
        cached = math.inf if device["cached_bytes"] is None else device["cached_bytes"]
        fetched = device["s_per_spilled_byte"] * (held - cached) if held > cached else 0
        work = sum(operators[operator]["macs"] for operator in stage.operators) * device["s_per_mac"]
        moved = [(device["receive"], received), (hop, received), (device["send"], sent)]
        moving = sum(fixed + of_byte * amount for (fixed, of_byte), amount in moved)
        factor = device["busy"][len(stages) - 1] if stated["objective"] == "throughput" else 1
        taken.append(factor * (device["call_s"] + sum(seconds) + max(work, fetched) + moving))
    return [max(taken) if stated["objective"] == "throughput" else sum(taken)]


def problem_of(stated: Stated) -> Problem:
    """Return a problem whose plans are those of the certificate's graph and devices; its costs mean nothing."""

    def tensors(sizes: dict[str, int]) -> tuple[Tensor, ...]:
        return tuple(Tensor(name, (max(size, 1),), "int8") for name, size in sizes.items())

    operators = tuple(
        Operator(operator["name"], "kind", tuple(operator["reads"]), tensors(operator["writes"]))
        for operator in stated["operators"]
    )
    graph = OperatorGraph("net", tensors(stated["inputs"]), operators, tuple(stated["outputs"]))
    devices = tuple(Device(device["name"], cores=tuple(set(device["cores"]))) for device in stated["devices"])
    return Problem(graph, Platform("box", devices), unmeasured(graph), LEXICOGRAPHIC[0])


def is_true(stated: Stated) -> bool:
    """Return whether the plan has its value, and no plan is better than the bound, by comparing all plans."""
    slack = 1 + 2e-6  # the tolerance that the checker allows, and rounding
    names = [operator["name"] for operator in stated["operators"]]
    plan = tuple(Stage((each["device"],), tuple(sorted(each["operators"], key=names.index))) for each in stated["plan"])
    value, bound = stated["value"], stated["bound"]
    if stated["objective"] == "throughput":
        value, bound = ([1 / figure for figure in found] for found in (value, bound))
    plans = list(every_plan(problem_of(stated), stated["stages"], again=stated["objective"] == "latency"))
    best = min(found for stages in plans if (found := figures(stated, stages)) is not None)
    reached = figures(stated, plan) if plan in plans else None
    if reached is None or any(a > b * slack or b > a * slack for a, b in zip(reached, value, strict=True)):
        return False
    return best >= bound if stated["objective"] in LEXICOGRAPHIC else bound[0] <= best[0] * slack


@given(rng=randoms())
def test_certificates_are_checked_and_true(rng: random.Random) -> None:
    stated = certified(rng)
    assert is_true(stated)
    assert is_checked(stated)


@given(rng=randoms())
def test_a_bound_beyond_the_best_plan_is_refused(rng: random.Random) -> None:
    stated = certified(rng)
    part = rng.randrange(len(stated["bound"]))
    if stated["objective"] in LEXICOGRAPHIC:
        stated["bound"][part] += 1
    else:
        stated["bound"][part] *= 0.999 if stated["objective"] == "throughput" else 1.001
    assert not is_checked(stated)


@given(rng=randoms(), many=st.just(5))
def test_a_broken_certificate_is_refused_or_true(rng: random.Random, many: int) -> None:
    stated = certified(rng)
    names = ["all", *stated["inputs"], *(found["name"] for found in (*stated["operators"], *stated["devices"]))]
    for _ in range(many):
        other = mutated(rng, stated, names)
        if is_checked(other):
            assert is_true(other), other


def test_the_checker_stands_alone(tmp_path: Path) -> None:
    certificates.check_stands_alone(check_certificate, certified(random.Random(0)), tmp_path)


@pytest.mark.parametrize("written", ["", "[]", "{}", "\xff", '{"objective": "energy"}', "1e999", "[" * 100_000])
def test_other_files_are_refused(written: str) -> None:
    with pytest.raises(check_certificate.Refused):
        check_certificate.check(written.encode("latin-1"))


@given(rng=randoms())
def test_plans_without_certificates_are_refused_in_a_line(rng: random.Random) -> None:
    objective, scheduler = rng.choice((("energy", "best"), ("throughput", "hybrid")))
    problem = random_problem(rng, objective)
    try:
        plan = planning.plan(problem, scheduler).plan
    except PipelineError:
        assume(False)
    with pytest.raises(OptionError, match="there are certificates of plans by"):
        certificate(problem, plan)
