"""The cost models of a store as a listing: `neuroshard models`."""

from collections.abc import Sequence

from neuroshard.core.text import wrapped
from neuroshard.core.value import canonical_json
from neuroshard.models.published import Listed
from neuroshard.report.bars import bar


def listing_text(found: Sequence[Listed], where: str) -> str:
    """Two lines a cost model: hardware, digest, time, error on unseen tables, batch size, whether it is live; and the device."""
    if not found:
        return f"{where}: no cost model is published there"
    lines = ["hardware          cost model    published             unseen error   batch"]
    worst = max((one.error or 0.0 for one in found), default=0.0)
    for one in found:
        moment = one.modified.strftime("%Y-%m-%dT%H:%M:%SZ")
        line = f"{one.fingerprint}  {one.digest[:12]}  {moment}"
        if one.manifest is None:
            lines += [line, *wrapped(f"  {one.fault}", indent=4)]
            continue
        error, bench = one.error, one.manifest.bench
        shown = f"{'-':>5}" if error is None else f"{error:>5.1%} {bar([error], worst, 6)}"
        lines.append(f"{line}  {shown:<12}  {one.manifest.batch_size:>6,}{'  live' if one.is_live else ''}")
        lines += wrapped(f"  {bench.hardware.name} ({bench.backend})", indent=4)
        lines += wrapped(f"  {one.fault}", indent=4) if one.fault else []
    return "\n".join(lines)


def listing_json(found: Sequence[Listed]) -> str:
    """A JSON list with an object a cost model, its whole manifest included."""
    rows = [
        {
            "fingerprint": one.fingerprint,
            "digest": one.digest,
            "published": one.modified.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "live": one.is_live,
            "error": one.error,
            "fault": one.fault or None,
            "manifest": one.manifest.model_dump(mode="json") if one.manifest else None,
        }
        for one in found
    ]
    return canonical_json(rows).decode()
