"""What a nightly run has to do: whom to measure, with how many pods, and which cost model each model's plan is searched with."""

import json
from dataclasses import replace
from typing import Any

import pytest

from helpers.costs import random_model
from helpers.nodes import mixed_fleet, node
from helpers.plans import NOW
from helpers.refusals import refused
from helpers.tier_costs import TRUTH
from neuroshard.core.cost import Hardware
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.release import ModelRelease
from neuroshard.core.table import Table
from neuroshard.costmodel.bundle import TrainedCostModel
from neuroshard.fleet.cluster import Node
from neuroshard.fleet.labels import Fleet, kinds_of
from neuroshard.fleet.run import TOLERATIONS
from neuroshard.fleet.survey import Surveyed, SurveySettings, backends_view, survey
from neuroshard.models.serving import Known
from neuroshard.orders.nightly import ModelSpec, Request, read_specs
from neuroshard.store.bundles import ModelKey


def fleet(*nodes: dict[str, Any]) -> Fleet:
    kinds, _ = kinds_of([Node.from_json(one, "n") for one in nodes], {}, TOLERATIONS)
    return Fleet(source="test", kinds=kinds)


def known(hardware: Hardware, number: int = 1, time: str = "2025-11-19T12:00:00Z") -> dict[ModelKey, Known]:
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
    return {ModelKey(hardware.fingerprint, 65536): Known(release, model_of(hardware, 2, 4, 8))}


def model_of(hardware: Hardware, *device_counts: int) -> TrainedCostModel:
    """A cost model of this hardware that knows the all-to-all of these numbers of devices."""
    model = random_model(*device_counts)
    bench = model.manifest.bench.model_copy(update={"hardware": hardware})
    changed = {"bench": bench, "hardware_fingerprint": hardware.fingerprint}
    return replace(model, manifest=model.manifest.model_copy(update=changed))


def spec(**changes: Any) -> ModelSpec:
    got = {"name": "ads", "tables": "mlperf-dlrm-dcnv2", "devices": 8, "memory": "80GiB", "hardware": "h200"}
    return ModelSpec.parse({**got, **changes}, "spec")


def found(
    there: Fleet, live: dict[ModelKey, Known], *specs: ModelSpec, pods: int = 4, seed: int = 0, dim: int = 64
) -> Surveyed:
    asked = specs or (spec(),)
    return survey(
        there,
        live,
        asked,
        {one.name: [Table(name="t", rows=10**5, dim=dim, pooling_factor=8.0)] for one in asked},
        SurveySettings(
            Request(compute_cases=40, collective_cases=32, batch_size=65536, seed=seed, backend="cuda"), most_pods=pods
        ),
        now=NOW,
    )


def hardware(**changes: Any) -> Hardware:
    return fleet(node("n", **changes)).kinds[0].hardware


def test_an_unchanged_fleet_has_nothing_to_measure() -> None:
    got = found(fleet(node("a"), node("b")), known(hardware()))
    assert (got.campaigns, got.hardware, got.no_plan) == ((), {"ads": hardware().fingerprint}, {})


def test_a_new_kind_is_the_only_one_to_measure_on_as_many_nodes_as_are_alike() -> None:
    there = fleet(node("a"), *(node(f"h{n}", product="NVIDIA-H100") for n in range(3)))
    [campaign] = found(there, known(hardware())).campaigns
    assert (campaign.hardware.name, campaign.pods, campaign.devices) == ("NVIDIA-H100", 3, 8)
    assert campaign.node_selector["nvidia.com/gpu.product"] == "NVIDIA-H100"
    assert [found(there, known(hardware()), pods=2).campaigns[0].pods] == [2]


def test_a_new_driver_is_measured_and_planned_with() -> None:
    got = found(fleet(node("a", driver="580.65.06")), known(hardware()))
    assert [campaign.hardware.driver for campaign in got.campaigns] == ["580.65.06"]
    assert got.hardware == {"ads": hardware(driver="580.65.06").fingerprint}


def test_while_drivers_are_rolled_out_a_plan_follows_most_nodes() -> None:
    there = fleet(node("a"), node("b", driver="580.65.06"), node("c", driver="580.65.06"))
    assert found(there, known(hardware())).hardware == {"ads": hardware(driver="580.65.06").fingerprint}


