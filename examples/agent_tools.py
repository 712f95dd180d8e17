"""An agent that reads files through a tool: every result of a tool is a document.

The agent forgets its history between two tasks, so the files come back behind another beginning. What it has read
before is reused. The calls are scripted here, because small models seldom make good ones.
"""

import json
import os

from library import BAKERY, FERRY, MUSEUM
from openai import OpenAI

FILES = {"ferry.txt": FERRY, "bakery.txt": BAKERY, "museum.txt": MUSEUM}
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "The content of a file.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"), api_key="none")
model = client.models.list().data[0].id


def run(task: str, names: list[str]) -> None:
    """One task, for which the agent reads some files."""
    messages: list[dict] = [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": task}]
    for number, name in enumerate(names):
        call = {"id": f"call{number}", "type": "function", "function": {"name": "read_file"}}
        call["function"]["arguments"] = json.dumps({"name": name})
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call{number}", "content": FILES[name]})
    # With tool_choice="auto", the server needs --enable-auto-tool-choice and a parser of calls.
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=32
    )
    usage = answer.usage
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    print(answer.choices[0].message.content)
    print(f"cached {cached} of {usage.prompt_tokens} prompt tokens")


run("When does the ferry leave?", ["ferry.txt", "museum.txt"])
run("Plan a day with a visit to the museum and something to eat.", ["museum.txt", "bakery.txt", "ferry.txt"])
