"""``kvmosaic dashboard``: the Grafana dashboard of the metrics."""

from importlib.resources import files

import typer

TELEMETRY = "kvmosaic.engines.vllm.telemetry"


def dashboard() -> None:
    """Print a Grafana dashboard for the metrics of the vLLM server, as JSON to import into Grafana."""
    typer.echo((files(TELEMETRY) / "dashboard.json").read_text(encoding="utf-8"), nl=False)
