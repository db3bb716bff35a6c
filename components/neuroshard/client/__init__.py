"""The front door for trainers: `load_plan(store_url, model)`. Needs pydantic, and boto3 for an S3 store; nothing else.

from neuroshard.client import load_plan
from neuroshard.client.torchrec import to_torchrec  # this one needs torchrec

plan = load_plan("s3://bucket/prefix", "ads-ranker", world_size=16)
sharding_plan = to_torchrec(plan, model, device_type="cuda")

plan = load_plan_on_all_ranks("s3://bucket/prefix", "ads-ranker")  # in a torch.distributed world: rank 0 loads, all get it

for plan in watch("s3://bucket/prefix", "ads-ranker", seen=plan.digest()):
    ...  # another plan went live

Behind it, for those who have TorchRec: torchrec/ gives it a plan, checkpoint/ brings a model's state to another plan, rows/ holds
tables by access, and model/ is what these know of a model.
"""

from neuroshard.client.load import StaleWarning, load_plan, watch
from neuroshard.client.ranks import load_plan_on_all_ranks
from neuroshard.core.plan import Plan

__all__ = ["Plan", "StaleWarning", "load_plan", "load_plan_on_all_ranks", "watch"]
