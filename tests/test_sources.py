"""The register of claims and the notebooks' marks: they agree, and the checker finds what is damaged."""

import json

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from ci import notebook as nbk
from ci import sources

TITLE = "# Sources\n\n| word | meaning |\n|---|---|\n| derived | by arithmetic |\n\n"
HEAD = f"| {' | '.join(sources.COLUMNS)} |\n|---|---|---|---|---|---|\n"
GOOD = {
    "S301": ("Two stages overlap.", "derived", "`tests/test_a.py`", "2026-11-29", "constant times"),
    "S302": ("An engine holds so many tokens.", "measured here", "`results/pool.json`", "2026-11-28", "one engine"),
    "S401": ("Zero divides.", "paper", "arXiv:1910.02054, section 3", "2026-11-29", "states only"),
    "S402": ("A default is 4.", "code at commit", "a/b.py:3-9 at f2cd57710ae3", "2026-07-24", "read, not run"),
    "S403": ("It broke.", "field report", "[x 1](https://github.com/a/b/issues/1)", "2026-11-29", "their figures"),
}


def write_register(folder, rows):
    """A register with these rows, each a tuple of cells, after a table that is none of claims."""
    text = TITLE + HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)
    path = folder / "SOURCES.md"
    path.write_text(text + "\nEnd.\n", encoding="utf-8")
    return path


def write_notebook(folder, name, *cells):
    """A notebook in `folder`/notebooks; a text is a markdown cell."""
    (folder / "notebooks").mkdir(exist_ok=True)
    path = folder / "notebooks" / f"{name}.ipynb"
    cells = [new_markdown_cell(cell) if isinstance(cell, str) else cell for cell in cells]
    nbformat.write(new_notebook(cells=cells), path)
    return path


@pytest.fixture
def root(tmp_path):
    """A repository with what the good rows name, and notebooks with their marks."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "pool.json").write_text(json.dumps({"date": "2026-11-28"}))
    write_notebook(
        tmp_path, "03_queues", "## Queues\n\nTwo stages overlap [S301]. It holds [S302].", new_code_cell("x = 1")
    )
    write_notebook(tmp_path, "04_staleness", "Zero divides [S401]: so.\n\nIt is 4 [S402].", "It broke [S403].")
    return tmp_path


def run(root, rows, capsys):
    """(exit status, findings) of the checker over `root` with these rows."""
    status = sources.main(write_register(root, rows), root / "notebooks", root)
    *findings, total = capsys.readouterr().out.splitlines()
    assert total.endswith(f"{len(findings)} findings")
    return status, findings


def as_rows(rows):
    return [(name, *cells) for name, cells in rows.items()]


def test_marks_and_register_of_this_repository_agree():
    rows, broken = sources.read_register()
    marks, misplaced = sources.read_marks(nbk.find([]))
    assert not [*broken, *misplaced, *sources.check(rows, marks)]
    assert len(rows) == len(marks) > 0


def test_a_good_register_has_no_finding(root, capsys):
    assert run(root, as_rows(GOOD), capsys) == (0, [])


@pytest.mark.parametrize(
    ("column", "value", "finding"),
    [
        ("id", "S3O2", "id 'S3O2' is not S and three digits"),
        ("claim", "", "claim is empty"),
        ("limit", "", "limit is empty"),
        ("evidence", "hearsay", "evidence 'hearsay' is not one of derived, measured here"),
        ("evidence", "measured here, hearsay", "evidence 'hearsay' is not one of"),
        ("evidence", "code at commit", "so the source has to hold a commit of at least 12 hex digits"),
        ("evidence", "measured here, field report", "so the source has to hold a link to the issue or pull request"),
        ("evidence", "official document", "so the source has to hold a link"),
        ("evidence", "paper", "so the source has to hold an arXiv id or a year"),
        ("source", "our own run", "so the source has to hold a result, test, benchmark or notebook"),
        ("source", "`results/lost.json`", "there is no results/lost.json"),
        ("checked", "2026-11-29", "checked 2026-11-29, but results/pool.json is of 2026-11-28"),
        ("checked", "29.11.2026", "checked '29.11.2026' is not a date"),
        ("checked", "2026-02-30", "checked '2026-02-30' is not a date"),
        ("checked", "20261128", "checked '20261128' is not a date"),
    ],
)
def test_a_damaged_row_is_named_with_its_line(root, capsys, column, value, finding):
    cells = {"id": "S302"} | dict(zip(sources.COLUMNS[1:], GOOD["S302"], strict=True)) | {column: value}
    status, findings = run(root, [("S301", *GOOD["S301"]), tuple(cells.values()), *as_rows(GOOD)[2:]], capsys)
    assert status == 1
    assert any(line.startswith(f"line 10: {cells['id']}: ") and finding in line for line in findings), findings


def test_a_row_of_too_few_cells_is_named_with_its_line(root, capsys):
    status, findings = run(root, [*as_rows(GOOD)[:4], ("S403", "It broke.", "field report")], capsys)
    assert status == 1
    assert findings == [
        "line 13: 3 cells; a row has 6: id, claim, evidence, source, checked, limit",
        "S403 is marked in a notebook and has no row",
    ]


def test_a_row_without_a_mark_and_a_mark_without_a_row(root, capsys):
    rows = {name: cells for name, cells in GOOD.items() if name != "S401"} | {"S404": GOOD["S403"]}
    assert run(root, as_rows(rows), capsys) == (
        1,
        ["S401 is marked in a notebook and has no row", "S404 has a row and no mark in a notebook"],
    )


def test_ids_are_unique_and_in_order(root, capsys):
    rows = as_rows(GOOD)
    assert run(root, [*rows, rows[-1]], capsys) == (1, ["S403 has 2 rows"])
    assert run(root, [rows[1], rows[0], *rows[2:]], capsys) == (1, ["S301 stands after S302: sort by id"])


@pytest.mark.parametrize(
    ("cell", "finding"),
    [
        (new_code_cell("print(1)  # holds [S302]"), "stands in a code cell"),
        ("### Overlap [S302]\n\nText.", "stands in a heading"),
        ("It broke [S403].", "is not of this notebook, whose ids begin with S3"),
    ],
)
def test_a_mark_in_the_wrong_place_is_named_with_its_cell(root, capsys, cell, finding):
    path = write_notebook(root, "03_queues", "It is so [S301], and so [S302].", cell)
    status, findings = run(root, as_rows(GOOD), capsys)
    wrong = nbk.read(path).cells[1].id
    assert status == 1
    assert len(findings) == 1
    assert findings[0].startswith(f"03_queues.ipynb: cell {wrong}: ")
    assert finding in findings[0]


def test_a_mark_of_another_length_is_seen(root, capsys):
    write_notebook(root, "03_queues", "It is so [S301], and so [S302], and so [S31].")
    assert run(root, as_rows(GOOD), capsys) == (1, ["S31 is marked in a notebook and has no row"])
