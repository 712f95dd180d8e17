"""``kvmosaic doctor`` with vLLM: which options of ``kvmosaic serve`` will work, and why others will not."""

import json
import sys

import pytest
import torch
from typer.testing import CliRunner
from vllm.platforms import current_platform
from vllm.v1.core.block_pool import BlockPool

from kvmosaic.cli.doctor import machine
from kvmosaic.cli.main import app
from kvmosaic.core.learned_sink import WITNESS_TOKENS, LearnedSink, SinkAbout
from kvmosaic.models.sink_file import save_sink
from tests.cli.command import run_here
from tests.engines.vllm.test_support import HYBRID, IDEFICS, LATENT, LLAMA, MIXTRAL
from tests.engines.vllm.tiny import FP8_CACHE
from tests.half_precision import IS_NATIVE

RUNS = "runs in bfloat16" if IS_NATIVE else "runs in float32: this CPU has no bfloat16 instructions"
DTYPE = "bfloat16" if IS_NATIVE else "float32"
OTHER = json.dumps({"kv_connector": "OffloadingConnector", "kv_role": "kv_both"})
NGRAM = json.dumps({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2})

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Write a model that is only a ``config.json``. Returns its folder."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # as the command sets it, so that it is put back

    def write(config, dtype="bfloat16"):
        (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
        return str(tmp_path)

    return write


def rows_of(*arguments):
    """Rows of the command by name: (verdict, found, advice)."""
    before = list(sys.argv)
    done = CliRunner().invoke(app, ["doctor", *map(str, arguments), "--json"], catch_exceptions=False)
    assert sys.argv == before
    result = json.loads(done.stdout.splitlines()[-1])
    rows = {row["check"]: (row["verdict"], row["found"], row["advice"]) for row in result["checks"]}
    assert done.exit_code == any(verdict == "fail" for verdict, *_ in rows.values())
    return rows


def refused_by_serve(model, *options):
    """The line with which ``kvmosaic serve`` refuses to start."""
    done = run_here("serve", model, "--enable-chunk-cache", *options)
    assert done.returncode == 2
    return done.stderr.splitlines()[-1].removeprefix("error: ")


@pytest.mark.parametrize(
    ("model", "options", "verdict", "found"),
    [
        (LLAMA, (), "ok", RUNS),
        (
            {**LLAMA, "quantization_config": FP8_CACHE},
            (),
            "ok",
            f"{RUNS}; KV cache in fp8, documents in {DTYPE}",
        ),
        (LLAMA, ("--dtype", "float32"), "ok", "runs in float32"),
        (HYBRID, (), "fail", "not supported"),
        (LLAMA, ("--runner", "pooling"), "fail", "not supported"),
        (LLAMA, ("--tensor-parallel-size", "3"), "fail", "vLLM refuses it"),
        (LLAMA, ("-tp", "3"), "fail", "vLLM refuses it"),
    ],
    ids=["ok", "fp8", "dtype", "hybrid", "pooling", "ranks", "ranks-short"],
)
def test_a_model(folder, model, options, verdict, found):
    rows = rows_of(folder(model), *options)
    assert rows["model in vLLM"][:2] == (verdict, found)
    assert [rows[check][0] for check in ("vLLM", "vLLM connector", "vLLM worker")] == ["ok"] * 3


@pytest.mark.parametrize(
    ("sources", "found"),
    [
        ("parts", "documents beside them are reused; images too, if chunk_sources has images"),
        ("parts,images", "reused, and so are documents beside them"),
    ],
)
def test_what_of_images_is_reused(folder, sources, found):
    rows = rows_of(folder(IDEFICS, "float32"), "--chunk-sources", sources)
    assert rows["images"][:2] == ("ok", found)


@pytest.mark.parametrize(
    ("model", "options", "row", "verdict", "found"),
    [
        (LLAMA, ("--kv-cache-dtype", "fp8"), "--kv-cache-dtype", "ok", "fp8: works"),
        (LLAMA, ("--enable-lora",), "--enable-lora", "ok", "on: works"),
        (LLAMA, ("--speculative-config", NGRAM), "--speculative-config", "ok", "ngram: works"),
        (LLAMA, ("--pipeline_parallel_size=2",), "--pipeline-parallel-size", "warn", "2: works, with a limit"),
        (LLAMA, ("--data-parallel-size", "2"), "--data-parallel-size", "warn", "2: works, with a limit"),
        (MIXTRAL, ("--enable-expert-parallel",), "--enable-expert-parallel", "warn", "on: works, with a limit"),
    ],
    ids=["fp8", "lora", "ngram", "pipeline", "data", "expert"],
)
def test_a_feature_that_works(folder, model, options, row, verdict, found):
    rows = rows_of(folder(model), *options)
    assert rows[row][:2] == (verdict, found)
    assert bool(rows[row][2]) == (verdict == "warn")
    assert not any(verdict == "fail" for verdict, *_ in rows.values())


@pytest.mark.parametrize(
    ("model", "options", "refused"),
    [
        (LLAMA, ("--kv-offloading-size", "4"), {"--kv-offloading-size"}),
        (LLAMA, ("--kv-cache-dtype", "fp8_per_token_head"), {"--kv-cache-dtype"}),
        (MIXTRAL, ("--data-parallel-size", "2"), {"--data-parallel-size"}),
        (LATENT, ("--enable-lora",), {"--enable-lora"}),
        (LATENT, ("--pipeline-parallel-size", "2"), {"--pipeline-parallel-size"}),
        (LLAMA, ("--enable-lora", "-pp", "2"), {"--enable-lora", "--pipeline-parallel-size"}),
    ],
    ids=["offloading", "dtype", "experts", "mla-lora", "mla-stages", "pair"],
)
def test_a_feature_that_is_refused_as_serve_refuses_it(folder, model, options, refused):
    """A pair is shown at both of its features: either can be left out."""
    model = folder(model)
    rows = rows_of(model, *options)
    assert {name for name, (verdict, *_) in rows.items() if verdict == "fail"} == refused
    assert rows["model in vLLM"][0] == "ok"
    said = refused_by_serve(model, *options)
    for name in refused:
        assert rows[name][1].endswith(": refused at start")
        assert said == f"the chunk cache cannot be used here: {rows[name][2]}"


@pytest.mark.skipif(not current_platform.is_cpu(), reason="GPUs have sleep mode")
def test_many_options_at_once(folder):
    """Each has a row of its own, even if vLLM itself refuses some."""
    options = ["--kv-cache-dtype", "fp8", "--enable-lora", "--speculative-config", NGRAM, "-pp", "2"]
    options += ["--data-parallel-size", "2", "--enable-expert-parallel", "--kv-offloading-size", "4"]
    rows = rows_of(folder(LLAMA), *options, "--enable-sleep-mode", "--port", "8001")
    verdicts = {name: row[:2] for name, row in rows.items() if name.startswith("--")}
    assert verdicts == {
        "--kv-cache-dtype": ("fail", "fp8: refused at start"),
        "--enable-lora": ("fail", "on: refused at start"),
        "--speculative-config": ("fail", "ngram: refused at start"),
        "--pipeline-parallel-size": ("fail", "2: refused at start"),
        "--data-parallel-size": ("warn", "2: works, with a limit"),
        "--enable-expert-parallel": ("fail", "on: vLLM refuses it"),
        "--kv-offloading-size": ("fail", "4.0: refused at start"),
        "--enable-sleep-mode": ("fail", "on: vLLM refuses it"),
    }
    assert "Sleep mode is not supported" in rows["--enable-sleep-mode"][2]
    stages = rows["--pipeline-parallel-size"][2]
    assert all(what in stages for what in ("LoRA", "speculative decoding", "a quantised KV cache"))
    assert "kv_offloading" not in stages


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            ("--kv-transfer-config", '{"kv_connector": "X", "kv_role": "kv_both"}'),
            "kv_transfer_config: vLLM has one connector",
        ),
        (("--worker-cls", "mine.Worker"), "worker_cls=mine.Worker: "),
        (("--nonsense",), "unrecognized arguments: --nonsense"),
        (("--kv-cache-dtype", "fp9"), "argument --kv-cache-dtype: invalid choice"),
    ],
)
def test_options_that_serve_does_not_take(folder, options, reason):
    """The chunk cache is on in the doctor, whatever the settings are."""
    model = folder(LLAMA)
    verdict, found, advice = rows_of(model, *options)["options"]
    assert (verdict, found) == ("fail", "refused at start")
    assert reason in advice
    assert refused_by_serve(model, *options) == advice


