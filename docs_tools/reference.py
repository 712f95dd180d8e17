"""Reference pages about settings, requests and metrics."""

from collections.abc import Mapping

from docs_tools.commands import commands_page
from docs_tools.docstrings import attribute_docstrings
from docs_tools.markup import code, prose, table
from kvmosaic.core.config import CLIENT_PARAMETERS, CONFIG_FILE_VARIABLE, SECRETS
from kvmosaic.core.limits import MAX_BOUNDARIES, MAX_DOCUMENTS, MAX_POLICY_LENGTH
from kvmosaic.core.secret import LEAST_BYTES
from kvmosaic.core.setting import all_settings
from kvmosaic.engines.results import Fallback
from kvmosaic.engines.vllm.parameters import RequestParameters
from kvmosaic.engines.vllm.telemetry.series import COUNTS, LEVELS, PREFIX, STAGE_BUCKETS, STAGE_SECONDS, Labelled


def pages() -> dict[str, str]:
    """The text of each page, by its path in the site."""
    return {
        "reference/settings.md": settings_page(),
        "reference/cli.md": commands_page(),
        "reference/parameters.md": parameters_page(),
        "reference/metrics.md": metrics_page(),
    }


def settings_page() -> str:
    """All settings."""
    secrets = ", ".join(map(code, SECRETS))
    text = f"""# Settings

Each setting can be given as a keyword argument of `LLM(...)` or an option of `kvmosaic serve`, as an environment
variable, or in a YAML file named by `{CONFIG_FILE_VARIABLE}`, in that order of precedence. A setting that is given in
none of these ways comes from the model's profile, if `kvmosaic calibrate` saved one; otherwise the default applies.
[Using kvmosaic](../usage.md#settings) says more about some of them.

Secrets are not settings, because settings are logged. Secrets come only from the environment: {secrets}. The last two
need at least {LEAST_BYTES} bytes.
"""
    for setting in all_settings():
        rows = [
            ("type", setting.type_name),
            ("default", code(setting.default)),
            ("option", " ".join(map(code, setting.flag.split("/")))),
            ("environment", code(setting.variable)),
        ]
        text += f"\n## `{setting.name}`\n\n{prose(setting.meaning)}\n\n{table(('', ''), rows)}"
    return text


def parameters_page() -> str:
    """What a request may have, and why it may be served plainly."""
    meanings = attribute_docstrings(RequestParameters)
    limits = {
        "policy": f"At most {MAX_POLICY_LENGTH} characters.",
        "boundaries": f"At most {MAX_BOUNDARIES:,} pairs `[start, end]`.",
        "documents": f"At most {MAX_DOCUMENTS:,} texts.",
        "seams": f"At most {MAX_DOCUMENTS:,} pairs `[before, question]`.",
    }
    rows = [(code(name), f"{prose(meanings[name])} {limits.get(name, '')}".strip()) for name in CLIENT_PARAMETERS]
    reasons = attribute_docstrings(Fallback)
    return f"""# Request parameters

A request to the vLLM engine may have these keys in its `kv_transfer_params`. All are optional. The setting
[`client_parameters`](settings.md#client_parameters) lists those that clients may send. Plain vLLM serves a request
with a parameter that is wrong or not allowed.

{table(("parameter", "meaning"), rows)}
[Serve with vLLM](../howto/serve.md) has examples, and the fields of a report.

## Fallback reasons

Why a request with chunks is served by an ordinary prefill: `fallback_reason` in its report, and the label `reason` of
[`kvmosaic:fallbacks_total`](metrics.md).

{table(("reason", "meaning"), ((code(each.value), prose(reasons[each.name])) for each in Fallback))}"""


def metrics_page() -> str:
    """All Prometheus metrics."""
    buckets = ", ".join(f"{bound:g}" for bound in STAGE_BUCKETS)
    return f"""# Metrics

vLLM's own `/metrics` shows these metrics, with vLLM's labels `model_name` and `engine` and the label in the
tables. The log shows the most important metrics. `kvmosaic dashboard` prints a Grafana dashboard for them.

## Counters

{_metrics(COUNTS, "_total")}
## Gauges

{_metrics(LEVELS)}
## Histograms

{_metrics({"stage_seconds": STAGE_SECONDS})}
Buckets, in seconds: {buckets}.
"""


def _metrics(metrics: Mapping[str, Labelled], suffix: str = "") -> str:
    rows = (
        (code(PREFIX + name + suffix), metric.documentation, code(metric.label), " ".join(map(code, metric.values)))
        for name, metric in metrics.items()
    )
    return table(("metric", "meaning", "label", "values"), rows)
