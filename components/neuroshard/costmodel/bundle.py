"""A cost model on disk: model.json (what it is, how far to trust it) and nets.safetensors (its numbers). No pickle.

    model = load_cost_model(Path("model"))
    model.compute_ms(model.table_vectors(tables, dims).sum(axis=0))

model.json holds the sha256 of nets.safetensors and is written last, so a folder is whole or recognised as not. The digest of
model.json names the bundle.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from neuroshard.costmodel.all_to_all_net import AllToAllNet, Transfers
from neuroshard.costmodel.compute_net import RATES, ComputeNet
from neuroshard.costmodel.features import FEATURE_VERSION, FEATURES, split_features
from neuroshard.costmodel.nets import Nets
from neuroshard.costmodel.protocol import Dips, Floats, Ints
from neuroshard.costmodel.report import Report
from neuroshard.costmodel.tensors import from_tensors, to_tensors
from neuroshard.costmodel.unseen import unlike_trained
from neuroshard.files.disk import read_bytes, writing
from neuroshard.store.bundles import BUNDLE_FILES

Format = Literal[2, 3, 4, 5]
# How many thresholds nets of a format have rates for
RATES_OF: Final[dict[Format, int]] = {2: 0, 3: RATES[0], 4: RATES[1], 5: RATES[2]}
MODEL_FORMAT: Final = max(RATES_OF)
TENSORS, MANIFEST = BUNDLE_FILES


class Provenance(Value):
    """Where a cost model comes from. No clock: the same costs and seed give the same bytes."""

    neuroshard_version: str
    seed: int
    compute_cases: int  # measured, of all splits, without error
    collective_cases: int
    started_from: str | None = None  # digest of the cost model whose nets were the first guess


class Manifest(Value):
    """model.json."""

    format_version: Format
    feature_version: int
    features: tuple[str, ...]
    bench: Bench
    hardware_fingerprint: str
    batch_size: Annotated[int, Field(gt=0)]  # the bench's: of the all-to-alls, and of compute cases that name none
    batch_sizes: Annotated[tuple[Annotated[int, Field(gt=0)], ...], Field(min_length=1)]  # of the compute cases
    max_dim: Annotated[int, Field(gt=0)]
    device_counts: tuple[Annotated[int, Field(ge=2, le=MAX_DEVICES)], ...]  # whose all-to-all was measured
    tensors_sha256: str
    report: Report
    provenance: Provenance


@dataclass(frozen=True)
class TrainedCostModel:
    """Trained nets and what is known of them; a protocol.CostModel. Read-only, so threads may share one.

    `batch_size` is the one that is predicted for: see `at_batch_size`.
    """

    manifest: Manifest
    nets: Nets
    batch_size: int

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
    def max_dim(self) -> int:
        return self.manifest.max_dim

    @property
    def device_counts(self) -> tuple[int, ...]:
        """Any number where two or more were measured; where one was, that one, and one device, which needs no all-to-all."""
        return () if len(self.manifest.device_counts) > 1 else (1, *self.manifest.device_counts)

    @property
    def bounded(self) -> bool:
        return self.nets.bounded

    @property
    def dips(self) -> Dips:
        return self.nets.compute.dips

    @property
    def convex(self) -> bool:
        return self.nets.compute.convex

    def convex_below(self, low: Floats, high: Floats) -> "TrainedCostModel":
        return replace(self, nets=replace(self.nets, compute=self.nets.compute.convex_below(low, high)))

    def at_batch_size(self, batch_size: int) -> "TrainedCostModel":
        """The same model, predicting for another batch size. Raises InvalidInput where compute was measured for one alone."""
        measured = self.manifest.batch_sizes
        if batch_size != self.batch_size and batch_size not in measured and len(measured) == 1:
            raise InvalidInput(
                f"the cost model was measured for a batch of {measured[0]:,} samples, not {batch_size:,}; measure with "
                f"--batch-size {batch_size}, or give augment several batch sizes, and pretrain again"
            )
        return replace(self, batch_size=batch_size)

    def caveats(self, devices: int, tables: Sequence[Table] = ()) -> tuple[str, ...]:
        """What a plan of these tables for so many devices should say: which of its costs lie beyond what was measured."""
        found = []
        for what, asked, measured in (
            ("an all-to-all between {:,} devices", devices, self.manifest.device_counts),
            ("a batch of {:,} samples", self.batch_size, self.manifest.batch_sizes),
        ):
            if measured and asked > 1 and not min(measured) <= asked <= max(measured):
                known = f"{min(measured):,}" if len(measured) == 1 else f"{min(measured):,} to {max(measured):,}"
                found.append(f"costs of {what.format(asked)} are extrapolated: {known} were measured")
        return (*found, *self.report.doubts, *unlike_trained(self.nets.compute.scale, tables)) if tables else (*found,)

    def table_vectors(self, tables: Sequence[Table], dims: Ints) -> Floats:
        """(N,) tables and the widths they are cut to -> (N, K). Not negative."""
        return self.nets.compute.split_vectors(split_features(tables, dims, self.batch_size))

    def compute_ms(self, vector_sums: Floats) -> Floats:
        return self.nets.compute.ms(vector_sums)

    def compute_slope(self, vector_sums: Floats) -> Floats:
        return self.nets.compute.slope(vector_sums)

    def forward_collective_ms(self, device_dims: Floats, start_delays_ms: Floats) -> Floats:
        return self._all_to_all(self.nets.forward, device_dims).ms(self._bytes(device_dims), start_delays_ms)

    def backward_collective_ms(self, device_dims: Floats) -> Floats:
        return self._all_to_all(self.nets.backward, device_dims).ms(self._bytes(device_dims))

    def transfers_ms(self, device_dims: Floats) -> tuple[Floats, Floats]:
        """Forward and backward all-to-all of every device without waiting, in half the time: (…, D) -> two (…, D)."""
        devices = device_dims.shape[-1]
        if devices not in self._transfers:
            nets = self._all_to_all(self.nets.forward, device_dims), self._all_to_all(self.nets.backward, device_dims)
            self._transfers[devices] = Transfers.of(nets, devices)
        both = self._transfers[devices].ms(self._bytes(device_dims))
        return both[..., 0], both[..., 1]

    @cached_property
    def _transfers(self) -> dict[int, Transfers]:
        """Of each number of devices asked about."""
        return {}

    def spread_ms(self, vector_sums: Floats, device_dims: Floats) -> Floats:
        """As in the protocol. All devices end when the last has begun and its own transfer is done; so each total is as uncertain
        as the time at which the slowest is ready, and its own transfer. The errors are taken to be independent.
        """
        compute = np.where(device_dims > 0, self.nets.compute.spread_ms(vector_sums), 0.0)
        if device_dims.shape[-1] == 1:
            return compute
        forward, backward = (self._all_to_all(net, device_dims) for net in (self.nets.forward, self.nets.backward))
        sent = self._bytes(device_dims)
        backward_ms = backward.ms(sent)
        ready = np.where(device_dims > 0, self.compute_ms(vector_sums), 0.0) + backward_ms
        slowest = ready.argmax(axis=-1)[..., None]
        ready_spread = np.take_along_axis(np.hypot(compute, backward_ms * backward.spread), slowest, axis=-1)
        spread: Floats = np.hypot(ready_spread, forward.ms(sent) * forward.spread)
        return spread

    def _bytes(self, device_dims: Floats) -> Floats:
        """What the embeddings of the whole batch take of each device's columns. They travel as fp32."""
        return device_dims * (4.0 * self.batch_size)

    def _all_to_all(self, net: AllToAllNet | None, device_dims: Floats) -> AllToAllNet:
        devices, measured = device_dims.shape[-1], self.manifest.device_counts
        if net is None or (len(measured) == 1 and devices not in measured):
            known = f"{measured[0]} devices" if measured else "one device"
            raise InvalidInput(
                f"the cost model was measured for {known}, not {devices}; run `neuroshard augment --devices "
                f"{','.join(map(str, (*measured, devices)))}` with enough --collective-cases, measure and pretrain again"
            )
        return net


