"""The conformance suite: it is what its generator makes, it covers the standard, and ckptspec passes all of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema_rs
import pytest

from ckptspec.cli.main import main
from ckptspec.format import lexical, schemas

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import answer
import conform
import make_fixtures
from fixtures import cases as case_files
from fixtures import suite

ROOT = Path(__file__).resolve().parents[1]
CASES = conform.load(conform.HOME)
BY_ID = {case["id"]: case for _, case in CASES}
VALIDATE = [(folder, case) for folder, case in CASES if case["action"] == "validate"]
README = (conform.HOME.parent / "README.md").read_text(encoding="utf-8")

# Rules of documents that no file can break, with the reason; README.md says the same.
IMPOSSIBLE = {"B-READ": "a file cannot hold a disk that fails"}


def fired(case: dict[str, Any]) -> list[str]:
    """Return the codes a case expects, whatever their severity."""
    expected = case.get("expected", {})
    return [*expected.get("codes", ()), *expected.get("infos", ())]


def document_rules() -> list[str]:
    """Return the rules that a file can break."""
    return [id for id, rule in schemas.rules().items() if rule.subject == "document" and id not in IMPOSSIBLE]


# What the suite is


def test_the_suite_on_disk_is_what_the_generator_makes() -> None:
    assert make_fixtures.differences(suite.files(), make_fixtures.on_disk(conform.HOME)) == []


def test_a_difference_on_disk_is_named() -> None:
    found = {"a": b"1", "b": b"2", "c": b"3"}
    assert make_fixtures.differences(found, found) == []
    lines = make_fixtures.differences({"a": b"1", "b": b"", "d": b""}, found)
    assert lines == ["b: differs", "c: not of the suite", "d: missing"]


def test_writing_makes_a_folder_hold_the_suite_and_nothing_else(tmp_path: Path) -> None:
    make_fixtures.write(tmp_path, {"a/b": b"1", "c": b"2"})
    make_fixtures.write(tmp_path, {"a/d": b"3", "e/f/g": b""})
    assert make_fixtures.on_disk(tmp_path) == {"a/d": b"3", "e/f/g": b""}
    make_fixtures.write(tmp_path, {"c": b""})
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_two_cases_of_one_id_are_refused() -> None:
    case = case_files.Case("x", "", (), {})
    with pytest.raises(ValueError, match="two cases are called x"):
        case_files.trees([case, case])


def test_the_suite_is_small_enough_to_copy() -> None:
    files = make_fixtures.on_disk(conform.HOME)
    assert sum(map(len, files.values())) < 4_000_000
    assert max(map(len, files.values())) < 300_000


@pytest.mark.parametrize("rule", document_rules())
def test_every_rule_about_documents_has_a_case_that_keeps_it_and_one_named_for_it_that_breaks_it(rule: str) -> None:
    keep = [case["id"] for case in BY_ID.values() if rule in case["rules"] and rule not in fired(case)]
    broken = [id for id, case in BY_ID.items() if fired(case) == [rule] and re.search(rf"/{rule}-[a-z0-9]", id)]
    assert keep
    assert broken


def test_what_no_file_can_break_is_said_with_its_reason() -> None:
    for rule, reason in IMPOSSIBLE.items():
        assert schemas.rules()[rule].subject == "document"
        assert re.search(rf"`{rule}`[^\n]*\n?[^\n]*{reason}", README)
        assert not [id for id, case in BY_ID.items() if rule in fired(case)]


@pytest.mark.parametrize("id", BY_ID)
def test_a_case_is_named_for_what_it_is(id: str) -> None:
    case = BY_ID[id]
    part, name = id.split("/")[-2:] if "/" in id else ("", id)
    assert set(case["rules"]) <= schemas.rules().keys()
    assert set(fired(case)) <= schemas.rules().keys()
    if part == "invalid" or (part in ("corrupt", "mismatch") or (fired(case) and part == "lexical")):
        assert fired(case) == case["rules"][:1], "one mutation, one rule"
        assert name.startswith(fired(case)[0] + "-")
    if part in ("valid", "complete"):
        assert case.get("expected", {}).get("exit_code", 0) == 0
    if "base" in case:
        base = BY_ID[case["base"]]
        assert base["expected"]["codes"] == []
    for key in [*case, *case.get("expected", {})]:
        assert f"`{key}`" in README


def test_two_libraries_agree_on_what_the_schemas_refuse() -> None:
    for name in ("manifest", "target", "signature", "report", "plan"):
        schema = schemas.load(name)
        one, other = jsonschema.Draft202012Validator(schema), jsonschema_rs.Draft202012Validator(schema)
        seen = 0
        for path in filter(Path.is_file, conform.HOME.rglob(f"{name}.json")):
            document = json_of(path)
            if document is None:
                continue
            seen += 1
            if path.parent.name.endswith("-line-feed"):  # in Python `$` is before a last line feed, too
                assert not other.is_valid(document)
            else:
                assert one.is_valid(document) is other.is_valid(document), path
        assert seen >= 4


def json_of(path: Path) -> Any:
    """Return the document in a file, or None where the file breaks a lexical rule."""
    document, findings = lexical.scan(path.read_bytes(), sealed=path.name == "manifest.json")
    return None if findings else document


# What ckptspec says of it


@pytest.mark.parametrize(("folder", "case"), VALIDATE, ids=[case["id"] for _, case in VALIDATE])
def test_ckptspec_finds_what_a_case_expects(
    folder: Path, case: dict[str, Any], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    exit_code = main(conform.command_line(folder, case))
    report = json.loads(capfdbinary.readouterr().out)
    assert conform.judge(case["expected"], exit_code, report) == []
    assert list(schemas.check("report", report)) == []


QUESTIONS = [q for folder, case in CASES for q in conform.questions(folder, case)]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q.id)
def test_ckptspec_answers_what_validate_cannot_show(question: conform.Question) -> None:
    found = answer.ABOUT[question.ask["ask"]](question.ask)
    assert conform.compare(question, found).problems == ()


# The runner


def run(command: str, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Run conform.py as others would, without any package, and return its exit code and results."""
    line = [sys.executable, "-I", "-S", str(ROOT / "tools" / "conform.py"), "--cmd", command, "--json", *arguments]
    done = subprocess.run(line, capture_output=True, timeout=120)
    return done.returncode, json.loads(done.stdout) if done.stdout else []


