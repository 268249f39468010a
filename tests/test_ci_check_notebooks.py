"""The static check: a good notebook is clean, and each rule alone finds the one thing that breaks it."""

import nbformat
import pytest
from series_samples import as_if_run, cell, good, write

from ci import bootstrap, check_notebooks

output = nbformat.v4.new_output


def add(source: str):
    """A change: put `source` into the body cell."""

    def change(notebook):
        cell(notebook, "body-0").source = source

    return change


def tag(cell_id: str, *tags: str):
    def change(notebook):
        cell(notebook, cell_id).metadata["tags"] = list(tags)

    return change


def show(*outputs):
    def change(notebook):
        as_if_run(notebook)
        cell(notebook, "body-0").outputs = list(outputs)

    return change


def metadata(**entries):
    def change(notebook):
        notebook.metadata.update(nbformat.from_dict(entries))

    return change


def on(cell_id: str, **fields):
    def change(notebook):
        cell(notebook, cell_id).update(nbformat.from_dict(fields))

    return change


def run_halfway(notebook):
    as_if_run(notebook)
    cell(notebook, "body-0").execution_count = None


def sentinel_not_reached(notebook):
    show(output("stream", name="stdout", text="x\n"))(notebook)
    cell(notebook, "end").outputs = []


def old_format(notebook):
    notebook.nbformat_minor = 4
    for each in notebook.cells:
        del each["id"]


def without_bootstrap(notebook):
    notebook.cells = [each for each in notebook.cells if each.id != "boot"]


def text_about(kind: str, text: str):
    return show(output("display_data", data={kind: text}))


def hardware(cards, needs):
    return metadata(rlinfra={"runs_on": cards, "needs": needs})


BREAKS = [
    ("parameters", tag("params"), "0 cells are tagged `parameters`"),
    ("parameters", tag("body-0", "parameters"), "2 cells are tagged `parameters`"),
    ("parameters", on("params", source="SEED = 3\nSTEPS = SEED * 2"), "`STEPS = SEED * 2` is not NAME = literal"),
    ("parameters", on("params", source='LEVEL = "B"'), "LEVEL = 'B' by default"),
    ("tags", tag("body-0", "sentinal"), "tag 'sentinal' is not one of"),
    ("kernelspec", metadata(kernelspec={"name": "my-env", "display_name": "mine"}), "'my-env', not 'python3'"),
    ("cell_length", add("x = 1\n" * 31), "31 lines; at most 30"),
    ("level_cells", add("%%level B\nx = 1"), "is not `%%level B name`"),
    ("level_cells", add("%%level D rate\nx = 1"), "is not `%%level B name`"),
    ("level_cells", add("x = 1\n%%level B rate"), "has to stand once, on the first line"),
    ("level_cells", add("%%level B rate\nx = ("), "is not Python"),
    ("bootstrap_cell", tag("boot"), "has to be tagged `bootstrap`"),
    ("bootstrap_cell", without_bootstrap, "has to be tagged `bootstrap`"),
    ("bootstrap_cell", tag("body-0", "bootstrap"), "and only that one"),
    ("bootstrap_cell", on("boot", source="import rlinfra_utils"), "run `python -m ci.badges`"),
    ("badge", on("title", source="# A title"), "it has []"),
    ("badge", on("title", source=good("00_other").cells[0].source), "it has ['notebooks/00_other.ipynb']"),
    ("ids", on("params", id="boot"), "2 cells have the id 'boot'"),
    ("ids", old_format, "save it as 4.5"),
    ("sentinel", tag("end"), "has to be tagged `sentinel`"),
    ("sentinel", tag("body-0", "sentinel"), "and only that one"),
    ("sentinel", on("end", source="print('ok')"), "asserts nothing"),
    ("sentinel", sentinel_not_reached, "the stored run did not reach it"),
    ("clean_outputs", show(output("error", ename="KeyError", evalue="'x'", traceback=[])), "stored error KeyError"),
    ("clean_outputs", show(output("stream", name="stderr", text="a\nWarning: b\n")), "stored stderr: a Warning: b"),
    ("clean_outputs", show(output("stream", name="stderr", text="\n")), "stored stderr"),
    ("size", text_about("image/png", "A" * 500_000), "bytes; less than 500,000"),
    ("papermill", metadata(papermill={"duration": 1.0}), "papermill's metadata"),
    ("papermill", tag("body-0", "injected-parameters"), "left over from a papermill run: injected-parameters"),
    ("papermill", on("body-0", metadata={"papermill": {}}), "left over from a papermill run: metadata"),
    ("machine_paths", add("open('/home/ann/data.json')"), "a path of one machine: /home/ann/data.json"),
    ("machine_paths", on("title", source=good("01_loop").cells[0].source + " See /root/x."), "/root/x."),
    ("machine_paths", show(output("stream", name="stdout", text="wrote /tmp/abc/x.json\n")), "/tmp/abc/x.json"),
    ("machine_paths", text_about("text/html", "<td>C:\\Users\\ann</td>"), "C:\\Users\\ann"),
    ("execution_counts", run_halfway, "not 1 to 4"),
    ("execution_counts", on("body-0", execution_count=7), "not 1 to 4"),
    ("event_loop", add("import asyncio\nasyncio.run(main())"), "use `await`"),
    ("installs", add("!pip install torch"), "only the bootstrap cell does"),
    ("installs", add("%pip install -U torch"), "only the bootstrap cell does"),
    ("installs", add("!{sys.executable} -m pip install torch"), "only the bootstrap cell does"),
    ("finished", add("x = 1  # TODO: measure"), "says TODO"),
    ("hardware", hardware(["T4"], ["fp8"]), "says it runs on T4, but fp8 needs compute capability 8.9"),
    ("hardware", metadata(rlinfra="T4"), "metadata rlinfra is 'T4'"),
    ("hardware", hardware(["T400"], []), "names 'T400'"),
    ("hardware", hardware(["T4"], ["fp9"]), "feature='fp9': known are"),
]


