"""The lists of hot rows of a plan's tables: in the store before the plan, kept while a plan or counts name them."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.plans import NOW, TABLES, make_plan, row_wise
from helpers.refusals import refused
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import Conflict, InvalidInput, NotFound
from neuroshard.core.parts import RowsByAccess
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.release import Decision, Release
from neuroshard.core.row_order import LISTS_FOLDER, RowOrder
from neuroshard.core.task import ShardingTask
from neuroshard.core.value import sha256, timestamp
from neuroshard.deploy.gc import gc
from neuroshard.deploy.golive import roll_back
from neuroshard.deploy.run import DeploySettings, deploy, promote, publish, run, run_publish
from neuroshard.files.plan import write_plan
from neuroshard.files.row_orders import bytes_of_ids, ids_path, write_ids
from neuroshard.store.folder import FolderStore
from neuroshard.store.releases import plan_key, plans_of, read_live
from neuroshard.store.row_orders import put_ids, read_ids, rows_of

DAY = 86400.0


def np_header(shape: str) -> bytes:
    header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


def list_of(*ids: int) -> bytes:
    return bytes_of_ids(np.array(ids))


def order_of(data: bytes, hot_rows: int) -> RowOrder:
    return RowOrder(
        ids_digest=sha256(data), rows=1000, hot_rows=hot_rows, lookup_share=0.5, time="2026-01-05T00:00:00Z"
    )


def plan_with(order: RowOrder, note: str = "", *, dealt: bool = True) -> Plan:
    """A plan that deals the first table by the order, or cuts it into blocks of ids."""
    first, *others = TABLES
    rule = TableRule(table=first.name, rows_by_access=RowsByAccess(dealt=True))
    return Plan(
        task=ShardingTask(
            tables=(first.model_copy(update={"row_order": order}), *others),
            device_memory_bytes=(2**20,) * 2,
            batch_size=64,
            constraints=Constraints(tables=(rule,) if dealt else ()),
        ),
        shards=(
            *row_wise(first, 2),
            *(Shard(table=each.name, rows=each.rows, dim=each.dim, device=0) for each in others),
        ),
        predicted_ms=(1.5, 1.5),
        provenance=Provenance(neuroshard_version="0", algorithm="by hand", notes=(note,)),
    )


def run_one(plan: Plan, store: FolderStore, folder: Path) -> Decision:
    """What the gate finds of a plan."""
    write_plan(folder / "one.json", plan)
    decision = run(folder / "one.json", store.url, "m", DeploySettings(force=True)).decision
    assert decision is not None
    return decision


def key_of(order: RowOrder) -> str:
    return rows_of("m").keys(order.ids_digest)[0]


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


def age(store: FolderStore) -> None:
    for path in store.root.rglob("*.*"):
        then = path.stat().st_mtime - 30 * DAY
        os.utime(path, (then, then))


def lists(store: FolderStore) -> set[str]:
    return {entry.key for entry in store.list("m/rows/")}


@pytest.mark.parametrize("how", ["deploy", "publish"])
def test_the_list_beside_a_plan_goes_into_the_store_with_it(store: FolderStore, tmp_path: Path, how: str) -> None:
    data = list_of(7, 3)
    write_plan(tmp_path / "plan.json", plan_with(order_of(data, 2)))
    write_ids(tmp_path / LISTS_FOLDER, [data])
    for _ in range(2):  # a second time changes nothing
        (run if how == "deploy" else run_publish)(tmp_path / "plan.json", store.url, "m")
        assert store.read(key_of(order_of(data, 2))) == data


def test_a_list_is_read_by_its_digest_and_one_without_is_the_first_rows(store: FolderStore) -> None:
    data = list_of(7, 3)
    put_ids(store, "m", data)
    assert read_ids(store, "m", order_of(data, 2)).tolist() == [7, 3]
    in_order = order_of(data, 2).model_copy(update={"ids_digest": ""})
    assert read_ids(store, "m", in_order).tolist() == [0, 1]
    store.delete(key_of(order_of(data, 2)))
    with pytest.raises(NotFound, match="list of hot rows was deleted there"):
        read_ids(store, "m", order_of(data, 2))


def test_a_damaged_list_is_refused_before_anything_is_written(store: FolderStore, tmp_path: Path) -> None:
    data = list_of(7, 3)
    write_plan(tmp_path / "plan.json", plan_with(order_of(data, 2)))
    write_ids(tmp_path / LISTS_FOLDER, [data])
    ids_path(tmp_path / LISTS_FOLDER, order_of(data, 2)).write_bytes(data[:-1])
    with pytest.raises(InvalidInput, match="cut off or changed"):
        run(tmp_path / "plan.json", store.url, "m")
    assert store.list("m/") == ()


@pytest.mark.parametrize("how", ["deploy", "publish"])
def test_a_plan_whose_list_is_nowhere_is_refused_with_the_way_out(store: FolderStore, tmp_path: Path, how: str) -> None:
    put = run if how == "deploy" else run_publish
    write_plan(tmp_path / "plan.json", plan_with(order_of(list_of(7, 3), 2)))
    with refused(InvalidInput, "user", tmp_path / LISTS_FOLDER, store.url):
        put(tmp_path / "plan.json", store.url, "m")
    assert store.list("m/") == ()
    put_ids(store, "m", list_of(7, 3))
    put(tmp_path / "plan.json", store.url, "m")


def twice_live(store: FolderStore) -> tuple[Plan, RowOrder]:
    """The plan of the first release, whose list is as old as the second release's plan without one."""
    order = order_of(list_of(7, 3), 2)
    put_ids(store, "m", list_of(7, 3))
    plan = plan_with(order)
    deploy(plan, store, "m", now=NOW)
    deploy(make_plan(), store, "m", now=NOW)
    age(store)
    return plan, order