def test_a_pool_that_has_left_is_still_planned_for_by_its_newest_model() -> None:
    old = known(hardware(driver="560.1"), time="2025-11-10T12:00:00Z")
    got = found(fleet(node("l", product="NVIDIA-L40S")), {**old, **known(hardware())})
    assert got.hardware == {"ads": hardware().fingerprint}
    assert [campaign.hardware.name for campaign in got.campaigns] == ["NVIDIA-L40S"]


def test_work_keeps_its_folder_whatever_is_asked_for_unless_its_costs_could_not_be_compared() -> None:
    there = fleet(node("a", driver="580.65.06"))
    [campaign], [again] = found(there, known(hardware())).campaigns, found(there, {}, spec(devices=4), pods=1).campaigns
    assert campaign.folder == again.folder
    assert campaign.folder.startswith(f"_measuring/{campaign.hardware.fingerprint}/")
    assert found(there, {}, seed=1).campaigns[0].folder != campaign.folder


def test_the_formula_measures_twins_that_no_real_hardware_is_taken_for() -> None:
    there = fleet(*mixed_fleet()[:-2])
    twins = backends_view(there, "synthetic")
    assert {kind.fingerprint for kind in twins.kinds}.isdisjoint(kind.fingerprint for kind in there.kinds)
    assert {kind.hardware.kind for kind in twins.kinds} == {"synthetic"}
    campaigns = found(twins, {}).campaigns
    assert not [campaign for campaign in campaigns if campaign.hardware.sharing]


def test_hardware_that_nobody_has_is_known_by_name_alone() -> None:
    assert found(fleet(node("a")), {}, spec(hardware="b200")).hardware == {"ads": ""}


def test_hardware_that_is_out_of_service_is_planned_for_and_not_measured() -> None:
    got = found(fleet(node("a", ready=False)), {})
    assert (got.hardware, got.campaigns) == ({"ads": hardware().fingerprint}, ())


L4: dict[str, Any] = {"product": "NVIDIA-L4", "memory_mib": 23034}
H100: dict[str, Any] = {"product": "NVIDIA-H100", "memory_mib": 81559}


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        ([], {}),
        ([node("a", **L4)], L4),
        ([node("a"), node("b", **H100), node("c", **H100)], H100),  # most nodes
        (
            [node("a", **H100), node("b", **L4), node("c", **L4)],
            H100,
        ),  # whose devices have the memory that is asked for
        ([node("a", ready=False), node("b", **L4)], L4),  # in service
    ],
    ids=["no nodes", "one kind", "two kinds", "too little memory", "out of service"],
)
def test_a_model_that_names_no_hardware_is_planned_for_what_is_likely(
    there: list[dict[str, Any]], taken: dict[str, Any]
) -> None:
    got = found(fleet(*there), {}, spec(hardware=""))
    assert (got.hardware, got.no_plan) == ({"ads": hardware(**taken).fingerprint if there else ""}, {})


def test_constraints_that_are_none_lose_their_own_plan_alone() -> None:
    got = found(fleet(node("a")), {}, spec(constraints={"min_dim": 6}), spec(name="feed"))
    assert "constraints of model 'ads': min_dim" in got.no_plan["ads"]
    assert list(got.hardware) == ["feed"]


@pytest.mark.parametrize(
    ("devices", "counts", "ranks"), [(8, (2, 4, 8), 8), (6, (2, 4, 6), 8), (2, (2,), 2), (1, (), 8)]
)
def test_gpus_all_to_all_in_doubling_numbers_up_to_all_of_a_node(
    devices: int, counts: tuple[int, ...], ranks: int
) -> None:
    """A plan for 8 GPUs on nodes of 2 has four domains; nodes of 6 do not divide it."""
    [campaign] = found(fleet(node("n", devices=devices)), {}).campaigns
    assert (campaign.measurable, campaign.ranks) == (counts, (ranks,))


def test_nodes_of_one_gpu_measure_no_all_to_all_and_a_model_that_knows_none_does_not_serve() -> None:
    there = fleet(node("n", devices=1))
    alone = {key: one._replace(model=model_of(hardware())) for key, one in known(hardware()).items()}
    [kind] = found(there, alone).kinds
    assert (kind.state, kind.lacks) == ("ranks missing", ("ranks missing",))
    [kind] = found(there, alone, spec(devices=1)).kinds
    assert kind.state == "covered"


