"""The earlier name of what is in neuroshard.client.checkpoint, for trainers that import it."""

from neuroshard.client.checkpoint import PLAN, load_resharded, saved_plan

__all__ = ["PLAN", "load_resharded", "saved_plan"]
