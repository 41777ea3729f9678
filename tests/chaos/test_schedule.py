"""A seed gives one plan, and every plan can be carried out."""

from __future__ import annotations

import pytest

from tests.chaos.schedule import BACKENDS, ENDINGS, FAULTS, REMOVES, STORE, EpisodePlan, plan_episode

PLANS = [plan_episode(seed, backend) for seed in range(300) for backend in BACKENDS]


def test_the_same_seed_gives_the_same_plan() -> None:
    assert [plan_episode(seed) for seed in range(20)] == [plan_episode(seed) for seed in range(20)]
    assert len({plan_episode(seed).actions for seed in range(20)}) == 20


def test_a_known_seed_keeps_its_plan() -> None:
    """A seed from an old report is worth something only as long as this holds."""
    plan = plan_episode(7, agents=4, faults=("cut", "worker-kill", "store-kill"))
    assert (plan.nodes, plan.minimum, plan.maximum, plan.hosted, plan.ending) == (4, 1, 3, True, "terminate")
    assert [str(action) for action in plan.actions][:2] == [
        "0.33 s worker-kill n1 worker 1",
        "1.91 s cut n3 for 3.8 s",
    ]


def test_every_fault_and_every_ending_occurs() -> None:
    assert {action.fault for plan in PLANS for action in plan.actions} == set(FAULTS)
    assert {plan.ending for plan in PLANS} == set(ENDINGS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_alone_makes_a_plan(name: str) -> None:
    backend = FAULTS[name].backends[0]
    plans = [plan_episode(seed, backend, 4, [name]) for seed in range(30)]
    assert {action.fault for plan in plans for action in plan.actions} == {name}


def test_plans_can_be_carried_out() -> None:
    for plan in PLANS:
        assert 3 <= plan.nodes <= 8
        assert 1 <= plan.minimum <= plan.maximum <= plan.nodes
        assert _stay(plan) >= max(2, plan.minimum)
        assert list(plan.actions) == sorted(plan.actions, key=lambda action: action.at)
        for action in plan.actions:
            fault = FAULTS[action.fault]
            assert plan.backend in fault.backends
            assert (action.node == STORE) == (fault.area == "store")
            assert fault.host_too or action.node != 0 or not plan.hosted
            assert 0 <= action.seconds <= fault.longest
        if plan.backend == "static":
            assert all(action.seconds for action in plan.actions if action.fault in REMOVES)


def test_faults_of_one_area_do_not_overlap_on_a_node() -> None:
    for plan in PLANS:
        until: dict[tuple[int, str], float] = {}
        for action in plan.actions:
            where = action.node, FAULTS[action.fault].area
            assert action.at >= until.get(where, 0.0), plan
            until[where] = action.at + action.seconds


def _stay(plan: EpisodePlan) -> int:
    """Nodes that are there from the beginning to the end."""
    gone = {a.node for a in plan.actions if a.fault in REMOVES and a.seconds == 0.0}
    return plan.nodes - len(gone | plan.late)
