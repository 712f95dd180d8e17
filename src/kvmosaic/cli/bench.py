"""``kvmosaic bench``: ratios measured in one run."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvmosaic.cli import bench_plots, bench_traffic
from kvmosaic.cli.bench_traffic import (
    EagerOption,
    HeadsOption,
    LayersOption,
    LmcacheOption,
    RatiosOption,
    shares_of,
)
from kvmosaic.cli.eval import BETWEEN_POLICIES
from kvmosaic.cli.output import JsonOption, ModelOption, console, print_json, print_line, print_table, reporting
from kvmosaic.cli.remote import reach
from kvmosaic.core.errors import ConfigError

app = typer.Typer(help="Benchmarks. Each measures both sides of a comparison in one run.", no_args_is_help=True)
app.command("throughput")(bench_traffic.throughput)
app.command("sustained")(bench_traffic.sustained)
app.command("interference")(bench_traffic.interference)


@app.command("chunk-hit")
def chunk_hit(
    model: ModelOption = "smollm2-135m",
    tokens: Annotated[int, typer.Option(help="Length of the chunk, in tokens.", min=1)] = 512,
    json: JsonOption = False,
) -> None:
    """Time to get one chunk's KV by computing it, from host memory, and from disk."""
    from kvmosaic.bench import chunk_hit  # here, because importing it takes seconds

    with reporting("loading the model") as progress:
        result = chunk_hit.run(model, tokens, progress=progress)
    print_table(
        f"{model}: a chunk of {tokens} tokens ({result['entry_mb']:.1f} MB of KV) put in place",
        ("from", "ms (median)", "against computing"),
        (
            ("computing", f"{result['compute_ms']:.1f}", "1x"),
            ("host", f"{result['host_ms']:.1f}", f"{result['host_speedup']:.0f}x"),
            ("disk", f"{result['disk_ms']:.1f}", f"{result['disk_speedup']:.0f}x"),
        ),
        json=json,
    )
    if json:
        print_json(result)


@app.command("lookup")
def lookup(json: JsonOption = False) -> None:
    """Lookup time in host memory, by number of stored entries."""
    from kvmosaic.bench import lookup

    with console.status("filling stores of growing size"):
        result = lookup.run()
    print_table(
        "look-up in host memory",
        ("entries", "hit µs", "miss µs"),
        ((row["entries"], f"{row['hit_us']:.1f}", f"{row['miss_us']:.1f}") for row in result["rows"]),
        json=json,
    )
    if json:
        print_json(result)


@app.command("eviction")
def eviction(
    seed: Annotated[int, typer.Option(help="Random seed for the made-up data.")] = 0, json: JsonOption = False
) -> None:
    """Hit rate of the eviction policy against plain LRU, on popular chunks mixed with scans."""
    from kvmosaic.bench import eviction

    with console.status("replaying the trace"):
        result = eviction.run(seed)
    rows = result["rows"]
    print_table("hit rates by budget", rows[0], (row.values() for row in rows), json=json)
    if json:
        print_json(result)


@app.command("discovery")
def discovery(
    data: Annotated[
        str | None,
        typer.Option(help="File of examples, as for `kvmosaic eval`; its documents replace the made-up ones."),
    ] = None,
    model: ModelOption = "smollm2-135m",
    prompts: Annotated[int, typer.Option(help="Number of prompts for each kind of traffic.", min=1)] = 400,
    seed: Annotated[int, typer.Option(help="Random seed for the made-up data.")] = 0,
    json: JsonOption = False,
) -> None:
    """Share of reusable text that chunk_sources=auto finds in traffic without named documents, and the time that it
    takes. The model only provides the tokenizer for --data."""
    from kvmosaic.bench import discovery
    from kvmosaic.eval.data import load

    documents = None
    if data is not None:
        texts = dict.fromkeys(text for example in load(data, discovery.DOCUMENTS, seed) for text in example.chunks)
        documents = _tokens(model, list(texts))
    with console.status("sending prompts"):
        result = discovery.run(prompts, seed, documents)
    rows = result["rows"]
    print_table(
        "shares of the tokens that a prefix cache does not cover", rows[0], (row.values() for row in rows), json=json
    )
    if json:
        print_json(result)


