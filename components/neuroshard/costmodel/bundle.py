"""A trained cost model, and its bundle on disk: model.json (costmodel/manifest.py) and nets.safetensors (the weights). No pickle.

    model = load_cost_model(Path("model"))
    model.compute_ms(model.part_vectors(parts).sum(axis=0))

model.json holds the sha256 of nets.safetensors and is written last, so an incomplete folder is recognised. The sha256 of
model.json is the name of the bundle.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from neuroshard.core.cost import Bench
from neuroshard.core.errors import InvalidInput, NewerFormat
from neuroshard.core.part import Part
from neuroshard.core.precision import CollectivePrecision
from neuroshard.core.release import BUNDLE_FILES
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted
from neuroshard.core.value import check_format, decode_json, sha256
from neuroshard.costmodel.all_to_all_net import AllToAllNet, Transfers
from neuroshard.costmodel.analytic import DATASHEETS, Analytic, analytic_for
from neuroshard.costmodel.compute_net import FeatureScale
from neuroshard.costmodel.features import (
    FEATURE_VERSION,
    FEATURES,
    FEWEST_FEATURES,
    OLDEST_FEATURES,
    SHARE_COLUMNS,
    part_features,
    split_features,
)
from neuroshard.costmodel.manifest import MODEL_FORMAT, Manifest, MeasuredTiers, TrainedFrom
from neuroshard.costmodel.measured_tiers import beyond_hbm
from neuroshard.costmodel.nets import Nets, from_tensors, to_tensors
from neuroshard.costmodel.network import BACKWARD, FORWARD, Codec, MoreColumns, Network, input_ms_per_column
from neuroshard.costmodel.protocol import Dips, Floats
from neuroshard.costmodel.report import ModelReport
from neuroshard.costmodel.tiers import BeyondHbm
from neuroshard.files.disk import read_bytes, writing

TENSORS, MANIFEST = BUNDLE_FILES


class _Sent(NamedTuple):
    """Bytes of all samples on each device (…, D), the network that they take, and ms to encode and decode them (…, D)."""

    nbytes: Floats
    network: Network | None
    codec_ms: Floats


@dataclass(frozen=True)
class TrainedCostModel:
    """Trained nets and their manifest; a protocol.CostModel. Read-only, so threads may share one.

    It predicts for `batch_size`; see `at_batch_size`.
    """

    manifest: Manifest
    nets: Nets
    batch_size: int
    network: Network | None = None  # between domains, which were measured one at a time
    input_ms: float = 0.0  # a column of input, where steps wait for it
    precision: CollectivePrecision | None = None
    codec: Codec = field(default_factory=Codec)
    encoded_more: Floats | float = field(default=0.0, compare=False)  # as in MoreColumns
    by: str = ""  # by what its times were corrected (seen/corrected.py)

    @cached_property
    def name(self) -> str:
        return self.manifest.digest() + self.by

    @property
    def report(self) -> ModelReport:
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
        """Any number of devices if two or more were measured, or a network joins domains that were. Otherwise the measured one,
        and one device (no all-to-all)."""
        measured = self.manifest.device_counts
        joined = self.network is not None and self.network.domain in measured
        return () if len(measured) > 1 or joined else (1, *measured)

    @property
    def bounded(self) -> bool:
        return self.nets.bounded

    @property
    def prices_rows(self) -> bool:
        return True

    @property
    def error_on_unseen_tables(self) -> float | None:
        return self.report.uncertainty

    @property
    def two_deviations(self) -> float | None:
        """As in uncertainty.Calibrated."""
        return None if self.report.deviations is None else self.report.deviations.two

    def deviations_ms(self, vector_sums: Floats, forward_ms: Floats, backward_ms: Floats) -> Floats:
        """As in uncertainty.Calibrated."""
        nets, compute = self.nets, self.nets.compute.spread_ms(vector_sums)
        if self.report.deviations is not None:
            compute = np.hypot(compute, self.report.deviations.least_ms)
        if nets.forward is None or nets.backward is None:
            return compute
        found: Floats = np.sqrt(
            compute**2 + (forward_ms * nets.forward.spread) ** 2 + (backward_ms * nets.backward.spread) ** 2
        )
        return found

    @property
    def stand_ins(self) -> tuple[str, ...]:
        return self.report.stand_ins

    @cached_property
    def operator_ms(self) -> float:
        return max(float(self.compute_ms(np.zeros(self.nets.compute.width))), 0.0)

    @property
    def reorder_ms(self) -> float:
        bench = self.manifest.bench
        if bench.reorder_ms is None:
            return DATASHEETS[analytic_for(bench.hardware)[0]].reorder_ms(self.batch_size)
        return bench.reorder_ms * self.batch_size / bench.batch_size

    @property
    def dips(self) -> Dips:
        return self.nets.compute.dips

    @property
    def convex(self) -> bool:
        return self.nets.compute.convex

    def convex_below(self, low: Floats, high: Floats) -> "TrainedCostModel":
        return replace(self, nets=replace(self.nets, compute=self.nets.compute.convex_below(low, high)))

    def beyond_own_ms(self, vectors: Floats, holds: Floats) -> Floats:
        return self.nets.compute.beyond_own_ms(vectors, holds)

    def at_batch_size(self, batch_size: int) -> "TrainedCostModel":
        """The same model for another batch size. Raises InvalidInput if compute was measured at a single other batch size."""
        measured = self.manifest.batch_sizes
        if batch_size != self.batch_size and batch_size not in measured and len(measured) == 1:
            raise InvalidInput(
                f"the cost model was measured for a batch of {measured[0]:,} samples, not {batch_size:,}; measure with "
                f"--batch-size {batch_size}, or give augment several batch sizes, and pretrain again"
            )
        return replace(self, batch_size=batch_size)

    def for_task(self, task: ShardingTask, *, waiting: bool) -> "TrainedCostModel":
        """As in network.ForTasks. The network between domains is the topology's, else the datasheet's of the hardware."""
        network, sheet = None, DATASHEETS[analytic_for(self.manifest.bench.hardware)[0]]
        if task.topology is not None:
            given = task.topology.network_bytes_per_s
            rate = sheet.network_rate if given is None else given / 1000
            latency_ms = task.topology.network_latency_ms
            if latency_ms is None:
                latency_ms = sheet.latency_ms + sheet.network_latency_ms
            network = Network(task.topology.domain, rate, latency_ms, given=task.topology.has_measured_network)
        # input travels as it is
        found = replace(self, network=network, precision=None, codec=Codec(), encoded_more=0.0)
        input_ms = input_ms_per_column(found, task) if waiting else 0.0
        compute = replace(self.nets.compute, waits=input_ms > 0)
        return replace(
            found,
            nets=replace(self.nets, compute=compute),
            input_ms=input_ms,
            precision=task.collective_precision,
            codec=Codec.of(task.collective_precision, self.batch_size, sheet.memory),
        )

    def sending_more(self, more: MoreColumns) -> "TrainedCostModel":
        """As in network.ForTasks."""
        if self.network is None:
            return self
        near, far = (columns * self._column_bytes for columns in (more.near, more.far))
        return replace(self, network=replace(self.network, near_more=near, far_more=far), encoded_more=more.encoded)

    def waiting_ms(self, vector_sums: Floats) -> Floats:
        net = self.nets.compute
        return vector_sums[..., net.waiting] if net.waits else np.zeros(vector_sums.shape[:-1])

    @property
    def network_bytes_per_ms(self) -> float:
        return 0.0 if self.network is None else self.network.bytes_per_ms

    def _network(self, devices: int) -> Network | None:
        """The network that this many devices need; None for one domain."""
        return self.network if self.network is not None and self.network.joins(devices) else None

    def caveats(self, devices: int, parts: Sequence[Part] = ()) -> tuple[str, ...]:
        """As in the protocol. With `parts`, also what is unlike the training data, and doubts about the model itself."""
        found = []
        network = self._network(devices)
        if network is not None:
            rate = f"{network.bytes_per_ms * 1000 / 1e9:.3g} GB/s a rank"
            if network.given:
                found.append(f"all-to-alls between domains are priced as given: {rate} and {network.latency_ms:.3g} ms")
            else:
                found.append(
                    f"the network between domains was not measured: {rate}, as given or by its datasheet; "
                    "`neuroshard network` measures it"
                )
        near = devices if network is None else network.domain
        for what, asked, measured in (
            ("an all-to-all between {:,} devices", near, self.manifest.device_counts),
            ("a batch of {:,} samples", self.batch_size, self.manifest.batch_sizes),
        ):
            if measured and asked > 1 and not min(measured) <= asked <= max(measured):
                known = f"{min(measured):,}" if len(measured) == 1 else f"{min(measured):,} to {max(measured):,}"
                found.append(f"costs of {what.format(asked)} are extrapolated: {known} were measured")
        return (*found, *self.report.doubts, *unlike_trained(self.nets.compute.scale, parts)) if parts else (*found,)

    def unmeasured_kinds(self, parts: Sequence[Part]) -> tuple[str, ...]:
        """A line for each kind of table, by element type, pooling, weights and features, that no training case has."""
        return unlike_in_kind(self.nets.compute.scale, parts) if parts else ()

    def part_vectors(self, parts: Sequence[Part]) -> Floats:
        """N parts of tables -> (N, K). Not negative."""
        net = self.nets.compute
        vectors = net.split_vectors(split_features(parts, self.batch_size))
        if net.waits:
            vectors[:, net.waiting] = self.input_ms * np.array([part.input_columns for part in parts])
        return vectors

    @property
    def has_tiers(self) -> bool:
        """Whether it is of GPUs, which a bus joins to host memory."""
        return self.backend == "cuda" and (self.manifest.tiers is not None or self._datasheet.has_tiers)

    @property
    def tiers_from(self) -> str:
        """As in tiers.KnowsTiers."""
        measured = self.manifest.tiers
        if measured is None:
            return self._datasheet.tiers_from
        off = [f"{tier} {one.mape:.1%}" for tier, one in sorted(self.report.tiers.items()) if one.mape is not None]
        return (
            f"as measured beyond HBM on {self.device_name} ({counted(measured.cases, 'case')}"
            + (f"; off on cases held out: {', '.join(off)}" if off else "")
            + ")"
        )

    def beyond_hbm(self, parts: Sequence[Part]) -> BeyondHbm:
        """As in tiers.KnowsTiers: as measured, else by the rates of the GPU's datasheet."""
        if self.manifest.tiers is None:
            return self._datasheet.beyond_hbm(parts)
        return beyond_hbm(self.manifest.tiers, parts, self.batch_size, self._datasheet.sheet)

    @property
    def _datasheet(self) -> Analytic:
        return Analytic(analytic_for(self.manifest.bench.hardware)[0], self.batch_size)

    def compute_ms(self, vector_sums: Floats) -> Floats:
        return self.nets.compute.ms(vector_sums)

    def compute_slope(self, vector_sums: Floats) -> Floats:
        return self.nets.compute.slope(vector_sums)

    def forward_collective_ms(self, device_dims: Floats, start_delays_ms: Floats) -> Floats:
        sent, network, codec_ms = self._sent(device_dims, FORWARD)
        return self._all_to_all(self.nets.forward, device_dims).ms(sent, start_delays_ms, network) + codec_ms

    def backward_collective_ms(self, device_dims: Floats) -> Floats:
        sent, network, codec_ms = self._sent(device_dims, BACKWARD)
        return self._all_to_all(self.nets.backward, device_dims).ms(sent, network=network) + codec_ms

    def transfers_ms(self, device_dims: Floats) -> tuple[Floats, Floats]:
        """Forward and backward all-to-all ms of every device without waiting: (…, D) -> two (…, D)."""
        devices = device_dims.shape[-1]
        network = self._network(devices)
        if devices not in self._transfers:
            nets = self._all_to_all(self.nets.forward, device_dims), self._all_to_all(self.nets.backward, device_dims)
            self._transfers[devices] = Transfers.of(nets, devices if network is None else network.domain)
        if self.precision is None:
            both = self._transfers[devices].ms(self._bytes(device_dims), network)
            return both[..., 0], both[..., 1]
        forward, backward = (self._sent(device_dims, way) for way in (FORWARD, BACKWARD))
        return (
            self._transfers[devices].ms(forward.nbytes, forward.network)[..., 0] + forward.codec_ms,
            self._transfers[devices].ms(backward.nbytes, backward.network)[..., 1] + backward.codec_ms,
        )

    @cached_property
    def _transfers(self) -> dict[int, Transfers]:
        """The two nets as one, kept by number of devices."""
        return {}

    def _bytes(self, device_dims: Floats) -> Floats:
        """Bytes of the whole batch's pooled embeddings on each device, in fp32: columns (…, D) -> (…, D)."""
        return device_dims * self._column_bytes

    @property
    def _column_bytes(self) -> float:
        return 4.0 * self.batch_size

    def _sent(self, device_dims: Floats, way: int) -> _Sent:
        """What devices send of outputs (FORWARD), or of gradients (BACKWARD), in the precision of the task."""
        share, network = self.codec.shares[way], self._network(device_dims.shape[-1])
        if network is not None and share != 1:
            network = replace(network, near_more=network.near_more * share, far_more=network.far_more * share)
        return _Sent(
            self._bytes(device_dims) * share, network, (device_dims + self.encoded_more) * self.codec.column_ms[way]
        )

    def _all_to_all(self, net: AllToAllNet | None, device_dims: Floats) -> AllToAllNet:
        devices, measured = device_dims.shape[-1], self.manifest.device_counts
        if (network := self._network(devices)) is not None:
            devices = network.domain
        sends_near = devices > 1  # domains of one rank send nothing near, so any net serves
        if net is None or (sends_near and len(measured) == 1 and devices not in measured):
            known = f"{measured[0]} devices" if measured else "one device"
            raise InvalidInput(
                f"the cost model was measured for {known}, not {devices}; run `neuroshard augment --devices "
                f"{','.join(map(str, (*measured, devices)))}` with enough --collective-cases, measure and pretrain again"
            )
        return net


