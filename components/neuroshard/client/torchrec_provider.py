"""The earlier name of what is in neuroshard.client.torchrec.provider, for trainers that import it."""

from neuroshard.client.torchrec.provider import NeuroShardPlannerProvider as NeuroShardPlannerProvider
