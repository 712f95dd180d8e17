"""Made-up documents with questions that need one, two or three of them.

A *thing* (a ship, a bakery) has one fact told about it in its document. Another document says who owns the thing, a
third who the owner's best friend is. A question with one source asks for the fact of a thing by name, with two
sources by its owner, with three by its owner's friend.

Models of a few hundred million parameters should be able to answer, so every thing is of a different kind. With one
source, each kind has its own type of fact. With more, all things have the same type of fact, so that the answer
cannot be found without following the links. Documents that belong together follow each other in the order friend,
owner, thing; in random order, such models do little better than guess. A document alone does not say whose fact it
tells. The document before it does; reused KV lacks this information, and a blend restores it. However, such models
rely on nearness more than on names: if the owner's document is left out, they find the fact for the friend equally
often.
"""

import random
from typing import Literal, NamedTuple

from kvmosaic.eval.base import Example
from kvmosaic.eval.world import FRIEND, KINDS, OWNER, PEOPLE, TRAITS, Kind

Sources = Literal[1, 2, 3]

SYSTEM = "Read the documents and answer the question with a few words."
DOCUMENTS = 8
"""Number of documents per question, of 45 to 60 tokens each."""


class _Chain(NamedTuple):
    """A thing with its fact, its owner, and the owner's friend."""

    kind: Kind
    name: str
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
    chains = _chains(rng, -(-DOCUMENTS // sources))
    asked = chains[0]
    # The lead brings a base model to the answer, and keeps a chat model from writing a whole sentence.
    if sources == 1:
        facts, answers = [chain.kind.fact for chain in chains], [rng.choice(chain.kind.answers) for chain in chains]
        question, lead = (text.format(thing=asked.thing) for text in (asked.kind.question, asked.kind.fact))
    else:
        trait = rng.choice(TRAITS)
        facts = [f"The {trait.name} of {{thing}} {trait.verb}"] * len(chains)
        answers = rng.sample(trait.answers, len(chains))
        who = (asked.person, f"the best friend of {asked.friend}")[sources - 2]
        question = f"What is the {trait.name} for {who}?"
        lead = f"{who[0].upper()}{who[1:]}: the {trait.name} {trait.verb}"
    told = [_documents(rng, *parts)[-sources:] for parts in zip(chains, facts, answers, strict=True)]
    # Surplus documents are removed from the last chain, which the question is not about.
    told[-1] = told[-1][sum(map(len, told)) - DOCUMENTS :]
    rng.shuffle(told)
    documents = tuple(document for chain in told for document in chain)
    return Example(SYSTEM, documents, f"Question: {question}", (answers[0],), f"Answer: {lead}")


def _chains(rng: random.Random, count: int) -> list[_Chain]:
    """Chains that have no kind, name or person in common."""
    kinds, people = rng.sample(KINDS, count), rng.sample(PEOPLE, 2 * count)
    names = [rng.choice(kind.names) for kind in kinds]
    return [_Chain(*parts) for parts in zip(kinds, names, people[:count], people[count:], strict=True)]


def _documents(rng: random.Random, chain: _Chain, fact: str, answer: str) -> list[str]:
    """The documents about the owner's friend, the owner, and the thing."""
    # The fact is on its own line: a model that continues to copy after the answer then ends the line first.
    texts = (FRIEND, OWNER, f"{fact} {answer}.\n{chain.kind.rest}")
    return [
        f"{text}.".format(
            thing=chain.thing,
            person=chain.person,
            friend=chain.friend,
            small=rng.randint(2, 9),
            large=rng.randint(20, 90),
        )
        for text in texts
    ]
