"""The pages in docs say every option and metric, alike in all of them, and every link resolves."""

import ast
import json
import re
import unicodedata
from collections import Counter
from functools import cache

import pytest
from conftest import ROOT

SCRIPTS = sorted({path.stem for path in ROOT.glob("*.py")} - {"enjoy", "plot"})
# disco_meta.py imports disco.py and has the second half of its page. These functions of disco.py
# make metrics for both.
META_TRAINING = "## Meta-training\n"
IMPORTED = {"disco_meta": ("disco", ("learn", "disco_loss", "mean_losses"))}
COLUMNS = ("update", "seed", "env_steps")  # of every table, besides the metrics
METRIC = r"(episode|eval|loss|policy|value|optim|time|actor|meta)(/[a-z_*]*[a-z*]){1,2}"
# A metric means the same in every script, but for these.
OWN_METRICS = {
    "ppo_drift": {"loss/policy"},
    "ppo_vtrace": {"loss/policy", "loss/value"},
    "ppo_meta": {"episode/return", "eval/return"},
    "ippo": {
        *("episode/return", "episode/length", "eval/return", "eval/length"),
        *("optim/grad_norm", "optim/lr"),
    },
    "ippo_rnn": {
        *("episode/return", "episode/length", "eval/return", "eval/length"),
        *("optim/grad_norm", "optim/lr"),
    },
    "mappo": {
        *("episode/return", "episode/length", "eval/return", "eval/length"),
        *("loss/value", "optim/grad_norm", "optim/lr"),
    },
    "disco": {
        *("loss/policy", "loss/value", "value/explained_variance"),
        *("optim/grad_norm", "optim/lr"),
    },
    "disco_meta": {
        *("update", "seed", "env_steps", "episode/return", "time/sps"),
        *("loss/policy", "loss/value", "value/explained_variance", "optim/grad_norm"),
    },
}
IGNORED = ("runs", "build", "site-packages")  # folders; so are those that start with a dot
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part in IGNORED for part in path.relative_to(ROOT).parts)
)
DOCUMENTS = [page for page in PAGES if page == "README.md" or page.startswith("docs/")]


@cache
def read(path):
    return (ROOT / path).read_text()


def page_of(script):
    """The part of a page in docs that is about the script."""
    if not script.startswith("disco"):
        return read(f"docs/{script}.md")
    disco, disco_meta = read("docs/disco.md").split(META_TRAINING)
    return disco if script == "disco" else disco_meta


def rows(text, header):
    """The cells of all rows of all tables with this header."""
    found, is_inside = [], False
    for line in text.splitlines():
        is_inside = line.startswith("|") and (is_inside or line == header)
        if is_inside and line != header and not line.startswith("|---"):
            found.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return found


def options_of(script):
    """[option, default, meaning] of each row."""
    return rows(page_of(script), "| option | default | meaning |")


def metrics_of(script):
    """[column, meaning] of each row."""
    table = rows(page_of(script), "| column | meaning |")
    return [(column.strip("`"), meaning) for column, meaning in table]


@cache
def fields(script):
    """option -> its type, default and help, of all three groups."""
    text = read(f"{script}.py")
    lines = text.splitlines()
    body = ast.parse(text).body
    groups = "Environment", "Algorithm", "Run"
    nodes = [x for n in body if getattr(n, "name", None) in groups for x in n.body]
    return {
        f"`--{node.target.id.replace('_', '-')}`": (
            ast.unparse(node.annotation),
            ast.literal_eval(node.value),
            lines[node.lineno - 1].split("  # ")[1],
        )
        for node in nodes
        if isinstance(node, ast.AnnAssign)
    }


def written(default):
    """A cell of a table as the value that it stands for."""
    words = {"on": True, "off": False, "none": ""}
    if default in words:
        return words[default]
    return default.strip("`") if default.startswith("`") else float(default)


