"""The earlier name of what is in neuroshard.client.checkpoint, for trainers that import it."""

from neuroshard.client.checkpoint import PLAN as PLAN
from neuroshard.client.checkpoint import load_resharded as load_resharded
from neuroshard.client.checkpoint import saved_plan as saved_plan
