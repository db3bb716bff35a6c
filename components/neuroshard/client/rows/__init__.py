"""Tables held by access, in a trainer (docs/rows.md): the public names of this room."""

from neuroshard.client.rows.collection import CollectionByAccess
from neuroshard.client.rows.held import by_access
from neuroshard.client.rows.lists import hot_ids
from neuroshard.client.rows.sharded import CollectionByAccessSharder

__all__ = ["CollectionByAccess", "CollectionByAccessSharder", "by_access", "hot_ids"]
