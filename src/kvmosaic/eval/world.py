"""The things and people of the synthetic documents."""

from typing import NamedTuple


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


class Kind(NamedTuple):
    """A kind of thing. Every text has a place for the ``{thing}``, as in "the ship Aurora"."""

    noun: str
    names: tuple[str, ...]
    fact: str
    """Words with which documents state the fact, and with which the reply begins. The answer follows directly."""
    question: str
    answers: tuple[str, ...]
    rest: str
    """Rest of the document; ``{small}`` and ``{large}`` are numbers."""


def _kind(noun: str, names: str, fact: str, question: str, answers: str, rest: str) -> Kind:
    return Kind(noun, _words(names), fact, question, _words(answers), rest)


KINDS = (
    _kind(
        "ship",
        "Aurora Cormorant Meridian Tempest Halcyon Marigold",
        "The captain of {thing} is called",
        "What is the captain of {thing} called?",
        "Agnes Boris Clara Dmitri Elena Felix Greta Hugo Irene Jonas",
        "It has {small} masts, carries up to {large} sacks of grain, and leaves the harbour early in the morning, "
        "as soon as the fog over the bay has cleared",
    ),
    _kind(
        "bakery",
        "Kiln Crumb Hearth Sheaf Crescent Larder",
        "The favourite fruit of {thing} is the",
        "What is the favourite fruit of {thing}?",
        "apple cherry lemon plum banana peach pear mango",
        "It was opened {large} years ago by {small} sisters, and the smell from its old brick oven can be noticed "
        "everywhere in the narrow street",
    ),
    _kind(
        "lighthouse",
        "Gannet Skerry Pharos Breaker Seastone Windward",
        "The building material of {thing} is",
        "What is the building material of {thing}?",
        "granite marble concrete brick sandstone iron wood limestone",
        "There are {large} steps inside, the lamp flashes {small} times a minute, and visitors may climb up whenever "
        "the sea is calm",
    ),
    _kind(
        "orchestra",
        "Harmonia Cantabile Sonata Allegro Cadenza Vivace",
        "The country of origin of {thing} is",
        "What is the country of origin of {thing}?",
        "Norway Brazil Egypt Japan Mexico India Canada Poland",
        "It has {large} members, {small} of whom are still at university, and it rehearses in a wooden hall right "
        "behind the railway station",
    ),
    _kind(
        "museum",
        "Atlas Minerva Relic Antiqua Mosaic Archive",
        "The collection of {thing} consists of old",
        "What does the collection of {thing} consist of?",
        "clocks coins maps dolls guns masks stamps bicycles",
        "The guided tour takes {large} minutes, a ticket costs {small} pounds, and children who bring a drawing of "
        "their own are let in for free",
    ),
    _kind(
        "football team",
        "Rovers Wanderers Falcons Thunder Badgers Comets",
        "The home town of {thing} is",
        "What is the home town of {thing}?",
        "Vienna Lisbon Oslo Prague Dublin Madrid Athens Warsaw",
        "It has won {small} cups and lost {large} matches so far, and it trains twice a week on a muddy field beside "
        "the old canal",
    ),
    _kind(
        "circus",
        "Bravado Carnival Fanfare Pirouette Spectacle Trapeze",
        "The favourite animal of {thing} is the",
        "What is the favourite animal of {thing}?",
        "tiger bear lion elephant horse camel monkey zebra",
        "It travels in {large} wagons, stays in every town for {small} nights, and puts up its tent on the market "
        "square or, when that is taken, in a field",
    ),
    _kind(
        "balloon",
        "Zephyr Cirrus Stratus Nimbus Skylark Feather",
        "The colour of {thing} is",
        "What is the colour of {thing}?",
        "red blue green white yellow black orange purple pink",
        "It can carry {small} passengers for {large} minutes, and takes off from the meadow next to the church when "
        "there is little wind",
    ),
    _kind(
        "machine",
        "Automax Gearbox Dynamo Pistonia Cogwheel Turbina",
        "The fuel of {thing} is",
        "What is the fuel of {thing}?",
        "petrol coal gas diesel alcohol straw sawdust charcoal",
        "It has {large} wheels and {small} levers, makes a terrible noise, and stands in a large barn just outside "
        "the village of its inventor",
    ),
    _kind(
        "school",
        "Elmwood Brightside Oakfield Larkhill Ashgrove Fernley",
        "The first foreign language of {thing} is",
        "What is the first foreign language of {thing}?",
        "Latin Greek Spanish Chinese Russian Arabic Italian German",
        "There are {small} teachers and {large} desks, a small pond and a gate, and in summer most of the lessons "
        "are held under the trees",
    ),
    _kind(
        "park",
        "Arcadia Belvedere Eden Solitude Verdana Tivoli",
        "The most common flowers of {thing} are",
        "What are the most common flowers of {thing}?",
        "roses tulips lilies daisies violets poppies orchids daffodils",
        "It has {small} fountains and {large} benches, and a brass band plays there in the evening until the gates "
        "are closed for the night",
    ),
    _kind(
        "inn",
        "Anchor Lantern Barrel Saddle Horseshoe Compass",
        "The favourite drink of {thing} is",
        "What is the favourite drink of {thing}?",
        "tea coffee beer wine milk cider lemonade cocoa",
        "It has {large} beds in {small} rooms, a fireplace, and a cellar in which the landlord keeps everything that "
        "travellers have ever forgotten",
    ),
)


class Trait(NamedTuple):
    """A fact that any kind of thing can have."""

    name: str
    verb: str
    """Words between the name and the answer."""
    answers: tuple[str, ...]


def _answers(noun: str) -> tuple[str, ...]:
    return next(kind.answers for kind in KINDS if kind.noun == noun)


TRAITS = (
    Trait("manager", "is called", _answers("ship")),
    Trait("home town", "is", _answers("football team")),
    Trait("favourite fruit", "is the", _answers("bakery")),
    Trait("favourite animal", "is the", _answers("circus")),
    Trait("favourite colour", "is", _answers("balloon")),
)

PEOPLE = tuple(
    f"{first} {last}"
    for first, last in zip(
        _words("Karin Leon Marta Nils Olga Pablo Rosa Stefan Tilda Victor Wanda Xavier Yusuf Zoe Henrik Paula"),
        _words(
            "Abbott Baker Carter Dalton Ellis Fisher Grant Hunter Ingram Jensen Keller Lambert Mason Norris Ross Reed"
        ),
        strict=True,
    )
)
OWNER = (
    "{person} is the owner of {thing}. {person} grew up on a farm with {small} cows and {large} hens, is afraid of "
    "thunderstorms, and has never been seen without an umbrella, not even on the hottest day of the year"
)
FRIEND = (
    "The best friend of {friend} is {person}. The two have known each other for {large} years, live {small} streets "
    "apart, and go for a long walk along the river whenever the weather is good enough"
)
