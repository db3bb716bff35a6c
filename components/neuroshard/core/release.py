"""A release: the small pointer that trainers follow to the live plan."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from neuroshard.core.value import Value, check_format, decode_json

RELEASE_FORMAT: Literal[1] = 1
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
MODEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


class Release(Value):
    """`model`'s plan `plan_digest` went live at `time` (UTC, ISO 8601) as release `number`, after `previous_digest`.

    `rollback_number` is the release whose plan a rollback from this one brings back, or None where there is none: a deploy
    points at the release that it replaces, a rollback at what its target points at. So rollbacks walk back, never forth.
    """

    format_version: Literal[1] = RELEASE_FORMAT
    model: Annotated[str, Field(pattern=MODEL_NAME)]
    number: Annotated[int, Field(ge=1)]
    plan_digest: Digest
    previous_digest: Digest | None = None
    rollback_number: Annotated[int, Field(ge=1)] | None = None
    time: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
    action: Literal["deploy", "rollback"] = "deploy"
    cost_ms: float | None = None

    @model_validator(mode="after")
    def _walks_back(self) -> Self:
        if self.rollback_number is not None and self.rollback_number >= self.number:
            raise ValueError(f"rollback_number {self.rollback_number} is not before release {self.number}")
        return self

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Self:
        """A release from the bytes of live.json. Raises InvalidInput or NewerFormat in one line that names `where`."""
        return cls.parse(check_format(decode_json(data, where), RELEASE_FORMAT, where), where)
