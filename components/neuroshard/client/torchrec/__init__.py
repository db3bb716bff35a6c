"""A plan where TorchRec wants one: the public names of this room, but for TorchRec 1.9's planner provider (provider.py)."""

from neuroshard.client.model.order import keep_output_order, output_order
from neuroshard.client.model.warn import ShardingWarning
from neuroshard.client.torchrec.batches import check_batches
from neuroshard.client.torchrec.hosts import dmp_collection
from neuroshard.client.torchrec.pipelines import check_pipeline
from neuroshard.client.torchrec.plan import check_same_digest, from_torchrec, qcomms, to_torchrec
from neuroshard.client.torchrec.planner import NeuroShardPlanner

__all__ = [
    "NeuroShardPlanner",
    "ShardingWarning",
    "check_batches",
    "check_pipeline",
    "check_same_digest",
    "dmp_collection",
    "from_torchrec",
    "keep_output_order",
    "output_order",
    "qcomms",
    "to_torchrec",
]
