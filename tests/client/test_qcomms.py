"""Sharders with the codecs of a plan, on gloo: values as unsharded but for rounding, and half the bytes or less on the way."""

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

from helpers.gloo import on_ranks
from helpers.refusals import refused
from helpers.sharded import sharded
from neuroshard.client.torchrec import qcomms, to_torchrec
from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.precision import SHARE_OF_FP32, parse_precision
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology

pytestmark = pytest.mark.slow

RANKS, DOMAIN, LOCAL_BATCH, ROWS, DIM = 4, 2, 16, 64, 32
KINDS = ("whole", "columns", "rows", "domain", "grid")
COLLECTIVES = ("all_to_all_single", "reduce_scatter_tensor", "all_gather_into_tensor", "reduce_scatter", "all_gather")
OUTPUTS = "POOLED_EMBEDDINGS_ALL_TO_ALL"
ROUNDING = {"fp16": 2**-9, "bf16": 2**-6, "int8": 2**-6}


def plan_of(words: str, kind: str) -> Plan:
    """One table, whole, cut, or split over all ranks or those of a domain."""
    table = Table.model_validate(
        {
            "name": "t",
            "rows": ROWS,
            "dim": DIM,
            "optimizer_bytes_per_row": 0,
            "features": [{"name": "f", "pooling_factor": 2}],
        }
    )
    pieces = {
        "whole": [(0, ROWS, 0, DIM, 1)],
        "columns": [(0, ROWS, 0, DIM // 2, 0), (0, ROWS, DIM // 2, DIM // 2, 3)],
        "rows": [(16 * rank, 16, 0, DIM, rank) for rank in range(RANKS)],
        "domain": [(32 * place, 32, 0, DIM, 2 + place) for place in range(DOMAIN)],
        "quarters": [(0, ROWS, 8 * rank, DIM // RANKS, rank) for rank in range(RANKS)],
        "grid": [(32 * (rank % 2), 32, 16 * (rank // 2), DIM // 2, rank) for rank in range(RANKS)],
    }[kind]
    names = ("row_offset", "rows", "column_offset", "dim", "device")
    task = ShardingTask(
        tables=(table,),
        device_memory_bytes=(2**20,) * RANKS,
        batch_size=LOCAL_BATCH * RANKS,
        topology=Topology(domain=DOMAIN, local_world_size=DOMAIN),
        collective_precision=parse_precision(words),
    )
    shards = tuple(Shard(table="t", **dict(zip(names, piece, strict=True))) for piece in pieces)
    return Plan(task=task, shards=shards, provenance=Provenance(neuroshard_version="0", algorithm="by hand"))


def counting_bytes(counts: Counter[str]) -> None:
    """From here on, add up the bytes of values, not of ids, that collectives are given."""

    def count(name: str) -> None:
        real = getattr(dist, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            given = named.get("input", arguments[1] if len(arguments) > 1 else None)
            some = given if isinstance(given, list) else [given]
            tensors = [one for one in some if torch.is_tensor(one) and one.dtype not in (torch.int64, torch.int32)]
            counts[name] += sum(one.numel() * one.element_size() for one in tensors)
            return real(*arguments, **named)

        setattr(dist, name, counted)

    for name in COLLECTIVES:
        count(name)


def part_of(table: torch.Tensor, part: Shard) -> torch.Tensor:
    rows, columns = slice(part.row_offset, part.row_offset + part.rows), part.column_offset
    return table[rows, columns : columns + part.dim]


def train_a_step(rank: int, plans: list[Plan], **fused: Any) -> list[tuple[float, float, int]]:
    """For each plan, with these settings of the operator too: the largest difference of outputs, and of the table after a step,
    as shares of the largest value; and the bytes that this rank gave to collectives."""
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    counting_bytes(counts)
    found = []
    for plan in plans:
        config = EmbeddingBagConfig(name="t", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["f"])
        torch.manual_seed(5)
        whole = EmbeddingBagCollection(tables=[config])
        weights = whole.embedding_bags["t"].weight
        with torch.no_grad():
            weights.uniform_(-1, 1)
        meta = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
        sharder = EmbeddingBagCollectionSharder(
            fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5, **fused},
            qcomm_codecs_registry=qcomms(plan),
        )
        model = sharded(meta, to_torchrec(plan, meta, sharders=[sharder]), [sharder])
        parts = [shard for shard in plan.shards if shard.device == rank]
        local = next(iter(model.state_dict().values())).local_shards()
        for part, shard in zip(parts, local, strict=True):
            shard.tensor.detach().copy_(part_of(weights, part))
        all_ids = torch.randint(ROWS, (RANKS, LOCAL_BATCH * 2), generator=torch.Generator().manual_seed(7))
        lengths = torch.full((LOCAL_BATCH,), 2)
        counts.clear()
        output = model(KeyedJaggedTensor(keys=["f"], values=all_ids[rank], lengths=lengths)).values()
        wanted = whole(KeyedJaggedTensor(keys=["f"], values=all_ids[rank], lengths=lengths)).values()
        (output**2).sum().backward()
        nbytes = counts.total()
        outputs = float((output - wanted).abs().max() / wanted.abs().max())
        total = whole(KeyedJaggedTensor(keys=["f"], values=all_ids.flatten(), lengths=lengths.repeat(RANKS))).values()
        (gradient,) = torch.autograd.grad((total**2).sum(), weights)
        after = weights - 0.5 * gradient / RANKS  # TorchRec averages the gradients of ranks
        changes = [
            float((shard.tensor - part_of(after, part)).abs().max()) for part, shard in zip(parts, local, strict=True)
        ]
        found.append((outputs, max(changes, default=0.0) / float(after.abs().max()), nbytes))
    return found


@pytest.mark.parametrize("words", ["fp16", "bf16", "int8", "int8:fp16"])
def test_values_are_as_unsharded_but_for_rounding_and_fewer_bytes_travel(words: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(DOMAIN))
    plans = [plan_of(each, kind) for kind in KINDS for each in ("fp32", words)]
    found = on_ranks(RANKS, tmp_path, train_a_step, plans)
    forward = words.partition(":")[0]
    for place, kind in enumerate(KINDS):
        plain, quantised = ([of_rank[2 * place + one] for of_rank in found] for one in range(2))
        assert max(outputs for outputs, _, _ in plain) < 1e-6, kind
        assert max(table for _, table, _ in plain) < 1e-6, kind
        assert max(outputs for outputs, _, _ in quantised) < 2 * ROUNDING[forward], kind
        assert max(table for _, table, _ in quantised) < 4 * ROUNDING[forward], kind
        before, after = (sum(nbytes for _, _, nbytes in some) for some in (plain, quantised))
        precision = parse_precision(words)
        share = (SHARE_OF_FP32[precision.forward] + SHARE_OF_FP32[precision.backward]) / 2
        share *= precision.rows_factor if kind == "rows" else 1.0
        if kind not in ("domain", "grid"):  # where both kinds of collectives meet
            assert after / before == pytest.approx(share, rel=0.01), kind
        else:
            assert share * 0.99 <= after / before <= 0.501
    assert qcomms(plans[0]) is None


def test_fp8_goes_to_gpus_in_rows_of_as_many_bytes_as_priced_and_is_refused_for_cpus() -> None:
    plan = plan_of("fp8", "whole")
    with refused(InvalidInput, "fp8", "int8"):
        qcomms(plan, "cpu")
    registry = qcomms(plan, "cuda")
    assert registry is not None
    for codec in (registry[OUTPUTS].forward, registry[OUTPUTS].backward):
        assert codec.calc_quantized_size(64, codec.create_context()) == 64 * 4 * SHARE_OF_FP32["fp8"]
        assert codec.quantized_dtype == torch.uint8
    assert registry["POOLED_EMBEDDINGS_REDUCE_SCATTER"].forward.quantized_dtype == torch.float16


def with_fp16_outputs(rank: int, plans: list[Plan]) -> list[tuple[float, float, int]]:
    return train_a_step(rank, plans, output_dtype=SparseType.FP16)


def test_fp16_outputs_without_codecs_send_the_bytes_of_a_plan_in_fp16(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(DOMAIN))
    kinds = ("quarters", "rows", "grid")  # each rank has a shard
    (tmp_path / "half").mkdir()
    half = on_ranks(RANKS, tmp_path / "half", with_fp16_outputs, [plan_of("fp32", kind) for kind in kinds])
    words = [plan_of(words, kind) for kind in kinds for words in ("fp32", "fp16")]
    coded = on_ranks(RANKS, tmp_path, train_a_step, words)
    for place, kind in enumerate(kinds):
        outputs, after, nbytes = (sum(of_rank[place][one] for of_rank in half) / RANKS for one in range(3))
        plain, fp16 = (sum(of_rank[2 * place + one][2] for of_rank in coded) / RANKS for one in range(2))
        assert nbytes == fp16 == plain / 2, kind
        assert outputs < 2 * ROUNDING["fp16"], kind
        assert after < 4 * ROUNDING["fp16"], kind


def test_codecs_let_a_rank_without_a_table_receive_fp16_outputs(tmp_path, monkeypatch) -> None:
    """Without them it receives fp32, and dies: so to_torchrec refuses such a plan."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(DOMAIN))
    for outputs, after, _ in (
        of_rank[0] for of_rank in on_ranks(RANKS, tmp_path, with_fp16_outputs, [plan_of("fp16", "whole")])
    ):
        assert outputs < 2 * ROUNDING["fp16"]
        assert after < 4 * ROUNDING["fp16"]


@pytest.mark.parametrize(("has_gpu", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
@pytest.mark.filterwarnings("ignore")  # TorchRec's, of fp16 in place of bf16
def test_codecs_are_by_default_for_what_the_ranks_train_on(monkeypatch, has_gpu: bool, dtype: torch.dtype) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    codecs = qcomms(plan_of("bf16", "whole"))
    assert {codec.forward.quantized_dtype for codec in codecs.values()} == {dtype}
