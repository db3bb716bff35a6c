"""A model's state from one plan to another, by a checkpoint or without a restart: the public names of this room."""

from neuroshard.client.checkpoint.live import reshard
from neuroshard.client.checkpoint.load import PLAN, load_resharded, saved_plan
from neuroshard.client.checkpoint.rows import load_model_state, model_state

__all__ = ["PLAN", "load_model_state", "load_resharded", "model_state", "reshard", "saved_plan"]
