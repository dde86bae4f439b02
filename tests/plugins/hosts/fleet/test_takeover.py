"""After a loss those in place stay, the others go where there is room, and as few as possible are left out."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tvm_pipeline_hosts.fleet.messages import FleetPlan
from tvm_pipeline_hosts.fleet.takeover import take_over

MODELS = ("faces", "plates")


def plan_of(works, cameras, host_of=None):
    """Return a plan of hosts (name -> model -> seconds) and cameras (name -> (rates, reach))."""
    return FleetPlan(
        {name: ("", rates) for name, (rates, _) in cameras.items()},
        host_of or {},
        {name: reach for name, (_, reach) in cameras.items()},
        works,
        {},
    )


def load(plan, host_of, host):
    return sum(
        rate * plan.work_s[host][model]
        for camera, at in host_of.items()
        if at == host
        for model, rate in plan.cameras[camera][1].items()
    )


@st.composite
def fleets(draw):
    """Draw a plan, where its cameras are now, and the hosts that are alive."""
    hosts = [f"h{i}" for i in range(draw(st.integers(1, 4)))]
    works = {
        host: {m: draw(st.sampled_from([0.01, 0.02, 0.05])) for m in draw(st.sets(st.sampled_from(MODELS), min_size=1))}
        for host in hosts
    }
    cameras, host_of = {}, {}
    for index in range(draw(st.integers(1, 6))):
        wanted = sorted(draw(st.sets(st.sampled_from(MODELS), min_size=1)))
        reach = tuple(sorted(draw(st.sets(st.sampled_from(hosts), min_size=1))))
        cameras[f"c{index}"] = {m: draw(st.sampled_from([3.0, 7.0, 15.0, 40.0])) for m in wanted}, reach
        if draw(st.booleans()):
            host_of[f"c{index}"] = draw(st.sampled_from(hosts))
    alive = draw(st.sets(st.sampled_from(hosts)))
    return plan_of(works, cameras), host_of, alive


def may_take(plan, host, camera):
    return host in plan.reach[camera] and plan.cameras[camera][1].keys() <= plan.work_s[host].keys()


def least_starving(plan, stay, alive):
    """Return by trying everything how many cameras must starve while those of `stay` keep their hosts."""
    homeless = [camera for camera in plan.cameras if camera not in stay]
    choices = [[None, *(h for h in sorted(alive) if may_take(plan, h, c))] for c in homeless]
    least = len(homeless)
    for chosen in itertools.product(*choices):
        there = {**stay, **{c: h for c, h in zip(homeless, chosen, strict=True) if h}}
        if all(load(plan, there, h) <= 1 + 1e-9 for h in chosen if h):
            least = min(least, chosen.count(None))
    return least


@examples(150, deadline=None)
@given(fleets())
def test_those_in_place_stay_and_the_fewest_starve(case):
    plan, host_of, alive = case
    found = take_over(plan, host_of, alive)
    stay = {c: h for c, h in host_of.items() if h in alive and may_take(plan, h, c)}
    assert {c: found[c] for c in stay} == stay
    assert all(host in alive and may_take(plan, host, camera) for camera, host in found.items())
    assert all(load(plan, found, found[c]) <= 1 + 1e-9 for c in found if c not in stay)
    assert len(plan.cameras) - len(found) == least_starving(plan, stay, alive)
    assert take_over(plan, found, alive) == found


def test_a_camera_without_a_host_goes_where_it_was_planned():
    works = {"attic": {"faces": 0.01}, "barn": {"faces": 0.01}}
    reach = ("attic", "barn")
    cameras = {"gate": ({"faces": 10.0}, reach), "yard": ({"faces": 10.0}, reach)}
    plan = plan_of(works, cameras, {"gate": "barn", "yard": "barn"})
    assert take_over(plan, {}, ["attic", "barn"]) == {"gate": "barn", "yard": "barn"}
    assert take_over(plan, {}, ["attic"]) == {"gate": "attic", "yard": "attic"}


def test_a_camera_leaves_its_planned_host_where_another_would_starve():
    works = {"attic": {"faces": 0.01}, "barn": {"faces": 0.01}}
    cameras = {"gate": ({"faces": 60.0}, ("attic", "barn")), "yard": ({"faces": 60.0}, ("barn",))}
    plan = plan_of(works, cameras, {"gate": "barn"})
    assert take_over(plan, {}, ["attic", "barn"]) == {"gate": "attic", "yard": "barn"}


def test_a_changed_plan_is_not_taken_for_the_last_one():
    cameras = {"gate": ({"faces": 10.0}, ("attic", "barn"))}
    slow = plan_of({"attic": {"faces": 1.0}, "barn": {"faces": 0.01}}, cameras)
    fast = plan_of({"attic": {"faces": 0.01}, "barn": {"faces": 1.0}}, cameras)
    assert take_over(slow, {}, ["attic", "barn"]) == {"gate": "barn"}
    assert take_over(fast, {}, ["attic", "barn"]) == {"gate": "attic"}


def test_hosts_and_cameras_that_the_plan_lacks_are_ignored():
    plan = plan_of({"attic": {"faces": 0.01}}, {"gate": ({"faces": 10.0}, ("attic", "shed"))})
    assert take_over(plan, {"gone": "attic", "gate": "shed"}, ["attic", "shed"]) == {"gate": "attic"}
