"""The renderers that code calls by name."""

from __future__ import annotations

from pi2.diagnostics import render_concise, render_full, render_json
from pi2.diagnostics.formats import Renderer

full: Renderer = render_full.render
concise: Renderer = render_concise.render
json: Renderer = render_json.render
