"""The earlier name of what is in neuroshard.client.torchrec, for trainers that import it."""

from neuroshard.client.torchrec import check_pipeline as check_pipeline
