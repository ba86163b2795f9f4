"""Sphinx's settings for this site: `make docs` builds it into runs/docs, with warnings as errors.

The theme is Furo: Gymnasium and PettingZoo use a fork of it (Celshast), it works on narrow screens
and in the dark without settings, and it needs nothing but Sphinx. Ray's (pydata-sphinx-theme) is as
well kept; it is made for larger sites, with a menu across the top.
"""

import os
import re
from typing import Any, get_type_hints

from sphinx.application import Sphinx

from docs import refresh
from rlmesh_ray import actors
from rlmesh_ray.server.endpoint.endpoint_options import ListenOptions
from rlmesh_ray.server.observe.statistics import (
    EnvStatistics,
    ModelStatistics,
    SessionStatistics,
)

os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")  # or importing RLlib warns

project = "rlmesh-ray"
copyright = "the authors of rlmesh-ray"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_static"]
source_suffix = {".md": "markdown"}

smartquotes = False  # options would lose a dash

html_theme = "furo"
html_title = "rlmesh-ray"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False

myst_heading_anchors = 3

copybutton_exclude = ".linenos, .gp, .go"

autodoc_mock_imports = refresh.NOT_INSTALLED
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88

# Types of other packages, whose sites cannot be asked when this one is built, and internal ones.
nitpick_ignore_regex = [
    ("py:.*", r"(?!rlmesh_ray\.).*"),
    ("py:.*", r"rlmesh_ray\.(actors|auth|dialects|envs|protocol|rllib)\..*"),
    ("py:.*", r"rlmesh_ray\.evaluation\.coordinator\.EndpointFleet"),
    ("py:.*", r"rlmesh_ray\.models\.onnx\.compiled_forward\.InferenceChoice"),
]


# The pages are plain Markdown; what the site adds to them:


def _add(_app: Sphinx, page: str, text: list[str]) -> None:
    """Replace first lines with whole docstrings, and list the pages below each index."""
    text[0] = refresh.PART.sub(_docstrings, text[0])
    if page.endswith("index"):
        links = re.findall(r"\]\((?:(\w+)/)?(\w+)\.md", text[0])
        pages = dict.fromkeys(f"{folder}/index" if folder else name for folder, name in links)
        text[0] += "\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"


def _docstrings(part: re.Match[str]) -> str:
    if part[2] != "api":
        return part[0]
    return "".join(
        f"### {found[2].rpartition('.')[2]}\n\n```{{eval-rst}}\n{found[0]}```\n\n"
        for found in refresh.AUTODOC.finditer(f"{part[3]}\n")
    )


_NO_COLON = "\ue000"


def _shield(_app: Sphinx, what: str, *given: Any) -> None:
    """Keep napoleon from taking what stands before an attribute's first colon for its type."""
    lines = given[-1]
    if what in ("attribute", "property"):
        lines[:1] = [line.replace(":", _NO_COLON) for line in lines[:1]]


def _unshield(*given: Any) -> None:
    lines = given[-1]
    lines[:] = [line.replace(_NO_COLON, ":") for line in lines]


def _readable_signature(*given: Any) -> tuple[str, str] | None:
    """Write "..." for a default that is not code, which Sphinx could not set."""
    signature, result = given[-2:]
    if "<f" not in (signature or ""):
        return None
    return re.sub(r"<factory>|\w+\([^()]*<function[^()]*\)", "...", signature), result


def _show_actors_as_classes() -> None:
    """Replace Ray's actor classes, which hide docstrings, with plain classes."""
    shown: Any = actors
    shown.EnvServiceActor = refresh.documented("rlmesh_ray.actors.EnvServiceActor")
    factory = type(shown.ModelServiceActor)
    factory.__name__ = "ModelServiceActor"
    factory.__doc__ = refresh.docstring("rlmesh_ray.actors.ModelServiceActor")
    shown.ModelServiceActor = factory


def _hide_annotations() -> None:
    """Show the types of fields without the metrics and options that annotate them."""
    for shown in (SessionStatistics, EnvStatistics, ModelStatistics, ListenOptions):
        for annotated in (shown, shown.__init__):
            annotated.__annotations__ = get_type_hints(annotated)


def setup(app: Sphinx) -> None:
    """Connect them."""
    _show_actors_as_classes()
    _hide_annotations()
    app.connect("source-read", _add)
    app.connect("autodoc-process-signature", _readable_signature)
    app.connect("autodoc-process-docstring", _shield, priority=100)
    app.connect("autodoc-process-docstring", _unshield, priority=900)