def cost_model(
    nets: Nets,
    bench: Bench,
    report: ModelReport,
    provenance: TrainedFrom,
    *,
    max_dim: int,
    batch_sizes: tuple[int, ...],
    device_counts: tuple[int, ...],
    tiers: MeasuredTiers | None = None,
) -> TrainedCostModel:
    """A cost model of these nets, with a manifest that holds the sha256 of their weights."""
    manifest = Manifest(
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
        tiers=tiers,
    )
    return TrainedCostModel(manifest, nets, manifest.main_batch_size)


def save_cost_model(folder: Path, model: TrainedCostModel) -> None:
    """Write the bundle. An old one in the folder is removed only once both new files are on the disk, and model.json comes last.

    So a full disk loses nothing, and a run that is killed leaves no folder that looks complete.
    """
    with writing(folder / MANIFEST) as manifest:
        manifest.write_bytes(model.manifest.canonical_json())
        with writing(folder / TENSORS) as tensors:
            tensors.write_bytes(to_tensors(model.nets))
            (folder / MANIFEST).unlink(missing_ok=True)


def load_cost_model(folder: Path) -> TrainedCostModel:
    """Read a bundle, checked whole. Raises InvalidInput or NewerFormat in one line that names the file."""
    path = folder / MANIFEST
    if not path.exists():
        if (folder / "costs.json").exists():
            raise InvalidInput(
                f"{folder}: holds costs, not a cost model; train one with `neuroshard pretrain {folder} -o model/`"
            )
        raise InvalidInput(
            f"{folder}: no {MANIFEST} here; make a cost model with `neuroshard pretrain costs/ -o {folder}`"
        )
    where = str(path)
    manifest = Manifest.parse(check_format(decode_json(read_bytes(path), where), MODEL_FORMAT, where), where)
    if manifest.feature_version > FEATURE_VERSION:
        raise NewerFormat(
            f"{where}: feature_version {manifest.feature_version} is from a newer neuroshard; this one reads "
            f"{FEATURE_VERSION}: upgrade it"
        )
    known = len(manifest.features)
    if manifest.feature_version < OLDEST_FEATURES or known < FEWEST_FEATURES or manifest.features != FEATURES[:known]:
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
    nets = from_tensors(tensors, bool(manifest.device_counts), str(folder / TENSORS), known)
    return TrainedCostModel(manifest, nets, manifest.main_batch_size)