@app.command("documents")
def documents(
    model: ModelOption = "smollm2-135m",
    tokens: Annotated[int, typer.Option(help="Approximate length of each prompt, in tokens.", min=100)] = 10_000,
    repeats: Annotated[int, typer.Option(help="Number of times that each prompt is measured.", min=1)] = 100,
    seed: Annotated[int, typer.Option(help="Random seed for the made-up data.")] = 0,
    json: JsonOption = False,
) -> None:
    """Time to find named documents in a request's JSON and in the prompt's tokens."""
    from kvmosaic.bench import documents

    result = documents.run(_tokenizer(model), tokens, repeats, seed)
    rows = result["rows"]
    print_table("milliseconds for 10,000 tokens", rows[0], (row.values() for row in rows), json=json)
    if json:
        print_json(result)


def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    from kvmosaic.models import resolve

    return AutoTokenizer.from_pretrained(resolve(model))


def _tokens(model: str, texts: list[str]) -> list[list[int]]:
    tokenizer = _tokenizer(model)
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


@app.command("store")
def store(
    remote: Annotated[
        str | None,
        typer.Option(help="URL of a remote store to measure: valkey://host:6379/0 or mooncake://host:50051."),
    ] = None,
    disk_path: Annotated[
        Path | None, typer.Option(help="Folder on the disk to measure; temporary files in it are removed afterwards.")
    ] = None,
    entries: Annotated[
        int, typer.Option(help="Number of entries (stored chunks) that are written or read at a time.", min=2)
    ] = 4,
    tokens: Annotated[int, typer.Option(help="Number of tokens per entry.", min=1)] = 128,
    layers: Annotated[int, typer.Option(help="Number of layers of an entry.", min=1)] = 32,
    heads: Annotated[
        int, typer.Option(help="Number of KV heads; the remote store holds each head as a separate value.", min=1)
    ] = 8,
    head_dim: Annotated[int, typer.Option(help="Dimension of a head.", min=1)] = 128,
    json: JsonOption = False,
) -> None:
    """Throughput of every tier compared with plain use of the same memory, disk or server, and lookup time of the
    remote tier. Existing entries of the tiers are not touched."""
    from kvmosaic.bench import store
    from kvmosaic.core.config import load_config

    given: dict[str, Any] = {"remote": remote, "disk_path": disk_path}
    config = load_config(**{name: value for name, value in given.items() if value is not None})
    if config.remote is not None:
        reach(config.remote)
    shape = store.Shape(entries, tokens, layers, heads, head_dim)
    with reporting("making entries") as progress:
        result = store.run(shape, config.remote, config.disk_path, progress=progress)
    moved = [row for row in result["rows"] if "tier" in row]
    title = f"{entries} entries of {heads} heads of {shape.head_bytes / 2**20:.2f} MiB"
    print_table(title, moved[0], (row.values() for row in moved), json=json)
    for row in result["rows"]:
        if "lookup" in row:
            took = f"{row['ours_ms']:.1f} ms, {row['plain']} {row['plain_ms']:.1f} ms"
            print_line(f"look-up of {row['keys']} keys, {row['lookup']}: {took}", json)
    if json:
        print_json(result)


@app.command("ttft")
def ttft(
    context: Annotated[
        int, typer.Option(help="Total length of all chunks, in tokens; each chunk has 512.", min=512)
    ] = 16384,
    layers: LayersOption = 32,
    heads: HeadsOption = 32,
    eager: EagerOption = False,
    tier: Annotated[str, typer.Option(help="Tier that holds the chunks: device or host.")] = "device",
    policies: Annotated[
        str, typer.Option(help="Policies to measure, which choose the tokens to recompute, like composite,sink-link.")
    ] = "composite",
    ratios: RatiosOption = "0",
    plot: bench_plots.PlotOption = None,
    json: JsonOption = False,
) -> None:
    """vLLM: time to first token with a full prefill, a prefix-cache hit, and chunks reused in a new order."""
    from kvmosaic.bench import ttft
    from kvmosaic.bench.engine import Model
    from kvmosaic.engines.vllm.support import policy_served

    if tier not in ("device", "host"):
        raise ConfigError(f"--tier {tier}: choose device or host")
    chosen, shares = [part.strip() for part in BETWEEN_POLICIES.split(policies)], shares_of(ratios)
    for policy in chosen:
        policy_served(policy, layers)
    bench_plots.check(plot)
    with reporting("starting vLLM") as progress:
        result = ttft.run(context, Model(layers, heads, eager), tier, chosen, shares, progress=progress)
    rows = result["rows"]
    bench_plots.ttft(plot, result)
    print_table(
        f"vLLM {result['machine']['vllm']}: time to first token", rows[0], (row.values() for row in rows), json=json
    )
    if json:
        print_json(result)


