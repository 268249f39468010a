"""The rules that a committed notebook keeps: each is a function from a notebook to its findings, listed in RULES.

They read structure, tags, sources and stored outputs. Leaves out whether the code is right, which `run_series` and
nbval say, and how findings are shown (`check_notebooks.py`). Use: `for cell, what in rule(path, notebook): ...`.
"""

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from IPython.core.inputtransformer2 import TransformerManager

from ci import bootstrap
from ci import notebook as nbk
from rlinfra_utils import levels

TAGS = {
    "parameters",  # the one cell of literals that papermill fills
    "bootstrap",  # the one cell that installs the package in Colab
    "copy",  # a cell made to be copied out
    "sentinel",  # the last code cell: asserts the lesson's numbers
    "hide-input",  # the HTML page shows only the output
    "nbval-check-output",
    "nbval-ignore-output",
}
MAX_LINES = 30
MAX_BYTES = 500_000
MACHINE_PATH = re.compile(r"(?<![\w.~/<])/(?:home|root|tmp|work|Users|var/folders)\b|\b[A-Z]:\\Users\b")
BADGE = re.compile(r"colab\.research\.google\.com/github/[^/\s]+/[^/\s]+/blob/[^/\s]+/([^\s)\"']+)")
LEVEL_LINE = re.compile(r"%%level [BC] [a-z0-9_]+")
# Compute capability of the cards a notebook may name (NVIDIA's table of CUDA GPUs).
CAPABILITY = {"T4": (7, 5), "A100": (8, 0), "L4": (8, 9), "H100": (9, 0), "H200": (9, 0)}

Findings = Iterator[tuple[object, str]]  # (the cell or None for the whole file, what is wrong)


def parameters(path: Path, notebook) -> Findings:
    """Exactly one cell is tagged `parameters`; it holds nothing but literals, and its LEVEL is what nbval runs."""
    cells = nbk.tagged(notebook, "parameters")
    if len(cells) != 1:
        yield None, f"{len(cells)} cells are tagged `parameters`; there has to be one"
        return
    try:
        level = nbk.literals(cells[0].source).get("LEVEL", "A")
    except ValueError as error:
        yield cells[0], str(error)
    else:
        if level not in ("A", "auto"):
            yield cells[0], f"LEVEL = {level!r} by default; nbval gives no parameters, so it has to be 'A' or 'auto'"


def tags(path: Path, notebook) -> Findings:
    """Only known tags: a cell that one runner skips or expects to fail, the other runs (nbval, papermill)."""
    for cell in notebook.cells:
        for tag in cell.metadata.get("tags", []):
            if tag not in TAGS | {"injected-parameters", "papermill-error-cell-tag"}:  # `papermill` speaks of these
                yield cell, f"tag {tag!r} is not one of {', '.join(sorted(TAGS))}"
        for marker in re.findall(r"#\s*(NBVAL_\w+|PYTEST_VALIDATE\w+)", cell.source):
            yield cell, f"the comment {marker} steers nbval: use a tag"


def kernelspec(path: Path, notebook) -> Findings:
    """The kernel is `python3`: a private name fails elsewhere."""
    if nbk.kernel(notebook) != "python3":
        yield None, f"kernelspec is {nbk.kernel(notebook)!r}, not 'python3'"


def cell_length(path: Path, notebook) -> Findings:
    """A code cell has at most MAX_LINES lines."""
    for cell in nbk.code_cells(notebook):
        if (count := len(cell.source.splitlines())) > MAX_LINES:
            yield cell, f"{count} lines; at most {MAX_LINES}"


def level_cells(path: Path, notebook) -> Findings:
    """A `%%level` line is the first of its cell, well formed, and what follows is Python even where it never runs."""
    for cell in nbk.code_cells(notebook):
        first, _, body = cell.source.partition("\n")
        if re.search(r"^\s*%%level", body, re.MULTILINE):
            yield cell, "`%%level` has to stand once, on the first line of its cell"
        if not first.startswith("%%level"):
            continue
        if not LEVEL_LINE.fullmatch(first):
            yield cell, f"`{first}` is not `%%level B name` or `%%level C name`"
        try:
            ast.parse(TransformerManager().transform_cell(body))
        except SyntaxError as error:
            yield cell, f"the body of `{first}` is not Python: {error.msg}"


def bootstrap_cell(path: Path, notebook) -> Findings:
    """The first code cell, and no other, is the bootstrap cell as `ci.bootstrap` writes it."""
    cells = nbk.tagged(notebook, "bootstrap")
    if len(cells) != 1 or cells[0] is not nbk.code_cells(notebook)[0]:
        yield None, "the first code cell, and only that one, has to be tagged `bootstrap`"
    elif cells[0].source != bootstrap.cell_source(bootstrap.repository()):
        yield cells[0], "differs from ci.bootstrap.cell_source; run `python -m ci.badges`"


def badge(path: Path, notebook) -> Findings:
    """The first cell links to this very file in Colab."""
    own = f"{path.resolve().parent.name}/{path.name}"
    linked = BADGE.findall(notebook.cells[0].source) if notebook.cells else []
    if linked != [own]:
        yield None, f"the first cell has to hold one Colab badge, for {own}; it has {linked}"


