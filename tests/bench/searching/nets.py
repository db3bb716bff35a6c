"""Cost nets for the benchmark, by the product's own stages: augment -> measure (synthetic, noisy) -> pretrain. Kept by digest."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import neuroshard
from neuroshard.core.table import Table
from neuroshard.core.value import canonical_json, sha256
from neuroshard.files.tables import write_tables

PACKAGE = Path(neuroshard.__file__).parent


def code_digest(*places: str) -> str:
    """Of the package's source in these files and folders: figures of other code are not to be mixed."""
    files = sorted(path for place in places for path in PACKAGE.glob(place))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def trained(
    tables: Sequence[Table],
    devices: Sequence[int],
    folder: Path,
    *,
    compute_cases: int,
    collective_cases: int,
    batch_size: int,
    max_dim: int = 128,
) -> Path:
    """The folder of nets for a pool of tables and some numbers of devices, trained unless they are there. Seeds are 0.

    Cases are drawn again where the code that draws them is another; only where they come out otherwise are nets trained anew.
    """
    from neuroshard.augment.run import run as augment
    from neuroshard.augment.settings import AugmentSettings
    from neuroshard.measure.backends import MeasureSettings
    from neuroshard.measure.run import run as measure
    from neuroshard.pretrain.run import run as pretrain  # torch, which a process that only searches should not load

    asked = [
        [t.digest() for t in tables],
        list(devices),
        compute_cases,
        collective_cases,
        max_dim,
        code_digest("augment/*.py"),
    ]
    drawn = folder / f"cases-{sha256(canonical_json(asked))[:12]}"
    if not (drawn / "cases" / "cases.json").exists():
        write_tables(drawn / "tables.json", tuple(tables))
        augment(
            drawn / "tables.json",
            drawn / "cases",
            AugmentSettings(
                compute_cases=compute_cases,
                collective_cases=collective_cases,
                devices=tuple(devices),
                memory_bytes=80 * 2**30,
                max_dim=max_dim,
                seed=0,
            ),
        )
    cases = [sha256(path.read_bytes()) for path in sorted((drawn / "cases").iterdir())]
    code = code_digest("measure/formula.py", "pretrain/*.py", "costmodel/*net*.py", "costmodel/features.py")
    work = folder / f"nets-{sha256(canonical_json([cases, batch_size, code]))[:12]}"
    if not (work / "model" / "model.json").exists():
        measure(drawn / "cases", work / "costs", "synthetic", MeasureSettings(batch_size=batch_size, seed=0))
        pretrain(work / "costs", work / "model", seed=0)
    return work / "model"
