"""What notebook 00 promises of cells tagged `copy`: each runs after its notebook's parameters and imports alone."""

import pytest

from ci.notebook import NOTEBOOKS, code_cells, read, tagged


def copy_cells():
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        for cell in tagged(read(path), "copy"):
            yield pytest.param(path, cell.source, id=f"{path.stem}-{cell.id}")


def setup_source(path):
    """The parameters, at level A, and the cell that imports."""
    notebook = read(path)
    (parameters,) = tagged(notebook, "parameters")
    imports = next(cell for cell in code_cells(notebook) if "from rlinfra_utils import" in cell.source)
    return f"{parameters.source}\nLEVEL = 'A'\n{imports.source}"


@pytest.mark.slow
@pytest.mark.parametrize(("path", "source"), list(copy_cells()))
def test_a_copy_cell_runs_after_parameters_and_imports_alone(path, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(setup_source(path), names)
    exec(source, names)
