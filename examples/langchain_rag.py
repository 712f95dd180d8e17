"""LangChain: each retrieved document is a text block of its own. The rest of the chain does not change."""

import os
import random

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI
from library import BAKERY, FERRY, MUSEUM


def retrieve(question: str) -> list[str]:
    """Stands for a search index, which returns the best documents in an order of its own."""
    return random.sample([FERRY, BAKERY, MUSEUM], 3)


def prompt(question: str) -> list[SystemMessage | HumanMessage]:
    blocks = [{"type": "text", "text": text} for text in (*retrieve(question), question)]
    return [SystemMessage("Answer from the documents, briefly."), HumanMessage(blocks)]


model = ChatOpenAI(
    model=os.environ.get("MODEL", "smollm2-135m"),
    base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"),
    api_key="none",
    max_tokens=32,
)
chain = RunnableLambda(prompt) | model
for question in ("When does the ferry leave Port Almery?", "Who owns the bakery?", "What can be seen in the museum?"):
    answer = chain.invoke(question)
    usage = answer.usage_metadata
    print(answer.text)
    print(f"cached {usage['input_token_details'].get('cache_read', 0)} of {usage['input_tokens']} prompt tokens")
