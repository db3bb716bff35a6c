"""The precision in which pooled outputs and their gradients travel between ranks: what TorchRec calls quantised collectives."""

from collections.abc import Collection
from typing import Literal, get_args

from neuroshard.core.errors import UsageError
from neuroshard.core.table import Table
from neuroshard.core.value import Value

Precision = Literal["fp32", "fp16", "bf16", "int8", "fp8"]

# Bytes on the way, as a share of fp32's. FBGEMM's rows of int8, and of fp8 where it is given their length, are 32 values and 8
# bytes of scale and offset (quantize_comm.py, `calc_quantized_size`).
ROW = 32
_IN_ROWS = (ROW + 8) / (4 * ROW)
SHARE_OF_FP32: dict[Precision, float] = {"fp32": 1.0, "fp16": 0.5, "bf16": 0.5, "int8": _IN_ROWS, "fp8": _IN_ROWS}
# A reduce-scatter sums what it receives, and codes of 8 bits cannot be summed: there they are sent as fp16.
ADDED_UP_AS: dict[Precision, Precision] = {
    "fp32": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
    "int8": "fp16",
    "fp8": "fp16",
}


class CollectivePrecision(Value):
    """Of the collectives of outputs (`forward`), and of those of their gradients (`backward`)."""

    forward: Precision = "fp32"
    backward: Precision = "fp32"

    @property
    def text(self) -> str:
        """`fp16`, or `fp16:bf16` where the two differ; `parse_precision` reads it."""
        return self.forward if self.forward == self.backward else f"{self.forward}:{self.backward}"

    def fault(self, tables: Collection[Table], batch_size: int, devices: int) -> str:
        """Why these tables cannot be sent in this precision; empty if they can. FBGEMM would fail an assertion in training."""
        rows = next((way for way in (self.forward, self.backward) if way in ("int8", "fp8")), "")
        if not rows:
            return ""
        sequence = next((table.name for table in tables if table.pooling == "none"), None)
        if sequence is not None:
            why = f"which the lookups of sequence {sequence!r} do not always fill; use fp16"
            return f"{rows} travels in rows of {ROW} values, {why}"
        if batch_size % (8 * devices):
            return (
                f"{rows} travels in rows of {ROW} values, which the samples of a rank must fill: a batch of {batch_size:,} on "
                f"{devices} ranks must be a multiple of {8 * devices}"
            )
        return ""

    @property
    def rows_factor(self) -> float:
        """The bytes that collectives of row blocks send, both ways, relative to all-to-alls of as many values."""
        ways: tuple[Precision, Precision] = (self.forward, self.backward)
        return sum(SHARE_OF_FP32[ADDED_UP_AS[way]] for way in ways) / sum(SHARE_OF_FP32[way] for way in ways)


def parse_precision(text: str) -> CollectivePrecision | None:
    """`fp16`, or `fp16:bf16` for outputs and gradients; None for fp32, as without it. Raises UsageError for other words."""
    forward, _, backward = text.partition(":")
    known = get_args(Precision)
    for word in (forward, backward or forward):
        if word not in known:
            raise UsageError(
                f"collective precision {text!r}: {word!r} is none of {', '.join(known)}; say one, or one for outputs and one for "
                "gradients: fp16:bf16"
            )
    found = CollectivePrecision.model_validate({"forward": forward, "backward": backward or forward})
    return None if found == CollectivePrecision() else found
