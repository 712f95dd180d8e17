"""LangChain with one prompt string: the chain joins the documents, so each request names them."""

import os
import random

from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable
from langchain_openai import ChatOpenAI
from library import BAKERY, FERRY, MUSEUM


def retrieve(question: str) -> list[str]:
    """Stands for a search index, which returns the best documents in an order of its own."""
    return random.sample([FERRY, BAKERY, MUSEUM], 3)


prompt = ChatPromptTemplate.from_messages(
    [("system", "Answer from the documents, briefly."), ("user", "{context}\n\nQuestion: {question}")]
)
model = ChatOpenAI(
    model=os.environ.get("MODEL", "smollm2-135m"),
    base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"),
    api_key="none",
    max_tokens=32,
)


def answering(question: str) -> Runnable:
    """The chain for one question, because each question has documents of its own."""
    texts = retrieve(question)
    named = model.bind(extra_body={"kv_transfer_params": {"documents": texts}})
    return prompt.partial(context="\n\n".join(texts)) | named


for question in ("When does the ferry leave Port Almery?", "Who owns the bakery?", "What can be seen in the museum?"):
    answer = answering(question).invoke({"question": question})
    usage = answer.usage_metadata
    print(answer.text)
    print(f"cached {usage['input_token_details'].get('cache_read', 0)} of {usage['input_tokens']} prompt tokens")
