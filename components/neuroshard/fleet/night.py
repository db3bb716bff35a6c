"""`run` of the nightly survey: asks the cluster (or this machine) and the store, and tells what is to be done tonight."""

import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from neuroshard.core.nightly import Survey, read_orders
from neuroshard.fleet.cluster import in_cluster
from neuroshard.fleet.coverage import known_models
from neuroshard.fleet.run import fleet_text, kubernetes_fleet, local_fleet
from neuroshard.fleet.survey import backends_view, survey
from neuroshard.store.folders import patiently
from neuroshard.store.open import open_store


def run(
    models: str,
    store_url: str,
    *,
    backend: str,
    recorded: str = "",
    node_selector: Mapping[str, str],
    tolerations: Sequence[Mapping[str, Any]],
    request: Mapping[str, object],
    batch_size: int,
    most_pods: int,
    max_age_seconds: float | None,
    max_error: float | None,
) -> Survey:
    """Survey the fleet for the orders in `models` (a JSON list), and say on stderr how each kind of hardware stands.

    GPUs are asked for at the cluster's API, or taken from the NodeList in the file `recorded`; CPUs, and whatever there is
    where no cluster is, are this machine's. Raises NeuroshardError and its kinds.
    """
    orders = read_orders(models)
    gpus = backend != "cpu" and (recorded or in_cluster())
    there = (
        kubernetes_fleet(
            recorded=Path(recorded) if recorded else None, node_selector=node_selector, tolerations=tolerations
        )
        if gpus
        else local_fleet()
    )
    fleet = backends_view(there, backend)
    store = open_store(store_url)
    found, stands = survey(
        fleet,
        patiently(lambda: known_models(store)),
        orders,
        request={**request, "backend": backend},
        batch_size=batch_size,
        most_pods=most_pods,
        now=datetime.now(UTC),
        max_age_seconds=max_age_seconds,
        max_error=max_error,
    )
    print(fleet_text(fleet, stands), *(f"note: {note}" for note in fleet.notes), sep="\n", file=sys.stderr)
    print(f"to measure: {len(found.works)} of {len(stands)} kinds of hardware", file=sys.stderr)
    return found
