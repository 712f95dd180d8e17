"""``kvmosaic bench`` under load: throughput, sustained, interference."""

import math
from typing import Annotated

import typer

from kvmosaic.cli import bench_plots
from kvmosaic.cli.eval import numbers
from kvmosaic.cli.output import JsonOption, print_json, print_line, print_table, reporting
from kvmosaic.core.errors import ConfigError

LayersOption = Annotated[int, typer.Option(help="Number of layers of the benchmark model; Llama 3 8B has 32.", min=1)]
HeadsOption = Annotated[
    int,
    typer.Option(
        help="Number of attention heads of the benchmark model; Llama 3 8B has 32. Fewer make the model narrower.",
        min=1,
        max=32,
    ),
]
EagerOption = Annotated[bool, typer.Option("--eager", help="Run vLLM without compilation and CUDA graphs.")]
DocumentsOption = Annotated[int, typer.Option(help="Number of different documents that queries draw from.", min=1)]
TokensOption = Annotated[int, typer.Option(help="Length of each document, in tokens.", min=1)]
PerQueryOption = Annotated[int, typer.Option(help="Number of documents in each query.", min=1)]
RatioOption = Annotated[float, typer.Option(help="Share of document tokens to recompute, 0 to 1.", min=0, max=1)]
RatiosOption = Annotated[
    str, typer.Option(help="Shares of document tokens to recompute, separated by commas, like 0,0.05,0.15.")
]
LmcacheOption = Annotated[
    float | None,
    typer.Option(
        help="Also measure LMCache's CacheBlend, with this share of document tokens recomputed. Needs LMCache 0.5.3 "
        "and vLLM 0.26.0.",
        min=0,
        max=1,
    ),
]
SeedOption = Annotated[int, typer.Option(help="Random seed for documents, questions and arrival times.")]


def throughput(
    rates: Annotated[
        str, typer.Option(help="Request rates to measure, in requests per second, separated by commas.")
    ] = "2,4,8,16,32",
    seconds: Annotated[float, typer.Option(help="Duration of each request rate, in seconds.", min=0.1)] = 5.0,
    objective_ms: Annotated[
        float, typer.Option(help="Target for the 90th percentile of the time to first token, in milliseconds.", min=1)
    ] = 1000.0,
    outputs: Annotated[int, typer.Option(help="Number of tokens per answer.", min=2)] = 32,
    documents: DocumentsOption = 200,
    document_tokens: TokensOption = 512,
    per_query: PerQueryOption = 14,
    new_per_query: Annotated[
        int, typer.Option(help="Number of documents in each query that no earlier query had.", min=0)
    ] = 0,
    ratios: RatiosOption = "0",
    lmcache_ratio: LmcacheOption = None,
    layers: LayersOption = 32,
    heads: HeadsOption = 32,
    eager: EagerOption = False,
    seed: SeedOption = 0,
    plot: bench_plots.PlotOption = None,
    json: JsonOption = False,
) -> None:
    """vLLM: latency of RAG traffic at growing request rates, with the chunk cache and with prefix caching alone."""
    from kvmosaic.bench import throughput
    from kvmosaic.bench.engine import Model
    from kvmosaic.bench.traffic import Corpus

    shares = shares_of(ratios)
    try:
        offered = numbers(rates)
    except ConfigError:
        offered = []
    if not offered or not all(0 < rate < math.inf for rate in offered):
        raise ConfigError(f"--rates {rates}: must be positive numbers with commas between them, like 2,4,8")
    bench_plots.check(plot)
    model, corpus = Model(layers, heads, eager), Corpus(documents, document_tokens, per_query, seed)
    with reporting("starting vLLM") as progress:
        result = throughput.run(
            model,
            corpus,
            offered,
            seconds,
            outputs,
            objective_ms,
            shares,
            new_per_query,
            lmcache_ratio,
            progress,
        )
    times = [f"{kind}_p{share}_ms" for kind in ("ttft", "itl") for share in (50, 90, 99)]
    columns = ("requests", *times, "completed_per_s", "unfinished", "hit_share")
    print_table(
        title(result["machine"], "RAG traffic"),
        ("rate", "engine", *columns),
        (
            (f"{row['rate']:g}", throughput.name_of(row), *(row.get(column, "") for column in columns))
            for row in result["rows"]
        ),
        json=json,
    )
    best = (f"{name} {rate or 0:g}" for name, rate in result["rate_at_objective"].items())
    print_line(f"requests/s with a p90 TTFT within {objective_ms:g} ms: {', '.join(best)}", json=json)
    bench_plots.throughput(plot, result)
    if json:
        print_json(result)


