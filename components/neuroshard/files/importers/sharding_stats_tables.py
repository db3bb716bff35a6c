"""The tables of a printout of TorchRec's planner (files/importers/sharding_stats.py), with what it does not print inferred."""

from neuroshard.core.text import counted
from neuroshard.files.importers.imported import TableEntry, equal_features
from neuroshard.files.importers.sharding_stats import GIB, Printed, PrintedTable, host_notes

ROUNDING_GIB = 0.0006  # three digits after the point


def stats_entries(printed: Printed, element_bytes: int | None = None) -> tuple[list[TableEntry], list[str]]:
    """The tables as entries, and notes. With `element_bytes` None they are inferred from the printed storage."""
    inferred, how = element_bytes_of(printed, element_bytes)
    entries = [
        TableEntry(
            table.where,
            {
                "name": table.name,
                "module": table.module,
                "rows": table.rows,
                "dim": table.dim,
                "pooling_factor": table.lookups,
                "weighted": bool(table.weighted),
                "element_bytes": size,
                "pooling": "sum" if table.pooled else "none",
                "features": equal_features(list(map(str, range(1, table.features + 1))), table.lookups)
                if table.features > 1
                else [],
            },
        )
        for table, size in zip(printed.tables, inferred, strict=True)
    ]
    shared = sum(table.features > 1 for table in printed.tables)
    notes = [how, "whether a table pools by sum or mean is not printed: sum is assumed", *printed.notes]
    sizes = (table.rows * table.dim * size for table, size in zip(printed.tables, inferred, strict=True))
    notes += host_notes(zip(printed.tables, sizes, strict=True))
    if shared:
        notes.append(
            f"read by several features: {counted(shared, 'table')}; each feature is given an equal share of the lookups"
        )
    if all(table.lookups == table.features for table in printed.tables):
        notes.append("every feature has 1 lookup, as if the planner got no pooling factors: costs grow with them")
    return entries, notes


def element_bytes_of(printed: Printed, given: int | None) -> tuple[list[int], str]:
    """Bytes of an element of each table (4 or 2), and a note on where they come from."""
    elements = [table.rows * table.dim / GIB for table in printed.tables]
    if given is not None:
        return [given] * len(elements), f"elements have {given} bytes, as --dtype says"
    if all(table.stored_gib is None for table in printed.tables):
        return [4] * len(elements), (
            "neither element types nor what a table stores are printed by this version of TorchRec: elements count as fp32; if "
            "they are not, say so with --dtype"
        )
    # a table that stores less than its weights take in fp32 must be fp16
    sizes = [
        2
        if table.stored_gib is not None and table.stored_gib + ROUNDING_GIB < 4 * count * _copies(table, printed)
        else 4
        for table, count in zip(printed.tables, elements, strict=True)
    ]
    weights = sum(size * count for size, count in zip(sizes, elements, strict=True))
    for size in (4, 2):
        if printed.weights_gib is not None and abs(size * sum(elements) - printed.weights_gib) <= 0.0005 * 8:
            return [size] * len(
                sizes
            ), f"elements have {size} bytes, by the printed {printed.weights_gib:,} GB of weights"
    if printed.weights_gib is not None and abs(weights - printed.weights_gib) <= 0.0005 * 8:
        halves = sizes.count(2)
        return (
            sizes,
            f"{halves} tables of {len(sizes)} have elements of 2 bytes, by what each stores (unknown for small ones)",
        )
    return sizes, (
        f"element types are not printed: {sizes.count(2)} of {counted(len(sizes), 'table')} too small for fp32 count as "
        "fp16, the others as fp32; if all have one type, give it with --dtype"
    )


def _copies(table: PrintedTable, printed: Printed) -> int:
    """Copies of a table in its printed storage: a data-parallel table is on every rank."""
    return max(1, printed.ranks) if table.sharding == "DP" and table.stored_gib else 1
