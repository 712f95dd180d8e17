"""The page that draws requests as mosaics. One HTML file draws both live requests and those inside a file."""

import base64
import hashlib
import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

_DATA = '<script type="application/json" id="data">null</script>'
"""Place of the requests in a page that is a file."""
_INLINE = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


@cache
def live_page() -> str:
    """The page of a server: it asks the server for requests and statistics again and again."""
    return (files(__package__) / "page.html").read_text(encoding="utf-8")


def file_page(title: str, stats: dict[str, Any], requests: list[dict[str, Any]]) -> str:
    """A page with these requests inside. ``stats`` and ``requests`` have the form of a server's answers."""
    data = json.dumps({"title": title, "stats": stats, "requests": requests})
    # A text with "</script>" would end the element.
    data = data.replace("<", "\\u003c")
    page = live_page()
    assert page.count(_DATA) == 1
    return page.replace(_DATA, _DATA.replace("null", data))


@cache
def content_policy() -> str:
    """The live page's content security policy: its own style and script, its own server, and nothing else."""
    inline = dict(_INLINE.findall(live_page()))
    allowed = {kind: f"'sha256-{_hash(content)}'" for kind, content in inline.items()}
    return (
        f"default-src 'none'; style-src {allowed['style']}; script-src {allowed['script']}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(content: str) -> str:
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
