"""KFP: measure cases, in this pod or in the pods of a TrainJob."""

from neuroshard.component import component


@component
def measure(job: str, store: str, backend: str, batch_size: int, budget: str, seed: int, single_writer: bool) -> None:
    """Measure a job's share of the cases on this pod's devices, for at most `budget` (3m, 2h), into the store."""
    from neuroshard.core.units import parse_duration
    from neuroshard.measure.shares.job import run
    from neuroshard.orders.nightly import Job, parse_message

    run(
        parse_message(Job, job),
        store,
        backend=backend,
        batch_size=batch_size,
        budget_seconds=parse_duration(budget),
        seed=seed,
        single_writer=single_writer,
    )


@component
def train_job(
    campaign: str,
    store: str,
    backend: str,
    batch_size: int,
    budget: str,
    seed: int,
    single_writer: bool,
    training_runtime: str,
    image: str,
) -> None:
    """Measure all shares of a kind of hardware at once, by a TrainJob on several nodes."""
    from neuroshard.core.errors import NeuroshardError
    from neuroshard.core.units import parse_duration
    from neuroshard.measure.shares.train_job import run, train_job
    from neuroshard.orders.nightly import Campaign, parse_message

    options = {
        "store_url": store,
        "backend": backend,
        "batch_size": batch_size,
        "budget_seconds": parse_duration(budget),
        "seed": seed,
        "single_writer": single_writer,
    }
    parsed = parse_message(Campaign, campaign)
    try:
        # time for nodes to start and pull images
        run(train_job(parsed, training_runtime, image, options), 2 * parse_duration(budget) + 3600)
    except NeuroshardError as error:  # concerns this kind alone: the others continue
        from neuroshard.store.measuring import note_failure
        from neuroshard.store.patience import open_patiently

        note_failure(open_patiently(store, single_writer=single_writer), parsed.folder, "train job", str(error))
