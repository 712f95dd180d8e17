"""LlamaIndex: it joins all text parts into one text, so the request names the documents."""

import os

from library import BAKERY, FERRY, MUSEUM
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

for documents, question in (
    ([FERRY, BAKERY, MUSEUM], "When does the ferry leave Port Almery?"),
    ([BAKERY, MUSEUM, FERRY], "Who owns the bakery?"),
):
    model = OpenAILike(
        model=os.environ.get("MODEL", "smollm2-135m"),
        api_base=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"),
        api_key="none",
        is_chat_model=True,
        max_tokens=32,
        additional_kwargs={"extra_body": {"kv_transfer_params": {"documents": documents}}},
    )
    answer = model.chat([ChatMessage(role="user", content="\n\n".join([*documents, question]))])
    usage = answer.raw.usage
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    print(answer.message.content)
    print(f"cached {cached} of {usage.prompt_tokens} prompt tokens")
