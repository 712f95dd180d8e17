"""Chunk-cache parameters of a request, sent in its ``kv_transfer_params``."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import islice

from kvmosaic.core.config import CLIENT_PARAMETERS
from kvmosaic.core.errors import PromptError
from kvmosaic.core.limits import MAX_BOUNDARIES, MAX_DOCUMENTS, MAX_POLICY_LENGTH, shown, shown_id
from kvmosaic.core.questions import Seam
from kvmosaic.engines.results import Fallback

PAGE_PARAMETER = "_page"
"""Parameter with which the HTTP server asks for a report for its page, whatever clients may have. Its value is
:attr:`AdminKey.page_pass`."""
MAX_UNKNOWN = 4
"""Maximum number of unknown parameter names that are reported per request."""
MAX_LOOKED_AT = 64
"""Maximum number of parameter names per request that are checked for unknown ones."""
OTHERS_PREFIXES = ("do_", "remote_", "num_", "_")
"""Prefixes of parameter names that vLLM's other connectors use."""
OTHERS_NAMES = frozenset(
    {
        "transfer_id",
        "tp_size",
        "pp_size",
        "dcp_size",
        "disagg_spec",
        "prompt_token_ids",
        "hidden_states_path",
        "include_output_tokens",
        "is_request_leader",
        "max_load_tokens",
        "max_offload_tokens",
    }
)
"""Further parameter names that vLLM's other connectors use, except those with a dot, like ``lmcache.skip_save``."""


@dataclass(frozen=True)
class RequestParameters:
    """Parameters of one request. Clients can send anything, so parameters are read by hand: values that are too long
    are not iterated over, and reading stops at the first error. Unknown keys may belong to another connector and are
    left alone."""

    chunk_cache: bool = True
    """Whether chunks are reused. ``false``: plain vLLM serves the request."""
    recompute_ratio: float | None = None
    """Share of the chunk tokens to recompute, from 0 to 1, instead of the setting."""
    policy: str | None = None
    """Policy that chooses the recomputed tokens, instead of the setting."""
    boundaries: tuple[tuple[int, int], ...] | None = None
    """Start and end, in tokens, of the system prompt, of every chunk and of the question, instead of documents and
    separators. Tokens between two of them are ordinary text."""
    documents: tuple[str, ...] = ()
    """Texts that are chunks wherever they occur in the prompt."""
    question: str | None = None
    """Separators from the first occurrence of this text on are ignored."""
    seams: tuple[tuple[str, str], ...] = ()
    """Beginnings of questions that end users typed, each with the end of the text before it. No document is found
    across one."""
    report: bool = False
    """Whether the response has a report about the request's chunks."""
    refused: Fallback | None = None
    """Reason for serving the request plainly, whatever its other parameters are."""
    problem: str = ""
    """The same reason, explained in one line."""
    unknown: tuple[str, ...] = ()
    """Parameter names that belong neither to us nor to another connector."""

    @classmethod
    def read(cls, sent: object, allowed: Collection[str], page_pass: str | None = None) -> "RequestParameters":
        """Read the parameters that a client ``sent``, which may be anything. ``allowed`` are the names that clients
        may send. A report that is not allowed is omitted, unless ``page_pass`` was sent with the request. Any other
        parameter that is not allowed is a reason to serve the request plainly."""
        if sent is None:
            return cls()
        if not isinstance(sent, dict):
            return cls(refused=Fallback.BAD_PARAMETERS, problem=f"kv_transfer_params: {shown(sent)} is not an object")
        is_for_page = page_pass is not None and sent.get(PAGE_PARAMETER) == page_pass
        params = cls._read(sent, allowed)
        return replace(params, report=params.report or is_for_page, unknown=_unknown(sent))

    @classmethod
    def _read(cls, sent: dict[str, object], allowed: Collection[str]) -> "RequestParameters":
        given = {name: sent[name] for name in CLIENT_PARAMETERS if sent.get(name) is not None}
        report = given.get("report") is True and "report" in allowed
        for name in given:
            if name not in allowed and name != "report":
                problem = f"kv_transfer_params: {name} is not allowed here; see the setting client_parameters"
                return cls(report=report, refused=Fallback.NOT_ALLOWED, problem=problem)
        try:
            return cls(
                chunk_cache=_flag("chunk_cache", given.get("chunk_cache", True)),
                recompute_ratio=_ratio(given.get("recompute_ratio")),
                policy=_policy(given.get("policy")),
                boundaries=_boundaries(given.get("boundaries")),
                documents=_documents(given.get("documents")),
                question=_text("question", given.get("question")),
                seams=_seams(given.get("seams")),
                report=_flag("report", given.get("report", False)) and report,
            )
        except PromptError as error:
            return cls(report=report, refused=Fallback.BAD_PARAMETERS, problem=f"kv_transfer_params: {error}")


def _unknown(sent: dict[str, object]) -> tuple[str, ...]:
    names = (name for name in islice(sent, MAX_LOOKED_AT) if name not in CLIENT_PARAMETERS and not _is_others(name))
    return tuple(shown_id(name) if isinstance(name, str) else shown(name) for name in islice(names, MAX_UNKNOWN))


def _is_others(name: object) -> bool:
    return isinstance(name, str) and (name.startswith(OTHERS_PREFIXES) or name in OTHERS_NAMES or "." in name)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise PromptError(f"{name}={shown(value)}: must be true or false")
    return value


def _ratio(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise PromptError(f"recompute_ratio={shown(value)}: must be a number between 0 and 1")
    return float(value)


def _policy(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > MAX_POLICY_LENGTH:
        raise PromptError(f"policy={shown(value)}: must be a text of {MAX_POLICY_LENGTH} characters at most")
    return value


def _boundaries(value: object) -> tuple[tuple[int, int], ...] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        raise PromptError(f"boundaries={shown(value)}: must be a list of [start, end]")
    if len(value) > MAX_BOUNDARIES:
        raise PromptError(f"boundaries: {len(value)} parts; the maximum is {MAX_BOUNDARIES}")
    return tuple(_pair(index, pair) for index, pair in enumerate(value))


def _documents(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise PromptError(f"documents={shown(value)}: must be a list of texts")
    if len(value) > MAX_DOCUMENTS:
        raise PromptError(f"documents: {len(value)} texts; the maximum is {MAX_DOCUMENTS}")
    for index, text in enumerate(value):
        if not isinstance(text, str):
            raise PromptError(f"documents: number {index} is {shown(text)}, which is not text")
    return tuple(value)


def _text(name: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise PromptError(f"{name}={shown(value)}: must be a text")
    return value


def _seams(value: object) -> tuple[tuple[str, str], ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or len(value) > MAX_DOCUMENTS:
        raise PromptError(f"seams={shown(value)}: must be a list of [before, question], {MAX_DOCUMENTS} at most")
    seams = []
    for index, pair in enumerate(value):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(each, str) for each in pair):
            raise PromptError(f"seams: number {index} must be [before, question], both texts")
        seams.append(Seam.between(*pair))
    return tuple(seams)


def _pair(index: int, pair: object) -> tuple[int, int]:
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        raise PromptError(f"boundaries: part {index} must be [start, end]")
    for each in pair:
        if type(each) is not int or not 0 <= each < 2**31:
            raise PromptError(f"boundaries: part {index} has {shown(each)}, which is not a position in a prompt")
    return pair[0], pair[1]
