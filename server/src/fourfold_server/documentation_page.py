"""The page at /docs: the OpenAPI description as plain HTML, which needs nothing from any other host."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { border-top: 1px solid #8886; padding-top: 1rem; }
code, pre { font: 13px/1.5 ui-monospace, monospace; }
pre { background: #8882; padding: .7rem; overflow-x: auto; }
table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: .2rem 1rem .2rem 0; border-bottom: 1px solid #8884; }
:root { color-scheme: light dark; }
"""


def render_page(description: Mapping[str, Any]) -> str:
    """HTML of an OpenAPI description: each route with its fields and an example."""
    title = escape(f"{description['info']['title']} {description['info']['version']}")
    routes = "".join(
        part
        for path, methods in sorted(description["paths"].items())
        for method, route in methods.items()
        for part in _route(path, method, route)
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f'</head><body><h1>{title}</h1><p>The same for programs: <a href="openapi.json">openapi.json</a></p>'
        f"{routes}</body></html>"
    )


def _route(path: str, method: str, route: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2><code>{escape(method.upper())} {escape(path)}</code></h2><p>{escape(route.get('summary', ''))}</p>"
    body = route.get("requestBody", {}).get("content", {}).get("application/json", {})
    schema = body.get("schema", {})
    if schema.get("properties"):
        yield "<table><tr><th>Field</th><th>Type</th><th>Default</th><th></th></tr>"
        for name, field in schema["properties"].items():
            default = json.dumps(field["default"]) if "default" in field else ""
            needed = "needed" if name in schema.get("required", ()) else default
            cells = (f"<code>{escape(name)}</code>", escape(_type(field)), f"<code>{escape(needed)}</code>")
            yield f"<tr><td>{'</td><td>'.join(cells)}</td><td>{escape(field.get('description', ''))}</td></tr>"
        yield "</table>"
    if "example" in body:
        yield f"<pre>{escape(json.dumps(body['example'], indent=2))}</pre>"


def _type(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "enum" in schema:
        return "string"
    if schema.get("type") == "array" and "items" in schema:
        return f"array of {_type(schema['items'])}"
    return str(schema.get("type", "any"))
