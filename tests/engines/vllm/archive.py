"""Documents, and the ways in which applications send them: parts of a message, or results of a tool."""

import random

DOCUMENTS = [
    " ".join(f"{name} {number} is kept in box {(number * 7 + seed) % 97}, {where}." for number in range(9))
    for seed, (name, where) in enumerate(
        [
            ("Letter", "which stands in the archive behind the town hall"),
            ("Painting", "which the harbour museum lent to a school"),
            ("Map", "next to the atlas that nobody has opened for years"),
            ("Coin", "together with a note about the ship it was found in"),
        ]
    )
]
QUESTION = "In which box is letter 5 kept? Answer with a number."
TRIMS = """\
{% for message in messages %}<|im_start|>{{ message['role'] | trim }}
{{ message['content'] | trim }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
LISTS_DOCUMENTS = """\
{% for document in documents %}Document {{ loop.index }}, {{ document['title'] }}:
{{ document['text'] | trim }}

{% endfor %}{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
NUMBER = {
    "type": "object",
    "properties": {"box": {"enum": [1, 2, 35]}},
    "required": ["box"],
    "additionalProperties": False,
}


def user(texts):
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


def system_prompt():
    """A different system prompt each time."""
    return f"You work for archive number {random.randrange(10**9)}. Answer from what you are given, and be brief."


def shuffled():
    return random.sample(DOCUMENTS, len(DOCUMENTS))


def results():
    """A conversation in which a tool returned the documents."""
    call = {"type": "function", "function": {"name": "search", "arguments": '{"query": "boxes"}'}}
    messages = [{"role": "system", "content": system_prompt()}, {"role": "user", "content": QUESTION}]
    for number, document in enumerate(shuffled()):
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"id": f"call{number}", **call}]})
        messages.append({"role": "tool", "tool_call_id": f"call{number}", "content": document})
    return messages


def parts(label="", after=""):
    documents = [f"{label.format(number)}{text}{after}" for number, text in enumerate(shuffled(), 1)]
    return [{"role": "system", "content": system_prompt()}, user([*documents, QUESTION])]
