"""Which blocks of sliding-window layers are stored, compared with the tokens that later ones can really see."""

from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.core.window import WindowTails, reachable_block_mask, reachable_tail


@given(st.integers(0, 700), st.integers(1, 32), st.integers(1, 200), st.integers(1, 12), st.integers(0, 2))
def test_the_mask_has_exactly_the_blocks_that_a_later_token_sees(tokens, block, window, blocks, extra):
    segment = blocks * block
    mask = reachable_block_mask(tokens, block, reachable_tail(window, block, extra), segment)
    assert len(mask) == tokens // segment * blocks  # nothing beyond the last boundary
    boundaries = range(segment, tokens + 1, segment)
    seen = set()
    for boundary in boundaries:
        # The first token behind the boundary looks back farthest, or the first one that is computed blocks before it.
        # The part that it sees of earlier segments is kept by those.
        first = max(boundary - segment, boundary - (window - 1) - extra * block)
        seen.update(position // block for position in range(first, boundary))
    assert {index for index, stored in enumerate(mask) if stored} >= seen
    # No more blocks than rounding up to whole blocks requires.
    per_segment = min(blocks, -(-(window - 1) // block) + extra)
    assert sum(mask) == len(boundaries) * per_segment


@given(st.integers(1, 64), st.integers(1, 300), st.integers(0, 2))
def test_the_tail_is_the_masks_last_blocks(block, window, extra):
    tail = reachable_tail(window, block, extra)
    segment = tail + 3 * block
    mask = reachable_block_mask(segment, block, tail, segment)
    assert mask == [False] * 3 + [True] * (tail // block)
    assert tail >= window - 1


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 40), st.integers(1, 60))
def test_tails_cut_what_is_longer(windowed, tail, tokens):
    tails = WindowTails(tuple(index for index, cut in enumerate(windowed) if cut), tail)
    kept = [min(tail, tokens) if cut else tokens for cut in windowed]
    assert [tails.kept(index, tokens) for index in range(len(windowed))] == kept
    assert tails.cuts(tokens) == (sum(kept) < tokens * len(windowed))
