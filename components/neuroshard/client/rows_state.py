"""The earlier name of what is in neuroshard.client.checkpoint, for trainers that import it."""

from neuroshard.client.checkpoint import load_model_state as load_model_state
from neuroshard.client.checkpoint import model_state as model_state