def names_in(tree):
    """The metrics among the strings of some code; what an f-string fills in is a star."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [x.value if isinstance(x, ast.Constant) else "*" for x in node.values]
            names.add("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return {name for name in names if re.fullmatch(METRIC, name)}


@cache
def metrics_written(script):
    names = names_in(ast.parse(read(f"{script}.py")))
    module, functions = IMPORTED.get(script, (script, ()))
    for node in ast.parse(read(f"{module}.py")).body:
        if isinstance(node, ast.FunctionDef) and node.name in functions:
            names |= names_in(node)
    return names


# ------------------------------------- script pages
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_page_has_every_option_with_its_default_in_the_order_of_the_script(script):
    table = options_of(script)
    assert [option for option, _, _ in table] == list(fields(script))
    for option, default, meaning in table:
        _, value, _ = fields(script)[option]
        kind = type(value[0]) if isinstance(value, tuple) else None
        if kind:  # a list of words
            shown = tuple(map(kind, default.strip("`").split()))
        else:
            shown = written(default)
        assert shown == value and isinstance(shown, bool) == isinstance(value, bool), option
        assert meaning


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_page_has_every_metric_once_and_no_other(script):
    columns = [re.sub("<.*?>", "*", column) for column, _ in metrics_of(script)]
    own = ["env_id"] if script == "disco_meta" else []
    assert Counter(columns) == Counter((*COLUMNS, *own, *metrics_written(script)))
    assert all(meaning for _, meaning in metrics_of(script))


def test_an_option_with_the_same_help_has_the_same_row_in_all_pages():
    """Only the default may differ."""
    seen = {}
    for script in SCRIPTS:
        for option, default, meaning in options_of(script):
            kind, value, text = fields(script)[option]
            assert seen.setdefault((option, kind, text), meaning) == meaning, (script, option)
            assert seen.setdefault((option, kind, text, value), default) == default, script


def test_a_metric_with_the_same_meaning_has_the_same_row_in_all_pages():
    seen = {}
    for script in SCRIPTS:
        own = OWN_METRICS.get(script, set())
        table = dict(metrics_of(script))
        assert own <= set(table)
        for column, meaning in table.items():
            if column not in own:
                assert seen.setdefault(column, meaning) == meaning, (script, column)
    for script, own in OWN_METRICS.items():  # the exceptions are exceptions
        table = dict(metrics_of(script))
        assert [column for column in own if table[column] == seen.get(column)] == []


@pytest.mark.parametrize("page", sorted({f"docs/{s}.md" for s in SCRIPTS} - {"docs/disco_meta.md"}))
def test_no_page_is_defined_by_another(page):
    text = " ".join(read(page).split())
    of_another = r"(options|columns|metrics|deviations|those) (are those )?of \[`\w+\.py`"
    assert not re.search(rf"\b{of_another}|with these differences|lists the rest", text, re.I)


# ----------------------------------- links and words
def prose(text):
    """Without code, in which nothing is a link or a heading."""
    return re.sub(r"`[^`\n]*`", "``", re.sub(r"^```[\s\S]*?^```", "", text, flags=re.M))


def slug(heading):
    """The anchor that GitHub makes of a heading."""
    heading = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    kept = (c for c in heading if c in "-_ " or unicodedata.category(c)[0] in "LNM")
    return "".join(kept).strip().replace(" ", "-")


@cache
def anchors(page):
    text = re.sub(r"^```[\s\S]*?^```", "", read(page), flags=re.M)
    found, seen = set(), Counter()
    for heading in re.findall(r"^#{1,6} +(.*?) *#*$", text, re.M):
        name = slug(heading)
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found | set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))


def broken(page, text):
    """The links of a text in the file `page` that lead nowhere in this repository."""
    text = prose(text)
    links = re.findall(r"\]\(<?([^)\s>]+)", text) + re.findall(r"(?:src|href)=\"([^\"]+)\"", text)
    links += re.findall(r"^\[[^]]+\]: (\S+)", text, re.M)
    wrong = []
    for link in links:
        if re.match(r"[a-z]+:", link):  # another site
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists():
            wrong.append(link)
        elif anchor:
            target = target.resolve().relative_to(ROOT.resolve()).as_posix()
            if not target.endswith(".md") or anchor not in anchors(target):
                wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    assert broken(page, read(page)) == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("notebooks/*.ipynb")), ids=lambda path: path.stem)
def test_every_link_of_a_notebook_leads_somewhere(path):
    cells = json.loads(path.read_text())["cells"]
    text = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    assert broken(path.relative_to(ROOT).as_posix(), text) == []


def test_the_index_leads_to_every_page():
    links = re.findall(r"\]\(([^)#\s]+)", read("docs/README.md"))
    linked = {(ROOT / "docs" / link).resolve() for link in links}
    pages = {*ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")}
    assert {page.resolve() for page in pages} - linked == {(ROOT / "docs/README.md").resolve()}


@pytest.mark.parametrize("page", DOCUMENTS)
def test_tables_have_as_many_cells_as_their_header(page):
    width = 0
    for number, line in enumerate(read(page).splitlines(), 1):
        cells = len(re.split(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert not (width and cells) or cells == width, f"line {number}"
        width = cells


JARGON = r"\b(anew|beside|crash-only)\b"
BRITISH = (
    r"\b\w*(behaviour|colour|favour|neighbour|modell(ed|ing)|travell(ed|ing)|centre\b|licence\b"
    r"|(normal|initial|optim|organ|general|visual|parallel|real|priorit|maxim|minim|summar|util)"
    r"is(e|es|ed|ing|ation)\b)"
)
MISSPELLED = r"\b(teh|recieve|occured|seperate|accross|untill|wich|succesful|paramter|enviroment)"


@pytest.mark.parametrize("page", DOCUMENTS)
@pytest.mark.parametrize("words", [JARGON, BRITISH, MISSPELLED], ids=["jargon", "us", "spelling"])
def test_words_that_the_documents_avoid(page, words):
    assert [m[0] for m in re.finditer(words, prose(read(page)), re.I)] == []


@pytest.mark.parametrize("page", DOCUMENTS)
def test_no_word_stands_twice_in_a_row(page):
    text = re.sub(r"^\|.*$", "", prose(read(page)), flags=re.M)
    assert [m[0] for m in re.finditer(r"\b([a-z]+)[ \n]+\1\b", text)] == []
