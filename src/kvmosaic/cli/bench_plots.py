"""``--plot`` of benchmarks: the result as an SVG file."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvmosaic.core.errors import ConfigError
from kvmosaic.eval.plot import Axis, Point, Series, file_svg

PlotOption = Annotated[Path | None, typer.Option(help="Write a plot of the result to this .svg file.")]


def check(path: Path | None, option: str = "--plot") -> None:
    """Refuse a file that the plot cannot be written to, before minutes of measuring."""
    if path is None:
        return
    if path.suffix != ".svg":
        raise ConfigError(f"{option} {path}: plots are SVG; choose a name that ends in .svg")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no directory {path.parent}")


def ttft(path: Path | None, result: dict[str, Any]) -> None:
    """Time to the first token by recompute ratio, a line for each policy."""
    rows = result["rows"]
    policies: dict[str, list[Point]] = {row["policy"]: [] for row in rows if row["ratio"] > 0} or {"reuse": []}
    for row in rows:
        for name, points in policies.items():
            if row["ratio"] == 0 or row["policy"] == name:
                label = f"{row['policy']} {row['ratio']:g}: {row['reuse_ms']:.1f} ms"
                points.append(_point(row["ratio"], row["reuse_ms"], label))
    peers = [("full prefill", rows[0]["full_ms"]), ("prefix-cache hit", rows[0]["prefix_hit_ms"])]
    series = [Series(name, points) for name, points in policies.items()]
    title = f"{rows[0]['context']} tokens of known documents in a new order"
    _write(path, title, series, Axis("recompute ratio"), Axis("time to first token (ms)", peers))


def throughput(path: Path | None, result: dict[str, Any]) -> None:
    """90th percentile of the time to the first token by rate, with bars from the median to the 99th."""
    from kvmosaic.bench.throughput import name_of

    names = {"plain": "vLLM with prefix caching", "reuse": "with the chunk cache", "lmcache": "with LMCache"}
    lines: dict[str, list[Point]] = {}
    for row in result["rows"]:
        name = name_of(row).replace(row["engine"], names[row["engine"]])
        low, middle, high = (row[f"ttft_p{share}_ms"] for share in (50, 90, 99))
        label = f"{name}, {row['rate']:g} requests/s: p50 {low:.0f}, p90 {middle:.0f}, p99 {high:.0f} ms"
        lines.setdefault(name, []).append(Point(row["rate"], middle, low, high, label))
    series = [Series(name, points) for name, points in lines.items()]
    y = Axis("p90 of the time to first token (ms)", [("objective", result["objective_ms"])])
    _write(path, "RAG traffic (bars: median to p99)", series, Axis("requests per second", crowded=True), y)


def sustained(path: Path | None, result: dict[str, Any]) -> None:
    """Speed-up of the time to the first token, by batch."""
    rows = result["rows"]
    points = [
        _point(row["batch"], row["speedup"], f"batch {row['batch']}: {row['reuse_ttft_ms']:.1f} ms") for row in rows
    ]
    y = Axis("speed-up of the first token", [("95 % of the second batch", 0.95 * rows[1]["speedup"])])
    title = f"New combinations of known documents, {rows[0]['queries']} queries a batch"
    _write(path, title, [Series("against vLLM with prefix caching", points)], Axis("batch"), y)


def _point(x: float, y: float, label: str) -> Point:
    return Point(x, y, y, y, label)


def _write(path: Path | None, title: str, series: list[Series], x: Axis, y: Axis) -> None:
    if path is not None:
        path.write_text(file_svg(title, series, x, y))