def python(script: Path, text: str) -> str:
    """Return the command of a new script."""
    script.write_text(text)
    return f"{sys.executable} -I -S {script}"


def test_the_runner_needs_no_package_and_ckptspec_passes() -> None:
    code, results = run(f"{sys.executable} {ROOT / 'tools' / 'answer.py'}", "--filter", "complete/mesh-b")
    assert code == 0
    assert [(r["id"], r["result"]) for r in results] == [
        ("checkpoint/complete/mesh-blocks", "pass"),
        ("checkpoint/complete/mesh-blocks (values)", "pass"),
    ]


def test_a_command_that_offers_no_answers_is_not_blamed_for_it() -> None:
    code, results = run(f"{sys.executable} -m ckptspec", "--filter", "documents/valid/plan-none")
    assert (code, [r["result"] for r in results]) == (0, ["not offered"])


def test_an_implementation_that_finds_nothing_fails(tmp_path: Path) -> None:
    text = 'print(\'{"outcome": "ok", "findings": [], "step": null}\')'
    code, results = run(python(tmp_path / "lazy.py", text), "--filter", "torn/S-MISSING-all")
    assert code == 1
    (result,) = results
    assert (result["result"], result["expected"], result["found"]) == ("FAIL", "1 S-MISSING", "0")
    assert len(result["problems"]) == 3


def test_an_implementation_that_writes_no_report_or_never_ends_fails(tmp_path: Path) -> None:
    quiet = python(tmp_path / "quiet.py", "import sys; sys.exit('out of order')")
    code, results = run(quiet, "--filter", "torn/S-MISSING-all")
    assert (code, results[0]["problems"]) == (1, ["no report in JSON: out of order"])
    slow = python(tmp_path / "slow.py", "import time; time.sleep(60)")
    code, results = run(slow, "--filter", "torn/S-MISSING-all", "--timeout", "0.2")
    assert (code, results[0]["problems"]) == (1, ["no end within 0.2 seconds"])


def test_wrong_answers_and_missing_ones_fail(tmp_path: Path) -> None:
    text = 'import sys\nfor i, line in zip(range(2), sys.stdin): print(\'{"codes": ["X-PLAN"]}\')'
    code, results = run(python(tmp_path / "wrong.py", text), "--filter", "documents/valid/")
    assert code == 1
    assert {r["result"] for r in results} == {"FAIL"}
    assert [r["problems"] == ["no answer in JSON"] for r in results] == [False] * 2 + [True] * (len(results) - 2)


def test_a_filter_that_fits_no_case_is_no_success() -> None:
    assert run("true", "--filter", "nothing like it") == (2, [])


def test_the_table_has_a_line_for_each_check_and_a_sum(capsys: pytest.CaptureFixture[str]) -> None:
    results = [conform.Result("a", "1 S-X", "0", conform.FAIL, ("why",)), conform.Result("b", "0", "0", conform.PASS)]
    assert list(conform.table(results)) == results
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["FAIL", "a", "1", "S-X", "0"], ["why"], ["pass", "b", "0", "0"]]


@pytest.mark.parametrize(
    ("where", "good"),
    [
        ({"file": "a", "tensor": "t", "range": [64, 128]}, True),
        ({"file": "a", "tensor": "t", "range": [0, 101]}, True),
        ({"file": "a", "tensor": "t", "range": [0, 100]}, False),
        ({"file": "a", "tensor": "t", "range": None}, False),
        ({"file": "a", "tensor": None, "range": [64, 128]}, False),
        ({"file": "b", "tensor": "t", "range": [64, 128]}, False),
    ],
)
def test_a_finding_must_be_where_the_case_says(where: dict[str, Any], good: bool) -> None:
    finding = {"code": "B-DIGEST", "severity": "error", "where": where}
    report = {"outcome": "error", "step": 7, "findings": [finding]}
    expected = {"codes": ["B-DIGEST"], "where": {"file": "a", "tensor": "t", "byte": 100}}
    assert (conform.judge(expected, 1, report) == []) is good
