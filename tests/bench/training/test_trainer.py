"""The trainer bench trains with examples/train.py's code; what it makes of its times: plans against ours, pairs far apart."""

from pathlib import Path

import numpy as np
import pytest

from bench.trainer import BATCH_SIZE, OURS, QUICK, Raced, Trained, against_ours, far_apart, planners, train
from helpers.gloo import on_ranks
from helpers.plans import make_plan
from neuroshard.core.plan import Plan
from neuroshard.files.plan import write_plan


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*broadcast_buffers:FutureWarning")  # TorchRec's
def test_ranks_take_steps_by_two_plans_in_turns(tmp_path: Path) -> None:
    files = {OURS: tmp_path / "ours.json", "size": tmp_path / "size.json"}
    made = make_plan()
    task = made.task.model_copy(update={"batch_size": BATCH_SIZE})
    plan = Plan(task=task, shards=made.shards, predicted_ms=made.predicted_ms, provenance=made.provenance)
    for file in files.values():
        write_plan(file, plan)
    [ms, _] = on_ranks(2, tmp_path, train, files, QUICK._replace(rounds=2, steps=1))
    assert {name: each.shape for name, each in ms.step_ms.items()} == dict.fromkeys(files, (2,))


def raced(**ms: tuple[float, float, float]) -> Raced:
    """A table set of two rounds: predicted ms, ms of a step and of embeddings alone by planner."""
    names = {OURS if name == "ours" else name: figures for name, figures in ms.items()}
    step, alone = ({name: np.full(2, figures[place]) for name, figures in names.items()} for place in (1, 2))
    return Raced({name: figures[0] for name, figures in names.items()}, Trained(step, alone), evaluated_ms=1.0)


def test_plans_of_a_planner_are_held_against_ours_on_the_table_sets_that_have_both() -> None:
    sets = [raced(ours=(10, 20, 15), size=(11, 22, 18)), raced(ours=(10, 20, 15), size=(13, 20, 15), dim=(10, 18, 15))]
    assert planners(sets) == ["size", "dim"]
    assert against_ours(sets, "size") == ("size", "2", "+5.0% (+0.0% to +10.0%)", "+10.0% (+0.0% to +20.0%)", "+20.0%")
    assert against_ours(sets, "dim") == ("dim", "1", "-10.0% (-10.0% to -10.0%)", "+0.0% (+0.0% to +0.0%)", "+0.0%")
    assert against_ours(sets, "lookup") is None


def test_pairs_predicted_far_apart_count_each_way_round_once() -> None:
    row = far_apart([raced(ours=(10, 20, 15), size=(10.5, 21, 15), dim=(12, 20.5, 15)), raced(ours=(10, 20, 15))])
    assert row is not None
    what, sets, step, _, predicted = row
    assert "slower in 1 of 2 pairs" in what  # dim over ours, and over size, which took longer
    assert (sets, predicted) == ("1", "+17.1%")
    assert step.startswith("+0.1%")
    assert far_apart([raced(ours=(10, 20, 15), size=(10.5, 21, 15))]) is None