def findings(tmp_path, change=lambda notebook: None) -> list[str]:
    notebook = good("01_loop", "x = 1")
    change(notebook)
    return check_notebooks.check(write(tmp_path, "01_loop", notebook))


def test_a_good_notebook_is_clean_stripped_or_run(tmp_path):
    assert findings(tmp_path) == []
    assert findings(tmp_path, as_if_run) == []


@pytest.mark.parametrize(("rule", "change", "says"), BREAKS, ids=[f"{rule}-{says[:20]}" for rule, _, says in BREAKS])
def test_a_rule_alone_finds_what_breaks_it(tmp_path, rule, change, says):
    (line,) = findings(tmp_path, change)
    assert line.endswith(f"[{rule}]")
    assert says in line
    assert line.startswith(str(tmp_path / "notebooks" / "01_loop.ipynb: "))


def test_every_rule_is_broken_by_some_notebook_above():
    assert {rule for rule, _, _ in BREAKS} == {rule.__name__ for rule in check_notebooks.RULES}


@pytest.mark.parametrize("marker", ["skip-execution", "nbval-skip", "raises-exception"])
def test_trap_4_a_tag_that_only_one_runner_honours_is_refused(tmp_path, marker):
    (line,) = findings(tmp_path, tag("body-0", marker))
    assert line.endswith("[tags]")
    assert "cell body-0: " in line


@pytest.mark.parametrize("comment", ["# NBVAL_SKIP", "#NBVAL_RAISES_EXCEPTION", "x = 1\n# NBVAL_IGNORE_OUTPUT"])
def test_trap_4_a_comment_that_steers_nbval_is_refused(tmp_path, comment):
    (line,) = findings(tmp_path, add(comment))
    assert line.endswith("[tags]")


def test_trap_8_a_notebook_without_a_kernelspec_is_found(tmp_path):
    (line,) = findings(tmp_path, lambda notebook: notebook.metadata.pop("kernelspec"))
    assert line.endswith("kernelspec is None, not 'python3' [kernelspec]")


def test_trap_10_the_bootstrap_cell_does_not_import_torch():
    lines = bootstrap.cell_source(bootstrap.repository()).splitlines()
    assert not [line for line in lines if line.lstrip().startswith(("import torch", "from torch"))]


@pytest.mark.parametrize("source", ["%%level B decode_rate\nx = await f()", "%%level C sync_time\n!ls\n%timeit f()"])
def test_a_well_formed_level_cell_is_clean(tmp_path, source):
    assert findings(tmp_path, add(source)) == []


@pytest.mark.parametrize(
    "text", ["see https://example.com/home/page", "~/work/x", "a/tmp/b", "</home>", "/homework", "and/or /workers"]
)
def test_what_only_looks_like_a_machine_path_is_clean(tmp_path, text):
    assert findings(tmp_path, add(f"# {text}")) == []


def test_a_path_in_the_bytes_of_a_picture_is_chance(tmp_path):
    assert findings(tmp_path, text_about("image/png", "A+/tmp/+A")) == []


@pytest.mark.parametrize(("card", "clean"), [("T4", False), ("A100", False), ("L4", True), ("H100", True)])
def test_field_case_b58_fp8_needs_capability_8_9(tmp_path, card, clean):
    assert (findings(tmp_path, hardware([card], ["fp8"])) == []) is clean


def test_the_command_line_says_what_it_found_and_exits_by_it(tmp_path, capsys):
    path = write(tmp_path, "01_loop", good("01_loop"))
    count = len(check_notebooks.RULES)
    assert check_notebooks.main([], path.parent) == 0
    assert capsys.readouterr().out == f"1 checked by {count} rules: 0 violations\n"
    (tmp_path / "bad.ipynb").write_text("{")
    assert check_notebooks.main([str(path), str(tmp_path / "bad.ipynb")]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first == f"{tmp_path}/bad.ipynb: not a notebook: not UTF-8 JSON"
    assert last == f"2 checked by {count} rules: 1 violations"


def test_an_empty_folder_is_wrong_use(tmp_path, capsys):
    assert check_notebooks.main([], tmp_path) == 2
    assert capsys.readouterr().err == f"check_notebooks: {tmp_path}: no notebook (*.ipynb) in this folder\n"


def test_a_notebook_without_code_is_one_line(tmp_path):
    notebook = good("01_loop")
    notebook.cells = notebook.cells[:1]
    path = write(tmp_path, "01_loop", notebook)
    assert check_notebooks.check(path) == [f"{path}: has no code cell"]
