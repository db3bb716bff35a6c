"""What trainers load: releases of plans and of cost models."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neuroshard.cli.app import command, say, say_json, say_text
from neuroshard.cli.options import AsJson, PlanFile, SingleWriter, StoreUrl, option, takes, was_typed
from neuroshard.core.errors import UsageError
from neuroshard.core.units import format_bytes, parse_duration
from neuroshard.orders.deploy import DeployOptions

if TYPE_CHECKING:
    from neuroshard.core.release import Pointer

ModelName = Annotated[str, option("NAME", "The model whose plans these are, as in ads-ranker.", "--name")]
GarbageName = Annotated[
    str,
    option(
        "NAME",
        "A model (its plans), hardware/FINGERPRINT/BATCH (its cost models), or _measuring/FINGERPRINT (what was measured "
        "of hardware that has left the fleet).",
        "--name",
    ),
]
TrackName = Annotated[
    str, option("NAME", "A model (its plans), or hardware/FINGERPRINT/BATCH (its cost models).", "--name")
]


@command(
    "release",
    "neuroshard deploy plan.json --store s3://bucket/prefix --name ads-ranker --tables tables.json --model model/",
)
@takes(DeployOptions)
def deploy(
    plan: PlanFile,
    *,
    store: StoreUrl,
    name: ModelName,
    tables_json: Annotated[
        Path | None, option("FILE", "Today's tables.json, which the plan must be for.", "--tables")
    ] = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Put a plan in a store, and live if the gate agrees. It is published under its digest; a live one that is better is kept."""
    from neuroshard import api

    deployed = api.deploy(plan, store, name, tables=tables_json, **options)
    say_json(deployed.data) if as_json else say_text(repr(deployed))


@command("release", "neuroshard publish plan.json --store s3://bucket/prefix --name ads-ranker")
def publish(
    plan: PlanFile, store: StoreUrl, name: ModelName, single_writer: SingleWriter = False, as_json: AsJson = False
) -> None:
    """Put a plan in a store, without making it live. It is published under its digest."""
    from neuroshard.deploy.run import run_publish

    digest = run_publish(plan, store, name, single_writer=single_writer)
    said = f"{store}: plan {digest} of {name} is published"
    say_json({"store": store, "name": name, "plan": digest}) if as_json else say(said)


@command("release", "neuroshard promote 3f2a9c01d4e7 --store s3://bucket/prefix --name ads-ranker")
def promote(
    digest: Annotated[
        str, typer.Argument(metavar="DIGEST", help="The digest of a plan or cost model, or at least 8 digits of it.")
    ],
    store: StoreUrl,
    name: TrackName,
    single_writer: SingleWriter = False,
    as_json: AsJson = False,
) -> None:
    """Make a published plan or cost model live. The gate is not asked."""
    from neuroshard.deploy.run import run_promote

    _say_now_live(store, name, run_promote(store, name, digest, single_writer=single_writer), as_json)


def _say_now_live(store: str, name: str, release: "Pointer", as_json: bool, how: str = "") -> None:
    from neuroshard.store.bundles import track_of

    said = f"{store}: {name} release {release.number} is live, {track_of(name).noun} {release.artifact[:12]}{how}"
    say_json({"store": store, "release": release.model_dump(mode="json")}) if as_json else say(said)


@command("release", "neuroshard releases --store s3://bucket/prefix --name ads-ranker")
def releases(
    store: StoreUrl,
    name: TrackName,
    refused: Annotated[bool, typer.Option("--refused", help="List the plans that the gate held back.")] = False,
    seen: Annotated[
        bool, typer.Option("--seen", help="Compare what the live plan promised with what trainers saw.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List what went live, newest first. These are releases of a model's plans, or of a hardware's cost models."""
    from neuroshard.core.release import HARDWARE
    from neuroshard.report.text import refusals_text, releases_text
    from neuroshard.seen.stored import compared, said_of_trainers
    from neuroshard.store.bundles import track_of
    from neuroshard.store.open import open_store
    from neuroshard.store.releases import read_refusals
    from neuroshard.store.track import all_releases

    said: Any
    if (refused or seen) and name.partition("/")[0] == HARDWARE:
        which = "--refused" if refused else "--seen"
        raise UsageError(f"{which} lists plans only: give the --name of a model, or leave it out")
    opened = open_store(store)
    if seen:
        text, said = compared(opened, name)
    elif refused:
        held_back = read_refusals(opened, name)
        text, said = refusals_text(held_back), [one.model_dump(mode="json") for one in held_back]
    else:
        went_live = all_releases(opened, track_of(name))
        text = "\n".join(filter(None, [releases_text(went_live), *said_of_trainers(opened, name)]))
        said = [one.model_dump(mode="json") for one in went_live]
    say_json(said) if as_json else say_text(text)


@command("release", "neuroshard rollback --store s3://bucket/prefix --name ads-ranker")
def rollback(store: StoreUrl, name: TrackName, single_writer: SingleWriter = False, as_json: AsJson = False) -> None:
    """Make live again what the live one replaced. It is a plan, or a cost model."""
    from neuroshard.deploy.run import run_rollback

    release = run_rollback(store, name, single_writer=single_writer)
    _say_now_live(store, name, release, as_json, " (rolled back)")


@command("release", "neuroshard gc --store s3://bucket/prefix --name ads-ranker --keep 10 --older-than 168h --apply")
def gc(
    context: typer.Context,
    store: StoreUrl,
    name: GarbageName,
    keep: Annotated[int, option("NUMBER", "Releases to keep, with their plans, besides the live one.", min=1)] = 10,
    older_than: Annotated[str, option("TIME", "Keep whatever is younger than this.")] = "168h",
    apply: Annotated[bool, typer.Option("--apply", help="Delete; else only list what would be.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete old plans, cost models, releases and refusals. Or what was measured. Without --apply they are only listed."""
    from neuroshard.deploy.gc import run
    from neuroshard.orders.nightly import MEASURING_FOLDER

    if was_typed(context, "keep") and name.partition("/")[0] == MEASURING_FOLDER:
        raise UsageError("--keep is for releases; leave it out: what was measured is kept by --older-than alone")
    garbage = run(store, name, keep=keep, age_seconds=parse_duration(older_than, "--older-than"), apply=apply)
    if as_json:
        entries = [{"key": entry.key, "bytes": entry.size} for entry in garbage.entries]
        say_json({"store": store, "deleted": apply, "entries": entries, "kept": garbage.kept})
        return
    for entry in garbage.entries:
        say(f"{'deleted' if apply else 'would delete'} {entry.key} ({format_bytes(entry.size)})")
    size = f"{len(garbage.entries)} objects, {format_bytes(garbage.nbytes)}; {garbage.kept} are kept"
    say(f"{store}: {size}" + ("" if apply or not garbage.entries else "; --apply deletes them"))
