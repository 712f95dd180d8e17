"""The chunk cache's metrics, through vLLM's own serialisers, aggregator, loggers and wrappers."""

import copy
import json
import pickle
import re
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics import loggers, ray_wrappers
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvmosaic.engines.vllm.telemetry import metrics
from kvmosaic.engines.vllm.telemetry.metrics import ChunkPromMetrics, ChunkStats
from kvmosaic.engines.vllm.telemetry.series import COUNTS, LEVELS, CountName, LevelName, Stage
from kvmosaic.store.base import MissReason

DASHBOARD = Path(metrics.__file__).with_name("dashboard.json")
PROMETHEUS = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
RAY = {
    Gauge: ray_wrappers.RayGaugeWrapper,
    Counter: ray_wrappers.RayCounterWrapper,
    Histogram: ray_wrappers.RayHistogramWrapper,
}


def everything(rank=0):
    """Statistics that include every metric."""
    stats = ChunkStats(rank=rank)
    for name, spec in COUNTS.items():
        stats.count(name, spec.values[0] if spec.values else "")
    for name in LEVELS:
        stats.level(name, "host", 100)
    for stage in get_args(Stage):
        stats.observe(stage, 0.02)
    return stats


def prometheus(metric_types=PROMETHEUS, engines=(0,)):
    config = SimpleNamespace(kv_transfer_config=None)
    return ChunkPromMetrics(
        config, metric_types, ["model_name", "engine"], {engine: ["a-model", str(engine)] for engine in engines}
    )


def value(name, engine=0, **labels):
    return REGISTRY.get_sample_value(name, {"model_name": "a-model", "engine": str(engine), **labels})


# --- collecting


def through_pickle(stats):
    return pickle.loads(pickle.dumps(stats))


def through_vllm(stats):
    """Statistics after vLLM has sent them from the scheduler to the frontend."""
    sent = EngineCoreOutputs(scheduler_stats=SchedulerStats(kv_connector_stats=stats.data))
    received = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent))
    return ChunkStats(received.scheduler_stats.kv_connector_stats, stats.rank)


def through_json(stats):
    return ChunkStats(json.loads(json.dumps(stats.data)), stats.rank)


@pytest.mark.parametrize("way", [through_pickle, through_vllm, through_json])
def test_stats_arrive_as_they_were_sent(way):
    stats = everything(rank=3)
    assert way(stats) == stats
    assert way(ChunkStats()).is_empty()


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("count"), st.sampled_from(get_args(CountName)), st.sampled_from("xy"), st.integers(1, 9)),
        st.tuples(st.just("level"), st.sampled_from(get_args(LevelName)), st.sampled_from("xy"), st.integers(0, 9)),
        st.tuples(st.just("observe"), st.sampled_from(get_args(Stage)), st.floats(0, 10)),
    ),
    max_size=5,
)
STEPS = st.lists(st.tuples(st.integers(0, 2), EVENTS), min_size=1, max_size=6)


def recorded(rank, events):
    stats = ChunkStats(rank=rank)
    for method, *arguments in events:
        getattr(stats, method)(*arguments)
    return stats


@given(STEPS, st.data())
def test_any_grouping_aggregates_to_the_same(steps, data):
    parts = [recorded(*step) for step in steps]
    before = copy.deepcopy(parts)
    in_turn = reduce(ChunkStats.aggregate, parts, ChunkStats())
    groups = list(parts)
    while len(groups) > 1:
        at = data.draw(st.integers(0, len(groups) - 2))
        groups[at : at + 2] = [groups[at].aggregate(groups[at + 1])]
    assert groups[0].data == in_turn.data
    shuffled = reduce(ChunkStats.aggregate, data.draw(st.permutations(parts)), ChunkStats())
    assert shuffled.data["counts"] == in_turn.data["counts"]
    assert parts == before, "aggregating changed what it was given"


@given(EVENTS, EVENTS)
def test_aggregating_is_recording_it_all_in_one_place(earlier, later):
    assert recorded(1, earlier).aggregate(recorded(1, later)) == recorded(1, earlier + later)


def test_two_loggers_accumulate_from_the_same_data():
    """vLLM passes one step's data to all its loggers. Data that one of them accumulates must not reach the others."""
    connector = SimpleNamespace(build_kv_connector_stats=ChunkStats)
    both = [KVConnectorLogging(None), KVConnectorLogging(None)]
    for step in (everything(), everything()):
        for logger in both:
            logger.connector_cls = connector
            logger.observe(step.data)
    lines = []
    both[1].log(lambda form, text: lines.append(form % text))
    [line] = lines
    assert "chunk_hits=2, chunk_misses=2, chunks_filled=2, reused_tokens=2, fallbacks=2" in line
    assert "mean_remap_ms=20.0" in line


def test_take_hands_out_each_number_once():
    stats = ChunkStats(rank=2)
    assert stats.take() is None
    stats.count("requests", "reuse")
    taken = stats.take()
    stats.count("requests", "fill")
    assert taken == recorded(2, [("count", "requests", "reuse")])
    assert stats.take() == recorded(2, [("count", "requests", "fill")])
    assert stats.take() is None


def test_levels_alone_are_worth_sending():
    assert not recorded(0, [("level", "tier_bytes", "host", 0)]).is_empty()


def test_members_of_string_enums_are_labels():
    prom = prometheus()
    prom.observe(recorded(0, [("count", "chunk_misses", MissReason.CORRUPT)] * 2).data)
    assert value("kvmosaic:chunk_misses_total", reason="corrupt") == 2


# --- Prometheus


