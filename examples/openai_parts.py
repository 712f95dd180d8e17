"""The OpenAI client: documents are parts of a message, and the last part is the question.

The second request has the same documents in another order, under another system prompt. A prefix cache has nothing
for it; kvmosaic reuses the documents. Start a server first: `kvmosaic serve smollm2-135m --enable-chunk-cache
--enable-prompt-tokens-details`.
"""

import os

from library import BAKERY, FERRY, MUSEUM
from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"), api_key="none")
model = client.models.list().data[0].id

for system, documents, question in (
    ("Answer briefly.", (FERRY, BAKERY, MUSEUM), "When does the ferry leave Port Almery?"),
    ("You work at the harbour.", (MUSEUM, FERRY, BAKERY), "Who owns the bakery?"),
):
    parts = [{"type": "text", "text": text} for text in (*documents, question)]
    messages = [{"role": "system", "content": system}, {"role": "user", "content": parts}]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=32)
    usage = answer.usage
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    print(answer.choices[0].message.content)
    print(f"cached {cached} of {usage.prompt_tokens} prompt tokens")
