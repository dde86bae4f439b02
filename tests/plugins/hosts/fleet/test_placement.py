"""Placements against everything tried, and lost hosts against code of its own."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plugins.hosts.fleets import least_key, lost_starving, may_take, unlike_fleet
from tests.support.examples import examples
from tvm_pipeline_hosts.fleet.description import Camera, Fleet, Host, Placement
from tvm_pipeline_hosts.fleet.placement import place

FULL = 1 + 1e-9


def load(fleet, host_of, host):
    works = {h.name: h.work_s for h in fleet.hosts}
    return sum(
        rate * works[host][model]
        for camera in fleet.cameras
        if host_of.get(camera.name) == host
        for model, rate in camera.rates_fps.items()
    )


def check(fleet, placement):
    """Check a placement's own figures by code that shares nothing with it."""
    hosts = {host.name: host for host in fleet.hosts}
    cameras = {camera.name: camera for camera in fleet.cameras}
    assert placement.host_of.keys() | placement.starving.keys() == cameras.keys()
    assert not placement.host_of.keys() & placement.starving.keys()
    assert all(may_take(hosts[host], cameras[camera]) for camera, host in placement.host_of.items())
    for host in hosts:
        assert placement.utilisation[host] == pytest.approx(load(fleet, placement.host_of, host))
        assert placement.utilisation[host] <= FULL
    assert placement.bound <= max(placement.utilisation.values()) + 1e-9
    assert placement.least_starving <= len(placement.starving)


@st.composite
def tiny_fleets(draw):
    hosts = []
    for index in range(draw(st.integers(1, 3))):
        models = draw(st.sets(st.sampled_from(["faces", "plates"]), min_size=1))
        hosts.append(Host(f"h{index}", {m: draw(st.sampled_from([0.01, 0.02, 0.05])) for m in sorted(models)}))
    names = [host.name for host in hosts]
    cameras = []
    for index in range(draw(st.integers(1, 5))):
        wanted = draw(st.sets(st.sampled_from(["faces", "plates"]), min_size=1))
        rates = {m: draw(st.sampled_from([3.0, 7.0, 15.0, 40.0])) for m in sorted(wanted)}
        reach = tuple(sorted(draw(st.sets(st.sampled_from(names)))))
        cameras.append(Camera(f"c{index}", "", rates, reach))
    return Fleet(tuple(hosts), tuple(cameras), draw(st.integers(0, len(hosts) - 1)))


@examples(25, deadline=None)
@given(tiny_fleets())
def test_tiny_fleets_are_placed_as_well_as_any(fleet):
    placement = place(fleet, 10.0)
    check(fleet, placement)
    best = least_key(fleet)
    found = (
        len(placement.starving),
        sum(lost_starving(fleet, placement.host_of).values()),
        max(placement.utilisation.values()),
    )
    assert found[:2] == best[:2]
    assert found[2] == pytest.approx(best[2], abs=2e-5)
    assert placement.proven
    assert placement.bound == pytest.approx(best[2], abs=2e-5)
    assert placement.least_starving == best[0]


@examples(25, deadline=None)
@given(tiny_fleets())
def test_without_time_a_placement_is_no_better_than_it_says(fleet):
    placement = place(fleet, 0.0)
    check(fleet, placement)
    best = least_key(fleet)
    assert placement.least_starving <= best[0]
    if len(placement.starving) == best[0]:
        assert placement.bound <= best[2] + 1e-9
    without = {lost: len(cameras) for lost, cameras in placement.starving_without.items()}
    assert without == {lost: n for lost, n in lost_starving(fleet, placement.host_of).items() if n}


@pytest.mark.thorough
def test_any_host_of_an_unlike_fleet_may_be_lost():
    fleet = unlike_fleet(cameras=60, hosts=10, level=0.55, seed=3)
    placement = place(fleet, 2.0)
    check(fleet, placement)
    assert not placement.starving
    assert not placement.starving_without
    assert not any(lost_starving(fleet, placement.host_of).values())
    assert placement.gap < 0.2


