"""Made-up documents with questions that need one, two or three of them.

A *thing* (a ship, a bakery) has one fact told about it in its document. Another document says who owns the thing, a
third who the owner's best friend is. A question with one source asks for the fact of a thing by name, with two
sources by its owner, with three by its owner's friend. With one source every document is about another kind of thing:
models of a few hundred million parameters can tell those apart. With more sources all things are of one kind, so that
the answer cannot be found without following the links.
"""

import random
from typing import Literal, NamedTuple

from kvmosaic.eval.base import Example
from kvmosaic.eval.world import FRIEND, KINDS, OWNER, PEOPLE, Kind

Sources = Literal[1, 2, 3]

SYSTEM = "Read the documents and answer the question with a few words."
DOCUMENTS = 8
"""Per question, of 45 to 60 tokens each."""


class _Chain(NamedTuple):
    """A thing with its fact, its owner, and the owner's friend."""

    kind: Kind
    name: str
    answer: str
    person: str
    friend: str

    @property
    def thing(self) -> str:
        return f"the {self.kind.noun} {self.name}"


def synthetic(limit: int, seed: int, sources: Sources | None = None) -> list[Example]:
    """``limit`` questions of ``DOCUMENTS`` documents each; with one, two and three sources in turn, or with
    ``sources`` throughout. The same arguments give the same examples, and a larger limit only adds to them."""
    return [_example(random.Random(f"{seed}/{index}"), sources or index % 3 + 1) for index in range(limit)]


def _example(rng: random.Random, sources: int) -> Example:
    chains = _chains(rng, -(-DOCUMENTS // sources), one_kind=sources > 1)
    links = [(chain, link) for chain in chains for link in range(sources)]
    documents = [_document(rng, chain, link) for chain, link in links[:DOCUMENTS]]
    rng.shuffle(documents)
    asked = chains[0]
    noun = asked.kind.noun
    owner = f"the {noun} of {asked.person}", f"the {noun} of the best friend of {asked.friend}"
    thing = (asked.thing, *owner)[sources - 1]
    # A base model has to be led to the answer.
    question = f"Question: {asked.kind.question}\nAnswer: {asked.kind.fact}".format(thing=thing)
    return Example(SYSTEM, tuple(documents), question, (asked.answer,))


def _chains(rng: random.Random, count: int, one_kind: bool) -> list[_Chain]:
    """Chains that have no name, answer or person in common."""
    kinds = [rng.choice(KINDS)] * count if one_kind else rng.sample(KINDS, count)
    people = rng.sample(PEOPLE, 2 * count)
    if one_kind:
        names, answers = rng.sample(kinds[0].names, count), rng.sample(kinds[0].answers, count)
    else:
        names, answers = [rng.choice(kind.names) for kind in kinds], [rng.choice(kind.answers) for kind in kinds]
    return [_Chain(*parts) for parts in zip(kinds, names, answers, people[:count], people[count:], strict=True)]


def _document(rng: random.Random, chain: _Chain, link: int) -> str:
    """The document about the thing (0), its owner (1), or the owner's friend (2)."""
    # On a line of its own: a model that goes on copying behind the answer then ends the line first.
    fact = f"{chain.kind.fact} {chain.answer}.\n{chain.kind.rest}"
    template = (fact, OWNER, FRIEND)[link] + "."
    return template.format(
        thing=chain.thing,
        person=chain.person,
        friend=chain.friend,
        small=rng.randint(2, 9),
        large=rng.randint(20, 90),
    )
