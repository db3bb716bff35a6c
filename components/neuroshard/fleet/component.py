"""KFP: where the pod of a job runs."""

from typing import NamedTuple

from neuroshard.component import component


@component
def place(
    job: str,
) -> NamedTuple("Place", [("gpus", str), ("resource", str), ("nodes", dict), ("tolerations", list)]):  # type: ignore[valid-type]
    """Where the pod of a job runs, and the devices it requests, as outputs: KFP cannot give Kubernetes fields of loop items."""
    from neuroshard.orders.nightly import Job, parse_message

    campaign = parse_message(Job, job).campaign
    return (
        str(campaign.devices) if campaign.resource else "0",
        campaign.resource or "nvidia.com/gpu",
        campaign.node_selector,
        list(campaign.tolerations),
    )
