"""``kvmosaic doctor``: run as users run it, and in this process where a made-up machine is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import kvmosaic
from kvmosaic.cli.doctor import in_vllm, machine, settings
from kvmosaic.cli.doctor.row import GIB
from kvmosaic.cli.main import app
from kvmosaic.engines.vllm.support import version_problem
from tests.half_precision import pretend_cpu

pytestmark = pytest.mark.timeout(180)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch):
    """The caller's settings, and those that the command makes for its own process, do not reach other tests."""
    for name in [name for name in os.environ if name.startswith("KVMOSAIC_") and name != "KVMOSAIC_MODELS_DIR"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", os.environ.get("HF_HUB_OFFLINE", "0"))


@pytest.fixture(autouse=True)
def same_cpu(monkeypatch, tmp_path_factory):
    """Rows made in this process are those of a CPU with bfloat16 instructions, whatever CPU the machine has."""
    pretend_cpu(monkeypatch, tmp_path_factory.mktemp("cpu"), "fp asimd bf16")


@pytest.fixture
def no_vllm(monkeypatch):
    """Rows are those of a machine without vLLM, even if vLLM is installed."""
    real = machine.find_spec
    for module in (machine, in_vllm):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name == "vllm" else real(name))


def folder(path, **changes):
    """A model folder with a configuration and nothing else."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return str(path)


def rows_of(*arguments, status=0):
    """Rows of the command, run in this process, by name: (verdict, found, advice)."""
    done = CliRunner().invoke(app, ["doctor", *map(str, arguments), "--json"], catch_exceptions=False)
    assert done.exit_code == status, done.output
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["ok"] == (status == 0)
    return {row["check"]: (row["verdict"], row["found"], row["advice"]) for row in result["checks"]}


def run(*arguments, **environment):
    """Run the command as a user does."""
    command = [sys.executable, "-m", "kvmosaic.cli.main", "doctor", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})


@pytest.mark.slow
def test_one_screen_for_a_real_model(smollm2_folder):
    done = run("smollm2-135m")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) < 25
    table = {line[:16].strip(): line[16:].split(None, 1) for line in lines[2:] if not line.startswith("warn:")}
    assert table["model"] == ["ok", "LlamaForCausalLM, 30 layers, 3 KV heads of 64"]
    # 30 layers x 3 heads x (64 + 64) columns x 4 bytes, and how often that goes into 2 GiB
    assert table["KV in float32"] == ["ok", "45.0 KiB a token; tokens that fit: host 46,603"]


@pytest.mark.slow
def test_json_is_alone_on_stdout():
    done = run("--json")
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    assert {row["verdict"] for row in json.loads(line)["checks"]} <= {"ok", "warn"}


def test_which_kvmosaic_it_is(monkeypatch, tmp_path):
    """With the commit in a clone, and without it elsewhere."""
    for args in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        settings = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *settings, *args], cwd=tmp_path, check=True)
    log = subprocess.run(["git", "log", "--format=%H"], cwd=tmp_path, check=True, capture_output=True, text=True)
    package = tmp_path / "src/kvmosaic/__init__.py"
    monkeypatch.setattr(kvmosaic, "__file__", str(package))
    verdict, found, _ = rows_of()["kvmosaic"]
    version, _, commit = found.partition(", commit ")
    assert (verdict, version) == ("ok", kvmosaic.__version__)
    assert len(commit) >= 7
    assert log.stdout.startswith(commit)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert rows_of()["kvmosaic"] == ("ok", kvmosaic.__version__, "")  # there is no git
    monkeypatch.setattr(kvmosaic, "__file__", str(package.parent / "inner/package/__init__.py"))
    assert rows_of()["kvmosaic"] == ("ok", kvmosaic.__version__, "")


def test_without_vllm_there_is_a_warning(no_vllm):
    verdict, found, advice = rows_of()["vLLM"]
    assert (verdict, found) == ("warn", "not installed")
    # As the README has it for a machine without a GPU; kvmosaic is on no package index.
    assert "make .venv-vllm/.serve" in advice
    assert "make .venv-vllm/.serve" in (Path(__file__).parents[2] / "README.md").read_text()


def test_a_vllm_that_is_broken_and_too_old(monkeypatch):
    monkeypatch.setattr(machine, "find_spec", lambda name: object())
    monkeypatch.setattr(machine, "_vllm_version", lambda: "0.11.2")
    monkeypatch.setitem(sys.modules, "kvmosaic.engines.vllm.connector", None)
    monkeypatch.setitem(sys.modules, "kvmosaic.engines.vllm.worker", None)
    rows = rows_of(status=1)
    assert rows["vLLM"][0] == "fail"
    assert "0.11.2" in rows["vLLM"][2]
    assert rows["vLLM connector"][0] == rows["vLLM worker"][0] == "fail"


def test_vllm_with_its_plugin_for_npus(monkeypatch):
    monkeypatch.setattr(machine, "find_spec", lambda name: object())
    monkeypatch.setattr("kvmosaic.engines.vllm.support.has_ascend", lambda: True)
    # As if nothing were broken: tests/engines/vllm/test_doctor.py looks at a real vLLM.
    monkeypatch.setattr(machine, "release_problems", lambda version: (version_problem(version), []))
    monkeypatch.setattr(machine, "_vllm_version", lambda: "0.23.0")
    rows = rows_of(status=1)
    assert rows["vLLM"][:2] == ("warn", "0.23.0, with vllm-ascend")
    assert "never run on an NPU" in rows["vLLM"][2]
    assert "python -m tests.ascend_report" in rows["vLLM"][2]
    monkeypatch.setattr(machine, "_vllm_version", lambda: "0.26.0")
    rows = rows_of(status=1)
    assert rows["vLLM"] == (
        "warn",
        "0.26.0",
        "vLLM 0.26.0 with vllm-ascend is not prepared; pip install vllm-ascend==0.23.0.post1",
    )


def test_an_npu(monkeypatch, tmp_path_factory):
    """There is no NPU here, so torch is made to report one, as it does with torch_npu."""
    import torch

    pretend_cpu(monkeypatch, tmp_path_factory.mktemp("other-cpu"), "fp asimd")  # which does not matter
    properties = type("P", (), {"total_memory": 64 * GIB})
    npu = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 8,
        get_device_name=lambda: "Ascend910B",
        get_device_properties=lambda _: properties,
    )
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    rows = rows_of()
    assert rows["accelerator"] == ("ok", "8 x Ascend910B, 64.0 GiB; 15% device pool: 9.6 GiB", "")
    assert "precision" not in rows


def test_wrong_settings_fail_without_hiding_the_rest(monkeypatch):
    monkeypatch.setenv("KVMOSAIC_CHUNK_HASH_ALGORITHM", "md5")
    rows = rows_of(status=1)
    assert rows["settings"][0] == "fail"
    assert "chunk_hash_algorithm" in rows["settings"][2]
    assert rows["host memory"][0] == "ok"


def test_an_unknown_policy_is_a_wrong_setting(monkeypatch):
    monkeypatch.setenv("KVMOSAIC_POLICY", "guess")
    verdict, _, advice = rows_of(status=1)["settings"]
    assert verdict == "fail"
    assert "unknown policy 'guess'" in advice


def test_unreadable_settings_file(monkeypatch, tmp_path):
    (tmp_path / "settings.yaml").write_text("- not\n- a mapping\n")
    monkeypatch.setenv("KVMOSAIC_CONFIG", str(tmp_path / "settings.yaml"))
    assert rows_of(status=1)["settings"][0] == "fail"


def test_changed_settings_are_shown(monkeypatch):
    monkeypatch.setenv("KVMOSAIC_TENANT", "team-a")
    assert rows_of()["settings"] == ("ok", "tenant=team-a", "")


def test_more_host_memory_than_there_is(monkeypatch):
    monkeypatch.setenv("KVMOSAIC_HOST_MEMORY", "3GiB")
    monkeypatch.setattr(settings, "_available_memory", lambda: 4 * GIB)
    assert rows_of()["host memory"][0] == "ok"
    verdict, found, advice = rows_of("--tensor-parallel-size", 2)["host memory"]
    assert (verdict, found) == ("warn", "6.0 of 4.0 GiB available")
    assert "1024MiB" in advice


def test_available_memory_is_that_of_this_machine():
    available = settings._available_memory()
    assert available is None or 2**26 < available < 2**46


def test_disk_path_is_judged_but_not_made(monkeypatch, tmp_path):
    monkeypatch.setenv("KVMOSAIC_DISK_PATH", str(tmp_path / "some" / "where"))
    monkeypatch.setenv("KVMOSAIC_DISK_SPACE", "1MiB")
    assert rows_of()["disk tier"][0] == "ok"
    assert list(tmp_path.iterdir()) == []


def test_disk_path_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("KVMOSAIC_DISK_PATH", str(tmp_path / "file" / "kv"))
    verdict, _, advice = rows_of(status=1)["disk tier"]
    assert verdict == "fail"
    assert "disk_path" in advice


def test_disk_space_counts_what_is_already_there(monkeypatch, tmp_path):
    monkeypatch.setenv("KVMOSAIC_DISK_PATH", str(tmp_path))
    monkeypatch.setenv("KVMOSAIC_DISK_SPACE", "3MiB")
    monkeypatch.setattr(settings.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 2 * 2**20}))
    verdict, _, advice = rows_of()["disk tier"]
    assert verdict == "warn"
    assert "2MiB" in advice
    (tmp_path / "entry.safetensors").write_bytes(bytes(2**20))
    assert rows_of()["disk tier"][0] == "ok"


def test_files_that_others_can_read_or_write(monkeypatch, tmp_path):
    root = tmp_path / "kv"
    monkeypatch.setenv("KVMOSAIC_DISK_PATH", str(root))
    assert "disk tier's files" not in rows_of()
    (root / "tenant").mkdir(parents=True)
    file = root / "tenant" / "entry.safetensors"
    file.write_bytes(b"kv")
    for places, mode in (([root, file.parent], 0o700), ([file], 0o600)):
        for place in places:
            place.chmod(mode)
    assert rows_of()["disk tier's files"][0] == "ok"
    for place, mode in ((file, 0o604), (file.parent, 0o701), (root, 0o770)):
        before = place.stat().st_mode
        place.chmod(mode)
        verdict, found, advice = rows_of()["disk tier's files"]
        assert verdict == "warn"
        assert str(place) in found
        assert f"chmod -R go= {root}" in advice
        place.chmod(before)


def test_a_store_key_is_judged_and_not_shown(monkeypatch):
    monkeypatch.setenv("KVMOSAIC_STORE_KEY", "a" * 15)
    assert "KVMOSAIC_STORE_KEY" in rows_of(status=1)["settings"][2]
    monkeypatch.setenv("KVMOSAIC_STORE_KEY", "correct-horse-battery")
    assert "correct-horse" not in str(rows_of())


def test_a_quota_counts_what_the_tenant_has(monkeypatch, tmp_path):
    monkeypatch.setenv("KVMOSAIC_DISK_PATH", str(tmp_path))
    monkeypatch.setenv("KVMOSAIC_TENANT_QUOTA", "3MiB")
    monkeypatch.setattr(settings.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 2 * 2**20}))
    for tenant, verdict in (("other", "warn"), ("default", "ok")):
        (tmp_path / tenant).mkdir()
        (tmp_path / tenant / "entry.safetensors").write_bytes(bytes(2**20))
        assert rows_of()["disk tier"][0] == verdict
    monkeypatch.setenv("KVMOSAIC_TENANT_QUOTA", "4MiB")
    assert "tenant_quota to 3MiB" in rows_of()["disk tier"][2]


def test_a_gpu(monkeypatch, tmp_path, no_vllm):
    """There is no GPU here, so torch is made to report one."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("P", (), {"total_memory": 100 * GIB}))
    monkeypatch.setitem(sys.modules, "triton", None)
    rows = rows_of(folder(tmp_path), status=1)
    assert rows["accelerator"] == ("ok", "2 x H200, 100.0 GiB; 15% device pool: 15.0 GiB", "")
    assert rows["Triton"][0] == "fail"
    assert rows["vLLM"][2].endswith("pip install -e '.[vllm]'")
    # 3 layers x 4 heads x (8 + 8) columns x 2 bytes = 384 bytes
    assert rows["KV in bfloat16"][1] == "0.4 KiB a token; tokens that fit: device pool 41,943,040, host 5,592,405"


