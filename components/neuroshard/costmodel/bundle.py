"""A cost model on disk: model.json (what it is, how far to trust it) and nets.safetensors (its numbers). No pickle.

    model = load_cost_model(Path("model"))
    model.compute_ms(model.table_vectors(tables, dims).sum(axis=0))

model.json holds the sha256 of nets.safetensors and is written last, so a folder is whole or recognised as not. The digest of
model.json names the bundle.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, Literal

import numpy as np
from pydantic import Field

from neuroshard.core.cost import Bench
from neuroshard.core.errors import InvalidInput, NewerFormat
from neuroshard.core.table import Table
from neuroshard.core.task import MAX_DEVICES
from neuroshard.core.value import Value, check_format, decode_json, sha256
from neuroshard.costmodel.features import FEATURE_VERSION, FEATURES, table_features
from neuroshard.costmodel.nets import ExchangeNet, Nets
from neuroshard.costmodel.protocol import Floats, Ints, slope_by_differences
from neuroshard.costmodel.report import Report
from neuroshard.costmodel.tensors import from_tensors, to_tensors
from neuroshard.files.disk import disk_errors, read_bytes, write_bytes

MODEL_FORMAT: Final = 1
MANIFEST, TENSORS = "model.json", "nets.safetensors"


class Provenance(Value):
    """Where a cost model comes from. No clock: the same costs and seed give the same bytes."""

    neuroshard_version: str
    seed: int
    compute_cases: int  # measured, of all splits, without error
    comm_cases: int


class Manifest(Value):
    """model.json."""

    format_version: Literal[1] = 1
    feature_version: int
    features: tuple[str, ...]
    bench: Bench
    hardware_fingerprint: str
    batch_size: int
    max_dim: Annotated[int, Field(gt=0)]
    device_counts: tuple[Annotated[int, Field(ge=2, le=MAX_DEVICES)], ...]  # those with exchange nets
    tensors_sha256: str
    report: Report
    provenance: Provenance


@dataclass(frozen=True)
class TrainedCostModel:
    """Trained nets and what is known of them; a protocol.CostModel. Read-only, so threads may share one."""

    manifest: Manifest
    nets: Nets

    @cached_property
    def name(self) -> str:
        return self.manifest.digest()

    @property
    def report(self) -> Report:
        return self.manifest.report

    @property
    def backend(self) -> str:
        return self.manifest.bench.backend

    @property
    def device_name(self) -> str:
        return self.manifest.bench.hardware.name

    @property
    def batch_size(self) -> int:
        return self.manifest.batch_size

    @property
    def max_dim(self) -> int:
        return self.manifest.max_dim

    @property
    def device_counts(self) -> tuple[int, ...]:
        """One device exchanges nothing and needs no net."""
        return (1, *self.manifest.device_counts)

    def table_vectors(self, tables: Sequence[Table], dims: Ints) -> Floats:
        """(N,) tables and the widths they are cut to -> (N, 32). Not negative."""
        return self.nets.compute.vectors(table_features(tables, dims, self.batch_size))

    def compute_ms(self, vector_sums: Floats) -> Floats:
        return self.nets.compute.ms(vector_sums)

    @property
    def convex(self) -> bool:
        return False

    def compute_slope(self, vector_sums: Floats) -> Floats:
        return slope_by_differences(self.compute_ms, vector_sums)

    def spread_ms(self, vector_sums: Floats, device_dims: Floats) -> Floats:
        """As much of the compute ms as the error on unseen tables; the exchanges' own error is left out."""
        return np.where(device_dims > 0, self.compute_ms(vector_sums), 0.0) * (self.report.unseen_tables_error or 0.0)

    def forward_comm_ms(self, device_dims: Floats, start_delays_ms: Floats) -> Floats:
        return self._exchange(self.nets.forward, device_dims).ms(device_dims, start_delays_ms)

    def backward_comm_ms(self, device_dims: Floats) -> Floats:
        return self._exchange(self.nets.backward, device_dims).ms(device_dims)

    def _exchange(self, nets: Mapping[int, ExchangeNet], device_dims: Floats) -> ExchangeNet:
        devices = device_dims.shape[-1]
        if devices not in nets:
            measured = f"{' and '.join(map(str, sorted(nets)))} devices" if nets else "one device"
            raise InvalidInput(
                f"the cost model was measured for {measured}, not {devices}; run `neuroshard augment --devices {devices}`, "
                "measure and pretrain again"
            )
        return nets[devices]


def cost_model(nets: Nets, bench: Bench, max_dim: int, report: Report, provenance: Provenance) -> TrainedCostModel:
    """A cost model from its nets, with a manifest that answers for their exact numbers."""
    manifest = Manifest(
        feature_version=FEATURE_VERSION,
        features=FEATURES,
        bench=bench,
        hardware_fingerprint=bench.hardware.fingerprint,
        batch_size=bench.batch_size,
        max_dim=max_dim,
        device_counts=tuple(sorted(nets.forward)),
        tensors_sha256=sha256(to_tensors(nets)),
        report=report,
        provenance=provenance,
    )
    return TrainedCostModel(manifest, nets)


def save_cost_model(folder: Path, model: TrainedCostModel) -> None:
    """Write the bundle. model.json comes last, so that a cut-off run leaves no folder that looks whole."""
    with disk_errors(folder, "write there"):
        (folder / MANIFEST).unlink(missing_ok=True)
    write_bytes(folder / TENSORS, to_tensors(model.nets))
    write_bytes(folder / MANIFEST, model.manifest.canonical_json())


def load_cost_model(folder: Path) -> TrainedCostModel:
    """Read a bundle, checked whole. Raises InvalidInput or NewerFormat in one line that names the file."""
    path = folder / MANIFEST
    if not path.exists():
        raise InvalidInput(
            f"{folder}: no {MANIFEST} here; make a cost model with `neuroshard pretrain costs/ -o {folder}`"
        )
    where = str(path)
    raw = check_format(decode_json(read_bytes(path), where), MODEL_FORMAT, where)
    manifest = Manifest.parse(raw, where)
    if manifest.feature_version > FEATURE_VERSION:
        raise NewerFormat(
            f"{where}: feature_version {manifest.feature_version} is from a newer neuroshard; this one reads "
            f"{FEATURE_VERSION}: upgrade it"
        )
    if manifest.feature_version != FEATURE_VERSION or manifest.features != FEATURES:
        raise InvalidInput(
            f"{where}: trained on other features (version {manifest.feature_version}, now {FEATURE_VERSION}); run "
            "`neuroshard pretrain` again"
        )
    tensors = read_bytes(folder / TENSORS)
    if sha256(tensors) != manifest.tensors_sha256:
        raise InvalidInput(
            f"{folder / TENSORS}: sha256 {sha256(tensors)[:12]}… is not the {manifest.tensors_sha256[:12]}… of {MANIFEST}: the "
            "file is damaged or of another model"
        )
    return TrainedCostModel(manifest, from_tensors(tensors, manifest.device_counts, str(folder / TENSORS)))
