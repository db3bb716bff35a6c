"""Tables of so many MiB."""

from collections.abc import Sequence

from neuroshard.core.table import Table

MIB = 2**20


def some_tables(mib: Sequence[int], dim: int = 64) -> tuple[Table, ...]:
    """Tables of so many MiB of weights each, read as if all alike."""
    return tuple(
        Table(name=f"t{n}", rows=size * MIB // (4 * dim), dim=dim, pooling_factor=10.0 + n, optimizer_bytes_per_row=0)
        for n, size in enumerate(mib)
    )