def go_back(store: FolderStore, how: str, plan: Plan) -> None:
    if how == "promote":
        promote(store, "m", plan.digest(), now=NOW)
    else:
        roll_back(store, plans_of("m"), now=NOW)


@pytest.mark.parametrize("how", ["promote", "rollback"])
def test_a_plan_whose_list_is_gone_or_none_goes_live_by_no_way(store: FolderStore, how: str) -> None:
    plan, order = twice_live(store)
    store.delete(key_of(order))
    with refused(InvalidInput, "user", store.url, LISTS_FOLDER):
        go_back(store, how, plan)
    other = order_of(b"PK", 2)
    no_list = publish_unchecked(store, plan_with(other), b"PK")
    with refused(InvalidInput, key_of(other)):
        promote(store, "m", no_list.digest(), now=NOW)
    assert read_live(store, "m").release.plan_digest == make_plan().digest()


def publish_unchecked(store: FolderStore, plan: Plan, data: bytes) -> Plan:
    """As somebody puts them there who may write to the store."""
    put_ids(store, "m", data)
    store.create(plan_key("m", plan.digest()), plan.canonical_json())
    return plan


@pytest.mark.parametrize("how", ["promote", "rollback"])
def test_gc_takes_no_list_of_a_plan_that_is_about_to_go_live(store: FolderStore, how: str, monkeypatch: Any) -> None:
    plan, order = twice_live(store)
    track, live = plans_of("m"), read_live(store, "m").release
    if how == "promote":  # of a plan that no release has
        store.delete(track.release_key(1))
    swap, collected, was = FolderStore.swap, [], store.list(key_of(order))[0].modified

    def late(self: FolderStore, key: str, data: bytes, token: str | None) -> None:
        if key == track.live_key:
            collected.append(gc(store, track, keep=1, age_seconds=DAY, apply=True))
        swap(self, key, data, token)

    monkeypatch.setattr(FolderStore, "swap", late)
    go_back(store, how, plan)
    assert len(collected) == 1
    assert store.list(key_of(order))[0].modified > was
    assert read_live(store, "m").release.number == live.number + 1
    assert read_ids(store, "m", order).tolist() == [7, 3]