def test_a_plan_for_several_hosts_needs_the_all_to_all_of_one() -> None:
    """Between hosts it goes over the network; a cost model that was measured in one serves any number of them."""
    got = found(fleet(node("a"), node("b")), known(hardware()), spec(devices=64))
    assert (got.campaigns, got.no_plan) == ((), {})
    one_gpu = fleet(node("n", devices=1))
    nothing = {key: one._replace(model=model_of(hardware())) for key, one in known(hardware()).items()}
    assert found(one_gpu, nothing, spec(devices=4, domain=2, local_world_size=2)).campaigns[0].ranks == (2,)
    assert found(one_gpu, nothing, spec(devices=4, domain=4, local_world_size=4)).campaigns[0].ranks == (4,)


def test_a_model_of_narrower_shards_than_plans_need_is_measured_on() -> None:
    got = found(fleet(node("a")), known(hardware()), dim=2048)
    assert got.kinds[0].why.endswith("its widest shard has 128 columns, and plans need shards of 256")
    assert len(got.campaigns) == 1


@pytest.mark.parametrize(
    ("models", "error", "facts"),
    [
        ("{", InvalidInput, ["models", "JSON"]),
        ("[]", UsageError, ["models", "at least one model"]),
        ('{"name": "ads"}', UsageError, ["models", "JSON list"]),
        ('[{"name": "hard ware"}]', InvalidInput, ["models[0]", "name"]),
        ('[{"name": "a", "tables": "t", "devices": 0, "memory": "1GiB"}]', InvalidInput, ["models[0]", "devices"]),
        ([spec(), spec()], UsageError, ["model 'ads'", "2 times"]),
        ([spec(memory="lots")], UsageError, ["'lots'"]),
        ([spec(memory="1GiB,2GiB")], UsageError, ["2 amounts", "8 devices"]),
    ],
)
def test_orders_that_cannot_be_are_reported_before_hours_of_measuring(
    models: str | list[ModelSpec], error: type[Exception], facts: list[str]
) -> None:
    with refused(error, *facts):
        read_specs(models if isinstance(models, str) else json.dumps([one.model_dump() for one in models]))


def test_numbers_that_kfp_made_floats_are_numbers_still() -> None:
    [one] = read_specs('[{"name": "a", "tables": "t", "devices": 8.0, "memory": "1GiB"}]')
    assert one.order.devices == 8


def test_a_name_given_whole_is_not_taken_for_its_slices() -> None:
    there = fleet(*(one for one in mixed_fleet() if one["metadata"]["name"].startswith("mig-")))
    names = {
        "a100-sxm4-80gb": "NVIDIA-A100-SXM4-80GB",
        "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb",
    }
    for called, name in names.items():
        got = found(there, {}, spec(hardware=called))
        [kind] = [kind for kind in there.kinds if kind.hardware.name == name]
        assert got.hardware == {"ads": kind.fingerprint}
    assert "may be any of" in found(there, {}, spec(hardware="a100")).no_plan["ads"]


def test_a_kind_whose_plans_have_host_memory_is_measured_beyond_hbm_once() -> None:
    """Its live cost model learned nothing of that, and serves all the same; other models' nights stay as they are."""
    there, live = fleet(node("a")), known(hardware())
    beyond = spec(host_memory="1TiB")
    [campaign] = found(there, live, beyond).campaigns
    assert campaign.tiers
    [one] = found(there, live, beyond).kinds
    assert (one.state, one.lacks) == ("tiers not measured", ("tiers not measured",))
    assert "host memory" in one.why
    [(key, of)] = live.items()
    assert of.model is not None
    manifest = of.model.manifest.model_copy(update={"tiers": TRUTH})
    learned = {key: of._replace(model=replace(of.model, manifest=manifest))}
    assert found(there, learned, beyond).campaigns == ()
    assert found(there, live).campaigns == ()
    assert not found(there, {}).campaigns[0].tiers
    assert found(there, {}, spec(), spec(name="feed", host_memory="1TiB")).campaigns[0].tiers


def test_hardware_without_tiers_is_never_measured_beyond_hbm() -> None:
    there = backends_view(fleet(node("a")), "synthetic")
    assert not found(there, {}, spec(host_memory="1TiB", hardware="")).campaigns[0].tiers
