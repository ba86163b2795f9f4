"""Sphinx's settings for this site: `make docs` builds it into runs/docs, with warnings as errors.

The theme is Furo: Gymnasium and PettingZoo use a fork of it (Celshast), it works on narrow screens
and in the dark without settings, and it needs nothing but Sphinx. Ray's (pydata-sphinx-theme) is as
well kept; it is made for larger sites, with a menu across the top.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")  # or importing RLlib warns

project = "rlmesh-ray"
copyright = "the authors of rlmesh-ray"

sys.path.insert(0, str(Path(__file__).with_name("_extensions")))
extensions = [
    "code_facts",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.graphviz",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_static", "_extensions"]
source_suffix = {".md": "markdown"}

smartquotes = False  # options would lose a dash

html_theme = "furo"
html_title = "rlmesh-ray"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

graphviz_output_format = "svg"
copybutton_exclude = ".linenos, .gp, .go"

# Public names have pages of their own choice; `code_facts` warns of one that is on none.
autodoc_mock_imports = ["stable_baselines3"]
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88

# Types of other packages, whose sites cannot be asked when this one is built, and internal ones.
nitpick_ignore_regex = [
    ("py:.*", r"(?!rlmesh_ray\.).*"),
    ("py:.*", r"rlmesh_ray\.(actors|auth|dialects|envs|protocol|rllib)\..*"),
    ("py:.*", r"rlmesh_ray\.evaluation\.session_sources\.EndpointFleet"),
]
