"""KFP: where the tables come from, and the cases to measure."""

from kfp.dsl import Artifact, Dataset, Input, Output

from neuroshard.component import component


@component
def load(source: str, tables: Output[Artifact]) -> None:
    """A preset, a file or an object in S3, as tables.json."""
    from pathlib import Path

    from neuroshard.augment.source import run

    run(source, Path(tables.path))


@component
def augment(
    tables: Input[Artifact],
    devices: int,
    memory: str,
    compute_cases: int,
    comm_cases: int,
    seed: int,
    cases: Output[Dataset],
) -> None:
    """Draw the cases to measure: table sets that fit a device, and placements on `devices` devices."""
    from pathlib import Path

    from neuroshard.augment.run import run
    from neuroshard.core.units import parse_memory

    run(
        Path(tables.path),
        Path(cases.path),
        compute_cases=compute_cases,
        comm_cases=comm_cases,
        devices=(devices,),
        memory_bytes=max(parse_memory(memory, devices)),
        seed=seed,
    )
