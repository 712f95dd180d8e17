"""A made-up corpus for the demo: a harbour town that does not exist. Each document is about 200 tokens."""

from typing import NamedTuple

DOCUMENTS = {
    "ferry": (
        "Ferry service of Port Almery. The ferry Cormorant connects Port Almery with Sill Island four times a "
        "day. The first boat leaves at 6:40 in the morning and the last one returns at 21:15 in the evening. A "
        "single ticket costs 4 crowns, a return ticket 7 crowns, and children under ten travel free of charge. "
        "Bicycles are carried on the lower deck as long as there is room, but cars are not accepted because the "
        "landing on Sill Island is too narrow for them. In winter, from December to February, the noon boat is "
        "replaced by a small launch that carries no more than twelve passengers. When the wind rises above force "
        "eight the harbour master hoists a black ball and all crossings are cancelled until it is lowered again. "
        "Captain Ines Varga has commanded the Cormorant since the old steamer was retired, and she is known for "
        "sounding the horn twice whenever dolphins follow the ship across the bay. Lost property is kept for "
        "thirty days in the blue hut at the end of the east pier."
    ),
    "bakery": (
        "The Old Kiln Bakery. On Lantern Street, three doors from the town hall, stands a bakery that has used the "
        "same brick oven for more than a century. It is owned by Tomas Reed, who learned the trade from his aunt "
        "and starts work at two in the morning. The house speciality is a dark rye loaf with caraway and a little "
        "honey, baked for exactly ninety minutes and sold from seven o'clock until it runs out, which on market "
        "days happens before nine. On Fridays the shop also offers almond crescents, and on the first Sunday of "
        "each month a saffron bun whose recipe is kept in a locked drawer. Customers may bring their own dough and "
        "have it baked in the cooling oven for half a crown. The bakery closes for two weeks in August, when Tomas "
        "goes walking in the hills with his brother. A brass bell above the door was taken from a wrecked fishing "
        "boat, and every child in town has rung it at least once."
    ),
    "library": (
        "Almery Town Library. The library holds about eighteen thousand volumes on two floors of the former customs "
        "house. Its head librarian, Doctor Miriam Okafor, came to the town eleven years ago to catalogue the "
        "shipping records and never left. Readers may borrow six books at a time for four weeks, and a late book "
        "costs ten pence a week, a sum that has not changed within living memory. The reading room on the upper "
        "floor looks out over the harbour and is heated by a tiled stove in the winter months. On Wednesday "
        "evenings there is a story hour for children, and on the last Thursday of the month a local historian "
        "talks about the town's past. The most valuable possession is a hand-coloured sea chart from 1687, which "
        "shows a rock that no sailor has ever found; it is displayed under glass and may be photographed without "
        "a flash. The library is closed on Mondays and on the day of the regatta."
    ),
    "lighthouse": (
        "The lighthouse on Gannet Rock. The tower was built of grey granite and is forty-one metres high, with two "
        "hundred and six steps from the door to the lamp. Its light flashes three times every twenty seconds and "
        "can be seen from nineteen nautical miles away in clear weather. The last keeper, Henrik Dahl, left the "
        "rock when the lamp was made automatic, and he now guides visitors on summer weekends. Tours last about "
        "an hour and begin at the landing stage at ten, at noon and at three; sturdy shoes are required, and the "
        "gallery is closed in strong wind. Inside the tower hangs a collection of knots and a barometer that was "
        "given by the crew of a rescued schooner. Seabirds nest on the northern ledge from April to July, and "
        "during that time the path around the rock is roped off. The fog signal, a deep double note, was silenced "
        "some years ago, but it is sounded once a year at midnight to greet the new year."
    ),
    "market": (
        "The Saturday market. Every Saturday from seven until one o'clock, farmers and fishermen set up some sixty "
        "stalls on the square in front of Saint Brenna's church. The market is run by a cooperative whose chair is "
        "Agnes Bell, a retired school teacher with a very loud voice. Fish is sold along the north wall, where "
        "there is shade, cheese and eggs by the fountain, and vegetables everywhere else. The best known product "
        "is a blue goat cheese named Stormcap, which ripens for five months in a cave behind the quarry. A stall "
        "costs nine crowns a day, and newcomers have to wait for about two years until a place becomes free. Music "
        "is allowed after ten, but amplifiers are not. If it rains the market moves into the old rope works, a "
        "long brick building with good light, and a flag with a green stripe is flown from the church tower to "
        "let everybody know. Leftover food is collected by volunteers and taken to the seamen's home."
    ),
    "museum": (
        "The Museum of Small Boats. In a shed beside the slipway more than forty rowing boats, dinghies and canoes "
        "hang from the beams or stand on trestles. The collection was begun by the boat builder Salome Finch, who "
        "could not bear to see old hulls burned on the beach. The oldest piece is a pilot's skiff with a mast "
        "of ash, and the strangest is a canoe made entirely of flattened tin cans. Admission is three crowns and "
        "includes a cup of tea, which visitors drink at a long table cut from a keel. On the second Saturday in "
        "June anyone may row one of the sound boats across the harbour, provided they can swim. The museum has no "
        "shop, but it sells plans drawn to scale for those who wish to build a boat of their own, and a volunteer "
        "called Piet answers questions about them by letter. It opens at ten and closes when the light fails, "
        "because there is no electricity in the shed."
    ),
}


class Request(NamedTuple):
    """One question of the session. ``ratio`` 1.0 recomputes every reused token: exact, but slow."""

    title: str
    system: str
    documents: tuple[str, ...]
    question: str
    ratio: float = 0.0


_FIVE = ("ferry", "bakery", "library", "lighthouse", "market")
REQUESTS = (
    Request(
        "1 first visit",
        "You answer questions about a town using the documents you are given. Be brief.",
        _FIVE,
        "Who owns the Old Kiln Bakery?",
    ),
    Request(
        "2 other order",
        "You answer questions about a town using the documents you are given. Be brief.",
        ("market", "lighthouse", "ferry", "library", "bakery"),
        "Who is the head librarian of the town library?",
    ),
    Request(
        "3 other system",
        "You are a friendly guide at the harbour office. Reply in one short sentence.",
        ("library", "market", "bakery", "ferry", "lighthouse"),
        "What is the name of the ferry to Sill Island?",
    ),
    Request(
        "4 one new doc",
        "You work at the tourist office. Use the leaflets below.",
        ("market", "museum", "lighthouse", "bakery", "ferry"),
        "Who began the collection of the Museum of Small Boats?",
    ),
    Request(
        "5 all known",
        "Answer in a few words.",
        ("museum", "ferry", "market", "library", "lighthouse"),
        "What is the blue goat cheese called?",
    ),
    Request(
        "6 a few redone",
        "You are the clerk of the town hall. Answer in one sentence.",
        ("bakery", "library", "museum", "lighthouse", "market"),
        "When is the library closed?",
        ratio=0.15,
    ),
    Request(
        "7 all redone",
        "Answer in a few words.",
        ("lighthouse", "museum", "market", "ferry", "bakery"),
        "How high is the lighthouse on Gannet Rock?",
        ratio=1.0,
    ),
)
