"""What happened to each document: the report that a request may ask for.

The server must allow it: `kvmosaic serve … --client-parameters all`, because a report tells whether somebody asked
about the same document before.
"""

import json
import os

from library import BAKERY, FERRY
from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"), api_key="none")
model = client.models.list().data[0].id
for documents in ((BAKERY, FERRY), (FERRY, BAKERY)):
    parts = [{"type": "text", "text": text} for text in (*documents, "When does the ferry leave?")]
    response = client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "user", "content": parts}],
        max_tokens=8,
        extra_headers={"x-kvmosaic": "report"},
    )
    report = json.loads(response.headers["x-kvmosaic"])
    print(f"mode: {report['mode']}, reused tokens: {report.get('reused_tokens', 0)}")
