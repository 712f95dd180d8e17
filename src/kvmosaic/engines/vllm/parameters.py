"""What a request may ask of the chunk cache, in its ``kv_transfer_params``."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, ValidationError

from kvmosaic.core.errors import PromptError


class RequestParameters(BaseModel):
    """Parameters of one request. Keys that are not ours may belong to another connector and are left alone."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    chunk_cache: StrictBool = True
    recompute_ratio: StrictFloat | StrictInt | None = Field(None, ge=0, le=1)
    policy: StrictStr | None = None
    boundaries: list[tuple[StrictInt, StrictInt]] | None = None
    report: StrictBool = False

    @classmethod
    def of(cls, request: Any) -> "RequestParameters":
        """Those of a vLLM request; raises :class:`PromptError` with one line about the first that is wrong."""
        try:
            return cls.model_validate(request.kv_transfer_params or {})
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise PromptError(f"kv_transfer_params: {where}: {first['msg']}") from None
