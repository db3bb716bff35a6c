#!/usr/bin/env bash
# One would guess: a cached table whose plan names no load factor gets TorchRec's default (0.2), whatever other tables do.
# What happens: beside a table that names one, it gets that one. A table of 9 million rows caches 1 % of them because a table of
# 1,000 rows asked for 1 %; alone, it names none and has the default. If both name one, both get the mean, weighted by rows.
# Seen with: torchrec 1.8.0, fbgemm-gpu-cpu 1.8.0, on 29 November 2026.
# Why it matters: TorchRec runs such tables by one operator with one cache, so a factor named for a small table sizes everybody's:
# misses of the large one rise many times over, and no plan or log says so. Name a factor for each table.
#
# Ends with 0 if that holds, with 1 if it changed, with 2 if the packages could not be installed.
set -euo pipefail
export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" || exit 2; }
"${PYTHON:-python3}" -m venv "$work/venv" || exit 2
install torch==2.13.0 fbgemm-gpu-cpu==1.8.0 tensordict==0.15.3 torchmetrics==1.0.3 tqdm==4.70.1 pyre-extensions==0.0.32
install --no-deps torchrec==1.8.0 # its own requirements name the CUDA build of FBGEMM

cat > "$work/check.py" <<'END'
import logging
import sys
from importlib.metadata import version

import torch

logging.disable(logging.CRITICAL)
from torchrec.distributed.embedding_sharding import group_tables
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, ShardedEmbeddingTable
from torchrec.distributed.types import CacheParams, ParameterSharding
from torchrec.distributed.utils import add_params_from_parameter_sharding
from torchrec.modules.embedding_configs import DataType, PoolingType

print(*(f"{name} {version(name)}" for name in ("torch", "torchrec")), sep=", ")


def table(name, rows, factor):
    cached = None if factor is None else CacheParams(load_factor=factor)
    planned = ParameterSharding("table_wise", "fused_uvm_caching", [0], cache_params=cached)
    return ShardedEmbeddingTable(
        name=name,
        embedding_names=[name],
        feature_names=[name],
        num_embeddings=rows,
        local_rows=rows,
        embedding_dim=16,
        local_cols=16,
        data_type=DataType.FP32,
        pooling=PoolingType.SUM,
        is_weighted=False,
        has_feature_processor=False,
        compute_kernel=EmbeddingComputeKernel.FUSED_UVM_CACHING,
        fused_params=add_params_from_parameter_sharding({}, planned),
    )


def factors(*tables):
    """Of each operator that runs them: its tables' names, and the load factor of its cache."""
    operators = group_tables([list(tables)])[0]
    return [
        (*(one.name for one in operator.embedding_tables), (operator.fused_params or {}).get("cache_load_factor"))
        for operator in operators
    ]


alone = factors(table("large", 9_000_000, None))
beside = factors(table("small", 1_000, 0.01), table("large", 9_000_000, None))
both = factors(table("small", 1_000, 0.5), table("large", 9_000, 0.05))
print("expected: the large table names no factor, alone or beside a small one that names 0.01")
print(f"seen: alone {alone}; beside {beside}; 0.5 of 1,000 rows beside 0.05 of 9,000 {both}")
sys.exit(not (alone == [("large", None)] and beside == [("small", "large", 0.01)] and both == [("small", "large", 0.095)]))
END
"$work/venv/bin/python" -W ignore "$work/check.py"
