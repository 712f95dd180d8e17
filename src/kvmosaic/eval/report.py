"""An evaluation as one self-contained HTML file."""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import product

from kvmosaic.eval.advice import WORDS, sentence
from kvmosaic.eval.metrics import Interval
from kvmosaic.eval.plan import ALL, NONE
from kvmosaic.eval.plot import STYLE as PLOT_STYLE
from kvmosaic.eval.plot import Axis, Point, Series, legend, svg
from kvmosaic.eval.summary import Summary, SummaryLine

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1240px;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.wide { overflow-x: auto }
.advice { font-size: 1.1rem; border-left: 4px solid var(--good); padding-left: .8rem }
summary { cursor: pointer } dd { margin: 0 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 1rem 2rem }
figure { margin: 0 } figcaption { font-weight: 600 }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; white-space: nowrap }
th, td { padding: .2rem .45rem; text-align: right; border-bottom: 1px solid var(--faint) }
th:first-child, td:first-child { text-align: left }
.good { color: var(--good) } .bad { color: var(--bad) } small { opacity: .7 }
.legend span { display: inline-flex; align-items: center; margin-right: 1.2rem }
.legend svg { width: 14px; height: 14px; margin-right: .35rem }
"""
HEADS = (
    *(
        "policy",
        "sink prefix",
        "entries",
        "ratio",
        "charged ratio",
        "KL mean",
        "KL p95",
        "top-1",
        "EM",
        "F1",
        "gap closed",
        "TTFT ms",
    ),
    *("KL − random", "F1 − random"),
)


def render(title: str, summary: Summary) -> str:
    """The report."""
    full, none = summary.full_prefill, summary.no_context
    shown = _series(summary.lines)
    charged, kl = Axis("charged ratio", crowded=True), Axis("KL (nats)")
    time = Axis("time to first token (ms)", [("full prefill", full.prefill_ms)])
    # Names of two lines at nearly the same height would cover each other.
    apart = abs(full.f1 - none.f1) > 0.05
    f1 = Axis("word F1", [("full prefill", full.f1), *([("no context", none.f1)] if apart else [])])
    plots = (
        ("KL to full prefill, by what is recomputed (lower is better)", charged, kl, _charged, _kl),
        ("KL to full prefill, by time (lower is better)", time, kl, _time, _kl),
        ("F1 of the answers, by what is recomputed (higher is better)", charged, f1, _charged, _f1),
        ("F1 of the answers, by time (higher is better)", time, f1, _time, _f1),
    )
    figures = "".join(
        f"<figure><figcaption>{caption}</figcaption>{svg(_points(shown, x, y), x_axis, y_axis)}</figure>"
        for caption, x_axis, y_axis, x, y in plots
    )
    words = "".join(f"<dt>{word}</dt><dd>{escape(meaning)}</dd>" for word, meaning in WORDS.items())
    rows = "\n".join(f"<tr>{''.join(_cells(line))}</tr>" for line in summary.lines)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>kvmosaic eval: {escape(title)}</title><style>{PLOT_STYLE}{STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<p class="advice">{escape(sentence(summary))}</p>
<details><summary>What the words mean</summary><dl>{words}</dl></details>
<p>Full prefill: EM {full.em:.3f}, F1 {full.f1:.3f}, {full.prefill_ms:.0f} ms. Without context: EM {none.em:.3f},
F1 {none.f1:.3f}. KL is measured over the full-prefill answer, token by token. Brackets and bars are 95&nbsp;%
bootstrap intervals over examples. Times to first token (TTFT) are medians with all chunks cached. Every line begins
at reuse without recomputing.</p>
{legend(_points(shown, _charged, _kl))}
<div class="plots">{figures}</div>
<h2>All cells</h2>
<div class="wide"><table><thead><tr>{"".join(f"<th>{head}</th>" for head in HEADS)}</tr></thead>
<tbody>
{rows}
</tbody></table></div>
<p><small>“− random”: paired difference to random tokens at the same charged ratio, interpolated between random’s
cells; coloured where its 95&nbsp;% interval, shown on hover, does not contain 0.</small></p>
</body></html>
"""


def _series(lines: Sequence[SummaryLine]) -> dict[str, list[SummaryLine]]:
    """Lines by policy, sink prefix and dtype of entries. Each begins with nothing recomputed, which is the same for
    all policies. Everything recomputed is left out: it says nothing about a policy, and would leave a tenth of the
    width to the interesting ratios."""
    sinks = list(dict.fromkeys(line.sink_prefix for line in lines))
    dtypes = list(dict.fromkeys(line.entry_dtype for line in lines))
    are_short_names_unique = len({_short(sink) for sink in sinks}) == len(sinks)
    series = {}
    for sink, dtype in product(sinks, dtypes):
        name = _short(sink) if are_short_names_unique else sink
        behind = (f" after {name}" if len(sinks) > 1 else "") + (f" in {dtype}" if len(dtypes) > 1 else "")
        mine = [line for line in lines if (line.sink_prefix, line.entry_dtype) == (sink, dtype)]
        ends = {line.row.policy: line for line in mine if line.row[:2] in (NONE, ALL)}
        names = dict.fromkeys(line.row.policy for line in mine if line.row.policy not in ends)
        between = {name: [line for line in mine if line.row.policy == name] for name in names}
        for name, some in (between or {"reuse as is, recompute all": [ends[ALL.policy]]}).items():
            series[name + behind] = sorted([ends[NONE.policy], *some], key=lambda line: line.row.charged_ratio)
    return series


def _short(sink_prefix: str) -> str:
    """A sink prefix as a legend shows it: files without their folders, texts by their first words."""
    return sink_prefix.rpartition("/")[2][:40]


def _points(
    shown: dict[str, list[SummaryLine]], x: Callable[[SummaryLine], float], y: Callable[[SummaryLine], Interval]
) -> list[Series]:
    return [Series(name, [Point(x(line), *y(line), _label(line)) for line in lines]) for name, lines in shown.items()]


def _label(line: SummaryLine) -> str:
    return f"{line.row.policy} {line.row.ratio:g}: KL {line.row.kl_mean:.3f}, F1 {line.row.f1:.3f}"


def _charged(line: SummaryLine) -> float:
    return line.row.charged_ratio


def _time(line: SummaryLine) -> float:
    return line.row.prefill_ms


def _kl(line: SummaryLine) -> Interval:
    return line.kl


def _f1(line: SummaryLine) -> Interval:
    return line.f1


def _cells(line: SummaryLine) -> Iterator[str]:
    row = line.row
    gap = "–" if row.gap_closed is None else f"{row.gap_closed:.0%}"
    for text in (
        escape(row.policy),
        escape(_short(line.sink_prefix)),
        line.entry_dtype,
        f"{row.ratio:g}",
        f"{row.charged_ratio:.3f}",
        _bracketed(line.kl),
        f"{row.kl_p95:.3f}",
        f"{row.top1:.3f}",
        f"{row.em:.3f}",
        _bracketed(line.f1),
        gap,
        f"{row.prefill_ms:.1f}",
    ):
        yield f"<td>{text}</td>"
    for difference, sign in ((line.kl_to_random, -1), (line.f1_to_random, 1)):
        least, most = sorted((sign * difference.low, sign * difference.high))
        mark = "good" if least > 0 else "bad" if most < 0 else ""
        interval = f"[{difference.low:+.3f}, {difference.high:+.3f}]"
        yield f'<td class="{mark}" title="{interval}">{difference.mean:+.3f}</td>'


def _bracketed(interval: Interval) -> str:
    return f"{interval.mean:.3f} <small>[{interval.low:.3f}, {interval.high:.3f}]</small>"