def test_a_cpu_without_bfloat16(monkeypatch, tmp_path, tmp_path_factory, no_vllm):
    assert "precision" not in rows_of()
    pretend_cpu(monkeypatch, tmp_path_factory.mktemp("other-cpu"), "fp asimd")
    rows = rows_of(folder(tmp_path))
    assert rows["precision"] == ("ok", "float32: this CPU has no bfloat16 instructions", "")
    assert "KV in bfloat16" not in rows
    # 3 layers x 4 heads x (8 + 8) columns x 4 bytes = 768 bytes
    assert rows["KV in float32"][1] == "0.8 KiB a token; tokens that fit: host 2,796,202"


def test_triton_is_not_needed_without_a_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert rows_of()["Triton"][0] == "ok"


@pytest.mark.usefixtures("no_vllm")
@pytest.mark.parametrize(
    ("ranks", "verdict", "found"),
    [
        (2, "ok", "2 ranks with 2 KV heads each"),
        (8, "ok", "8 ranks, each KV head on 2 of them"),
        (3, "fail", "4 KV heads, 3 ranks"),
    ],
)
def test_tensor_parallel(tmp_path, ranks, verdict, found):
    rows = rows_of(folder(tmp_path), "--tensor-parallel-size", ranks, status=int(verdict == "fail"))
    assert rows["tensor parallel"][:2] == (verdict, found)


