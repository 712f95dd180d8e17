"""A whole run on a narrow model: the sink improves, the run continues after an interruption, and no worse sink is
written."""

import json
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

import kvmosaic.tune.train as training
import kvmosaic.tune.tune as tuning
from kvmosaic.core.errors import ConfigError, UnsupportedModelError
from kvmosaic.core.learned_sink import LearnedSink, SinkAbout
from kvmosaic.core.profile import profile_path
from kvmosaic.eval.synthetic import synthetic
from kvmosaic.hf import LLM
from kvmosaic.models.sink_file import load_sink, save_sink
from kvmosaic.tune.lessons import Lessons
from kvmosaic.tune.material import Material
from kvmosaic.tune.train import DivergedError, Recipe, SinkTrainer, mean_kl
from kvmosaic.tune.tune import tune
from tests.cli.command import run_here
from tests.engines.hf.tiny import make

pytestmark = pytest.mark.slow

RECIPE = Recipe(steps=6, batch=2, together=2, max_prompt=400, judged=4, seed=3)
TOKENS = 16


@pytest.fixture(scope="module")
def model(narrow):
    """The narrow model, with few of its layers."""
    config = deepcopy(narrow.config)
    config.num_hidden_layers = 3
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def llm(model, tokenizer):
    with LLM(model, tokenizer, enable_chunk_cache=True) as llm:
        yield llm


def material():
    return Material.of([], [], [], 0)