HOSTILE = {
    "a zip": b"PK\x03\x04" + bytes(40),
    "10^13 ids": np_header("(10000000000000,)") + bytes(8),
    "twice": list_of(3, 3),
    "nothing": b"",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_live_plan_whose_list_is_none_does_not_keep_the_next_one_away(
    store: FolderStore, tmp_path: Path, data: bytes, neuroshard: Any
) -> None:
    bad = publish_unchecked(store, plan_with(order_of(data, 2)), data)
    release = Release(model="m", number=1, plan_digest=bad.digest(), time=timestamp(NOW))
    for key in (plans_of("m").live_key, plans_of("m").release_key(1)):
        store.create(key, release.canonical_json())
    newer = order_of(list_of(7, 3), 2).model_copy(update={"time": "2026-01-06T00:00:00Z"})
    write_ids(tmp_path / LISTS_FOLDER, [list_of(7, 3)])
    write_plan(tmp_path / "plan.json", plan_with(newer))
    page = neuroshard("report", "plan.json", "--live", f"{store.url}#m", "-o", "page.html", cwd=tmp_path)
    assert page.returncode == 0, page.stderr
    assert run(tmp_path / "plan.json", store.url, "m").release.number == 2


def test_lists_that_a_plan_does_not_use_are_not_looked_at(store: FolderStore, tmp_path: Path) -> None:
    data = list_of(7, 3)
    write_plan(tmp_path / "plan.json", plan_with(order_of(data, 2), dealt=False))
    write_ids(tmp_path / LISTS_FOLDER, [data])
    ids_path(tmp_path / LISTS_FOLDER, order_of(data, 2)).write_bytes(b"damaged")
    run(tmp_path / "plan.json", store.url, "m")
    assert lists(store) == set()


def test_deploy_and_diff_say_where_access_has_drifted(
    store: FolderStore, tmp_path: Path, neuroshard: Any, capfd: Any
) -> None:
    orders = [order_of(list_of(*ids), 2) for ids in ((7, 3), (3, 8))]
    orders[1] = orders[1].model_copy(update={"time": "2026-01-06T00:00:00Z", "points": ((1, 0.1),)})
    write_ids(tmp_path / LISTS_FOLDER, [list_of(7, 3), list_of(3, 8)])
    plans = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, order in zip(plans, orders, strict=True):
        write_plan(path, plan_with(order))
        deployed = run(path, store.url, "m")
    line = "row order of table 'user': its hottest 2 rows had 50.0% of the lookups when it was made"
    assert deployed.decision is not None
    assert f"the live plan's {line}" in deployed.decision.why
    (drifted,) = json.loads(deployed.release.canonical_json())["decision"]["drifted"]
    assert drifted.startswith(f"the live plan's {line}")
    by_id = plan_with(orders[0], dealt=False)
    same = by_id.task.tables[0].model_copy(update={"row_order": orders[0].model_copy(update={"ids_digest": "f" * 64})})
    for order, lines in ((orders[0], 1), (same.row_order, 0)):  # an older plan's, and one whose list is nowhere
        assert order is not None
        newer = order.model_copy(update={"time": "2026-01-07T00:00:00Z"})
        decision = run_one(plan_with(newer, f"{lines}", dealt=False), store, tmp_path)
        assert len(decision.drifted) == lines
        run(plans[1], store.url, "m", DeploySettings(force=True))
    found = neuroshard("diff", *plans)
    assert line in " ".join(found.stdout.split())
    (said,) = json.loads(neuroshard("diff", *plans, "--json").stdout)["row_orders_drifted"]
    assert said.endswith("(2026-01-05T00:00:00Z), 10.1% now; as many of the newer order have 50.0%")
    assert json.loads(neuroshard("diff", *plans[::-1], "--json").stdout)["row_orders_drifted"] == []

    ids_path(tmp_path / LISTS_FOLDER, orders[0]).unlink()
    said = " ".join(neuroshard("diff", *plans).stdout.split())
    assert "whether access has drifted from the old plan's row orders is not known: " in said


def test_gc_keeps_the_lists_of_plans_that_can_go_live_again(store: FolderStore) -> None:
    data = [list_of(number, 9) for number in range(4)]
    orders = [order_of(one, 2) for one in data]
    for one in data:
        put_ids(store, "m", one)
    for number in range(3):
        deploy(plan_with(orders[number], str(number)), store, "m", now=NOW)
    age(store)
    gc(store, plans_of("m"), keep=1, age_seconds=DAY, apply=True)
    assert lists(store) == {key_of(order) for order in orders[1:3]}


def test_gc_deletes_no_list_where_it_cannot_know_which_are_named(store: FolderStore) -> None:
    deploy(make_plan(), store, "m", now=NOW)
    data = list_of(7, 3)
    put_ids(store, "m", data)
    plan = store.root / plan_key("m", make_plan().digest())
    whole = plan.read_bytes()
    plan.write_bytes(b"{}")
    age(store)
    assert not gc(store, plans_of("m"), keep=1, age_seconds=DAY, apply=True).entries
    plan.write_bytes(whole)
    age(store)
    assert [entry.key for entry in gc(store, plans_of("m"), keep=1, age_seconds=DAY, apply=True).entries] == [
        key_of(order_of(data, 2))
    ]


def test_a_plan_is_not_published_while_gc_deletes_its_list(store: FolderStore, monkeypatch: Any) -> None:
    deploy(make_plan(), store, "m", now=NOW)
    data = list_of(7, 3)
    put_ids(store, "m", data)
    age(store)
    deleted = FolderStore.delete

    def meanwhile(self: FolderStore, key: str) -> None:
        if key == key_of(order_of(data, 2)):
            with pytest.raises(Conflict, match="is deleting list of hot rows"):
                publish(plan_with(order_of(data, 2)), store, "m")
        deleted(self, key)

    monkeypatch.setattr(FolderStore, "delete", meanwhile)
    gc(store, plans_of("m"), keep=1, age_seconds=DAY, apply=True)
    assert lists(store) == set()
