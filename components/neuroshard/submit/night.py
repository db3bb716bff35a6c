"""What a run says of itself, by what its steps recorded in the store: in runs of any size, whatever Kubeflow's API shows."""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime

from neuroshard.core.clean import log
from neuroshard.core.errors import NeuroshardError
from neuroshard.core.text import one_line
from neuroshard.store.night import NightRecords, degraded, read_night
from neuroshard.store.open import open_store
from neuroshard.submit.kubeflow import Kubeflow, Run
from neuroshard.submit.steps import steps_text

NOTHING = NightRecords((), None)


def night_of(run: Run) -> tuple[NightRecords, tuple[str, ...]]:
    """What the steps of a run recorded, and a line for each model and kind of hardware that has less than it should.

    Nothing, and a note, where its store cannot be read from here.
    """
    if not run.store:
        return NOTHING, ()
    try:
        store = open_store(run.store)
        found = read_night(store, run.run_id)
        return found, degraded(store, found.survey) if found.survey else ()
    except NeuroshardError as error:
        log(f"note: what the steps recorded in {run.store} cannot be read from here: {one_line(error)}")
        return NOTHING, ()


def idle(run: Run) -> tuple[float, str]:
    """Since when no step of a run under way has run, in seconds since 1970, and after which step.

    Now and "" while one runs, and where that cannot be known.
    """
    with suppress(NeuroshardError, ValueError):
        outcomes = read_night(open_store(run.store), run.run_id).outcomes if run.store else ()
        if outcomes and all(one.ended for one in outcomes):
            last = max(outcomes, key=lambda one: one.ended)
            return datetime.fromisoformat(last.ended).timestamp(), f"{last.step} ended at {last.ended}"
    return time.time(), ""


def failures(kubeflow: Kubeflow, run: Run, night: NightRecords) -> str:
    """Why the steps failed, in one line: as they recorded it, then those that Kubeflow's API names and that recorded nothing."""
    recorded = Counter(one.step for one in night.outcomes if one.failed)
    said: Sequence[str] = (*night.texts(), *kubeflow.failures(run, recorded))
    last = night.outcomes[-1:]
    if not recorded and last:  # a pod that is never made records nothing
        said = (*said, f"the last step that began was {last[0].step} at {last[0].began}")
    return steps_text(said)
