"""One pod's share of measuring a kind of hardware. Costs go to the store as they are measured, so another pod can continue.

The layout in the store is in store/measuring.py. The next nightly run continues a share that ran out of budget.
"""

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from neuroshard.core.clean import log
from neuroshard.core.errors import Conflict, InvalidInput, NeuroshardError, Unreachable, Unsafe
from neuroshard.files.cases import KINDS, read_cases, write_cases
from neuroshard.files.costs import BROKEN, merge_costs, read_costs, read_manifest
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.run import RunSummary
from neuroshard.measure.run import run as measure
from neuroshard.orders.nightly import Campaign, Job
from neuroshard.store.folders import fetch_folder, kept
from neuroshard.store.lease import LeaseHeld, leased
from neuroshard.store.measuring import (
    Share,
    cases_of,
    left_of_share,
    measuring,
    note_failure,
    set_aside_share,
    write_record,
)
from neuroshard.store.patience import PatientStore, open_patiently
from neuroshard.store.protocol import Store

LEAST_SECONDS = 1.0  # of the budget that must be left to begin another draw


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
    """Measure the rest of a job's share of every draw into the store, newest draw first, for at most `budget_seconds`.

    A failure is recorded in the store, for the next nightly run and for the end of this one: other kinds of hardware continue.
    Raises StoreError where the store cannot be listed, or does not answer.
    """
    store = open_patiently(store_url, single_writer=single_writer)
    settings = MeasureSettings(batch_size=batch_size, seed=seed, hardware=job.campaign.hardware)
    deadline = None if budget_seconds is None else time.monotonic() + budget_seconds
    begun = False
    for draw in reversed(measuring(store, job.campaign.folder).draws):
        share = Share(draw, job.share, job.campaign.pods)
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        if begun and left is not None and left < LEAST_SECONDS:
            log(f"the budget is used up: the next nightly run measures {share.costs}")
            continue
        if left_of_share(store, job.campaign.folder, share) == 0:
            log(f"{store.url}/{job.campaign.folder}/{share.costs}: was measured to its end before")
            continue
        begun = True
        try:
            with leased(store, f"{job.campaign.folder}/{share.lease}", job.owner):
                done = _measure(store, job.campaign, share, backend, replace(settings, budget_seconds=left))
            record = {"left": done.left, "measured": str(done)}
            write_record(store, f"{job.campaign.folder}/{share.ended}", record)
        except (LeaseHeld, Conflict) as error:
            log(f"note: {error}")
        except (Unreachable, Unsafe):
            raise
        except NeuroshardError as error:
            note_failure(store, job.campaign.folder, "measure", str(error))
            return


def _measure(
    store: PatientStore, campaign: Campaign, share: Share, backend: str, settings: MeasureSettings
) -> RunSummary:
    """Measure the rest of a share. Costs of an earlier run that cannot be continued are set aside once."""
    with tempfile.TemporaryDirectory(prefix="neuroshard-job-") as scratch:
        cases, costs = Path(scratch, "cases"), Path(scratch, "costs")
        _own_cases(store, campaign, share, Path(scratch), cases)
        begun = fetch_folder(store, f"{campaign.folder}/{share.costs}", costs)

        def measure_rest() -> RunSummary:
            with kept(store, f"{campaign.folder}/{share.costs}", costs):
                return measure(cases, costs, backend, settings)

        try:
            if begun:
                read_manifest(costs)
            measured = measure_rest()
        except InvalidInput as error:  # damaged, or begun on another bench, with other packages or drivers
            if not begun:
                raise
            set_aside_share(store, campaign.folder, share, str(error).replace(scratch, share.costs))
            shutil.rmtree(costs)
            measured = measure_rest()
        for broken in costs.glob(f"*{BROKEN}"):  # its rows were measured again, and are in other parts
            store.delete(f"{campaign.folder}/{share.costs}/{broken.stem}")
    return measured


def _own_cases(store: Store, campaign: Campaign, share: Share, scratch: Path, out: Path) -> None:
    """Write the cases of a share, without those that were measured when the draw was split into another number of shares."""
    fetch_folder(store, f"{campaign.folder}/{cases_of(share.draw)}", scratch / "draw")
    cases = read_cases(scratch / "draw")
    now = measuring(store, campaign.folder)
    others = [one for one in now.shares if one.draw == share.draw and one.of != share.of]
    done = {case_id for one in others for case_id in _measured(store, campaign, one, scratch)}
    first, of = share.number, share.of
    own = {
        kind: tuple(case for case in getattr(cases, kind)[first - 1 :: of] if case.case_id not in done)
        for kind in KINDS
    }
    write_cases(out, cases.model_copy(update=own))


def _measured(store: Store, campaign: Campaign, share: Share, scratch: Path) -> set[str]:
    """Ids of the cases with costs in a share; none where the costs cannot be read."""
    try:
        costs = read_costs(_fetched(store, campaign, share, scratch / "others"))
    except InvalidInput:
        return set()
    return {cost.case_id for _, cost in costs.every}


def merge_shares(campaign: Campaign, store_url: str, out: Path, *, single_writer: bool = False) -> None:
    """All shares of all draws of a campaign -> one folder of costs.

    Shares that cannot be read, and those of another bench than the newest share's, are set aside; the next nightly run measures
    them again. Raises StoreError, and InvalidInput if no share is left.
    """
    store = open_patiently(store_url, single_writer=single_writer)
    now = measuring(store, campaign.folder)
    with tempfile.TemporaryDirectory(prefix="neuroshard-merge-") as scratch:
        shares = sorted(now.shares, key=lambda share: now.shares[share].modified, reverse=True)
        readable = _readable(store, campaign, shares, Path(scratch))
        mergeable = _of_one_bench(store, campaign, readable)
        if not mergeable:
            raise InvalidInput(f"{store.url}/{campaign.folder}: no case was measured that could be used")
        merge_costs([readable[share] for share in sorted(mergeable)], out)


def _readable(store: Store, campaign: Campaign, shares: Sequence[Share], scratch: Path) -> dict[Share, Path]:
    """The folders of the shares that can be read, in the order given."""
    found = {}
    for share in shares:
        folder = _fetched(store, campaign, share, scratch)
        try:
            costs = read_costs(folder)
        except InvalidInput as error:
            set_aside_share(store, campaign.folder, share, str(error).replace(str(scratch), ""))
            continue
        if costs.every:
            found[share] = folder
    return found


def _of_one_bench(store: Store, campaign: Campaign, folders: dict[Share, Path]) -> list[Share]:
    """The newest share, and those that can be merged with it; the others are set aside."""
    mergeable: list[Share] = []
    for share, folder in folders.items():
        try:
            read_costs(*(folders[one] for one in mergeable[:1]), folder)
            mergeable.append(share)
        except InvalidInput as error:
            set_aside_share(store, campaign.folder, share, str(error).replace(f"{folder.parent}/", ""))
    return mergeable


def _fetched(store: Store, campaign: Campaign, share: Share, scratch: Path) -> Path:
    folder = scratch / share.costs.replace("/", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    fetch_folder(store, f"{campaign.folder}/{share.costs}", folder)
    return folder
