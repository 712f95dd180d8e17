"""``kvmosaic bench`` under load: throughput, sustained, interference."""

import math
from typing import Annotated

import typer

from kvmosaic.cli import bench_plots
from kvmosaic.cli.eval import numbers
from kvmosaic.cli.output import JsonOption, print_json, print_line, print_table, reporting
from kvmosaic.core.errors import ConfigError

LayersOption = Annotated[int, typer.Option(help="Layers of the 8B-shaped model.", min=1)]
HeadsOption = Annotated[
    int, typer.Option(help="Attention heads of the 8B-shaped model; fewer make it narrower.", min=1, max=32)
]
EagerOption = Annotated[bool, typer.Option("--eager", help="Without compilation and CUDA graphs.")]
DocumentsOption = Annotated[int, typer.Option(help="Documents there are.", min=1)]
TokensOption = Annotated[int, typer.Option(help="Tokens of a document.", min=1)]
PerQueryOption = Annotated[int, typer.Option(help="Documents in a query.", min=1)]
RatioOption = Annotated[float, typer.Option(help="Share of document tokens that is recomputed.", min=0, max=1)]
SeedOption = Annotated[int, typer.Option(help="Of documents, questions and arrivals.")]


def throughput(
    rates: Annotated[str, typer.Option(help="Requests per second, one after the other.")] = "2,4,8,16,32",
    seconds: Annotated[float, typer.Option(help="How long requests come at each rate.", min=0.1)] = 5.0,
    objective_ms: Annotated[
        float, typer.Option(help="Within what nine of ten requests shall have their first token.", min=1)
    ] = 1000.0,
    outputs: Annotated[int, typer.Option(help="Tokens of an answer.", min=2)] = 32,
    documents: DocumentsOption = 200,
    document_tokens: TokensOption = 512,
    per_query: PerQueryOption = 14,
    ratio: RatioOption = 0.0,
    layers: LayersOption = 32,
    heads: HeadsOption = 32,
    eager: EagerOption = False,
    seed: SeedOption = 0,
    plot: bench_plots.PlotOption = None,
    json: JsonOption = False,
) -> None:
    """vLLM: RAG traffic at growing rates, with the chunk cache against prefix caching alone."""
    from kvmosaic.bench import throughput
    from kvmosaic.bench.engine import Model
    from kvmosaic.bench.process import ENGINES
    from kvmosaic.bench.traffic import Corpus

    try:
        offered = numbers(rates)
    except ConfigError:
        offered = []
    if not offered or not all(0 < rate < math.inf for rate in offered):
        raise ConfigError(f"--rates {rates}: must be positive numbers with commas between them, like 2,4,8")
    bench_plots.check(plot)
    model, corpus = Model(layers, heads, eager), Corpus(documents, document_tokens, per_query, seed)
    with reporting("starting vLLM") as progress:
        result = throughput.run(model, corpus, offered, seconds, outputs, objective_ms, ratio, progress=progress)
    times = [f"{kind}_p{share}_ms" for kind in ("ttft", "itl") for share in (50, 90, 99)]
    columns = (*times, "completed_per_s", "unfinished", "hit_share")
    print_table(
        title(result["machine"], "RAG traffic"),
        ("rate", "engine", *columns),
        (
            (f"{row['rate']:g}", engine, *(row.get(f"{engine}_{column}", "") for column in columns))
            for row in result["rows"]
            for engine in ENGINES
        ),
        json=json,
    )
    best = (f"{engine} {result[f'{engine}_rate_at_objective'] or 0:g}" for engine in ENGINES)
    print_line(f"requests/s with a p90 TTFT within {objective_ms:g} ms: {', '.join(best)}", json=json)
    bench_plots.throughput(plot, result)
    if json:
        print_json(result)


def sustained(
    queries: Annotated[int, typer.Option(help="Queries, no two with the same documents.", min=2)] = 250,
    batch: Annotated[int, typer.Option(help="Queries whose times are averaged.", min=1)] = 50,
    documents: DocumentsOption = 200,
    document_tokens: TokensOption = 512,
    per_query: PerQueryOption = 14,
    device_share: Annotated[
        float, typer.Option(help="Share of the documents that fits the chunk cache on the device.", min=0)
    ] = 0.5,
    host_share: Annotated[
        float, typer.Option(help="Share of the documents that fits the chunk cache in host memory.", min=0)
    ] = 1.0,
    ratio: RatioOption = 0.0,
    layers: LayersOption = 32,
    heads: HeadsOption = 32,
    eager: EagerOption = False,
    seed: SeedOption = 0,
    plot: bench_plots.PlotOption = None,
    json: JsonOption = False,
) -> None:
    """vLLM: endless new combinations of known documents, with less memory than they take."""
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
    print_line(f"speed-up of the last batch over the second's: {result['last_over_second']:.3f}", json=json)
    bench_plots.sustained(plot, result)
    if json:
        print_json(result)


def interference(
    documents: Annotated[int, typer.Option(help="Documents in the long prompt.", min=1)] = 32,
    document_tokens: TokensOption = 512,
    decoders: Annotated[int, typer.Option(help="Requests that decode meanwhile.", min=1)] = 16,
    policy: Annotated[str, typer.Option(help="Which tokens are recomputed.")] = "composite",
    ratio: RatioOption = 0.15,
    turns: Annotated[int, typer.Option(help="Prompts of each kind.", min=1)] = 10,
    layers: LayersOption = 32,
    heads: HeadsOption = 32,
    eager: EagerOption = False,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """vLLM: time between tokens of others while a long prompt is blended, against a prefill in steps of 2k."""
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


def title(machine: dict[str, str], what: str) -> str:
    """Of a table: what was measured where."""
    return f"vLLM {machine['vllm']} on {machine['device']}: {what}"