@pytest.mark.usefixtures("no_vllm")
@pytest.mark.parametrize(
    ("layers", "stages", "verdict", "found"),
    [
        (4, 2, "ok", "2 stages with 2 layers each"),
        (5, 2, "ok", "2 stages with 2 or 3 layers each"),
        (2, 3, "fail", "2 layers, 3 stages"),
    ],
)
def test_pipeline_parallel(tmp_path, layers, stages, verdict, found):
    model = folder(tmp_path, num_hidden_layers=layers)
    rows = rows_of(model, "--pipeline-parallel-size", stages, status=int(verdict == "fail"))
    assert rows["pipeline parallel"][:2] == (verdict, found)
    assert "on each rank" in rows["KV in bfloat16"][1]


def test_each_rank_keeps_its_own_heads(tmp_path, no_vllm):
    rows = rows_of(folder(tmp_path), "--tensor-parallel-size", 2)
    assert rows["KV in bfloat16"][1] == "0.2 KiB a token on each rank; tokens that fit: host 11,184,810"


def rope(kind, **extra):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **extra}}


LEARNED = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}


@pytest.mark.usefixtures("no_vllm")
@pytest.mark.parametrize(
    ("changes", "verdict", "found"),
    [
        (rope("yarn", factor=4.0, original_max_position_embeddings=128), "ok", "rotary: yarn; can move"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "ok", "rotary: linear; can move"),
        (rope("default", mrope_section=[2, 1, 1]), "ok", "rotary: mrope; can move"),
        (rope("default", use_fope=True), "fail", "rotary: fope"),
        ({"dual_chunk_attention_config": {"chunk_size": 64}}, "fail", "rotary: dual-chunk"),
        (rope("spiral"), "warn", "rotary: spiral"),
        ({"model_type": "gptj", "rotary_dim": 8}, "ok", "rotary: default; can move"),
        (LEARNED, "fail", "no rotary positions"),
    ],
)
def test_positions(tmp_path, changes, verdict, found):
    rows = rows_of(folder(tmp_path, **changes), status=int(verdict == "fail"))
    assert rows["positions"][:2] == (verdict, found)


