"""What a night has to do: whom to measure, with how many pods, and which cost model each model's plan is searched with."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from helpers.nodes import mixed_fleet, node
from neuroshard.core.cost import Hardware
from neuroshard.core.errors import InvalidInput, NeuroshardError, UsageError
from neuroshard.core.nightly import Order, Survey, read_orders
from neuroshard.core.release import ModelRelease
from neuroshard.fleet.coverage import Known
from neuroshard.fleet.kinds import Fleet
from neuroshard.fleet.labels import kinds_of
from neuroshard.fleet.night import run
from neuroshard.fleet.node import Node
from neuroshard.fleet.run import TOLERATIONS
from neuroshard.fleet.survey import backends_view, survey

NOW = datetime(2026, 1, 11, tzinfo=UTC)


def fleet(*nodes: dict[str, Any]) -> Fleet:
    kinds, _ = kinds_of([Node.from_json(one, "n") for one in nodes], {}, TOLERATIONS)
    return Fleet(source="test", kinds=kinds)


def known(hardware: Hardware, number: int = 1, time: str = "2026-01-10T00:00:00Z") -> dict[str, Known]:
    release = ModelRelease(
        fingerprint=hardware.fingerprint,
        bundle_digest=f"{number:064x}",
        number=number,
        time=time,
        backend="cuda",
        device_name=hardware.name,
        batch_size=65536,
        error=0.08,
    )
    return {hardware.fingerprint: Known(release, hardware)}


def order(**changes: Any) -> Order:
    told = {"name": "ads", "tables": "mlperf-dlrm-dcnv2", "devices": 8, "memory": "80GiB", "hardware": "h200"}
    return Order.parse({**told, **changes}, "order")


def found(there: Fleet, live: dict[str, Known], *orders: Order, pods: int = 4, seed: int = 0) -> Survey:
    told, _ = survey(
        there, live, orders or [order()], request={"seed": seed}, batch_size=65536, most_pods=pods, now=NOW
    )
    return told


def hardware(**changes: Any) -> Hardware:
    return fleet(node("n", **changes)).kinds[0].hardware


def test_an_unchanged_fleet_has_nothing_to_measure() -> None:
    told = found(fleet(node("a"), node("b")), known(hardware()))
    assert (told.works, told.hardware) == ((), {"ads": hardware().fingerprint})


def test_a_new_kind_is_the_only_one_to_measure_on_as_many_nodes_as_are_alike() -> None:
    there = fleet(node("a"), *(node(f"h{n}", product="NVIDIA-H100") for n in range(3)))
    [work] = found(there, known(hardware())).works
    assert (work.hardware.name, work.pods, work.devices) == ("NVIDIA-H100", 3, 8)
    assert work.node_selector["nvidia.com/gpu.product"] == "NVIDIA-H100"
    assert [found(there, known(hardware()), pods=2).works[0].pods] == [2]


def test_a_new_driver_is_measured_and_planned_with() -> None:
    told = found(fleet(node("a", driver="580.65.06")), known(hardware()))
    assert [work.hardware.driver for work in told.works] == ["580.65.06"]
    assert told.hardware == {"ads": hardware(driver="580.65.06").fingerprint}


def test_while_drivers_are_rolled_out_a_plan_follows_most_nodes() -> None:
    there = fleet(node("a"), node("b", driver="580.65.06"), node("c", driver="580.65.06"))
    assert found(there, known(hardware())).hardware == {"ads": hardware(driver="580.65.06").fingerprint}


def test_a_pool_that_has_left_is_still_planned_for_by_its_newest_model() -> None:
    old = known(hardware(driver="560.1"), time="2026-01-01T00:00:00Z")
    told = found(fleet(node("l", product="NVIDIA-L40S")), {**old, **known(hardware())})
    assert told.hardware == {"ads": hardware().fingerprint}
    assert [work.hardware.name for work in told.works] == ["NVIDIA-L40S"]


def test_work_keeps_its_folder_until_a_cost_model_is_live_or_something_else_is_asked_for() -> None:
    there = fleet(node("a", driver="580.65.06"))
    [work], [again] = found(there, known(hardware())).works, found(there, {}).works
    assert work.folder == again.folder
    assert work.folder.startswith(f"_measuring/{work.hardware.fingerprint}/")
    assert found(there, {}, seed=1).works[0].folder != work.folder


def test_the_formula_measures_twins_that_no_real_hardware_is_taken_for() -> None:
    there = fleet(*mixed_fleet()[:-2])
    twins = backends_view(there, "synthetic")
    assert {kind.fingerprint for kind in twins.kinds}.isdisjoint(kind.fingerprint for kind in there.kinds)
    assert {kind.hardware.kind for kind in twins.kinds} == {"synthetic"}
    works = found(twins, {}).works
    assert not [work for work in works if work.hardware.sharing]


def test_hardware_that_nobody_has_is_told_with_what_there_is() -> None:
    with pytest.raises(
        NeuroshardError, match=r"model 'ads': no cost model for hardware 'b200'.*NVIDIA-H200 \(new, 1 nodes"
    ):
        found(fleet(node("a")), {}, order(hardware="b200"))
    with pytest.raises(NeuroshardError, match=r"none can be measured tonight.*NVIDIA-H200 \(new, 0 nodes"):
        found(fleet(node("a", ready=False)), {})


def test_hardware_that_is_not_named_is_fine_until_there_are_two_kinds() -> None:
    assert found(fleet(node("a")), {}, order(hardware="")).hardware
    with pytest.raises(UsageError, match=r"hardware '' may be any of NVIDIA-H200; NVIDIA-L40S; name one"):
        found(fleet(node("a"), node("b", product="NVIDIA-L40S")), {}, order(hardware=""))


@pytest.mark.parametrize(
    ("models", "error", "message"),
    [
        ("{", InvalidInput, "models: not JSON"),
        ("[]", UsageError, "models must be a JSON list of at least one model"),
        ('{"name": "ads"}', UsageError, "models must be a JSON list"),
        ('[{"name": "hard ware"}]', InvalidInput, r"models\[0\]"),
        ('[{"name": "a", "tables": "t", "devices": 0, "memory": "1GiB"}]', InvalidInput, r"models\[0\]: devices"),
    ],
)
def test_orders_that_cannot_be_are_told_before_anything_is_asked(
    models: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_orders(models)


def test_numbers_that_kfp_made_floats_are_numbers_still() -> None:
    [one] = read_orders('[{"name": "a", "tables": "t", "devices": 8.0, "memory": "1GiB"}]')
    assert one.devices == 8


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ([order(), order()], "model 'ads' is asked for 2 times"),
        ([order(memory="lots")], "'lots' is not an amount of memory"),
        ([order(memory="1GiB,2GiB")], "lists 2 amounts for 8 devices"),
    ],
)
def test_what_cannot_be_planned_is_told_before_hours_of_measuring(orders: list[Order], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_orders(json.dumps([one.model_dump() for one in orders]))


def test_run_tells_how_each_kind_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nodes.json").write_text(json.dumps({"items": [node("a")]}))
    told = run(
        json.dumps([order().model_dump()]),
        str(tmp_path / "store"),
        backend="cuda",
        recorded=str(tmp_path / "nodes.json"),
        node_selector={},
        tolerations=TOLERATIONS,
        request={},
        batch_size=512,
        most_pods=1,
        max_age_seconds=None,
        max_error=None,
    )
    assert len(told.works) == 1
    assert "-> new: no cost model of this kind is live\nto measure: 1 of 1 kinds" in capsys.readouterr().err


def test_a_name_given_whole_is_not_taken_for_its_slices() -> None:
    there = fleet(*(one for one in mixed_fleet() if one["metadata"]["name"].startswith("mig-")))
    names = {
        "a100-sxm4-80gb": "NVIDIA-A100-SXM4-80GB",
        "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb",
    }
    for called, name in names.items():
        told = found(there, {}, order(hardware=called))
        [kind] = [kind for kind in there.kinds if kind.hardware.name == name]
        assert told.hardware == {"ads": kind.fingerprint}
    with pytest.raises(UsageError, match="may be any of"):
        found(there, {}, order(hardware="a100"))