def test_room_for_a_lost_host_comes_before_a_small_utilisation():
    """Balanced, both large hosts would be half busy, and neither could take the cameras of the other."""
    hosts = tuple(Host(name, {"faces": 0.01}) for name in ("attic", "barn", "cellar"))
    cameras = tuple(Camera(f"c{i}", "", {"faces": 60.0}, ("attic", "barn", "cellar")) for i in range(2))
    placement = place(Fleet(hosts, cameras, 1), 1.0)
    assert not placement.starving_without
    assert max(placement.utilisation.values()) == pytest.approx(0.6)
    crowded = place(Fleet(hosts, (*cameras, Camera("c2", "", {"faces": 60.0})), 1), 1.0)
    assert not crowded.starving
    assert [len(names) for names in crowded.starving_without.values()] == [1, 1, 1]


@pytest.mark.thorough
def test_two_lost_hosts_are_tried_in_all_pairs():
    hosts = tuple(Host(f"h{i}", {"faces": 0.01}) for i in range(4))

    def placed(rate: float) -> Placement:
        return place(Fleet(hosts, tuple(Camera(f"c{i}", "", {"faces": rate}) for i in range(4)), 2), 1.0)

    assert not placed(45.0).starving_without  # 2 hosts take two cameras each
    starving = placed(55.0).starving_without  # and here one each
    assert set(starving) == {"+".join(pair) for pair in itertools.combinations([host.name for host in hosts], 2)}
    assert all(len(names) == 2 for names in starving.values())


@pytest.mark.parametrize(
    ("camera", "why"),
    [
        (Camera("c", "", {"faces": 10.0}, ("shed",)), "no host of the fleet reaches it"),
        (Camera("c", "", {"text": 10.0}, ("attic",)), "none of its 1 hosts can run text"),
        (Camera("c", "", {"faces": 1.0, "plates": 1.0}), "none of the 2 hosts can run all of faces, plates"),
        (
            Camera("c", "", {"faces": 150.0}),
            "faces@150 needs 150% of attic, the fastest of the 2 hosts; lower its rate",
        ),
        (Camera("c", "", {"plates": 90.0}), "no room: 1 of the 2 hosts could take it"),
    ],
)
def test_a_camera_that_starves_is_told_why(camera, why):
    hosts = Host("attic", {"faces": 0.01}), Host("barn", {"plates": 0.01})
    other = Camera("other", "", {"plates": 20.0})
    placement = place(Fleet(hosts, (camera, other)), 1.0)
    assert placement.starving["c"].startswith(why)
    assert placement.host_of == {"other": "barn"}
    assert placement.least_starving == 1


def test_the_fewest_are_shed():
    hosts = (Host("attic", {"faces": 0.01}),)
    rates = [50.0, 40.0, 30.0, 20.0, 10.0]
    cameras = tuple(Camera(f"c{i}", "", {"faces": rate}) for i, rate in enumerate(rates))
    placement = place(Fleet(hosts, cameras), 2.0)
    assert placement.host_of.keys() == {"c2", "c3", "c4", "c1"}
    assert placement.least_starving == 1


def moved(before, placement):
    return {camera for camera, host in placement.host_of.items() if before.get(camera, host) != host}


def test_cameras_in_place_stay_unless_it_pays():
    hosts = tuple(Host(f"h{i}", {"faces": 0.01}) for i in range(2))
    cameras = tuple(Camera(f"c{i}", "", {"faces": 10.0}) for i in range(2))
    good = {"c0": "h1", "c1": "h0"}
    placement = place(Fleet(hosts, cameras), 3.0, before=good)
    assert (placement.host_of, placement.moved) == (good, ())
    hardly = {**good, "c0": good["c1"]}  # 20 % against 10 %
    placement = place(Fleet(hosts, cameras), 3.0, before=hardly)
    assert max(placement.utilisation.values()) == pytest.approx(0.1)
    assert len(placement.moved) == 1
    assert set(placement.moved) == moved(hardly, placement)


@pytest.mark.thorough
def test_a_new_camera_moves_nobody():
    fleet = unlike_fleet(cameras=30, hosts=6, level=0.3, seed=1)
    before = place(Fleet(fleet.hosts, fleet.cameras[1:], 1), 1.0).host_of
    placement = place(Fleet(fleet.hosts, fleet.cameras, 1), 1.0, before=before)
    assert placement.host_of.keys() == {camera.name for camera in fleet.cameras}
    assert moved(before, placement) == set(placement.moved)
    assert len(placement.moved) <= 2
