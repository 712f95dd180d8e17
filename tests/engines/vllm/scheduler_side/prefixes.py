"""A second implementation of the hashes of exact prefix segments."""

from collections.abc import Sequence
from struct import unpack

from kvmosaic.core.key import content_hash
from tests.engines.vllm.scheduler_side.fakes import SEGMENT


def prefix_digests(tokens: Sequence[int], segment: int = SEGMENT) -> list[bytes]:
    """Content hash of each full segment of a prompt, which is computed from its tokens and the hash before it."""
    digests: list[bytes] = []
    for start in range(0, len(tokens) - segment + 1, segment):
        before = unpack("<4i", digests[-1]) if digests else ()
        digests.append(content_hash(list(tokens[start : start + segment]), before))
    return digests
