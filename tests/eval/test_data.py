"""Loaders: every format, plain and compressed, and their errors for bad files."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.core.errors import ConfigError
from kvmosaic.eval.base import Example
from kvmosaic.eval.data import KV_CHUNKS, KV_RECORDS, PASSAGES, load
from kvmosaic.eval.synthetic import DOCUMENTS, synthetic
from kvmosaic.eval.world import KINDS, PEOPLE

OWN = [{"system": "s", "chunks": [f"c{i}", "d"], "question": f"q{i}", "answers": [f"a{i}"]} for i in range(9)]
NQ = [
    {"question": f"q{i}", "answers": [f"a{i}"], "ctxs": [{"title": f"t{i}", "text": f"x{i}", "isgold": True}]}
    for i in range(9)
]
KV = [
    {"ordered_kv_records": [[f"k{i}.{j}", f"v{i}.{j}"] for j in range(12)], "key": f"k{i}.3", "value": f"v{i}.3"}
    for i in range(4)
]
SQUAD = {
    "data": [
        {
            "paragraphs": [
                {"context": f"p{i}", "qas": [{"question": f"q{i}", "answers": [{"text": f"a{i}"}, {"text": "b"}]}]}
                for i in range(9)
            ]
        }
    ]
}


THINGS = [f"the {kind.noun} {name}" for kind in KINDS for name in kind.names]


def write(folder, content, compress=False):
    lines = content if isinstance(content, list) else [content]
    text = "\n".join(json.dumps(line) for line in lines).encode()
    path = folder / "data"
    path.write_bytes(gzip.compress(text) if compress else text)
    return str(path)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("content", [OWN, NQ, KV, SQUAD], ids=["jsonl", "nq", "kv", "squad"])
def test_formats_are_recognised_and_sampled_deterministically(tmp_path, content, compress):
    source = write(tmp_path, content, compress)
    some = load(source, 3, seed=5)
    assert len(some) == len(set(some)) == 3
    assert load(source, 3, seed=5) == some
    assert load(source, 4, seed=5)[:3] == some
    assert load(source, 3, seed=6) != some
    assert len(load(source, 100, seed=5)) == (4 if content is KV else 9)


def test_own_examples_are_taken_as_they_are(tmp_path):
    [example] = load(write(tmp_path, OWN[:1]), 1, seed=0)
    assert example == Example("s", ("c0", "d"), "q0", ("a0",))
    [example] = load(write(tmp_path, {**OWN[0], "lead": "It is"}), 1, seed=0)
    assert example.lead == "It is"


@pytest.mark.parametrize(("content", "gold"), [(NQ, "t{0}: x{0}"), (SQUAD, "p{0}")], ids=["nq", "squad"])
def test_the_answer_stands_at_a_random_place_among_distractors(tmp_path, content, gold):
    places = set()
    for example in load(write(tmp_path, content), 9, seed=0):
        number = example.answers[0][1:]
        assert f"q{number}" in example.question
        assert len(set(example.chunks)) == PASSAGES
        places.add(example.chunks.index(gold.format(number)))
    assert len(places) > 1


def test_no_passage_comes_twice(tmp_path):
    """Several questions about one paragraph make it a candidate several times."""
    qas = [{"question": f"q{i}", "answers": [{"text": "a"}]} for i in range(5)]
    content = {"data": [{"paragraphs": [{"context": f"p{i}", "qas": qas} for i in range(3)]}]}
    for example in load(write(tmp_path, content), 15, seed=0):
        assert sorted(example.chunks) == ["p0", "p1", "p2"]


def test_key_value_records_are_spread_over_chunks(tmp_path):
    for example in load(write(tmp_path, KV), 4, seed=0):
        assert len(example.chunks) <= KV_CHUNKS
        pairs = json.loads("{" + ",".join(example.chunks) + "}")
        assert len(pairs) == 12
        key = example.lead.split('"')[1]
        assert pairs[key] == example.answers[0]


def test_of_many_key_value_records_some_are_taken_in_their_order(tmp_path):
    records = [[f"k{j:02}", f"v{j}"] for j in range(99)]
    content = [{"ordered_kv_records": records, "key": f"k{j}", "value": f"v{j}"} for j in (10, 50, 98)]
    seen = set()
    for example in load(write(tmp_path, content), 3, seed=0):
        pairs = json.loads("{" + ",".join(example.chunks) + "}")
        assert len(pairs) == KV_RECORDS
        assert list(pairs) == sorted(pairs)
        assert pairs[example.lead.split('"')[1]] == example.answers[0]
        seen.add(tuple(pairs))
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no examples"),
        ('{"question": 1}', "line 1: format not recognised"),
        (json.dumps(OWN[0]) + "\n{oops", "line 2: not JSON"),
        (json.dumps(OWN[0]) + "\n" + json.dumps({**OWN[0], "answers": []}), "line 2: not a jsonl example (answers"),
        (json.dumps(OWN[0]) + "\n" + json.dumps({**OWN[0], "chunks": "x"}), "line 2: not a jsonl example (chunks"),
        (json.dumps(OWN[0]) + "\n[1]", "line 2: not a jsonl example"),
        (json.dumps({"data": [{"paragraphs": [{"context": "c"}]}]}), "question 1: not SQuAD (no 'qas')"),
        (json.dumps({"data": []}), "no question with an answer"),
        (json.dumps({**NQ[0], "ctxs": []}), "line 1: not a nq example"),
        (json.dumps({**KV[0], "ordered_kv_records": []}), "line 1: not a kv example"),
        (json.dumps({**KV[0], "key": "other"}), "does not have the key with the value"),
        (json.dumps({**OWN[0], "answers": [" "]}), "answers must not be empty"),
        (json.dumps({**OWN[0], "question": ""}), "question must not be empty"),
        (json.dumps({**OWN[0], "chunks": ["\ud800"]}), "chunks has an unpaired surrogate"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "bad"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(str(path), 9, seed=0)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "data",
    [b"\x1f\x8bnot gzip", gzip.compress(b"{}" * 99)[:-9], b"\xff\xfe"],
    ids=["no gzip", "cut off", "no text"],
)
def test_unreadable_files_are_refused(tmp_path, data):
    (tmp_path / "bad").write_bytes(data)
    with pytest.raises(ConfigError, match="cannot read data"):
        load(str(tmp_path / "bad"), 1, seed=0)


@given(st.integers(0, 1000), st.sampled_from([1, 2, 3, None]))
def test_synthetic_questions(seed, sources):
    examples = synthetic(3, seed, sources)
    assert examples == synthetic(4, seed, sources)[:3]
    for index, example in enumerate(examples):
        count = sources or index + 1
        [answer] = example.answers
        assert len(set(example.chunks)) == DOCUMENTS
        # The answer is in exactly one document, and not in the question.
        [holder] = [chunk for chunk in example.chunks if f" {answer}.\n" in chunk]
        asked = f"{example.question} {example.lead}"
        assert f" {answer}" not in asked
        told = holder.partition("\n")[0]
        things = [text for text in THINGS if text in told]
        [thing] = [text for text in things if text == max(things, key=len)]
        assert (thing in asked) == (count == 1)
        if count == 1:
            assert told == f"{example.lead.removeprefix('Answer: ')} {answer}."
            continue
        # The links of the question lead from one document to the next, and no document has two of them.
        people = [person for person in PEOPLE if person in asked]
        if count == 3:
            [friend] = people
            [link] = [chunk for chunk in example.chunks if f"best friend of {friend} is" in chunk]
            people = [person for person in PEOPLE if person in link and person != friend]
            assert thing not in link
        [person] = people
        [link] = [chunk for chunk in example.chunks if chunk.startswith(f"{person} is the owner of {thing}.")]
        assert person not in holder
        assert answer not in link
        # As many other documents could hold the answer.
        assert sum(told.split(thing)[0] in chunk for chunk in example.chunks) == len(example.chunks) // count + (
            count == 3
        )


@pytest.mark.parametrize("sources", [1, 2, 3])
def test_synthetic_facts_are_many(sources):
    chunks = {chunk for example in synthetic(100, 0, sources) for chunk in example.chunks}
    assert len({chunk.partition("\n")[0] for chunk in chunks if "\n" in chunk}) >= 100
    assert len({(e.question, e.answers) for e in synthetic(300, 0)}) >= 100