def test_sliding_window_and_two_rotary_tables(tmp_path, no_vllm):
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    tables = {"sliding_attention": rope("default"), "full_attention": rope("linear", factor=4.0)}
    model = folder(
        tmp_path,
        model_type="gemma3_text",
        architectures=["Gemma3ForCausalLM"],
        layer_types=kinds,
        sliding_window=16,
        rope_parameters={kind: table["rope_parameters"] for kind, table in tables.items()},
    )
    rows = rows_of(model)
    assert rows["sliding window"][1].startswith("2 of 3 layers")
    assert rows["positions"][1] == "rotary: default, linear; can move"


def test_window_in_every_layer(tmp_path, no_vllm):
    rows = rows_of(folder(tmp_path, model_type="mistral", sliding_window=16))
    assert rows["sliding window"][1].startswith("3 of 3 layers")
    rows = rows_of(folder(tmp_path, model_type="mistral", sliding_window=None))
    assert "sliding window" not in rows


def test_latent_attention(tmp_path, no_vllm):
    latent = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    rows = rows_of(folder(tmp_path, model_type="deepseek_v2", **latent))
    assert rows["model"][1].endswith("one latent of 32 + 8 (MLA)")
    # 3 layers x (32 + 8) columns x 2 bytes
    assert rows["KV in bfloat16"][1] == "0.2 KiB a token; tokens that fit: host 8,947,848"