@app.command("peers")
def peers(
    context: Annotated[
        int, typer.Option(help="Total length of all documents, in tokens; each has 512.", min=512)
    ] = 16384,
    ratios: RatiosOption = "0,0.05,0.15",
    lmcache_ratio: LmcacheOption = None,
    repeats: Annotated[int, typer.Option(help="Number of measured prompts of each kind.", min=1)] = 5,
    layers: LayersOption = 32,
    heads: HeadsOption = 32,
    eager: EagerOption = False,
    json: JsonOption = False,
) -> None:
    """GPU: time to first token of plain vLLM, of kvmosaic with documents on the GPU and in host memory, and of
    LMCache, in one run."""
    from kvmosaic.bench import peers
    from kvmosaic.bench.engine import Model
    from kvmosaic.core.accelerator import accelerator_there

    if accelerator_there() is None:
        raise ConfigError("bench peers needs a GPU; without one, use `kvmosaic bench ttft --tier host`")
    shares = shares_of(ratios)
    with reporting("starting vLLM") as progress:
        result = peers.run(context, Model(layers, heads, eager), shares, lmcache_ratio, repeats, progress)
    rows = result["rows"]
    print_table(
        bench_traffic.title(result["machine"], f"first token, {context} tokens"),
        rows[0],
        (row.values() for row in rows),
        json=json,
    )
    if json:
        print_json(result)


@app.command("kernels")
def kernels(
    context: Annotated[
        int, typer.Option(help="Number of tokens whose KV is moved, and over which attention is computed.", min=512)
    ] = 16384,
    chunk: Annotated[int, typer.Option(help="Number of tokens per entry (a stored chunk).", min=1)] = 512,
    layers: Annotated[int, typer.Option(help="Number of layers of a stored entry.", min=1)] = 32,
    heads: Annotated[int, typer.Option(help="Number of KV heads.", min=1)] = 8,
    group: Annotated[int, typer.Option(help="Number of query heads per KV head.", min=1, max=128)] = 4,
    head_dim: Annotated[int, typer.Option(help="Dimension of a head.", min=2)] = 128,
    json: JsonOption = False,
) -> None:
    """GPU: speed of moving entries into and out of paged caches, and of attention for chosen tokens, compared with
    the GPU's measured limits."""
    from kvmosaic.bench import kernels

    with console.status("measuring"):
        result = kernels.run(context, chunk, layers, heads, group, head_dim)
    rows = result["rows"]
    print_table(f"{result['device']}: {context} tokens", rows[0], (row.values() for row in rows), json=json)
    if json:
        print_json(result)


@app.command("overhead")
def overhead(
    layers: LayersOption = 32,
    heads: HeadsOption = 32,
    eager: EagerOption = False,
    turns: Annotated[int, typer.Option(help="Number of times that each engine is started.", min=1)] = 2,
    repeats: Annotated[int, typer.Option(help="Number of request batches per start of an engine.", min=1)] = 7,
    outputs: Annotated[int, typer.Option(help="Number of tokens per answer.", min=2)] = 128,
    json: JsonOption = False,
) -> None:
    """vLLM: step time of requests without chunks, in plain vLLM and in vLLM with the chunk cache."""
    from kvmosaic.bench import overhead
    from kvmosaic.bench.engine import Model

    with reporting("starting vLLM") as progress:
        result = overhead.run(Model(layers, heads, eager), turns, repeats, outputs, progress=progress)
    rows = result["rows"]
    title = bench_traffic.title(result["machine"], "requests without chunks")
    print_table(title, rows[0], (row.values() for row in rows), json=json)
    if json:
        print_json(result)


@app.command("figure")
def figure(
    measured: Annotated[
        Path, typer.Argument(help="JSON file with measured times and their commands.", show_default=False)
    ],
    output: Annotated[Path, typer.Option(help="SVG file to write.", show_default=False)],
) -> None:
    """Draw measured times to first token as bars, without measuring. An example of the file is
    docs/figures/first-token.json."""
    from kvmosaic.bench import figure

    bench_plots.check(output, "--output")
    output.write_text(figure.draw(figure.read(measured)), encoding="utf-8")
    print_line(f"figure: {output}", False)
