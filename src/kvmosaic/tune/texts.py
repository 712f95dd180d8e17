"""Raw material of made-up lessons."""

MODULES = (
    *("argparse", "ast", "asyncio.queues", "base64", "bisect", "calendar", "cmd", "collections", "configparser"),
    *(
        "contextlib",
        "copy",
        "csv",
        "dataclasses",
        "decimal",
        "difflib",
        "email.message",
        "enum",
        "fnmatch",
        "fractions",
    ),
    *("functools", "getopt", "glob", "gzip", "heapq", "html.parser", "http.client", "http.cookies", "inspect"),
    *("ipaddress", "json.decoder", "json.encoder", "logging", "mailbox", "mimetypes", "numbers", "optparse", "os"),
    *(
        "pathlib",
        "pickle",
        "platform",
        "pprint",
        "profile",
        "queue",
        "random",
        "sched",
        "selectors",
        "shelve",
        "shlex",
    ),
    *("shutil", "smtplib", "socketserver", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap"),
    *("threading", "timeit", "tokenize", "traceback", "types", "typing", "unittest.case", "urllib.parse", "uuid"),
    *("wave", "weakref", "webbrowser", "xml.dom.minidom", "zipfile"),
)
"""Modules of Python's standard library whose functions are used as documents; every machine has them."""

LANGUAGES: dict[str, tuple[tuple[str, ...], str]] = {
    "de": (
        (
            "{person} arbeitet seit {large} Jahren in der Bäckerei {name} und steht jeden Morgen um vier Uhr auf.",
            "Die Brücke über den Fluss {name} ist {large} Meter lang; {person} hat sie vor {small} Jahren entworfen.",
            "Im Museum {name} hängen {large} Bilder, von denen {person} die {small} ältesten gestiftet hat.",
            "Wenn es regnet, bleibt {person} zu Hause und liest den Roman {name}, der {small} Kapitel hat.",
            "Der Zug nach {name} fährt um {small} Uhr ab, und {person} kommt wie immer {large} Minuten zu früh.",
        ),
        "Frage: Was steht in den Texten über {person}?",
    ),
    "fr": (
        (
            "{person} travaille depuis {large} ans à la boulangerie {name} et se lève chaque jour à quatre heures.",
            "Le pont sur la rivière {name} mesure {large} mètres ; {person} l'a dessiné il y a {small} ans.",
            "Le musée {name} possède {large} tableaux, dont les {small} plus anciens viennent de {person}.",
            "Quand il pleut, {person} reste à la maison et lit le roman {name}, qui compte {small} chapitres.",
            "Le train pour {name} part à {small} heures, et {person} arrive toujours {large} minutes en avance.",
        ),
        "Question : que disent les textes au sujet de {person} ?",
    ),
    "es": (
        (
            "{person} trabaja desde hace {large} años en la panadería {name} y se levanta cada día a las cuatro.",
            "El puente sobre el río {name} mide {large} metros; {person} lo diseñó hace {small} años.",
            "En el museo {name} hay {large} cuadros, y los {small} más antiguos son un regalo de {person}.",
            "Cuando llueve, {person} se queda en casa y lee la novela {name}, que tiene {small} capítulos.",
            "El tren a {name} sale a las {small}, y {person} llega siempre {large} minutos antes.",
        ),
        "Pregunta: ¿qué dicen los textos sobre {person}?",
    ),
    "it": (
        (
            "{person} lavora da {large} anni nel panificio {name} e si alza ogni mattina alle quattro.",
            "Il ponte sul fiume {name} è lungo {large} metri; lo ha progettato {person} {small} anni fa.",
            "Nel museo {name} ci sono {large} quadri, e i {small} più antichi sono un dono di {person}.",
            "Quando piove, {person} resta a casa a leggere il romanzo {name}, che ha {small} capitoli.",
        ),
        "Domanda: che cosa dicono i testi su {person}?",
    ),
    "ru": (
        (
            "{person} работает в пекарне {name} уже {large} лет и каждое утро встаёт в четыре часа.",
            "Мост через реку {name} имеет длину {large} метров; {small} лет назад его построил {person}.",
            "В музее {name} висит {large} картин, и {small} самых старых подарил городу {person}.",
            "Когда идёт дождь, {person} остаётся дома и читает роман {name}, в котором {small} глав.",
        ),
        "Вопрос: что говорится в текстах о человеке по имени {person}?",
    ),
    "zh": (
        (
            "{person}在面包店{name}工作了{large}年，每天早上四点起床。",
            "{name}河上的桥长{large}米，是{person}在{small}年前设计的。",
            "{name}博物馆里有{large}幅画，其中最古老的{small}幅是{person}捐赠的。",
            "下雨的时候，{person}留在家里读小说《{name}》，这本书有{small}章。",
        ),
        "问题：文中关于{person}说了什么？",
    ),
}
"""By language: sentences about people and things that do not exist, and a question."""

CHAT = (
    (
        "I just bought {article} {noun} and named it {name}. It cost me {large} dollars.",
        "What is the name of my {noun}?",
        "{name}",
    ),
    (
        "My friend {person} is coming over on {day}, we will visit the {noun} {name}.",
        "Who is coming over on {day}?",
        "{person}",
    ),
    (
        "I have to be at work at {small} on {day}. Can you remind me?",
        "When do I have to be at work on {day}?",
        "At {small}",
    ),
    (
        "For dinner I made soup with {large} beans. {person} did not like it at all.",
        "Who did not like my soup?",
        "{person}",
    ),
    (
        "I read {large} pages of the book {name} on {day}. It is about a {noun}.",
        "Which book did I read on {day}?",
        "{name}",
    ),
    (
        "My sister {person} moved into a flat with {small} rooms near the {noun} {name}.",
        "Where did my sister move?",
        "Near the {noun} {name}",
    ),
)
REPLIES = (
    "That sounds good! Is there anything else I can help you with?",
    "Thank you for telling me. I will keep it in mind.",
    "Of course. First write everything down, then decide what matters most, and leave the rest for later.",
    "I am sorry to hear that. Would you like some suggestions?",
    "Great. {large} is quite a lot, by the way.",
)
MIN_SOURCE, MAX_SOURCE = 200, 3000
"""Minimum and maximum number of characters of a function that is used as a document."""
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
