"""The lists of hot ids that a plan with rows by access needs, from the store, for `by_access` (client/rows/held.py). Needs NumPy
and torch."""

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from neuroshard.client.cache import kept_list, remember_lists
from neuroshard.client.load import DEADLINE_SECONDS, CacheDir, opened
from neuroshard.client.ranks import error_from_json, error_to_json
from neuroshard.core.errors import NeuroshardError, NotFound, UsageError
from neuroshard.core.plan import Plan, check_plan
from neuroshard.core.store_url import StoreUrl
from neuroshard.files.access import Ints
from neuroshard.files.row_orders import ids_in
from neuroshard.store.deadline import within
from neuroshard.store.releases import check_model
from neuroshard.store.row_orders import rows_of
from neuroshard.store.track import read_artifact

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def hot_ids(
    plan: Plan,
    store_url: StoreUrl,
    model: str,
    *,
    group: "ProcessGroup | None" = None,
    cache_dir: CacheDir = None,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> dict[str, Ints]:
    """The hot ids of each table that the plan holds by access, by its name in the plan, most read first; {} for other plans.

    Every rank of `group` (by default of the world) must call it with the same plan. Rank 0 alone needs the store, and gives the
    lists to the others by a broadcast; without torch.distributed this process reads them. They are kept in `cache_dir` as plans
    are (`load_plan`), and read from there first. Raises NotFound, InvalidInput or StoreError, on every rank, for a list that
    cannot be read within `deadline_seconds` or is not that of its digest.
    """
    check_plan(plan)
    orders = {name: order for name, order in plan.held.orders.items() if order.ids_digest}
    if not orders:
        return {}
    digests = sorted({order.ids_digest for order in orders.values()})
    where = f"the list of hot rows of {{}} in plan {plan.digest()[:12]} of {check_model(model)!r}"
    load = partial(_load, store_url, model, digests, cache_dir, time.monotonic() + deadline_seconds)
    lists = load() if not dist.is_initialized() else _from_rank_0(load, group)
    return {name: ids_in(lists[order.ids_digest], order, where.format(repr(name))) for name, order in orders.items()}


def _load(store_url: StoreUrl, model: str, digests: list[str], cache_dir: CacheDir, ends: float) -> dict[str, bytes]:
    """The lists by their digests, from the copies on this machine or from the store."""

    def left() -> float:
        return max(ends - time.monotonic(), 0.0)

    store, cache = opened(store_url, cache_dir, left())
    lists = {} if cache is None else {digest: kept_list(cache, model, digest) for digest in digests}
    kept = {digest: data for digest, data in lists.items() if data is not None}
    found = dict(kept)
    for digest in set(digests) - kept.keys():
        try:
            found[digest] = within(left(), store.url, partial(read_artifact, store, rows_of(model), digest)).value
        except NotFound:
            raise NotFound(
                f"{store.url}: there is no list {digest[:12]} of hot rows of {model!r}, by which the plan holds a table; deploy "
                "the plan again, with the folder rows/ beside its plan.json"
            ) from None
    if cache is not None:
        remember_lists(cache, model, found, kept)
    return found


def _from_rank_0(load: Any, group: "ProcessGroup | None") -> dict[str, bytes]:
    """What `load` returns on rank 0 of the group, on all ranks; or its error, whatever it is.

    Lists may have hundreds of MiB, so they are broadcast, and do not go through the key-value store as plans do (ranks.py).
    """
    if dist.get_rank(group) < 0:
        raise UsageError("hot_ids: this process is not in the group that was given")
    sent: list[Any] = [None, None]
    raised: BaseException | None = None
    if dist.get_rank(group) == 0:
        try:
            sent[0] = load()
        except BaseException as error:  # an interrupt too: the other ranks must not wait for a rank that has ended
            raised, sent[1] = error, error_to_json(error, 0)
    dist.broadcast_object_list(sent, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    if raised is not None and not isinstance(raised, NeuroshardError):
        raise raised
    if sent[1] is not None:
        raise error_from_json(sent[1], "rank 0: " if sent[1]["kind"] else "")
    lists: dict[str, bytes] = sent[0]
    return lists