DOUBLINGS: Final = 1.0  # tolerated beyond the measured range of a size, where nets still extrapolate well
SHARE: Final = 0.1  # tolerated beyond the measured range of a share of the lookups


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# Features of sizes, and how to print them.
_SIZES: Final[dict[str, Callable[[float], str]]] = {
    "log2_rows": lambda log2: f"{_number(2**log2)} rows",
    "log2_pooling_factor": lambda log2: f"{_number(max(2**log2 - 1, 0.0))} lookups a sample",
}
# Features of kinds. A net that saw only one kind prices all others like it.
_KINDS: Final[dict[str, Callable[[float], str]]] = {
    "log2_element_bytes": lambda log2: "fp32 elements" if log2 > 1 else "fp16 elements",
    "mean_pooling": lambda mean: (
        "mean pooling" if mean > 0 else "no pooling (sequences)" if mean < 0 else "sum pooling"
    ),
    "shared": lambda shared: "several features that read them" if shared else "one feature that reads them",
    "weighted": lambda weighted: "weighted lookups" if weighted else "lookups without weights",
}


def unlike_trained(scale: FeatureScale, parts: Sequence[Part]) -> tuple[str, ...]:
    """A line for each way in which some parts are outside the range of `scale`, the net's training data. Ignores widths."""
    features = part_features(parts, 1)
    lines = [*_beyond(scale, features, _SIZES), *unlike_in_kind(scale, parts)]
    read = np.array([any(part.table.reuse_bins) for part in parts])
    shares, low_share, high_share = (array[..., SHARE_COLUMNS] for array in (features, scale.low, scale.high))
    otherwise = ((shares < low_share - SHARE) | (shares > high_share + SHARE)).any(axis=1) & read
    if otherwise.any():
        lines.append(f"{_of(otherwise)} rows that repeat more or less often than any that was measured")
    return tuple(f"{line}: their costs are extrapolated" for line in lines)


