"""Writes the API pages: each public name with its signature, its docstring and a link to its source, with a search box.

pdoc does it: pages without a network, light or dark as the reader's browser says. A page shows what a package of
`rlinfra_utils` exports, not the files behind it; `doors`, the argument checks, has none. `api_theme/` holds colours
and the source links. Use: `write(folder)`, or `python -m ci.api build/lab/api`.
"""

import importlib
import inspect
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pdoc
from pygments.formatters import HtmlFormatter

import rlinfra_utils
from ci import bootstrap

ROOT = Path(__file__).parent.parent
THEME = Path(__file__).parent / "api_theme"
#: In the order of their floors, as they stand in the navigation.
MODULES = (
    *("timers", "memory", "rollouts", "offpolicy", "pipeline"),
    *("limits", "synthetic", "simulator", "mismatch", "stacks", "checkpoint", "tracing"),
    *("policy", "engines", "sync", "sharded", "plan"),
    *("cluster", "recovery"),
    *("levels", "exercises", "plots"),
)


def public_names(module: ModuleType) -> list[str]:
    """Names that `module` defines or takes from its own files: no modules, and nothing of another package."""
    own = module.__name__
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and getattr(value, "__module__", own).startswith(own)
        and name != "annotations"
    ]


def source_url(doc: pdoc.doc.Doc) -> str | None:
    """The repository's page of the lines that define `doc`; None for what another package defines."""
    path = doc.source_file
    if path is None or doc.source_lines is None or not path.is_relative_to(ROOT):
        return None
    first, last = doc.source_lines
    return f"{bootstrap.repository()}/blob/main/{path.relative_to(ROOT).as_posix()}#L{first}-L{last}"


def write(folder: Path) -> Path:
    """Write the pages of all modules into `folder` and return the first one."""
    for name in MODULES:
        module = importlib.import_module(f"rlinfra_utils.{name}")
        module.__all__ = public_names(module)  # what pdoc takes as a module's contents
    rlinfra_utils.__all__ = list(MODULES)
    pdoc.render.configure(docformat="markdown", show_source=False, template_directory=THEME)
    pdoc.render.env.globals["source_url"] = source_url
    pdoc.render.env.globals["dark_code"] = HtmlFormatter(style="github-dark").get_style_defs(".pdoc-code")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Error parsing type annotation")  # it is shown as it is written
        pdoc.pdoc("rlinfra_utils", r"!rlinfra_utils\.\w+\.", "!rlinfra_utils.doors", output_directory=folder)
    return folder / "rlinfra_utils.html"


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