def sustained(
    queries: Annotated[
        int, typer.Option(help="Number of queries; no two have the same set of documents.", min=2)
    ] = 250,
    batch: Annotated[
        int, typer.Option(help="Number of queries per batch; times are averaged over a batch.", min=1)
    ] = 50,
    documents: DocumentsOption = 200,
    document_tokens: TokensOption = 512,
    per_query: PerQueryOption = 14,
    device_share: Annotated[
        float, typer.Option(help="Size of the chunk cache on the GPU, as a share of the KV of all documents.", min=0)
    ] = 0.5,
    host_share: Annotated[
        float,
        typer.Option(help="Size of the chunk cache in host memory, as a share of the KV of all documents.", min=0),
    ] = 1.0,
    ratio: RatioOption = 0.0,
    layers: LayersOption = 32,
    heads: HeadsOption = 32,
    eager: EagerOption = False,
    seed: SeedOption = 0,
    plot: bench_plots.PlotOption = None,
    json: JsonOption = False,
) -> None:
    """vLLM: time to first token over many new combinations of known documents, with limited cache memory."""
    from kvmosaic.bench import sustained
    from kvmosaic.bench.engine import Model
    from kvmosaic.bench.traffic import Corpus

    bench_plots.check(plot)
    model, corpus = Model(layers, heads, eager), Corpus(documents, document_tokens, per_query, seed)
    with reporting("starting vLLM") as progress:
        result = sustained.run(model, corpus, queries, batch, device_share, host_share, ratio, progress=progress)
    rows = result["rows"]
    print_table(
        title(result["machine"], "mean time to first token"), rows[0], (row.values() for row in rows), json=json
    )
    print_line(
        f"speed-up of the last batch relative to the second batch: {result['last_over_second']:.3f}", json=json
    )
    bench_plots.sustained(plot, result)
    if json:
        print_json(result)


def interference(
    documents: Annotated[int, typer.Option(help="Number of documents in the long prompt.", min=1)] = 32,
    document_tokens: TokensOption = 512,
    decoders: Annotated[
        int, typer.Option(help="Number of requests that generate tokens while the long prompt is processed.", min=1)
    ] = 16,
    policy: Annotated[
        str, typer.Option(help="Policy that chooses which document tokens to recompute.")
    ] = "composite",
    ratio: RatioOption = 0.15,
    turns: Annotated[
        int,
        typer.Option(help="Number of long prompts to prefill, and of other long prompts to blend.", min=1),
    ] = 10,
    layers: LayersOption = 32,
    heads: HeadsOption = 32,
    eager: EagerOption = False,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """vLLM: time between the tokens of other requests while a long prompt of known documents is blended (reused and
    partly recomputed), compared with its prefill in steps of 2048 tokens."""
    from kvmosaic.bench import interference
    from kvmosaic.bench.engine import Model
    from kvmosaic.bench.traffic import Corpus
    from kvmosaic.engines.vllm.support import policy_served

    policy_served(policy, layers)
    model, corpus = Model(layers, heads, eager), Corpus(documents, document_tokens, documents, seed)
    with reporting("starting vLLM") as progress:
        result = interference.run(model, corpus, decoders, policy, ratio, turns, progress=progress)
    rows = result["rows"]
    print_table(
        title(result["machine"], f"{decoders} requests decode"), rows[0], (row.values() for row in rows), json=json
    )
    print_line(f"p99, blend over prefill: {result['blend_over_prefill_p99']:.2f}", json=json)
    if json:
        print_json(result)


def shares_of(ratios: str) -> list[float]:
    """The shares in a text like 0,0.05,0.15."""
    shares = numbers(ratios)
    if not all(0 <= share <= 1 for share in shares):
        raise ConfigError(f"--ratios {ratios}: must be between 0 and 1")
    return shares


def title(machine: dict[str, str], what: str) -> str:
    """Title of a table: the measurement, and the machine it ran on."""
    return f"vLLM {machine['vllm']} on {machine['device']}: {what}"