def ids(path: Path, notebook) -> Findings:
    """Each cell has an id of its own (nbformat 4.5)."""
    if notebook.nbformat_minor < 5:
        yield None, f"nbformat 4.{notebook.nbformat_minor} has no cell ids: save it as 4.5"
        return
    for cell_id, count in Counter(cell.id for cell in notebook.cells).items():
        if count > 1:
            yield None, f"{count} cells have the id {cell_id!r}"


def sentinel(path: Path, notebook) -> Findings:
    """The last code cell, and no other, is tagged `sentinel`; it asserts, and where outputs are stored it printed."""
    cells = nbk.tagged(notebook, "sentinel")
    if len(cells) != 1 or cells[0] is not nbk.code_cells(notebook)[-1]:
        yield None, "the last code cell, and only that one, has to be tagged `sentinel`"
        return
    if not re.search(r"^\s*assert\b", cells[0].source, re.MULTILINE):
        yield cells[0], "the sentinel asserts nothing"
    if not cells[0].outputs and any(cell.outputs for cell in nbk.code_cells(notebook)):
        yield cells[0], "the sentinel has no stored output, so the stored run did not reach it"


def clean_outputs(path: Path, notebook) -> Findings:
    """No stored output is an error or came through stderr."""
    for cell in nbk.code_cells(notebook):
        for output in cell.outputs:
            if output.output_type == "error":
                yield cell, f"stored error {output.ename}"
            if output.get("name") == "stderr":
                yield cell, f"stored stderr: {' '.join(output.text.split())[:80]}"


def size(path: Path, notebook) -> Findings:
    """The file stays under MAX_BYTES."""
    if (num_bytes := path.stat().st_size) >= MAX_BYTES:
        yield None, f"{num_bytes:,} bytes; less than {MAX_BYTES:,}"


def papermill(path: Path, notebook) -> Findings:
    """No trace of a papermill run: its metadata, its injected parameters, its failure markers."""
    if "papermill" in notebook.metadata:
        yield None, "has papermill's metadata: commit what `python -m ci.store_outputs` writes"
    for cell in notebook.cells:
        left = {"injected-parameters", "papermill-error-cell-tag"} & set(cell.metadata.get("tags", []))
        if left or "papermill" in cell.metadata:
            yield cell, f"left over from a papermill run: {', '.join(sorted(left)) or 'metadata'}"


def machine_paths(path: Path, notebook) -> Findings:
    """No path of one machine in a source or a stored text."""
    for cell in notebook.cells:
        for text in (cell.source, *_stored_texts(cell)):
            if found := MACHINE_PATH.search(text):
                yield cell, f"a path of one machine: {text[found.start() :].split()[0][:60]}"


def _stored_texts(cell) -> Iterator[str]:
    for output in cell.get("outputs", []):
        yield output.get("text", "")
        for kind, data in output.get("data", {}).items():
            if not kind.startswith("image/") or kind == "image/svg+xml":
                yield data if isinstance(data, str) else json.dumps(data)


def execution_counts(path: Path, notebook) -> Findings:
    """Either the whole notebook is stripped, or its code cells count 1 to n."""
    cells = [cell for cell in nbk.code_cells(notebook) if cell.source.strip()]
    counts = [cell.execution_count for cell in cells]
    stripped = not any(counts) and not any(cell.outputs for cell in cells)
    if not stripped and counts != list(range(1, len(cells) + 1)):
        yield None, f"execution counts are {counts}, not 1 to {len(cells)}: store one whole run"


def event_loop(path: Path, notebook) -> Findings:
    """No `asyncio.run`: a kernel already runs an event loop."""
    for cell in nbk.code_cells(notebook):
        if re.search(r"\basyncio\.run\(", cell.source):
            yield cell, "asyncio.run raises inside a kernel: use `await`"


def installs(path: Path, notebook) -> Findings:
    """No cell calls pip: that would move what Colab brings. The bootstrap cell installs, and checks."""
    for cell in nbk.code_cells(notebook):
        if re.search(r"^\s*[!%].*\b(pip3?|conda|mamba)\s+install\b", cell.source, re.MULTILINE):
            yield cell, "installs packages: only the bootstrap cell does"


def finished(path: Path, notebook) -> Findings:
    """No TODO, FIXME or XXX."""
    for cell in notebook.cells:
        if found := re.search(r"\b(TODO|FIXME|XXX)\b", cell.source):
            yield cell, f"says {found[1]}"


def hardware(path: Path, notebook) -> Findings:
    """Cards that metadata `rlinfra.runs_on` promises have what `rlinfra.needs` (bfloat16, fp8) asks for."""
    stated = notebook.metadata.get("rlinfra", {})
    if not isinstance(stated, dict):
        yield None, f"metadata rlinfra is {stated!r}, not an object with runs_on and needs"
        return
    for card in stated.get("runs_on", []):
        if card not in CAPABILITY:
            yield None, f"metadata rlinfra.runs_on names {card!r}; known: {', '.join(CAPABILITY)}"
            continue
        for feature in stated.get("needs", []):
            try:
                support = levels.supports(feature, CAPABILITY[card])
            except ValueError as error:
                yield None, f"metadata rlinfra.needs: {error}"
            else:
                if not support:
                    yield None, f"says it runs on {card}, but {support.reason}"


RULES = (
    parameters,
    tags,
    kernelspec,
    cell_length,
    level_cells,
    bootstrap_cell,
    badge,
    ids,
    sentinel,
    clean_outputs,
    size,
    papermill,
    machine_paths,
    execution_counts,
    event_loop,
    installs,
    finished,
    hardware,
)