def cost_model(
    nets: Nets,
    bench: Bench,
    report: Report,
    provenance: Provenance,
    *,
    max_dim: int,
    batch_sizes: tuple[int, ...],
    device_counts: tuple[int, ...],
) -> TrainedCostModel:
    """A cost model from its nets, with a manifest that answers for their exact numbers."""
    manifest = Manifest(
        format_version=_format_of(nets.compute),
        feature_version=FEATURE_VERSION,
        features=FEATURES,
        bench=bench,
        hardware_fingerprint=bench.hardware.fingerprint,
        batch_size=bench.batch_size,
        batch_sizes=batch_sizes,
        max_dim=max_dim,
        device_counts=device_counts,
        tensors_sha256=sha256(to_tensors(nets)),
        report=report,
        provenance=provenance,
    )
    return TrainedCostModel(manifest, nets, _main_batch_size(manifest))


def _format_of(net: ComputeNet) -> Format:
    thresholds = 0 if net.rates is None else net.rates.shape[2]
    return next(version for version, rates in RATES_OF.items() if rates == thresholds)


def _main_batch_size(manifest: Manifest) -> int:
    """The bench's, or where no compute case was measured at that, the largest that was."""
    return manifest.batch_size if manifest.batch_size in manifest.batch_sizes else max(manifest.batch_sizes)


def save_cost_model(folder: Path, model: TrainedCostModel) -> None:
    """Write the bundle. model.json comes last, so that a cut-off run leaves no folder that looks whole; what was there before
    goes when both files of the new one are on the disk, so that a full one takes nothing away."""
    with writing(folder / MANIFEST) as manifest:
        manifest.write_bytes(model.manifest.canonical_json())
        with writing(folder / TENSORS) as tensors:
            tensors.write_bytes(to_tensors(model.nets))
            (folder / MANIFEST).unlink(missing_ok=True)


def load_cost_model(folder: Path) -> TrainedCostModel:
    """Read a bundle, checked whole. Raises InvalidInput or NewerFormat in one line that names the file."""
    path = folder / MANIFEST
    if not path.exists():
        raise InvalidInput(
            f"{folder}: no {MANIFEST} here; make a cost model with `neuroshard pretrain costs/ -o {folder}`"
        )
    where = str(path)
    raw = check_format(decode_json(read_bytes(path), where), MODEL_FORMAT, where)
    if raw.get("format_version", 1) < min(RATES_OF):
        raise InvalidInput(
            f"{where}: a cost model of an older neuroshard, whose nets this one cannot use; run `neuroshard pretrain` again, "
            "from the same costs"
        )
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
    rates = RATES_OF[manifest.format_version]
    nets = from_tensors(tensors, bool(manifest.device_counts), rates, str(folder / TENSORS))
    return TrainedCostModel(manifest, nets, _main_batch_size(manifest))