def unlike_in_kind(scale: FeatureScale, parts: Sequence[Part]) -> tuple[str, ...]:
    """As `unlike_trained`, in kind alone: element type, pooling, weights, and how many features read a table."""
    return _beyond(scale, part_features(parts, 1), _KINDS)


def _beyond(
    scale: FeatureScale, features: NDArray[np.float64], names: dict[str, Callable[[float], str]]
) -> tuple[str, ...]:
    """A line for each of the features `names` of which some values are outside the range of `scale`."""
    lines = []
    for name, said in names.items():
        place, margin = FEATURES.index(name), DOUBLINGS if name in _SIZES else 0.0
        values, there = features[:, place], place < len(scale.low)  # a feature that is newer than the net was 0 then
        low, high = (float(end[place]) if there else 0.0 for end in (scale.low, scale.high))
        for beyond in (values < low - margin, values > high + margin):
            if beyond.any():
                most = float(values[beyond].max() if values[beyond].max() > high else values[beyond].min())
                known = said(low) if low == high else f"{said(low).partition(' ')[0]} to {said(high)}"
                lines.append(f"{_of(beyond)} {said(most)}; what was measured has {known}")
    return tuple(lines)


def _of(some: NDArray[np.bool_]) -> str:
    """How many of the tables, and the verb."""
    return f"{int(some.sum()):,} of {len(some):,} tables {'has' if some.sum() == 1 else 'have'}"
