"""The advice of an evaluation in one sentence, and the glossary of its report."""

from kvmosaic.eval.calibrate import Candidate, Target, cheapest, closest
from kvmosaic.eval.plan import ALL, RANDOM
from kvmosaic.eval.summary import Summary

USUAL = Target(max_kl=0.05, min_top1=0.9)
"""Targets of ``kvmosaic calibrate`` unless the user sets others."""
ENOUGH = 25
"""Number of examples from which on a setting can be chosen."""
WORDS = {
    "full prefill": "every token of the prompt is computed, as without kvmosaic; all rows are compared with it",
    "ratio": "the setting recompute_ratio: the share of document tokens that are computed again in their new place",
    "policy": "the rule that chooses the tokens to compute again; random is there for comparison only",
    "charged ratio": "what recomputing costs, with the cost of choosing, as a share of computing all document tokens",
    "KL": "distance of the next-token probabilities from those of a full prefill, in nats; 0 is the same, lower is "
    "better. p95: 95 % of all answer tokens are below",
    "top-1": "share of answer tokens at which the most likely token is that of a full prefill; higher is better",
    "EM, F1": "EM: share of answers that equal a right answer. F1: overlap of an answer's words with those of a "
    "right answer, from 0 to 1. Higher is better",
    "gap closed": "position of F1 between that of no documents at all (0 %) and that of a full prefill (100 %)",
    "TTFT": "time to first token, the median of all examples",
    "sink prefix": "text or learned KV that a document is computed after, when it is computed alone",
    "cell": "one policy at one ratio",
}
"""Words of the report, and their meanings."""


def sentence(summary: Summary) -> str:
    """Which ratio and policy to choose: the cheapest that stays close to a full prefill."""
    lines = [line for line in summary.lines if line.row[:2] != ALL and line.row.policy != RANDOM]
    candidates = [Candidate(line.sink_prefix, line.row) for line in lines]
    behind_sinks = len({line.sink_prefix for line in lines}) > 1
    chosen = cheapest(candidates, USUAL)
    best = chosen or closest(candidates, USUAL)
    row = best.row
    name = f"policy {row.policy} at ratio {row.ratio:g}" if row.ratio else "ratio 0, which recomputes nothing"
    name += f", with the sink prefix {best.sink_prefix}" if behind_sinks else ""
    few = f"Only {row.n} examples were measured; measure {ENOUGH} or more before you choose. "
    first = few if row.n < ENOUGH else ""
    if chosen is None:
        return (
            f"{first}Nothing measured here stays close to a full prefill ({USUAL}); closest is {name} (KL "
            f"{row.kl_mean:.3f}, top-1 {row.top1:.3f}), so try larger ratios, or learn a sink prefix (kvmosaic tune)."
        )
    return (
        f"{first}Choose {name}: the cheapest setting of these {row.n} examples that stays close to a full prefill "
        f"(KL {row.kl_mean:.3f}, top-1 {row.top1:.3f}; wanted: {USUAL}); "
        f"{_compared(row.prefill_ms, summary.full_prefill.prefill_ms)}."
    )


def _compared(ours_ms: float, full_ms: float) -> str:
    """Both medians, in words that do not sound like a gain if there was none."""
    ours = f"its median first token takes {ours_ms:.0f} ms"
    if round(ours_ms) < round(full_ms):
        return f"{ours} instead of {full_ms:.0f}"
    return f"it was no faster in this run: {ours}, and that of a full prefill {full_ms:.0f} ms"
