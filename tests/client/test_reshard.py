"""Real TorchRec trainers on gloo that take another plan between two steps, and go on as if they had been started again by it."""

import copy
import gc
import os
import re
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from helpers.gloo import on_ranks
from helpers.sharded import OPTIMIZERS, sharded, sharders_of
from helpers.trainers import Saved, cut_plan
from helpers.whole_model import SAMPLES, TABLES, Model, batch
from neuroshard.client.checkpoint import load_resharded, reshard
from neuroshard.client.model.order import keep_output_order, output_order
from neuroshard.client.torchrec import to_torchrec
from neuroshard.core.errors import NeuroshardError, UsageError
from neuroshard.core.groups import Groups
from neuroshard.core.plan import Plan, Shard, shard_memory
from neuroshard.core.units import format_bytes

pytestmark = pytest.mark.slow

STEPS, LEARNING_RATE, WIDTH = 3, 0.05, 5 * 16 + 8 + 16
plan = partial(cut_plan, TABLES, batch_size=SAMPLES)
ONE = plan(
    2,
    {"shared": [(8, 1), (8, 0)], "wide": [(16, 0)], "read": [(16, 1)], "seen": [(8, 0), (8, 1)], "placed": []},
    copied={"tiny"},
)
OTHER = plan(
    2,
    {"shared": [(16, 0)], "wide": [], "read": [(8, 1), (8, 0)], "seen": [], "placed": [(4, 0), (12, 1)]},
    copied={"tiny"},
)
BAGS_ONLY = plan(  # the sequences and the position weights of ONE
    2,
    {"shared": [(4, 0), (12, 1)], "wide": [(16, 1)], "read": [(16, 1)], "seen": [(8, 0), (8, 1)], "placed": []},
    copied={"tiny"},
)
NO_COPY = plan(
    2, {"shared": [(16, 0)], "wide": [], "tiny": [(8, 1)], "read": [(16, 1)], "seen": [(8, 0), (8, 1)], "placed": []}
)
NO_COPY_EITHER = plan(
    2,
    {
        "shared": [(8, 1), (8, 0)],
        "wide": [(16, 0)],
        "tiny": [(8, 0)],
        "read": [(16, 0)],
        "seen": [],
        "placed": [(16, 1)],
    },
)
CUTS = {"shared": [(16, 0)], "wide": [], "read": [(16, 1)], "seen": [(8, 0), (8, 1)], "placed": []}
FOUR = plan(
    4,
    {"shared": [], "wide": [(4, 3), (12, 1)], "read": [(8, 2), (8, 3)], "seen": [(16, 0)], "placed": [(16, 2)]},
    copied={"tiny"},
)
OTHER_FOUR = plan(
    4,
    {"shared": [(8, 2), (8, 0)], "wide": [], "read": [(16, 1)], "seen": [], "placed": [(8, 3), (8, 0)]},
    copied={"tiny"},
)


MOVED = plan(  # the cuts of ONE on other ranks
    2,
    {"shared": [(8, 0), (8, 1)], "wide": [(16, 1)], "read": [(16, 0)], "seen": [(8, 1), (8, 0)], "placed": []},
    copied={"tiny"},
)


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = Model()
        self.over = nn.Linear(WIDTH, 1)

    def forward(self, features: dict[str, KeyedJaggedTensor]) -> Tensor:
        return self.over(self.tables(features))


