"""Runs the conformance suite against any implementation: conform.py --cmd "<command>". Needs nothing but Python.

The command is called as `<command> validate INPUT --format json ARGS...` for each case. What `validate` cannot show
(values, vectors, documents) is asked of `<command> answer`, which an implementation may offer; README.md beside the
suite says how. Exit code: 0 all cases pass, 1 one fails, 2 there is nothing to run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parents[1] / "tests" / "conformance" / "v1"
PASS, FAIL, SKIP = "pass", "FAIL", "not offered"
Json = Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """How one case, or one question about it, ended."""

    id: str
    expected: str
    found: str
    result: str
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Question:
    """Something asked of `<command> answer`, and the members its answer must have."""

    id: str
    ask: Json
    expected: Json


def load(folder: Path, text: str = "") -> list[tuple[Path, dict[str, Any]]]:
    """Return the folder and case.json of every case whose id holds `text`, sorted by id."""
    cases = ((path.parent, json.loads(path.read_bytes())) for path in folder.rglob("case.json"))
    return sorted((c for c in cases if text in c[1]["id"]), key=lambda c: c[1]["id"])


def command_line(folder: Path, case: Json) -> list[str]:
    """Return the arguments of `validate` for a case: `{case}` in an argument is the folder of the case."""
    args = [arg.replace("{case}", str(folder)) for arg in case["args"]]
    return ["validate", str(folder / case["input"]), "--format", "json", *args]


def codes(report: Json, *severities: str) -> list[str]:
    """Return the sorted codes of the findings of these severities."""
    return sorted({f["code"] for f in report["findings"] if f["severity"] in severities})


def judge(expected: Json, exit_code: int, report: Json) -> list[str]:
    """Return in words where an exit code and a report are not what a case expects; nothing where they are."""
    found = {
        "exit_code": exit_code,
        "outcome": report["outcome"],
        "codes": codes(report, "error", "warning"),
        "infos": codes(report, "info"),
        "step": report["step"],
    }
    if "decision" in expected:
        found["decision"] = report.get("decision")
    if "renamed" in expected:
        found["renamed"] = (report.get("names") or {}).get("renamed")
    problems = [
        f"{k}: expected {expected[k]}, found {v}" for k, v in found.items() if k in expected and expected[k] != v
    ]
    problems += counsel(expected, report)
    place = expected.get("where")
    if place and not any(_at(f["where"], place) for f in report["findings"]):
        problems.append(f"no finding is at {json.dumps(place)}")
    return problems


def counsel(expected: Json, report: Json) -> Iterator[str]:
    """Yield in words which verdicts, lost ranges and advice of a case a report does not have."""
    said, advised = report.get("verdicts", []), report.get("advice", [])
    verdicts = {v["part"]: v["verdict"] for v in said}
    for part, verdict in expected.get("verdicts", {}).items():
        if verdicts.get(part) != verdict:
            yield f"verdict on {part!r}: expected {verdict}, found {verdicts.get(part)}"
    gone = [r for v in said for r in v.get("gone", ())]
    for lost in expected.get("gone", ()):
        if lost not in gone:
            yield f"not said to be gone: {json.dumps(lost)}"
    at = 0
    for advice in expected.get("advice", ()):
        rest = [a for a in advised[at:] if a["id"] == advice["id"]]
        if not rest:
            yield f"no advice {advice['id']!r}, or not in this order"
            continue
        at = advised.index(rest[0]) + 1
        for key, value in advice["params"].items():
            if rest[0]["params"].get(key) != value:
                yield f"advice {advice['id']!r}, {key}: expected {value}, found {rest[0]['params'].get(key)}"


def _at(where: Json, place: Json) -> bool:
    """Tell whether a finding is at the place a case expects; `byte` must lie in its range of bytes."""
    extent = where.get("range")
    for key, value in place.items():
        if key == "byte":
            if not extent or not extent[0] <= value < extent[1]:
                return False
        elif where.get(key) != value:
            return False
    return True


def run(command: Sequence[str], folder: Path, case: Json, timeout: float) -> Result:
    """Run one case of action `validate`."""
    expected = case["expected"]
    wanted = " ".join([str(expected["exit_code"]), *expected["codes"]])
    try:
        done = subprocess.run([*command, *command_line(folder, case)], capture_output=True, timeout=timeout)
        report = json.loads(done.stdout)
        found = " ".join([str(done.returncode), *codes(report, "error", "warning")])
        problems = judge(expected, done.returncode, report)
    except subprocess.TimeoutExpired:
        return Result(case["id"], wanted, "", FAIL, (f"no end within {timeout:g} seconds",))
    except (ValueError, KeyError, TypeError):
        words = done.stderr.decode(errors="replace").strip().splitlines()
        said = words[-1] if words else done.stdout.decode(errors="replace")[:80]
        return Result(case["id"], wanted, str(done.returncode), FAIL, (f"no report in JSON: {said}",))
    return Result(case["id"], wanted, found, FAIL if problems else PASS, tuple(problems))


def questions(folder: Path, case: Json) -> Iterator[Question]:
    """Yield what `validate` cannot show of a case."""
    name, action, path = case["id"], case["action"], folder / case["input"]
    if action == "document":
        yield Question(name, {"ask": "document", "schema": case["args"][0], "file": str(path)}, case["expected"])
    elif action == "objects":
        vectors = json.loads(path.read_bytes())
        for v in vectors["valid"]:
            yield Question(f"{name}/{v['id']}", {"ask": "object", "hex": v["hex"]}, {"hex": v["hex"]})
        for v in vectors["invalid"]:
            yield Question(f"{name}/{v['id']}", {"ask": "object", "hex": v["hex"]}, {"refused": v["rule"]})
    elif action == "reshard":
        target = str(folder / case["args"][0])
        yield Question(name, {"ask": "reshard", "path": str(path), "target": target}, case["expected"])
    elif action == "placement":
        for v in json.loads(path.read_bytes())["vectors"]:
            wanted = {key: v.pop(key) for key in ("held", "stored")}
            yield Question(f"{name}/{v['id']}", {"ask": "placement", **v}, wanted)
    elif "tensors" in case["expected"]:
        yield Question(
            f"{name} (values)", {"ask": "tensors", "path": str(path)}, {"tensors": case["expected"]["tensors"]}
        )


def compare(question: Question, answer: Json | None) -> Result:
    """Return how an answer, or none, compares with what is expected of it."""
    wanted = ", ".join(question.expected)
    if answer is None or answer.get("unsupported"):
        return Result(question.id, wanted, "", SKIP)
    problems = []
    for key, value in question.expected.items():
        found = answer.get(key)
        if key == "tensors" and isinstance(found, dict):  # null: a dtype that the reader has no type for
            value = {n: t for n, t in value.items() if n not in found or found[n] is not None}
            found = {n: t for n, t in found.items() if t is not None}
        if found != value:
            problems.append(f"{key}: expected {_short(value)}, found {_short(found)}")
    return Result(question.id, wanted, ", ".join(answer), FAIL if problems else PASS, tuple(problems))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:197] + "..."


def ask(command: Sequence[str], asked: Sequence[Question], timeout: float) -> Iterator[Result]:
    """Put all questions to one process of `<command> answer`, a line each; without it they are not offered."""
    lines = "".join(json.dumps(q.ask) + "\n" for q in asked)
    try:
        done = subprocess.run([*command, "answer"], input=lines.encode(), capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        yield from (Result(q.id, "", "", FAIL, (f"no end within {timeout:g} seconds",)) for q in asked)
        return
    answers = done.stdout.decode(errors="replace").splitlines()
    if done.returncode and not answers:
        yield from (compare(q, None) for q in asked)
        return
    for i, q in enumerate(asked):
        try:
            yield compare(q, json.loads(answers[i]))
        except (IndexError, ValueError, AttributeError):
            yield Result(q.id, "", "", FAIL, ("no answer in JSON",))


def run_all(command: Sequence[str], cases: Iterable[tuple[Path, Json]], jobs: int, timeout: float) -> Iterator[Result]:
    """Yield the results of all cases in order, then those of the questions."""
    cases = list(cases)
    plain = [(folder, case) for folder, case in cases if case["action"] == "validate"]
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda c: run(command, c[0], c[1], timeout), plain)
    asked = [q for folder, case in cases for q in questions(folder, case)]
    if asked:
        yield from ask(command, asked, 10 * timeout)


def table(results: Iterable[Result]) -> Iterator[Result]:
    """Print a line for each result as it comes, with its problems below it, and pass it on."""
    for r in results:
        print(f"{r.result:<12}{r.id:<60} {r.expected:<24} {r.found}".rstrip(), flush=True)
        for problem in r.problems:
            print(f"{'':<12}{problem}")
        yield r


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cmd", required=True, help="the command, as in a shell: 'ckptspec', 'python -m mine'")
    parser.add_argument("--dir", type=Path, default=HOME, help="the suite (default: %(default)s)")
    parser.add_argument("--filter", default="", metavar="TEXT", help="only cases whose id holds this text")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="cases at a time (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=60, metavar="S", help="seconds a case (default: %(default)s)")
    options = parser.parse_args(arguments)
    cases = load(options.dir, options.filter)
    if not cases:
        print(f"no case in {options.dir} has {options.filter!r} in its id", file=sys.stderr)
        return 2
    results = run_all(shlex.split(options.cmd), cases, options.jobs, options.timeout)
    done = list(results if options.json else table(results))
    if options.json:
        print(json.dumps([asdict(r) for r in done], indent=1))
    else:
        counts = ", ".join(f"{sum(r.result == kind for r in done)} {kind}" for kind in (PASS, FAIL, SKIP))
        print(f"{len(cases)} cases, {len(done)} checks: {counts}")
    return 1 if any(r.result == FAIL for r in done) else 0


if __name__ == "__main__":
    sys.exit(main())
