"""Draws measured times to first token: a bar for each, and its speed-up over a full prefill."""

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvmosaic.core.errors import ConfigError

WIDTH, LEFT, RIGHT = 760, 300, 130
HEAD, ROW, FOOT = 70, 44, 12
"""Heights in pixels: of the title, of a row, and below the last one."""
STYLE = """
:root { --ink: #1b1f24; --soft: #5c6570; --paper: #ffffff; --plain: #8a94a0; --ours: #2b5fd9; --peer: #b7791f }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --soft: #a4adb7; --paper: #161a20; --plain: #7c8794; --ours: #5b8dff; --peer: #d69e2e }
}
text { fill: var(--ink); font: 14px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif }
.title { font-size: 16px; font-weight: 600 } .soft { fill: var(--soft); font-size: 12px } .number { font-weight: 600 }
.plain { fill: var(--plain) } .ours { fill: var(--ours) } .peer { fill: var(--peer) } .range { stroke: var(--ink) }
"""
"""CSS of the figure. It has its own background, because pages that show it may be dark when the system is not."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Run(_Part):
    """One session in which rows were measured."""

    device: str
    date: str
    command: str
    commit: str | None
    """Commit of kvmosaic, if it was measured."""
    versions: dict[str, str]
    full_prefill_ms: float = Field(gt=0)
    """Time of a full prefill in this run, which its rows are compared with."""
    notes: str = ""


class Row(_Part):
    """A bar."""

    name: str
    detail: str
    kind: Literal["plain", "ours", "peer"]
    ms: float = Field(gt=0)
    """Median."""
    range_ms: tuple[float, float] | None = None
    """Minimum and maximum, if they are known."""
    run: str
    """Name of the run it is from."""


class Measured(_Part):
    """The data of a figure."""

    title: str
    subtitle: str
    runs: dict[str, Run]
    rows: tuple[Row, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _has_all_runs(self) -> "Measured":
        for row in self.rows:
            if row.run not in self.runs:
                raise ValueError(f"row {row.name!r} is from the run {row.run!r}, which the file does not have")
        return self


def read(path: Path) -> Measured:
    """The content of a JSON file. Raises a :class:`ConfigError` that says what is wrong with it."""
    try:
        return Measured.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"{path}: {place}: {first['msg'].removeprefix('Value error, ')}") from None


def draw(measured: Measured) -> str:
    """The figure as an SVG file."""
    height = HEAD + ROW * len(measured.rows) + FOOT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">',
            f"<title>{escape(measured.title)}</title><style>{STYLE}</style>",
            f'<rect width="{WIDTH}" height="{height}" rx="8" style="fill:var(--paper)"/>',
            f'<text class="title" x="20" y="30">{escape(measured.title)}</text>',
            f'<text class="soft" x="20" y="50">{escape(measured.subtitle)}</text>',
            *_rows(measured),
            "</svg>",
            "",
        ]
    )


def _rows(measured: Measured) -> Iterator[str]:
    most = max(max(row.ms, *(row.range_ms or (row.ms,))) for row in measured.rows)
    scale = (WIDTH - LEFT - RIGHT) / most
    for index, row in enumerate(measured.rows):
        top = HEAD + ROW * index
        length = row.ms * scale
        end = length
        yield f'<text x="20" y="{top + 16}">{escape(row.name)}</text>'
        yield f'<text class="soft" x="20" y="{top + 32}">{escape(row.detail)}</text>'
        yield f'<rect class="{row.kind}" x="{LEFT}" y="{top + 5}" width="{length:.1f}" height="22" rx="3"/>'
        if row.range_ms is not None:
            low, high = (LEFT + value * scale for value in row.range_ms)
            yield f'<line class="range" x1="{low:.1f}" x2="{high:.1f}" y1="{top + 16}" y2="{top + 16}"/>'
            end = max(end, high - LEFT)
        times = measured.runs[row.run].full_prefill_ms / row.ms
        sooner = f"  {times:.1f}×" if times < 10 else f"  {times:.0f}×"
        yield (
            f'<text class="number" x="{LEFT + end + 8:.1f}" y="{top + 21}">{row.ms:.0f} ms'
            f'<tspan class="soft">{"" if row.kind == "plain" and times == 1 else sooner}</tspan></text>'
        )