class Trainer(Saved):
    def __init__(
        self, given: Plan, optimizer: str, seed: int = 1, group: dist.ProcessGroup | None = None, applied: bool = False
    ) -> None:
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)  # what every rank has a copy of begins alike
        meta = Scored()
        if applied:  # a rate of its own for a table of each kind of collection
            for weight in (
                meta.tables.bags.embedding_bags["wide"].weight,
                meta.tables.sequences.embeddings["read"].weight,
            ):
                apply_optimizer_in_backward(RowWiseAdagrad, [weight], {"lr": 4 * LEARNING_RATE})
        self.model = sharded(meta, to_torchrec(given, meta), sharders_of(optimizer, LEARNING_RATE), group)
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.dense: torch.optim.Optimizer = torch.optim.Adagrad(dense.values(), lr=0.01)

    def train(self, first: int, end: int) -> list[float]:
        """The losses of all ranks together, step by step."""
        losses = []
        for step in range(first, end):
            features = batch(step, dist.get_rank(), dist.get_world_size())
            loss = (self.model(features) - 1).square().mean()
            self.dense.zero_grad()
            loss.backward()
            self.dense.step()
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            losses.append(float(mean))
        return losses


def live(rank: int, old: Plan, new: Plan, optimizer: str, folder: Path) -> dict[str, Any]:
    """The losses of a trainer that takes a new plan, of one that starts again by it from a checkpoint of the same step, and of
    one that goes on by the old plan."""
    trainer, unstopped = Trainer(old, optimizer), Trainer(old, optimizer)
    for each in (trainer, unstopped):
        each.train(0, STEPS)
    save(trainer.state(), checkpoint_id=folder)
    dense = [
        parameter for name, parameter in trainer.model.named_parameters() if "over" in name or "_feature_proc" in name
    ]
    fused = trainer.model.fused_optimizer

    order = output_order(trainer.model)

    said = reshard(trainer.model, new, step=STEPS, optimizer_of_copies=trainer.dense)

    assert output_order(trainer.model) == order
    after = dict(trainer.model.named_parameters())
    assert all(any(parameter is each for each in after.values()) for parameter in dense)
    assert trainer.model.fused_optimizer is fused
    again = Trainer(new, optimizer, seed=2)
    keep_output_order(again.model, order)  # the layer above reads by position
    again.train(0, 1)  # what a model had before must not stay
    estimated = load_resharded(again.state(), folder, old_plan=old, new_plan=new)
    again.dense.load_state_dict(copy.deepcopy(unstopped.dense.state_dict()))
    return {
        "said": (said, estimated),
        "losses": trainer.train(STEPS, 3 * STEPS),
        "started again": again.train(STEPS, 3 * STEPS),
        "unstopped": unstopped.train(STEPS, 3 * STEPS),
    }


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_losses_are_those_of_a_run_that_was_started_again(optimizer: str, tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path, live, ONE, OTHER, optimizer, tmp_path / "saved"):
        assert found["losses"] == found["started again"]
        assert found["said"][0] == found["said"][1]
        # under other column cuts, row-wise Adagrad's moments are estimated, and then summed up by other shards
        noise = 0.05 if optimizer == "rowwise_adagrad" else 1e-4
        assert found["losses"] == pytest.approx(found["unstopped"], rel=noise)


def test_row_wise_adagrad_goes_on_exactly_where_the_cuts_are_the_same(tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path, live, ONE, MOVED, "rowwise_adagrad", tmp_path / "saved"):
        assert found["said"] == ((), ())
        assert found["losses"] == pytest.approx(found["unstopped"], rel=1e-5)


