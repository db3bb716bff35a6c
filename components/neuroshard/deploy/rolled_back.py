"""Which plans a person rolled back from. Such a plan goes live again only by hand: by `promote`, or `deploy --force`."""

from collections.abc import Iterator

from neuroshard.core.errors import InvalidInput, NotFound
from neuroshard.core.plan import Plan, Shard
from neuroshard.core.release import Release
from neuroshard.store.protocol import Store
from neuroshard.store.releases import plans_of, read_plan
from neuroshard.store.track import Live, history, read_past

RELEASES_READ = 50  # the newest of the history: about a year of plans that were worth a release
Placement = frozenset[Shard]


def placement(plan: Plan) -> Placement:
    """Which shard is on which device, which is all that a trainer runs of a plan."""
    return frozenset(plan.shards)


def rolled_back_digests(live: Live[Release] | None, model: str, store: Store) -> frozenset[str]:
    """The digests of the plans of a model that were rolled back from, and were not made live again since. Raises StoreError."""
    said: dict[str, bool] = {}  # by the newest release that concerns a plan
    for release in _newest(live, model, store):
        said.setdefault(release.plan_digest, False)
        if release.action == "rollback" and release.previous_digest:
            said.setdefault(release.previous_digest, True)
    return frozenset(digest for digest, rolled_back in said.items() if rolled_back)


def rolled_back_placements(digests: frozenset[str], model: str, store: Store) -> frozenset[Placement]:
    """The placements of those plans that can be read. Raises StoreError."""
    found = set()
    for digest in digests:
        try:
            found.add(placement(read_plan(store, model, digest)))
        except (NotFound, InvalidInput):  # gc deleted it, or it is damaged
            continue
    return frozenset(found)


def _newest(live: Live[Release] | None, model: str, store: Store) -> Iterator[Release]:
    """The newest releases, the live one first. Those that cannot be read are left out."""
    numbers = history(store, plans_of(model))
    if live:
        yield live.release
        numbers = [number for number in numbers if number < live.release.number]
    for number in numbers[: -RELEASES_READ - 1 : -1]:
        try:
            yield read_past(store, plans_of(model), number)
        except (NotFound, InvalidInput):
            continue
