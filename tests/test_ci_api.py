"""The API pages: every public name is on its module's page with its docstring, its source link holds, no network."""

import importlib
import inspect
import re

import pytest
from bs4 import BeautifulSoup
from test_house import BESIDE, FLOORS

from ci import bootstrap

api = pytest.importorskip("ci.api")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The parsed page of each module by its name; "" is the first page."""
    first = api.write(tmp_path_factory.mktemp("api"))
    found = {name: first.parent / "rlinfra_utils" / f"{name}.html" for name in api.MODULES}
    return {
        name: BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")
        for name, path in {"": first, **found}.items()
    }


def exported(name):
    """(name, object) of each class and function that a module shows and its own files define."""
    module = importlib.import_module(f"rlinfra_utils.{name}")
    for key, value in inspect.getmembers(module, lambda value: inspect.isclass(value) or inspect.isfunction(value)):
        if not key.startswith("_") and value.__module__.split(".")[:2] == ["rlinfra_utils", name]:
            yield key, value


def test_the_modules_are_those_of_the_floors_in_their_order():
    assert list(api.MODULES) == [name for floor in (1, 2, 3, 4) for name in FLOORS[floor]] + list(BESIDE)


def test_the_first_page_names_each_module_by_the_first_line_of_its_head(pages):
    rows = {row.text.strip(): row.find_next("dd").text.split() for row in pages[""].select(".modules dt")}
    heads = {name: importlib.import_module(f"rlinfra_utils.{name}").__doc__.split("\n")[0] for name in api.MODULES}
    assert rows == {name: head.replace("`", "").split() for name, head in heads.items()}


@pytest.mark.parametrize("name", api.MODULES)
def test_a_page_has_every_exported_class_and_function_with_its_docstring(pages, name):
    for key, value in exported(name):
        section = pages[name].find(id=key)
        assert section is not None, key
        words = re.findall(r"\w+", inspect.getdoc(value).split("\n")[0])
        assert re.findall(r"\w+", section.select_one(".docstring").text)[: len(words)] == words, key


@pytest.mark.parametrize("name", api.MODULES)
def test_a_source_link_leads_to_the_lines_that_define_the_name(pages, name):
    base = f"{bootstrap.repository()}/blob/main/"
    for key, value in exported(name):
        url = pages[name].find(id=key).select_one("a.source")["href"]
        path, first, last = re.fullmatch(re.escape(base) + r"(.+)#L(\d+)-L(\d+)", url).groups()
        text = "\n".join((api.ROOT / path).read_text().splitlines()[int(first) - 1 : int(last)])
        assert re.search(rf"^(class|def) {value.__name__}\b", text, re.MULTILINE), key


def test_a_page_loads_nothing_from_elsewhere(pages):
    for name, page in pages.items():
        loaded = [tag.get("src") or tag.get("href") for tag in page.select("script[src], link[href], img[src], iframe")]
        assert [url for url in loaded if not url.startswith(("data:", "../search.js", "search.js"))] == [], name
        assert "prefers-color-scheme" in page.find("style").find_parent().decode()


def test_links_between_pages_hold(pages):
    ids = {name: {tag["id"] for tag in page.select("[id]")} | {""} for name, page in pages.items()}
    for name, page in pages.items():
        for link in page.select("a[href]"):
            target, _, place = link["href"].partition("#")
            if target.startswith("https://") or target.endswith("index.html"):
                continue
            other = name if not target else target.removesuffix(".html").split("/")[-1].replace("rlinfra_utils", "")
            assert place in ids[other], (name, link)


def test_a_method_of_a_class_of_its_own_parts_is_on_the_page(pages):
    assert pages["engines"].find(id="VLLMServer.generate").select_one(".docstring").text.strip()