def on_hosts() -> Plan:
    """Rows of `shared` over the two ranks of the second host, and `wide` in a grid over both hosts; the rest as in OTHER_FOUR."""
    given = OTHER_FOUR.by_table()
    moved = [
        *(Shard(table="shared", row_offset=at, rows=10, dim=16, device=2 + at // 10) for at in (0, 10)),
        *(
            Shard(table="wide", row_offset=row, rows=15, column_offset=column, dim=8, device=column // 4 + row // 15)
            for column in (0, 8)
            for row in (0, 15)
        ),
    ]
    others = [shard for name, shards in given.items() if name not in ("shared", "wide") for shard in shards]
    return Plan(task=OTHER_FOUR.task, shards=(*moved, *others), provenance=OTHER_FOUR.provenance)


def over_hosts(rank: int, folder: Path) -> dict[str, Any]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return live(rank, FOUR, on_hosts(), "rowwise_adagrad", folder)


def test_rows_over_the_ranks_of_a_host_and_grids_are_taken(tmp_path: Path) -> None:
    for found in on_ranks(4, tmp_path, over_hosts, tmp_path / "saved"):
        assert found["losses"] == found["started again"]
        assert found["said"][0] == found["said"][1]
        assert found["losses"] == pytest.approx(found["unstopped"], rel=0.05)


def refused(trainer: Trainer, new: Plan, **how: Any) -> str:
    with pytest.raises(NeuroshardError) as caught:
        reshard(trainer.model, new, **{"optimizer_of_copies": trainer.dense, **how})
    return f"{type(caught.value).__name__}: {caught.value}"


def refusals(rank: int) -> dict[str, str]:
    trainer, unstopped = Trainer(ONE, "adagrad"), Trainer(ONE, "adagrad")
    said = {}
    for each in (trainer, unstopped):
        each.train(0, 1)
    said["ranks"] = refused(trainer, FOUR)
    fewer = cut_plan(TABLES[1:], 2, {**CUTS, "tiny": [(8, 0)]}, batch_size=SAMPLES)
    said["tables"] = refused(trainer, fewer)
    widths = {"read": [(4, 0), (12, 1)]}
    said["to_torchrec"] = refused(trainer, plan(2, {**CUTS, **widths}, copied={"tiny"}))
    with pytest.raises(UsageError) as caught:
        reshard(trainer.model, OTHER, sharders=trainer.model.sharders)
    said["the model's own"] = str(caught.value)
    groups = Groups(ranks=4, contiguous=False, domain=4, local_world_size=4)
    in_groups = OTHER.task.model_copy(update={"groups": groups, "topology": groups.topology(2, None)})
    said["groups"] = refused(trainer, OTHER.model_copy(update={"task": in_groups}))
    with pytest.raises(UsageError) as caught:
        reshard(trainer.model, OTHER, sharding_group_size=2)
    said["groups of the model"] = str(caught.value)
    said["an argument"] = refused(trainer, OTHER, optimizer="adamw")
    said["plans"] = refused(trainer, OTHER if rank else MOVED)
    said["steps"] = refused(trainer, OTHER, step=7 + rank)
    said["no optimizer"] = refused(trainer, OTHER, optimizer_of_copies=None)
    said["another"] = refused(
        trainer, OTHER, optimizer_of_copies=torch.optim.SGD(trainer.model.module.over.parameters())
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("neuroshard.client.checkpoint.live.available_bytes", lambda: 3000)
        said["memory"] = refused(trainer, OTHER)
    loss = trainer.model(batch(1, rank, 2)).sum()
    said["inside a step"] = refused(trainer, OTHER)
    loss.backward()
    assert trainer.train(1, 3) != trainer.train(1, 3)  # goes on
    unstopped.model(batch(1, rank, 2)).sum().backward()
    unstopped.train(1, 3)
    unstopped.train(1, 3)
    assert trainer.train(3, 6) == unstopped.train(3, 6)  # as if nothing had been asked
    with pytest.raises(UsageError) as caught:
        reshard(trainer.model.module, OTHER)
    said["no DistributedModelParallel"] = str(caught.value)
    return said


def test_what_cannot_be_done_is_one_line_the_same_on_every_rank_and_changes_nothing(tmp_path: Path) -> None:
    one, other = on_ranks(2, tmp_path, refusals)

    assert one == other
    assert not any("\n" in line for line in one.values())
    for name, words in {
        "ranks": f"InvalidInput: ranks 0-1: plan {FOUR.digest()[:12]} is for 4 ranks, but the trainer has 2",
        "tables": "lacks table 'shared'",
        "to_torchrec": "sequences in shards of 4 columns (rank 0) and 12 (rank 1), which TorchRec cannot exchange",
        "the model's own": "sharders is the model's own for reshard; leave out sharders=",
        "groups": "is for 2 groups of 2 of 4 ranks (strided), averaged every step, and the model is one group; start again by",
        "groups of the model": "sharding_group_size is the model's own for reshard; leave out sharding_group_size=",
        "an argument": "UsageError: ranks 0-1: optimizer 'adamw' is none of",
        "plans": f"InvalidInput: rank 1: reshard is called for plan {OTHER.digest()[:12]}, and on rank 0 for plan "
        f"{MOVED.digest()[:12]}; call it on all ranks after the same step, with the same plan",
        "steps": "at step 8, and on rank 0 for plan",
        "no optimizer": "UsageError: ranks 0-1: 'tables.bags.embedding_bags.tiny.weight' is copied to every rank before or after",
        "another": "and optimizer_of_copies does not train it",
        "memory": "more of host memory while its ranks go from one plan to the other, and 2.9 KiB are available",
        "inside a step": "UsageError: ranks 0-1: reshard is called inside a step: module 'tables.bags' has run forward",
        "no DistributedModelParallel": "reshard needs what DistributedModelParallel returned, and the model is a Scored",
    }.items():
        assert words in one.pop(name), name
    assert not one


def nothing_to_do(rank: int) -> tuple[tuple[str, ...], bool]:
    trainer = Trainer(ONE, "adagrad")
    before = list(trainer.model.modules())
    said = reshard(trainer.model, ONE)
    return said, all(one is other for one, other in zip(before, trainer.model.modules(), strict=True))


def test_by_the_same_plan_nothing_changes(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path, nothing_to_do) == [((), True)] * 2


def there_and_back(rank: int) -> tuple[bool, bool]:
    trainer = Trainer(ONE, "adagrad")
    trainer.train(0, STEPS)
    before = tensors(trainer)
    for given in (OTHER, NO_COPY_EITHER, ONE):
        reshard(trainer.model, given, optimizer_of_copies=trainer.dense)
    after = tensors(trainer)
    return before.keys() == after.keys(), all(torch.equal(value, after[name]) for name, value in before.items())


def tensors(trainer: Trainer) -> dict[str, Tensor]:
    """The weights and moments of this rank, and the moments of dense parameters, but for those of copies."""
    found: dict[str, Tensor] = {}
    of_fused = {key: one for each in trainer.state()["optimizer"]["state"].values() for key, one in each.items()}
    for name, value in (trainer.model.state_dict() | of_fused).items():
        parts = [part.tensor for part in value.local_shards()] if hasattr(value, "local_shards") else [value]
        found |= {f"{name} {n}": part.detach().clone() for n, part in enumerate(parts)}
    named = {name: p for name, p in trainer.model.named_parameters() if p in trainer.dense.state and "tiny" not in name}
    return found | {name: trainer.dense.state[parameter]["sum"].clone() for name, parameter in named.items()}


def test_several_plans_in_turn_leave_every_weight_and_moment_as_it_was(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path, there_and_back) == [(True, True)] * 2


def some_change(rank: int) -> tuple[bool, ...]:
    trainer = Trainer(ONE, "adagrad")
    trainer.train(0, 1)
    tables = trainer.model.module.tables
    kept, left = (tables.sequences, tables.positions), weakref.ref(tables.bags)
    reshard(trainer.model, BAGS_ONLY, optimizer_of_copies=trainer.dense)
    gc.collect()
    return (tables.sequences is kept[0], tables.positions is kept[1], left() is None)


def test_collections_that_the_plan_holds_as_before_are_left_alone_and_of_others_nothing_stays(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path, some_change) == [(True, True, True)] * 2


KINDS = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam)


def wrapped(rank: int) -> list[list[bool]]:
    return [wrapped_in(kind) for kind in KINDS]


def wrapped_in(kind: Any) -> list[bool]:
    """Whether the dense optimizer, in TorchRec's wrappers, has the model's own parameters after each plan."""
    trainer = Trainer(ONE, "adagrad")
    dense = dict(in_backward_optimizer_filter(trainer.model.named_parameters()))
    wrapper = KeyedOptimizerWrapper(dense, lambda parameters: kind(parameters, lr=0.01))
    trainer.dense = GradientClippingOptimizer(CombinedOptimizer([trainer.model.fused_optimizer, wrapper]))
    found = []
    for given in (NO_COPY, ONE, BAGS_ONLY):
        trainer.train(0, 1)
        reshard(trainer.model, given, optimizer_of_copies=trainer.dense)
        now = dict(in_backward_optimizer_filter(trainer.model.named_parameters()))
        (group,) = wrapper.param_groups
        found.append(
            now.keys() == wrapper.params.keys()
            and all(wrapper.params[name] is parameter for name, parameter in now.items())
            and {id(parameter) for parameter in now.values()} == {id(parameter) for parameter in group["params"]}
            and wrapper.state.keys() <= set(group["params"])
        )
    before = now["tables.bags.embedding_bags.tiny.weight"].detach().clone()
    trainer.train(1, 2)
    return [*found, not torch.equal(before, now["tables.bags.embedding_bags.tiny.weight"])]


def test_a_dense_optimizer_in_wrappers_has_the_new_copies(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path, wrapped) == [[[True] * 4] * len(KINDS)] * 2


def beyond_hbm(rank: int) -> tuple[list[float], list[float]]:
    trainer, unstopped = Trainer(ONE, "rowwise_adagrad"), Trainer(ONE, "rowwise_adagrad")
    for each in (trainer, unstopped):
        each.train(0, STEPS)
    task = ONE.task.model_copy(update={"host_memory_bytes": 2**30}).with_tiers(
        {"wide": ("cached", 20), "seen": ("host", None)}
    )
    given = Plan(task=task, shards=ONE.shards, provenance=ONE.provenance)
    assert reshard(trainer.model, given, optimizer_of_copies=trainer.dense) == ()
    bags = trainer.model.module.tables.bags
    assert bags.module_sharding_plan["wide"].compute_kernel == "fused_uvm_caching"
    return trainer.train(STEPS, 2 * STEPS), unstopped.train(STEPS, 2 * STEPS)


def test_tables_go_beyond_hbm_and_train_on(tmp_path: Path) -> None:
    for losses, unstopped in on_ranks(2, tmp_path, beyond_hbm):
        assert losses == pytest.approx(unstopped, rel=1e-5)


def copies_change(rank: int, old: Plan, new: Plan, folder: Path) -> dict[str, Any]:
    """As `live`, for a table that only one of the plans copies: the optimizer's state of it starts anew on both sides."""
    trainer = Trainer(old, "adagrad")
    trainer.train(0, STEPS)
    save(trainer.state(), checkpoint_id=folder)
    dense = {name: trainer.dense.state[p] for name, p in trainer.model.named_parameters() if p in trainer.dense.state}
    dense, order = copy.deepcopy(dense), output_order(trainer.model)
    said = reshard(trainer.model, new, optimizer_of_copies=trainer.dense)
    again = Trainer(new, "adagrad", seed=2)
    keep_output_order(again.model, order)
    estimated = load_resharded(again.state(), folder, old_plan=old, new_plan=new)
    for name, parameter in again.model.named_parameters():
        if parameter in again.dense.state and name in dense:
            again.dense.state[parameter].update(dense[name])
    return {
        "said": said == estimated,
        "turned": said,
        "params": len(trainer.dense.param_groups[0]["params"]),
        "losses": trainer.train(STEPS, 2 * STEPS),
        "started again": again.train(STEPS, 2 * STEPS),
    }


@pytest.mark.parametrize(("old", "new"), [(ONE, NO_COPY), (NO_COPY, ONE)], ids=["sharded now", "copied now"])
def test_a_table_that_becomes_a_copy_or_was_one_goes_on_as_after_a_restart(
    old: Plan, new: Plan, tmp_path: Path
) -> None:
    found = on_ranks(2, tmp_path, copies_change, old, new, tmp_path / "saved")

    assert {name for each in found for name in each["turned"]} == {"tiny"}
    for each in found:
        assert each["said"]
        assert each["params"] == (4 if new is ONE else 3)
        assert each["losses"] == each["started again"]


def alone(rank: int, who: int) -> str:
    """What the rank is told that calls while the other does not, and then both train on."""
    trainer = Trainer(ONE, "sgd")
    said = refused(trainer, OTHER, step=3, timeout_seconds=0.5) if rank == who else ""
    trainer.train(0, 1)
    return said


def test_a_rank_that_does_not_come_is_named_and_the_others_train_on(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path, alone, 0)[0] == (
        f"NeuroshardError: rank 1 did not take plan {OTHER.digest()[:12]} at step 3 within 0.5 s, so no rank trains with it; "
        "look at the logs of that rank, then start all ranks again"
    )


def test_a_rank_0_that_does_not_come_is_named(tmp_path: Path) -> None:
    said = on_ranks(2, tmp_path, alone, 1)[1]
    assert "rank 1: rank 0 gave no new plan within 0.5 s; has rank 0 ended, or does it not call reshard" in said


class Dies(BaseException):
    """What ends a rank without a word."""


def fails(rank: int, places: dict[str, float], error: type[BaseException]) -> list[tuple[str, bool]]:
    """What the ranks are told where rank 1 fails, and whether they train on as if nothing had been; within seconds, by place."""
    trainer, unstopped = Trainer(NO_COPY, "rowwise_adagrad"), Trainer(NO_COPY, "rowwise_adagrad")
    for each in (trainer, unstopped):
        each.train(0, 2)
    found = []
    for step, (where, seconds) in enumerate(places.items(), 2):
        said = fails_at(trainer, rank, where, error, seconds)
        found.append((said, trainer.train(step, step + 1) == unstopped.train(step, step + 1)))
    return found


def fails_at(trainer: Trainer, rank: int, where: str, error: type[BaseException], seconds: float) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("neuroshard.client.checkpoint.in_memory.is_elsewhere", lambda storage: True)  # as on a GPU
        if rank == 1:
            patch.setattr(f"neuroshard.client.checkpoint.live.{where}", partial(fail, error))
        with pytest.raises((NeuroshardError, Dies)) as caught:
            reshard(trainer.model, NO_COPY_EITHER, timeout_seconds=seconds)
    return str(caught.value)


def fail(error: type[BaseException], *_: object) -> None:
    raise error("no memory")


def test_where_one_rank_fails_all_say_it_and_have_the_model_as_it_was(tmp_path: Path) -> None:
    places = {"leaving": 30.0, "InMemory.__init__": 2.0, "InMemory.read_data": 2.0, "_Job._set_operators": 30.0}
    one, other = on_ranks(2, tmp_path, fails, places, OSError)
    for said, same in (*one, *other):
        assert "rank 1: OSError: no memory" in said
        assert said.endswith("; the model is as it was")
        assert same


def test_a_rank_that_ends_half_way_is_named(tmp_path: Path) -> None:
    [(said, same)], _ = on_ranks(2, tmp_path, fails, {"_Job._set_operators": 3.0}, Dies)
    assert said == (
        f"rank 1 did not take the state of plan {NO_COPY_EITHER.digest()[:12]} within 3 s, so no rank trains with it; "
        "look at the logs of that rank, then start all ranks again; the model is as it was"
    )
    assert same


def is_lost(rank: int) -> str:
    trainer = Trainer(NO_COPY, "sgd")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("neuroshard.client.checkpoint.live._Job._set_operators", partial(fail, OSError))
            patch.setattr("neuroshard.client.checkpoint.in_memory.InMemory.bring_back", partial(fail, OSError))
        return refused(trainer, NO_COPY_EITHER).split("; ", 1)[1]


def test_a_model_that_cannot_be_brought_back_is_said_to_be_lost(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path, is_lost) == [
        "the model is as it was",
        "and the old shards cannot be brought back on rank 1 (no memory), so this model is of no use; start all ranks again "
        "from a checkpoint",
    ]


def fails_making(rank: int) -> str:
    """As `fails`, where TorchRec's collectives let the other rank wait: the process group is of no use afterwards."""
    trainer = Trainer(ONE, "sgd", group=dist.new_group())
    if rank == 1:
        trainer.model._sharder_map[type(Scored().tables.bags)].shard = partial(fail, OSError)
    return refused(trainer, BAGS_ONLY, timeout_seconds=2.0)


def test_a_rank_that_others_wait_for_in_a_collective_is_named_too(tmp_path: Path) -> None:
    for said in on_ranks(2, tmp_path, fails_making):
        assert said == "NeuroshardError: rank 1: OSError: no memory; other errors on rank 0; the model is as it was"


def as_on_a_gpu(rank: int, folder: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("neuroshard.client.checkpoint.in_memory.is_elsewhere", lambda storage: True)
        return live(rank, ONE, OTHER, "rowwise_adagrad", folder)


def test_old_shards_that_leave_their_device_first_arrive_as_well(tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path, as_on_a_gpu, tmp_path / "saved"):
        assert found["losses"] == found["started again"]


def settings(rank: int) -> dict[str, Any]:
    """What tables that apply_optimizer_in_backward gave another optimizer train by, before and after, and with another rate."""
    trainer, unstopped = (Trainer(ONE, "sgd", applied=True) for _ in range(2))
    for each in (trainer, unstopped):
        each.train(0, 1)
        for group in each.model.fused_optimizer.param_groups:
            group["lr"] /= 2
        each.model.fused_optimizer.step()
        each.train(1, 2)
    before = settings_by_table(trainer)
    hook = trainer.model.module.tables.bags.register_forward_hook(lambda *_: None)
    reshard(trainer.model, MOVED, optimizer_of_copies=trainer.dense)
    assert hook.id in trainer.model.module.tables.bags._forward_hooks
    return {
        "before": before,
        "after": settings_by_table(trainer),
        "losses": trainer.train(2, 5),
        "unstopped": unstopped.train(2, 5),
    }


def settings_by_table(trainer: Trainer) -> dict[str, tuple[str, float, float, int]]:
    """The optimizer of each table's operator on this rank, its rates, and the steps that it counts."""
    found: dict[str, tuple[str, float, float, int]] = {}
    for path in ("bags", "sequences"):
        for lookup in getattr(trainer.model.module.tables, path)._lookups:
            for module in lookup.modules():
                if hasattr(module, "_optim") and hasattr(module, "_emb_module"):
                    operator, group = module._emb_module, module._optim.param_groups[0]
                    said = str(operator.optimizer), group["lr"], operator.get_learning_rate(), int(operator.iter)
                    found |= {table.name: said for table in module._config.embedding_tables}
    return found


def test_optimizers_rates_and_steps_of_tables_go_along(tmp_path: Path) -> None:
    found = on_ranks(2, tmp_path, settings)

    before, after = (
        {name: said for each in found for name, said in each[when].items()} for when in ("before", "after")
    )
    assert before == after
    rates = {
        "shared": LEARNING_RATE / 2,
        "wide": 2 * LEARNING_RATE,
        "read": 2 * LEARNING_RATE,
        "seen": LEARNING_RATE / 2,
    }
    assert {name: said[1] for name, said in after.items()} == pytest.approx(rates)
    assert len({said[0] for said in after.values()}) == 2
    assert {said[3] for said in after.values()} == {0, 2}  # FBGEMM counts none for SGD
    for each in found:
        assert each["losses"] == pytest.approx(each["unstopped"], rel=1e-5)


def scheduled(rank: int) -> list[str]:
    trainer = Trainer(ONE, "sgd")
    torch.optim.lr_scheduler.LambdaLR(trainer.model.fused_optimizer, lambda step: 0.5)
    wrapper = GradientClippingOptimizer(CombinedOptimizer([trainer.model.fused_optimizer]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reshard(trainer.model, OTHER, optimizer_of_copies=trainer.dense)
    groups = trainer.model.fused_optimizer.param_groups
    assert [group["lr"] for group in groups] == pytest.approx([LEARNING_RATE / 2] * len(groups))
    assert not any(group is other for group in groups for other in wrapper.param_groups)
    return [str(each.message) for each in caught if "make it anew" in str(each.message)]


def test_schedules_and_wrappers_that_keep_groups_of_the_old_plan_are_warned_of(tmp_path: Path) -> None:
    said = {line for each in on_ranks(2, tmp_path, scheduled) for line in each}
    assert any("it would leave some groups as they are" in line for line in said)
    assert any("a GradientClippingOptimizer wraps the fused optimizer and keeps its groups" in line for line in said)


def memory(rank: int) -> str:
    """What is said where hosts have no memory at all: what both ranks need for their new shards."""
    trainer = Trainer(ONE, "rowwise_adagrad")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("neuroshard.client.checkpoint.live.available_bytes", lambda: 0)
        return refused(trainer, OTHER)


def test_a_host_without_room_for_the_new_shards_of_collections_that_change_is_named(tmp_path: Path) -> None:
    changing = {"shared", "wide", "read", "seen", "placed", "tiny"}
    shards = [shard for shard in OTHER.shards if shard.table in changing]
    sizes = [
        (shard.device, each.weights + each.optimizer)
        for shard, each in zip(shards, shard_memory(OTHER.task, shards), strict=True)
    ]
    needed = sum(size for _, size in sizes) + sum(max(size for rank, size in sizes if rank == one) for one in (0, 1))
    for said in on_ranks(2, tmp_path, memory):
        assert f"needs {format_bytes(needed)} more of host memory" in said


def by_the_docs(rank: int) -> list[int]:
    """The steps after which the snippets of docs/replan.md took a plan, and how the model is held then."""
    page = (Path(__file__).parents[2] / "docs" / "replan.md").read_text()
    section = page.partition("## A new plan without a restart")[2].partition("\n## ")[0]
    once, _, follow = re.findall(r"```python\n(.*?)```", section, re.S)
    trainer = Trainer(ONE, "adagrad")
    exec(once, {"model": trainer.model, "plan": OTHER, "step": 1, "dense_optimizer": trainer.dense})
    taken = []

    def take(model: DistributedModelParallel, plan: Plan, *, step: int, batch_size: int) -> None:
        taken.append(step)
        reshard(model, plan, step=step, batch_size=batch_size, optimizer_of_copies=trainer.dense)

    class Now:
        """A thread that has run when it was started."""

        def __init__(self, target: Callable[[], None], daemon: bool) -> None:
            self.start = target

    given = {
        "watch": lambda *_, **__: iter([MOVED]),
        "load_plan_on_all_ranks": lambda *_, digest: {MOVED.digest(): MOVED}[digest],
        "threading": SimpleNamespace(Thread=Now),
    }
    exec(follow, {**given, "dist": dist, "plan": OTHER, "model": trainer.model, "reshard": take, "loader": range(150)})
    shards = trainer.model.module.tables.bags.module_sharding_plan["wide"].sharding_spec.shards
    return [*taken, *(shard.placement.rank() for shard in shards)]


def test_the_snippets_of_the_docs_run(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path, by_the_docs) == [[0, 1]] * 2
