"""The earlier name of what is in neuroshard.client.checkpoint, for trainers that import it."""

from neuroshard.client.checkpoint import load_model_state, model_state

__all__ = ["load_model_state", "model_state"]
