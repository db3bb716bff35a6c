"""The earlier name of what is in neuroshard.client.rows, for trainers that import it."""

from neuroshard.client.rows import CollectionByAccessSharder as CollectionByAccessSharder