def test_options_without_a_model():
    done = run_here("doctor", "--enable-lora")
    assert done.returncode == 2
    assert "--enable-lora: options of vLLM are checked together with a model" in done.stderr


def test_memory_of_all_processes(folder):
    alone = rows_of(folder(LLAMA), "--host-memory", "1MiB")["host memory"][1]
    sizes = ("-tp", "2", "--pipeline-parallel-size", "2", "--data-parallel-size", "2")
    together = rows_of(folder(LLAMA), "--host-memory", "1GiB", *sizes)["host memory"][1]
    assert (alone.split()[0], together.split()[0]) == ("0.0", "8.0")


def test_a_learned_sink_and_stages(folder, tmp_path):
    about = SinkAbout(model="m", kl_before=0.2, kl_after=0.1, kvmosaic="1")
    k, witness = torch.randn(2, 2, 8, 16), torch.randn(2, WITNESS_TOKENS, 16)
    save_sink(LearnedSink(k, k.clone(), witness, about), tmp_path / "sink")
    options = ("--sink-prefix", f"learned:{tmp_path / 'sink'}", "--pipeline-parallel-size", "2")
    rows = rows_of(folder(LLAMA), *options)
    verdict, _, advice = rows["--pipeline-parallel-size"]
    assert verdict == "fail"
    assert "a learned sink does not work with pipeline_parallel_size > 1" in advice


def test_a_release_that_was_never_tested(monkeypatch):
    """It is a warning, and an error only with the contract that it broke, as an engine has it."""
    monkeypatch.setattr(machine, "_vllm_version", lambda: "0.99.0")
    verdict, found, advice = rows_of()["vLLM"]
    assert (verdict, found) == ("warn", "0.99.0")
    assert "vLLM 0.99.0 was never tried" in advice
    monkeypatch.delattr(BlockPool, "free_blocks")
    verdict, found, advice = rows_of()["vLLM"]
    assert (verdict, found) == ("fail", "0.99.0")
    assert "the chunk cache would be off" in advice
    assert "BlockPool has no free_blocks" in advice
