"""What the trainers of a model counted of how its tables are read, and the pointer to the newest of it in a store."""

from typing import Annotated, Literal

from pydantic import Field

from neuroshard.core.release import MODEL_NAME, Sealed
from neuroshard.core.table import Tables
from neuroshard.core.task import MAX_DEVICES
from neuroshard.core.text import counted
from neuroshard.core.value import Digest, Moment, Value, Whole

COUNTED_FORMAT: Literal[1] = 1
Steps = Annotated[Whole, Field(ge=0, le=2**53)]


class CountedAccess(Value):
    """How the tables of `model` were read in `steps` steps of `batch_size` samples over all `ranks` of the training run `run`,
    up to `time` (UTC, ISO 8601).

    `tables` are those of the trainer's model, with pooling factors, reuse bins and access curves as counted. `left_out_steps`
    were not counted, because a rank was behind or the batch had another size; `notes` say why, and what else is not whole.
    """

    format_version: Literal[1] = COUNTED_FORMAT
    model: Annotated[str, Field(pattern=MODEL_NAME)]
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    ranks: Annotated[Whole, Field(ge=1, le=MAX_DEVICES)]
    steps: Annotated[Steps, Field(ge=1)]
    left_out_steps: Steps = 0
    batch_size: Annotated[Whole, Field(ge=1, le=2**31)]
    time: Moment
    tables: Annotated[Tables, Field(min_length=1)]
    notes: tuple[Annotated[str, Field(max_length=500)], ...] = ()

    @property
    def said(self) -> str:
        """In a few words, for notes on tables and plans."""
        return (
            f"{self.steps:,} steps of {self.batch_size:,} samples on {counted(self.ranks, 'rank')}, up to {self.time}"
        )


class CountedPointer(Sealed):
    """The counts that readers take: those of this digest, of `steps` steps of the run `run` up to `time`."""

    model: Annotated[str, Field(pattern=MODEL_NAME)]
    counted_digest: Digest
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    steps: Steps
    time: Moment
