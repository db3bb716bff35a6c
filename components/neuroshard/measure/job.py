"""One pod's share of measuring a kind of hardware, kept in the store as it is measured, so that another pod can go on with it.

<work>/cases/…                  what to measure, drawn once
<work>/costs-1-of-2/…           a share's costs, as `neuroshard measure` writes them
<work>/ended-1-of-2.json        a share that ran to its end, or out of its budget
"""

import shutil
import sys
import tempfile
from pathlib import Path

from neuroshard.core.errors import InvalidInput
from neuroshard.core.nightly import Job, Work
from neuroshard.core.value import canonical_json
from neuroshard.files.costs import BROKEN
from neuroshard.measure import merge
from neuroshard.measure.run import run as measure
from neuroshard.store.folders import delete_folder, fetch_folder, kept, patiently
from neuroshard.store.open import open_store
from neuroshard.store.protocol import Store


def run(
    job: Job,
    store_url: str,
    *,
    backend: str,
    batch_size: int,
    budget_seconds: float | None,
    seed: int,
    single_writer: bool = False,
) -> None:
    """Measure a job's share into the store, for `budget_seconds` at most; nothing where that was done before.

    Raises MeasureError where this machine is not of the kind that the job is for, and what `neuroshard measure` raises.
    """
    store = open_store(store_url, single_writer=single_writer)
    ended = f"{job.work.folder}/ended-{job.share}-of-{job.work.pods}.json"
    if patiently(lambda: store.list(ended)):
        print(f"{store.url}/{ended}: this share was measured in an earlier run", file=sys.stderr)
        return

    with tempfile.TemporaryDirectory(prefix="neuroshard-job-") as scratch:
        cases, costs = Path(scratch, "cases"), Path(scratch, "costs")
        fetch_folder(store, f"{job.work.folder}/cases", cases)
        begun = fetch_folder(store, job.folder, costs)

        def go_on() -> str:
            with kept(store, job.folder, costs):
                return str(
                    measure(
                        cases,
                        costs,
                        backend=backend,
                        batch_size=batch_size,
                        budget_seconds=budget_seconds,
                        seed=seed,
                        share=(job.share, job.work.pods),
                        hardware=job.work.hardware,
                    )
                )

        try:
            measured = go_on()
        except InvalidInput as error:  # begun on another bench: packages or drivers have changed since
            if not begun:
                raise
            print(f"begun again, for what an earlier run left cannot be gone on with: {error}", file=sys.stderr)
            delete_folder(store, job.folder)
            shutil.rmtree(costs)
            measured = go_on()
        for broken in costs.glob(f"*{BROKEN}"):  # what it held is in other parts now
            patiently(lambda key=f"{job.folder}/{broken.stem}": store.delete(key))  # type: ignore[misc]
    patiently(lambda: store.create(ended, canonical_json({"format_version": 1, "measured": measured})))


def merge_shares(work: Work, store_url: str, out: Path) -> None:
    """Every share of a work's costs, those of an earlier number of pods too -> one folder of costs. Raises InvalidInput."""
    store = open_store(store_url)
    with tempfile.TemporaryDirectory(prefix="neuroshard-merge-") as scratch:
        folders = [_fetched(store, folder, Path(scratch)) for folder in _shares(work, store)]
        try:
            merge.run(folders, out)
        except InvalidInput as error:
            where = f"{store.url}/{work.folder}"
            raise InvalidInput(f"{error} (of {where}; once that is deleted, a run measures anew)") from None


def _shares(work: Work, store: Store) -> list[str]:
    entries = patiently(lambda: store.list(f"{work.folder}/costs-"))
    return sorted({entry.key.rpartition("/")[0] for entry in entries})


def _fetched(store: Store, prefix: str, scratch: Path) -> Path:
    folder = scratch / prefix.rpartition("/")[2]
    fetch_folder(store, prefix, folder)
    return folder
