"""A model's tables of the night -> size.html and size.json beside its release: how many devices it would take, of which kind.

The sweep comes last and has a time budget of its own. It may fail in any way without harm to the model's plan.
"""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from neuroshard.core.clean import log
from neuroshard.core.errors import InvalidInput, NeuroshardError, StoreError, Unreachable, Unsafe
from neuroshard.core.text import one_line
from neuroshard.core.value import canonical_json, timestamp
from neuroshard.files.tables import read_tables
from neuroshard.models.open import open_cost_model
from neuroshard.orders.nightly import ModelSpec, Survey, Verdict
from neuroshard.orders.sizes import Kind, SizeOrder
from neuroshard.size.page import sizes_page
from neuroshard.size.run import run as size
from neuroshard.store.measuring import write_over
from neuroshard.store.patience import patiently
from neuroshard.store.protocol import Store
from neuroshard.store.releases import size_keys


def put_sizes(survey: Survey, verdict: Verdict, tables: Path, store: Store, memory_margin: float) -> str:
    """Sweep the sizes that the model of a verdict asks for, and put the page and its JSON into the store. Returns why there are
    none; empty where there are, or where none are asked for. What an earlier night put there then stays, with its date.

    Raises Unreachable where the store does not answer.
    """
    spec = survey.spec(verdict.model)
    if spec.size is None:
        return ""
    try:
        page, data = _swept(survey, spec, verdict, tables, store, memory_margin)
    except NeuroshardError as error:
        return str(error)
    except Exception as error:  # a fault of ours in an extra must not fail the step of a plan that is live
        return f"the sweep failed: {type(error).__name__}: {one_line(error)}"
    keys = size_keys(spec.name)
    try:
        for key, written in zip(keys, (page, data), strict=True):
            write_over(store, key, written)
    except (Unreachable, Unsafe):
        raise
    except StoreError as error:  # a full disk, or a key that may not be written
        return str(error)
    log(f"{spec.name}: sizes are in {store.url}/{keys[0]}")
    return ""


def _swept(
    survey: Survey, spec: ModelSpec, verdict: Verdict, tables: Path, store: Store, memory_margin: float
) -> tuple[bytes, bytes]:
    """The page and the JSON. Raises NeuroshardError where no size fits, or none was searched in time."""
    asked = spec.sizes(survey.request.batch_size, store.url)
    assert asked is not None
    try:
        read_tables(tables)
    except InvalidInput:  # `search` had none, and wrote why in their place
        raise NeuroshardError(f"its tables are not known: {verdict.why}") from None
    order, left_out = _known(asked)
    rules = spec.rules
    # the gate refuses a plan that leaves less of any device
    rules = rules.model_copy(update={"reserve_share": max(rules.reserve_share, memory_margin)})
    with TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.json")
        constraints.write_bytes(rules.canonical_json())
        options = {**order.search, "constraints": constraints, "seed": survey.request.seed}
        found = size(tables, replace(order, search=options))
        if not any(row.fits for row in found.rows):
            raise NeuroshardError(f"no size was found to fit: {'; '.join(found.notes)}")
        time = timestamp(store.clock())
        release = f", release {verdict.release}" if verdict.release else ""
        found = replace(found, notes=(f"of {spec.name}{release}, {time}", *left_out, *found.notes))
        of = {"model": spec.name, "run": survey.owner, "release": verdict.release, "time": time}
        return sizes_page(found).encode(errors="replace"), canonical_json({**found.data, **of})


def _known(order: SizeOrder) -> tuple[SizeOrder, list[str]]:
    """The order of those kinds whose cost models can be opened, and a line for each of the others. Raises NeuroshardError where
    none can."""
    kinds, left_out = list[Kind](), list[str]()
    batch_size = order.batch_size(order.devices[0])
    for kind in order.kinds:
        try:
            patiently(lambda name=kind.name: open_cost_model(name, batch_size))  # type: ignore[misc]
        except NeuroshardError as error:
            left_out.append(f"{kind.name} is left out: {error}")
        else:
            kinds.append(kind)
    if not kinds:
        raise NeuroshardError("; ".join(left_out))
    log(*(f"note: {line}" for line in left_out))
    return replace(order, kinds=tuple(kinds)), left_out
