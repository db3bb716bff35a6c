"""Cost models: trained, kept and listed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from neuroshard.core.release import ModelRelease

import typer

from neuroshard.cli.app import command, say, say_json, say_text
from neuroshard.cli.options import AsJson, Seed, SingleWriter, StoreUrl, option, out_file
from neuroshard.core.errors import UsageError

MaxModelError = Annotated[float, option("SHARE", "Largest error on unseen tables to go live with: 0.2 is 20 %.")]


def _say_live(store: str, release: "ModelRelease", err: bool = False) -> None:
    error = "not known" if release.error is None else f"{release.error:.1%}"
    say(
        f"{store}: cost model {release.bundle_digest[:12]} is live for {release.device_name} ({release.name}, release "
        f"{release.number}); error on unseen tables {error}",
        err=err,
    )


@command("learn", "neuroshard pretrain costs/ -o model/")
def pretrain(
    costs: Annotated[
        list[Path],
        typer.Argument(metavar="COSTS...", help="Folders that `neuroshard measure` wrote, all of one bench."),
    ],
    out: Annotated[Path, out_file("Folder of the cost model", "; an unfinished training there is continued")],
    start_from: Annotated[
        str | None,
        option("MODEL", "Cost model of other hardware, or older, to begin from: a folder, or STORE#HARDWARE."),
    ] = None,
    monotone: Annotated[
        bool,
        typer.Option(
            "--monotone/--no-monotone",
            help="Train a compute net in which no table lowers a cost, so that a search can prove bounds.",
        ),
    ] = True,
    epochs: Annotated[int | None, option("NUMBER", "Most passes over the data; it stops early.", min=1)] = None,
    publish: Annotated[
        str | None, option("STORE", "Store in which to make it its hardware's live one, as publish-model does.")
    ] = None,
    single_writer: SingleWriter = False,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Train a cost model from costs, and report its error. The error is on table sets and on tables that it never saw."""
    from neuroshard.files.costs import read_manifest
    from neuroshard.files.disk import check_can_write
    from neuroshard.models.open import open_trained
    from neuroshard.store.open import open_store

    if single_writer and publish is None:
        raise UsageError("--single-writer is for --publish STORE")
    check_can_write(out, folder=True)
    for folder in costs:
        read_manifest(folder)
    if publish is not None:
        open_store(publish, single_writer=single_writer)  # fail now if its address is wrong
    start = None if start_from is None else open_trained(start_from, "--start-from")

    from neuroshard.pretrain.run import run  # imports torch, which takes seconds: after the checks above

    model = run(costs[0], out, *costs[1:], seed=seed, epochs=epochs, monotone=monotone, start=start)
    if as_json:
        about = {"out": str(out), "model": model.name, "backend": model.backend, "device_name": model.device_name}
        say_json({**about, "report": model.report.model_dump(mode="json")})
    else:
        say_text(model.report.text())
        source = "by a formula, not measured" if model.backend == "synthetic" else f"measured on {model.backend}"
        say(f"{out}: cost model {model.name[:12]} of costs {source} ({model.device_name})")
    if publish is not None:
        from neuroshard.deploy.bundles import run as publish_bundle

        _say_live(publish, publish_bundle(out, publish, single_writer=single_writer), err=as_json)


@command("learn", "neuroshard publish-model model/ --store s3://bucket/prefix")
def publish_model(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder that `neuroshard pretrain` wrote.")],
    store: StoreUrl,
    max_error: MaxModelError = 0.2,
    force: Annotated[
        bool, typer.Option(help="Go live whatever its error, and whatever it did not learn; the release says so.")
    ] = False,
    single_writer: SingleWriter = False,
    as_json: AsJson = False,
) -> None:
    """Put a cost model in a store; it goes live if it is good enough. It is put under its hardware.

    Its error must be low enough, and the datasheet may not stand in for a part that the live one learned.
    """
    from neuroshard.deploy.bundles import run

    release = run(model, store, max_error=max_error, force=force, single_writer=single_writer)
    say_json({"store": store, "release": release.model_dump(mode="json")}) if as_json else _say_live(store, release)


@command("learn", "neuroshard models --store s3://bucket/prefix")
def models(
    store: StoreUrl,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, with all that is known of each.")] = False,
) -> None:
    """List a store's cost models by their hardware. Their errors are on unseen tables."""
    from neuroshard.models.published import list_published
    from neuroshard.report.text import listing_json, listing_text
    from neuroshard.store.open import open_store

    found = list_published(open_store(store))
    say_text(listing_json(found) if as_json else listing_text(found, store))