def test_it_gets_better_and_engines_take_it(llm, model, tokenizer, tmp_path):
    looks = []
    tuned = tune(llm, material(), ["x"], replace(RECIPE, steps=16), TOKENS, tmp_path / "sink", looks.append)
    assert tuned.kl_after < tuned.kl_before
    assert [look.step for look in looks] == list(range(1, 17))
    assert looks[0].held_out_kl is None
    assert looks[-1].held_out_kl is not None
    sink = load_sink(tmp_path / "sink")
    assert len(sink.tokens) == TOKENS
    assert sink.about.recipe["steps"] == 16
    assert (sink.about.kl_before, sink.about.kl_after) == pytest.approx((tuned.kl_before, tuned.kl_after), abs=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["sink"]
    settings = {
        "enable_chunk_cache": True,
        "miss_policy": "fill-first",
        "sink_prefix": f"learned:{tmp_path / 'sink'}",
    }
    with LLM(model, tokenizer, **settings) as served:
        documents = ["The ferry leaves every morning at seven, except in winter, when the sea is too rough for it."]
        prompt = f"Read this.\n\n{documents[0]}\n\nWhen does the ferry leave?"
        outputs = [served.generate(prompt, documents=documents, max_tokens=2)[0] for _ in range(2)]
        assert [output.mode for output in outputs] == ["fill", "reuse"]
        assert outputs[0].token_ids == outputs[1].token_ids


def test_it_is_the_training_that_helps(llm, tmp_path):
    """The initial sink, which is shorter than the text, is worse."""
    lessons = Lessons(llm.parser, llm.tokenizer, material().held_out, 400, 77)
    judged = [lessons[number] for number in range(4)]
    tune(llm, material(), [], replace(RECIPE, steps=16), TOKENS, tmp_path / "sink")
    start = tuning._kv(llm, list(llm.chunk_cache.sink)[:TOKENS])
    learned = load_sink(tmp_path / "sink").kv(torch.float32, llm.model.device)
    assert mean_kl(llm.engine, learned, judged, 2) < mean_kl(llm.engine, start, judged, 2)


def test_other_data_do_not_go_on_with_a_run(llm, tmp_path):
    files = {
        tuning._state_file(llm, tmp_path / "sink", Material.of([], synthetic(9, a), synthetic(9, b), 0), RECIPE, 16)
        for a, b in ((1, 2), (1, 3), (2, 2))
    }
    assert len(files) == 3


def trained(llm, steps, state=None):
    """A trainer after a number of steps, from a saved state if there is one."""
    trainer = SinkTrainer(llm.engine, tuning._kv(llm, list(range(40, 40 + TOKENS))), RECIPE)
    if state is not None and state.exists():
        trainer.restore(state)
    lessons = Lessons(llm.parser, llm.tokenizer, material().learned, 400, 0)
    for progress in trainer.run(lessons):
        if progress.step == steps:
            break
    if state is not None:
        trainer.save(state)
    return trainer


def test_an_interrupted_run_ends_like_one_that_was_not(llm, tmp_path):
    whole = trained(llm, RECIPE.steps)
    trained(llm, 3, tmp_path / "state")
    resumed = trained(llm, RECIPE.steps, tmp_path / "state")
    assert resumed.step == whole.step
    for ours, theirs in zip(resumed.sink, whole.sink, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_answers_are_grouped_as_in_a_run_without_interruption(llm, tmp_path, monkeypatch):
    """In half precision, answers depend on the prompts that are computed together."""
    groups = []
    answered = training.answered
    monkeypatch.setattr(training, "answered", lambda *args: groups.append(args[1]) or answered(*args))
    trained(llm, RECIPE.steps)
    whole, groups[:] = list(groups), []
    trained(llm, 3, tmp_path / "state")
    groups.clear()
    trained(llm, RECIPE.steps, tmp_path / "state")
    assert [[prompt.tokens for prompt in group] for group in groups] == [
        [prompt.tokens for prompt in group] for group in whole
    ]


def test_a_damaged_state_is_a_new_beginning(llm, tmp_path, caplog):
    state = tmp_path / "state"
    state.write_bytes(b"PK half of a file")
    assert trained(llm, 1, state).step == 1
    assert "starts again" in caplog.text
    assert trained(llm, 2, state).step == 2


def test_a_disk_that_is_full_does_not_end_a_run(llm, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tuning, "SAVE_SECONDS", 0.0)
    save, calls = torch.save, []

    def full(*args):
        calls.append(args)
        if len(calls) < 4:
            raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")
        save(*args)

    monkeypatch.setattr(torch, "save", full)
    with suppress(DivergedError):  # a few steps may give nothing
        tune(llm, material(), [], RECIPE, TOKENS, tmp_path / "sink")
    assert caplog.text.count("the run continues") == 3
    assert "\n" not in caplog.records[-1].getMessage()


def test_the_sink_of_another_model_of_the_same_name_stays(llm, tmp_path):
    path = tmp_path / "sink"
    with LLM(make("llama", 1), enable_chunk_cache=True, sink_prefix="none") as other:
        k, v = (part.transpose(0, 1).contiguous() for part in tuning._kv(other, list(range(40, 40 + TOKENS))))
        about = SinkAbout(model="other", kl_before=1, kl_after=0.5, kvmosaic="x")
        save_sink(LearnedSink(k, v, other.engine.witness(), about), path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="not a sink of this model"):
        tune(llm, material(), [], RECIPE, TOKENS, path)
    assert path.read_bytes() == before


def test_the_model_stays_as_it_is(llm):
    before = {name: tensor.clone() for name, tensor in llm.model.state_dict().items()}
    trained(llm, 2)
    assert all(parameter.requires_grad for parameter in llm.model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in llm.model.state_dict().items())


def test_a_run_that_gets_worse_writes_nothing(llm, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "SAVE_SECONDS", 0.0)
    with pytest.raises(DivergedError, match="nothing was written"):
        tune(llm, material(), [], replace(RECIPE, learning_rate=300.0), TOKENS, tmp_path / "sink")
    assert not list(tmp_path.iterdir())


def test_a_sink_that_is_too_long_is_refused(llm, tmp_path):
    with pytest.raises(ConfigError, match="--tokens"):
        tune(llm, material(), [], RECIPE, llm.max_positions, tmp_path / "sink")


def test_tables_that_depend_on_the_length_are_refused(tokenizer, tmp_path):
    """They are refused before anything is computed."""
    with LLM(make("phi3-longrope", 1), tokenizer, enable_chunk_cache=True, sink_prefix="bos") as longrope:
        assert longrope.engine.switches_tables
        with pytest.raises(UnsupportedModelError, match="rotary tables"):
            tune(longrope, material(), [], replace(RECIPE, max_prompt=256), TOKENS, tmp_path / "sink")


def test_ctrl_c_keeps_what_was_done(llm, tmp_path):
    def stop(look):
        if look.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(llm, material(), [], RECIPE, TOKENS, tmp_path / "sink", stop)
    [state] = tmp_path.iterdir()
    assert state.suffix == ".state"
    steps = []
    with suppress(DivergedError):  # a few steps may give nothing
        tune(llm, material(), [], RECIPE, TOKENS, tmp_path / "sink", lambda look: steps.append(look.step))
    assert steps == [4, 5, 6]
    assert not state.exists()


@pytest.mark.usefixtures("default_ratio")
def test_the_command(model, tokenizer, tmp_path, monkeypatch):
    """The command goes from files to a profile that engines use. Another model's sink is refused in one line."""
    folder, profiles = tmp_path / "tiny-model", tmp_path / "profiles"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    monkeypatch.setenv("KVMOSAIC_PROFILES_DIR", str(profiles))
    data = tmp_path / "documents.jsonl"
    with data.open("w") as file:
        for document in (example.chunks for example in synthetic(40, 5)):
            file.write(json.dumps({"text": "\n".join(document)}) + "\n")
    options = ["--data", str(data), "--steps", "8", "--tokens", "16", "--json"]
    done = run_here("tune", folder, *options)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["kl_after"] < result["kl_before"]
    assert profile_path(str(folder)).exists()
    with LLM(str(folder), enable_chunk_cache=True) as llm:
        assert llm.config.sink_prefix == f"learned:{result['sink']}"
        assert (llm.config.policy, llm.config.recompute_ratio) == ("composite", 0.15)
        assert len(llm.chunk_cache.sink) == 16
    with pytest.raises(ConfigError, match="learned for"):
        LLM(make("llama", 1), enable_chunk_cache=True, sink_prefix=f"learned:{result['sink']}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--data", "nowhere"], "no such file"),
        (["--minutes", "0"], "must be more than 0"),
        (["--tokens", "1"], "must be at least 2"),
    ],
)
def test_mistakes_are_one_line(options, said):
    done = run_here("tune", "smollm2-135m", *options)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