@pytest.mark.usefixtures("no_vllm")
@pytest.mark.parametrize(
    ("changes", "check", "verdict"),
    [
        ({"model_type": "mamba", "num_attention_heads": None}, "model", "fail"),
        (
            {"model_type": "qwen3_next", "layer_types": ["linear_attention", "linear_attention", "full_attention"]},
            "layers",
            "fail",
        ),
        (
            {
                "model_type": "llama4_text",
                "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
            },
            "layers",
            "warn",
        ),
        ({"model_type": "no-such-type"}, "model", "fail"),
    ],
)
def test_models_that_do_not_fit(tmp_path, changes, check, verdict):
    found = rows_of(folder(tmp_path, **changes), status=int(verdict == "fail"))[check]
    assert found[0] == verdict
    assert found[2]


def test_a_model_that_brings_its_own_code_is_not_run(tmp_path, no_vllm):
    code = "raise SystemExit('ran')"
    model = folder(tmp_path, model_type="own", auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    (tmp_path / "configuration_own.py").write_text(code)
    verdict, _, advice = rows_of(model, status=1)["model"]
    assert verdict == "fail"
    assert "custom code" in advice


def test_models_that_are_not_here(monkeypatch, tmp_path):
    """Nothing is downloaded, and an invalid name is an error."""
    monkeypatch.setenv("KVMOSAIC_MODELS_DIR", str(tmp_path))
    assert rows_of("smollm2-135m")["model"][0] == "warn"
    assert "models pull smollm2-135m" in rows_of("smollm2-135m")["model"][2]
    assert "hf download nobody/nothing" in rows_of("nobody/nothing")["model"][2]
    assert "did you mean smollm2-135m?" in rows_of("smolm2-135m")["model"][2]
    assert rows_of("/nowhere/at/all", status=1)["model"][0] == "fail"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_hub_name_is_read_from_the_local_cache(tmp_path):
    cached = tmp_path / "hub" / "models--some--one"
    (cached / "snapshots").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    folder(cached / "snapshots" / ("0" * 40))
    done = run("some/one", HF_HOME=str(tmp_path), HF_HUB_CACHE=str(tmp_path / "hub"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "LlamaForCausalLM, 3 layers, 4 KV heads of 8" in done.stdout


def test_whatever_goes_wrong_is_a_row(monkeypatch):
    def broken(*_):
        raise RuntimeError("first line\nlast line\n")

    monkeypatch.setattr(machine, "accelerator", lambda _: (broken() for _ in [0]))
    assert rows_of(status=1)["accelerator"] == ("fail", "RuntimeError", "last line")


def test_which_documents_the_chat_template_takes(smollm2_folder, tmp_path, no_vllm, monkeypatch):
    verdict, found, _ = rows_of(smollm2_folder)["chat template"]
    assert verdict == "ok"
    assert "from content parts, tool results" in found
    assert 'the field "documents" never' in found
    monkeypatch.setenv("KVMOSAIC_CHUNK_SOURCES", "documents")
    verdict, _, advice = rows_of(smollm2_folder)["chat template"]
    assert verdict == "warn"
    assert "name their documents" in advice
    verdict, found, _ = rows_of(folder(tmp_path))["chat template"]
    assert (verdict, found) == ("warn", "its tokenizer cannot be read, not checked")
