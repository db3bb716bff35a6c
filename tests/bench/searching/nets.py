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
    comm_cases: int,
    batch_size: int,
    max_dim: int = 128,
) -> Path:
    """The folder of nets for a pool of tables and some numbers of devices, trained unless they are there. Seeds are 0."""
    from neuroshard.augment.run import run as augment
    from neuroshard.measure.run import run as measure
    from neuroshard.pretrain.run import run as pretrain  # torch, which a process that only searches should not load

    code = code_digest(
        "augment/*.py", "measure/formula.py", "pretrain/*.py", "costmodel/nets.py", "costmodel/features.py"
    )
    asked = [[t.digest() for t in tables], list(devices), compute_cases, comm_cases, batch_size, max_dim, code]
    work = folder / f"nets-{sha256(canonical_json(asked))[:12]}"
    if not (work / "model" / "model.json").exists():
        write_tables(work / "tables.json", tuple(tables))
        augment(
            work / "tables.json",
            work / "cases",
            compute_cases=compute_cases,
            comm_cases=comm_cases,
            devices=tuple(devices),
            memory_bytes=80 * 2**30,
            max_dim=max_dim,
            seed=0,
        )
        measure(work / "cases", work / "costs", backend="synthetic", batch_size=batch_size, seed=0)
        pretrain(work / "costs", work / "model", seed=0)
    return work / "model"
