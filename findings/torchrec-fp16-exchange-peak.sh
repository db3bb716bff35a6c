#!/usr/bin/env bash
# One would guess: exchanging embeddings as fp16 (QCommsConfig) needs less memory at a step's peak than as fp32.
# What happens: more. Before it casts to fp16, the codec clamps into another fp32 copy, so that for a moment both copies are
# there beside what is sent: the peak rises by half of what a rank's embeddings take as fp32.
# Seen with: torchrec 1.8.0, fbgemm-gpu-cpu 1.8.0 on a CPU (two gloo ranks), on 28 November 2026.
# Why it matters: fp16 halves the bytes that travel, and the trainer that only just fitted in memory no longer does.
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
import time
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

logging.disable(logging.CRITICAL)
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, ShardingEnv
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan

SAMPLES, LOOKUPS, DIM = 512, 10, 64  # of each rank; of each of two tables
EMBEDDINGS = 2 * SAMPLES * LOOKUPS * DIM * 4  # bytes that a rank gets as fp32


def most_live(events):
    """The most bytes of tensors that were there at once, of those made while events were recorded."""
    made, waiting = [], list(events.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            made.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    live, most = {}, 0
    for _, address, nbytes in sorted(made):
        if nbytes > 0:
            live[address] = nbytes
            most = max(most, sum(live.values()))
        else:
            live.pop(address, None)
    return most


def peak(precision):
    both = precision and QCommsConfig(forward_precision=precision, backward_precision=precision)
    sharder = EmbeddingCollectionSharder(qcomm_codecs_registry=both and get_qcomm_codecs_registry(both))
    tables = [
        EmbeddingConfig(name=f"t{n}", num_embeddings=1000, embedding_dim=DIM, feature_names=[f"t{n}"]) for n in range(2)
    ]
    model = torch.nn.ModuleDict({"sequences": EmbeddingCollection(tables=tables)})
    ways = {f"t{n}": table_wise(rank=n, compute_kernel="fused") for n in range(2)}
    plan = construct_module_sharding_plan(
        model["sequences"], ways, sharder=sharder, local_size=2, world_size=2, device_type="cpu"
    )
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"sequences": plan}),
        sharders=[sharder],
    ).module["sequences"]
    ids = torch.arange(2 * SAMPLES * LOOKUPS) % 1000
    lengths = torch.full((2 * SAMPLES,), LOOKUPS, dtype=torch.int32)
    batch = KeyedJaggedTensor(["t0", "t1"], ids, lengths=lengths)

    def step():
        sum(output.values().square().sum() for output in sharded(batch).values()).backward()

    step()
    step()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
        step()
        step()
    return most_live(events)


def work(rank, folder):
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    wait = dist.distributed_c10d.Work.wait

    def waits(self, *args, **kwargs):
        done = wait(self, *args, **kwargs)
        time.sleep(0.005)  # gloo's thread may hold a tensor for a moment longer, and its free would not be seen
        return done

    dist.distributed_c10d.Work.wait = waits
    peaks = [peak(None), peak(CommType.FP16)]
    Path(folder, f"peaks-{rank}").write_text(" ".join(map(str, peaks)))
    dist.destroy_process_group()


if __name__ == "__main__":
    print(*(f"{name} {version(name)}" for name in ("torch", "fbgemm-gpu-cpu", "torchrec")), sep=", ")
    here = Path(__file__).parent
    mp.start_processes(work, (str(here),), nprocs=2, start_method="spawn")
    fp32, fp16 = map(int, (here / "peaks-0").read_text().split())
    print("expected: the peak of a step with fp16 is lower than with fp32")
    print(f"seen: {fp16:,} bytes with fp16, {fp32:,} with fp32: {(fp16 - fp32) / EMBEDDINGS:+.2f} of a rank's embeddings")
    sys.exit(not fp16 > fp32)
END
code=0
"$work/venv/bin/python" -W ignore "$work/check.py" 2> "$work/log" || code=$?
grep -v '^$\|USDT:\|CPUAllocator' "$work/log" >&2 || true # the profiler's own lines
exit $code
