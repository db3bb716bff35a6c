"""What a search counts of memory: the bytes of parts while it places them, and what devices lack."""

from collections.abc import Sequence

from neuroshard.core.part import Part
from neuroshard.core.precision import SHARE_OF_FP32, CollectivePrecision
from neuroshard.core.step_memory import OUTPUT_BYTES
from neuroshard.core.task import ShardingTask


def searched_bytes(task: ShardingTask, parts: Sequence[Part]) -> list[int]:
    """What a search counts for parts: what they take at least and, where the task says so, the copies of their lookups'
    outputs that are sent; of pooled row blocks, which all devices have, that is among what it keeps."""
    counted = [memory.total for memory in task.memories(parts)]
    if not task.counts_sent:
        return counted
    way, found = (task.collective_precision or CollectivePrecision()).forward, list[int]()
    for part, nbytes in zip(parts, counted, strict=True):
        sequences, share = part.table.pooling == "none", SHARE_OF_FP32[way]
        copies = (sequences + 2 * (share < 1) or 1.0) * (sequences or part.row_blocks == 1) * (not part.copies)
        copies *= task.with_allocator * (not part.table.sent_once)  # then fewer are sent
        found.append(nbytes + int(copies * OUTPUT_BYTES * part.sent_columns * task.batch_size))
    return found


def lacking_bytes(task: ShardingTask) -> int:
    """What devices lack, in all, even without placed tables."""
    needed = (task.copies_bytes + own for own in task.mapped_bytes)
    return sum(max(own - usable, 0) for own, usable in zip(needed, task.left_bytes, strict=True))


def contradicts_itself(task: ShardingTask) -> bool:
    """Whether the constraints of a changed copy of a task contradict each other."""
    try:
        task.check_constraints()
    except ValueError:
        return True
    return False
