"""A release: the small pointer that trainers follow to the live plan."""

from typing import Annotated, Literal

from pydantic import Field

from neuroshard.core.value import Value

RELEASE_FORMAT: Literal[1] = 1
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
MODEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


class Release(Value):
    """`model`'s plan `plan_digest` went live at `time` (UTC, ISO 8601) as release number `number`, after `previous_digest`."""

    format_version: Literal[1] = RELEASE_FORMAT
    model: Annotated[str, Field(pattern=MODEL_NAME)]
    number: Annotated[int, Field(ge=1)]
    plan_digest: Digest
    previous_digest: Digest | None = None
    time: str
    action: Literal["deploy", "rollback"] = "deploy"
    cost_ms: float | None = None