def test_every_metric_is_shown():
    prom = prometheus(engines=(0, 1))
    prom.observe(everything().data)
    prom.observe(everything().data, engine_idx=1)
    prom.observe(everything().data, engine_idx=1)
    text = generate_latest(REGISTRY).decode()
    shown = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for engine, times in ((0, 1), (1, 2)):
        common = {"engine": str(engine), "model_name": "a-model"}
        for name, labels, expected in [
            ("chunk_hits_total", {"tier": "device"}, times),
            ("chunk_misses_total", {"reason": "new"}, times),
            ("chunks_filled_total", {}, times),
            ("requests_total", {"mode": "reuse"}, times),
            ("fallbacks_total", {"reason": "bad-parameters"}, times),
            ("tokens_total", {"kind": "reused"}, times),
            ("evictions_total", {}, times),
            ("write_errors_total", {}, times),
            ("tier_bytes", {"tier": "host"}, 100),
            ("tier_entries", {"tier": "host"}, 100),
            ("stage_seconds_count", {"stage": "remap"}, times),
            ("stage_seconds_bucket", {"stage": "remap", "le": "0.01"}, 0),
            ("stage_seconds_bucket", {"stage": "remap", "le": "0.025"}, times),
        ]:
            assert shown["kvmosaic:" + name, frozenset({**common, **labels}.items())] == expected
    bounds = {float(bound) for bound in re.findall(r'stage_seconds_bucket\{.*le="([^"+]+)"', text)}
    assert (min(bounds), max(bounds)) == (1e-4, 10)


def test_known_labels_start_at_zero():
    prometheus()
    for name, spec in COUNTS.items():
        for label in spec.values:
            assert value(f"kvmosaic:{name}_total", **{spec.label: label}) == 0
    assert value("kvmosaic:evictions_total") == 0
    assert value("kvmosaic:stage_seconds_count", stage="fetch") == 0
    assert value("kvmosaic:tier_bytes", tier="disk") is None


def test_levels_of_ranks_add_and_newer_ones_replace():
    """This uses vLLM's own aggregation over one step's workers. In the second step, rank 0 has nothing to report."""
    prom = prometheus()
    for levels in ({0: 10, 1: 20}, {1: 25}):
        outputs = [
            ModelRunnerOutput(
                req_ids=[],
                req_id_to_index={},
                kv_connector_output=KVConnectorOutput(
                    kv_connector_stats=recorded(rank, [("level", "tier_bytes", "host", levels[rank])])
                    if rank in levels
                    else None
                ),
            )
            for rank in (0, 1)
        ]
        step = KVOutputAggregator(2).aggregate(outputs).kv_connector_output.kv_connector_stats
        prom.observe(through_vllm(step).data)
        assert value("kvmosaic:tier_bytes", tier="host") == 30 + 5 * (0 not in levels)


def test_a_second_engine_takes_the_place_of_the_first():
    prometheus().observe(everything().data)
    second = prometheus()
    assert value("kvmosaic:chunks_filled_total") == 0
    second.observe(everything().data)
    assert value("kvmosaic:chunks_filled_total") == 1


def test_the_tables_hold_every_name():
    assert set(COUNTS) == set(get_args(CountName))
    assert set(LEVELS) == set(get_args(LevelName))


class RayMetric:
    """Stand-in for ray.util.metrics, which vLLM's wrappers call."""

    seen: list = []  # noqa: RUF012

    def __init__(self, name, description, tag_keys, boundaries=None):
        self._name, self._tag_keys = name, tag_keys

    def note(self, amount, tags):
        assert set(tags) == set(self._tag_keys)
        self.seen.append((self._name, amount, tags))

    inc = set = observe = note


def test_vllms_ray_wrappers(monkeypatch):
    fake = SimpleNamespace(Counter=RayMetric, Gauge=RayMetric, Histogram=RayMetric)
    monkeypatch.setattr(ray_wrappers, "ray_metrics", fake)
    monkeypatch.setattr(RayMetric, "seen", [])
    prometheus()
    prometheus(RAY).observe(everything().data)
    ours = {"model_name": "a-model", "engine": "0", "ReplicaId": ""}
    assert ("kvmosaic_chunk_hits", 1, {**ours, "tier": "device"}) in RayMetric.seen
    assert ("kvmosaic_tier_bytes", 100.0, {**ours, "tier": "host"}) in RayMetric.seen
    assert ("kvmosaic_stage_seconds", 0.02, {**ours, "stage": "fill"}) in RayMetric.seen
    assert value("kvmosaic:evictions_total") == 0, "Ray's metrics replaced Prometheus's"


# --- the dashboard


def queries(dashboard):
    """Each expression, with the legend that names its labels."""
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"], ""


def test_the_dashboard_asks_for_what_there_is_and_for_all_of_it():
    prometheus().observe(everything().data)
    labels: dict[str, set[str]] = {}
    families: dict[str, str] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith("kvmosaic:") and not sample.name.endswith("_created"):
                labels.setdefault(sample.name, set()).update(sample.labels)
                families[sample.name] = family.name
    theirs = Path(loggers.__file__).read_text()
    asked = set()
    for expression, legend in queries(json.loads(DASHBOARD.read_text())):
        names = re.findall(r"[a-z_]+:\w+", expression)
        assert names
        grouped = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}
        assert set(re.findall(r"{{(\w+)}}", legend)) <= grouped
        for name in names:
            if name.startswith("vllm:"):
                assert f'name="{name.removesuffix("_bucket")}"' in theirs
            else:
                assert name in labels, f"the dashboard asks for {name}"
                assert grouped <= labels[name]
                asked.add(families[name])
    assert asked == set(families.values())


def test_the_dashboard_is_one_that_grafana_can_import():
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["schemaVersion"] >= 39
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {"datasource", "model_name"}
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells)), "panels overlap"
    assert max(x for x, _ in cells) < 24
