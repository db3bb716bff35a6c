"""What steps of trainers took beside the promises of their plans, and cost models corrected by it."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import in_this_process
from helpers.plans import make_plan
from helpers.refusals import refused
from neuroshard.core.errors import InvalidInput
from neuroshard.core.groups import Groups
from neuroshard.core.plan import DeviceCost, Plan, Provenance
from neuroshard.core.value import decode_json
from neuroshard.deploy.run import deploy
from neuroshard.seen.record import PARTS, RankSeen, Seen, correction, truth_of
from neuroshard.seen.stored import put_seen
from neuroshard.store.folder import FolderStore
from neuroshard.store.releases import plans_of


def seen_of(plan: Plan, *ranks: tuple[float, ...], job: str = "0" * 16, gib: int | None = None) -> Seen:
    """Of each rank its parts and what it waits, in every step alike."""
    every = [
        RankSeen(
            parts={part: (ms, ms, ms) for part, ms in zip(PARTS, parts, strict=True)},
            embeddings_ms=(sum(parts),) * 3,
            waiting_ms=(waiting,) * 3,
            allocated_bytes=None if gib is None else (gib + rank) * 2**30,
        )
        for rank, (*parts, waiting) in enumerate(ranks)
    ]
    most = max(one.embeddings_ms[1] for one in every)
    return Seen(
        model="m", plan_digest=plan.digest(), job=job, time="2026-11-29T08:00:00Z", steps=5, step_ms=(30, 40, 50),
        embeddings_ms=(most - 1, most, most + 1), ranks=tuple(every), device="NVIDIA H100 80GB HBM3",
    )  # fmt: skip


def promised(plan: Plan, **changes: Any) -> Plan:
    costs = (
        DeviceCost(compute_ms=6, forward_collective_ms=2, backward_collective_ms=1, averaging_ms=100),
        DeviceCost(compute_ms=4, forward_collective_ms=4, backward_collective_ms=2),
    )
    return plan.model_copy(update={"predicted": costs, **changes})


def test_promise_and_truth_by_part() -> None:
    plan = promised(make_plan())
    seen = [
        seen_of(plan, (5, 2, 1, 7, 0.5), (2, 4, 2, 3, 2)),
        seen_of(plan, (5, 4, 3, 7, 0.5), (2, 4, 2, 5, 2), job="1" * 16),
    ]
    truth = truth_of(plan, seen)
    assert (truth.promised_ms, truth.promised_rank, truth.embeddings_ms, truth.rank) == (10, 1, (16, 17, 18), 0)
    assert [tuple(part)[1:] for part in truth.parts] == [(5, (12 + 6) / 2), (3, (3 + 4) / 2), (1.5, (2 + 2) / 2)]
    assert (truth.waiting_ms, truth.step_ms, truth.steps, truth.jobs, truth.memory) == (1.25, 40, 10, 2, "")
    assert "rank 0 is the slowest, rank 1 was promised to be" in str(truth)
    assert "10.000    17.000    +70%" in str(truth)


def test_memory_is_compared_without_what_the_allocator_holds() -> None:
    task = make_plan().task.model_copy(
        update={"pipeline": "none", "step_ledger": 1, "device_memory_bytes": (2**40,) * 2}
    )
    plan = promised(make_plan(), task=task)
    said = truth_of(plan, [seen_of(plan, (1, 1, 1, 1, 0), (1, 1, 1, 1, 0), gib=3)]).memory
    assert said.startswith("memory of rank ")
    assert "GiB allocated with its dense layers" in said


def test_ranks_of_groups_share_a_promise() -> None:
    groups = Groups(ranks=4, contiguous=True, domain=2, local_world_size=2)
    plan = make_plan()
    plan = promised(plan, task=plan.task.model_copy(update={"groups": groups}))
    truth = truth_of(plan, [seen_of(plan, *[(1, 1, 1, 1, 0)] * 3, (2, 1, 1, 1, 0))])
    assert (truth.rank, truth.promised_rank) == (3, 1)
    for one in (plan, plan.model_copy(update={"predicted": None})):
        with refused(InvalidInput, "promises no parts", "4 ranks", "2"):
            truth_of(one, [seen_of(plan, (1, 1, 1, 1, 0), (1, 1, 1, 1, 0))])


def job(
    number: int, promised: tuple[float, float], seen: tuple[float, float], model: str = "analytic:h100"
) -> tuple[Plan, Seen]:
    """Of a job on two ranks: ms of lookups and of an exchange each way, without waiting."""
    cost = DeviceCost(compute_ms=promised[0], forward_collective_ms=promised[1], backward_collective_ms=promised[1])
    provenance = Provenance(
        neuroshard_version="0", algorithm="by hand", cost_model=model, cost_model_backend="analytic"
    )
    plan = make_plan(str(number)).model_copy(update={"predicted": (cost,) * 2, "provenance": provenance})
    return plan, seen_of(plan, *[(seen[0] / 2, seen[1] + 3, seen[1], seen[0] / 2, 3)] * 2, job=f"{number:016x}")


def test_a_datasheet_is_corrected_by_what_jobs_saw() -> None:
    promised = [(1.0 + number, 9.0 - number) for number in range(5)]
    jobs = [job(number, of, (1.4 * of[0], 0.5 * of[1])) for number, of in enumerate(promised)]
    by = correction(
        "analytic:h100", [*jobs, job(9, (1, 1), (9, 9), "analytic:a100"), job(8, (1, 1), (9, 9), "a digest")]
    )
    assert by is not None
    assert by[:3] == pytest.approx((1.4, 0.5, 5))
    assert by.error > 0.2
    assert by.corrected_error == pytest.approx(0, abs=1e-9)
    assert by.suffix == "*1.4*0.5"
    again = [
        job(number, (2 * of[0], 3 * of[1]), (1.4 * of[0], 0.5 * of[1]), "analytic:h100*2*3")
        for number, of in enumerate(promised)
    ]
    assert correction("analytic:h100", again) == pytest.approx(by)  # promises by a corrected datasheet are of it too
    assert correction("analytic:b200", jobs) is None
    elsewhere = [
        (plan, seen.model_copy(update={"device": device})) for plan, seen in jobs for device in ("CPU", "NVIDIA B200")
    ]
    assert correction("analytic:h100", elsewhere) is None
    plan, seen = jobs[0]
    other = seen.model_copy(update={"batch_size": 3 * plan.task.global_batch_size})
    assert correction("analytic:h100", [(plan, other)]) is None
    said = f"trained with batches of {other.batch_size:,}, and planned for {plan.task.global_batch_size:,}"
    assert said in str(truth_of(plan, [other]))
    assert said in truth_of(plan, [other]).line


def test_a_correction_that_makes_jobs_that_are_left_out_worse_does_not_help() -> None:
    by = correction("analytic:h100", [job(0, (1, 1), (1.3, 1.3)), job(1, (1, 1), (0.8, 0.8))])
    assert by is not None
    assert not by.helps
    assert f"{by}" == "as 2 jobs saw, 50% off where each is left out, instead of 24%"
    by = correction("analytic:h100", [job(0, (1, 1), (2, 2))])
    assert by is not None
    assert by.helps


def test_factors_that_no_model_can_be_corrected_by_do_not_help() -> None:
    by = correction("analytic:h100", [job(0, (1, 1), (2000, 1))])
    assert by is not None
    assert not by.helps


def test_what_lacks_a_part_is_no_record() -> None:
    plan = promised(make_plan())
    data = seen_of(plan, (1, 1, 1, 1, 0), (1, 1, 1, 1, 0)).model_dump(mode="json")
    del data["ranks"][1]["parts"]["lookup_forward"]
    with refused(InvalidInput, "lookup_forward", "exchange_backward"):
        Seen.parse(data, "a record")


def test_the_command_says_it_of_the_live_plan(tmp_path: Path) -> None:
    store, plan = FolderStore(tmp_path / "store"), promised(make_plan())
    ms, by = tuple(cost.total_ms for cost in plan.predicted or ()), plan.provenance
    by = by.model_copy(update={"cost_model": "analytic:h100", "cost_model_backend": "analytic"})
    plan = plan.model_copy(update={"predicted_ms": ms, "provenance": by})
    deploy(plan, store, "m", now=datetime.now(UTC))
    place = ("releases", "--store", store.root, "--name", "m", "--seen")
    nothing = in_this_process(*place)
    assert nothing.returncode == 1
    assert "no trainer has written" in nothing.stderr
    put_seen(store, seen_of(plan, (5, 2, 1, 7, 0.5), (2, 4, 2, 3, 2)))
    put_seen(store, seen_of(make_plan("another"), (5, 2, 1, 7, 0.5)))
    (store.root / "m/seen/20261129T080000Z-0123456789abcdef.json").write_text("{")
    done = in_this_process(*place)
    assert done.stdout.startswith(f"plan {plan.digest()[:12]} of m\nseen in 5 steps of 1 job")
    assert "plan by what was seen: --model analytic:h100*1.7*0.8125 (as 1 job saw)" in done.stdout
    assert "left out" in done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "saw 15 ms for 10 promised (+50%, 5 steps of 1 job)" in in_this_process(*place[:-1]).stdout
    found = decode_json(in_this_process(*place, "--json").stdout.encode(), "")
    assert (found["truth"]["rank"], len(found["seen"]), found["seen"][0]["steps"]) == (0, 1, 5)
    assert all(plans_of("m").is_record(entry.key) for entry in store.list("m/seen/"))  # so `gc` deletes old ones
