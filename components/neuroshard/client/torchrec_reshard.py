"""The earlier name of what is in neuroshard.client.checkpoint, for trainers that import it."""

from neuroshard.client.checkpoint import reshard as reshard
