"""The validator finds every damage a folder can have, names the file and the rule, and never raises for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make import builder

from ckptspec import errors
from ckptspec.engine.documents import load_manifest, open_shard
from ckptspec.engine.verify import CHOICES, validate
from ckptspec.format import manifest as manifests
from ckptspec.format import schemas, shard
from ckptspec.format.report import Report
from ckptspec.format.target import Target

FILES = make.files(3)
SHARDS = ("rank-00000.shard", "rank-00001.shard", "rank-00002.shard")
OTHER_ID = "f" * 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A fresh sample checkpoint of three ranks in a run of its own."""
    return make.write(tmp_path / "run" / "step-00000007", FILES)


def errors_of(report: Report) -> set[str]:
    """Return the rule ids of the error findings, after the report was held to its schema."""
    assert list(schemas.check("report", report.document())) == []
    return {f.code for f in report.findings if f.severity == "error"}


def files_of(report: Report) -> set[str | None]:
    """Return the files that the error findings name."""
    return {f.where.file for f in report.findings if f.severity == "error"}


def test_a_sound_checkpoint_is_ok_at_every_level(folder: Path) -> None:
    for level in CHOICES:
        report = validate(folder, level=level)
        assert (errors_of(report), report.level, report.decision, report.exit_code) == (set(), level, "load", 0)
        assert report.findings == ()
    assert report.step == 7
    assert report.save_id == builder.SAVE_ID


def test_at_level_bytes_every_byte_of_every_file_is_verified(folder: Path) -> None:
    report = validate(folder, level="bytes")
    assert report.bytes_total == sum(f.stat().st_size for f in folder.iterdir())
    assert report.bytes_hashed == report.bytes_total
    less = validate(folder, level="shards")
    assert 0 < less.bytes_hashed < less.bytes_total


def test_the_manifest_itself_may_be_given_as_the_path(folder: Path) -> None:
    assert validate(folder / "manifest.json").findings == ()


def test_a_level_that_is_not_one_is_refused() -> None:
    with pytest.raises(ValueError, match="level is one of"):
        validate("anything", level="deep")


# Partial write


@pytest.mark.parametrize("keep", ["0", "1", "7", "8", "half", "n-1"])
@pytest.mark.parametrize("name", SHARDS)
def test_a_cut_shard_is_a_partial_write_with_both_sizes(folder: Path, name: str, keep: str) -> None:
    n = len(FILES[name])
    size = {"half": n // 2, "n-1": n - 1}.get(keep) or int(keep if keep.isdigit() else 0)
    os.truncate(folder / name, size)
    report = validate(folder)
    assert (errors_of(report), files_of(report)) == ({"S-NBYTES"}, {name})
    (found,) = report.findings
    assert (found.expected, found.found) == (f"{n} bytes", f"{size} bytes")
    assert "intact elsewhere" in found.message
    assert {v.verdict for v in report.verdicts} == {"lost", "lossless"}
    assert any(a.id == "restore" for a in report.advice)


def test_a_shard_whose_trailer_alone_is_cut_is_said_to_have_all_its_payload(folder: Path) -> None:
    os.truncate(folder / SHARDS[1], len(FILES[SHARDS[1]]) - 1)
    assert "only the trailer is cut" in validate(folder).findings[0].message


def test_an_appended_byte_can_be_cut_off_again(folder: Path) -> None:
    (folder / SHARDS[1]).write_bytes(FILES[SHARDS[1]] + b"\0")
    report = validate(folder)
    assert errors_of(report) == {"S-NBYTES"}
    assert report.decision == "repair"
    assert report.advice[0].argv == ("truncate", "-s", str(len(FILES[SHARDS[1]])), str(folder / SHARDS[1]))
    assert subprocess.run(report.advice[0].argv, timeout=60).returncode == 0
    assert validate(folder, level="bytes").findings == ()


def test_a_shard_of_the_right_size_that_was_never_written_is_found(folder: Path) -> None:
    (folder / SHARDS[0]).write_bytes(bytes(len(FILES[SHARDS[0]])))
    assert errors_of(validate(folder)) == {"S-TRAILER"}


# Bits


def flipped(data: bytes, bit: int) -> bytes:
    """Return the bytes with one bit turned."""
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


@pytest.mark.parametrize("name", ["manifest.json", SHARDS[1]])
def test_any_flipped_bit_is_found_at_level_bytes_and_its_file_named(folder: Path, name: str) -> None:
    data = FILES[name]
    for bit in range(0, len(data) * 8, 19):
        (folder / name).write_bytes(flipped(data, bit))
        report = validate(folder, level="bytes")
        assert files_of(report) == {name}, bit


def parts_of(name: str) -> tuple[shard.Header, shard.Index, shard.Trailer]:
    """Return what a shard of the sample says of itself."""
    document = builder.catalog(FILES).shards[SHARDS.index(name)]
    data = FILES[name]
    return document.header, document.index, shard.decode_trailer(data[-64:], len(data))


@pytest.mark.parametrize("name", SHARDS)
def test_a_flipped_bit_outside_the_payload_is_found_at_level_shards(folder: Path, name: str) -> None:
    _, index, trailer = parts_of(name)
    places = {
        "S-HEADER": range(index.header_nbytes),
        "S-STATE": range(index.state.start, index.state.stop),
        "S-INDEX": range(trailer.index_offset, trailer.index_offset + trailer.index_nbytes),
        "S-TRAILER": range(len(FILES[name]) - 64, len(FILES[name])),
    }
    for rule, extent in places.items():
        for i in range(extent.start, extent.stop, 3):
            (folder / name).write_bytes(flipped(FILES[name], i * 8 + i % 8))
            report = validate(folder)
            assert (errors_of(report), files_of(report)) == ({rule}, {name}), i


def test_a_damaged_payload_is_named_by_tensor_rank_and_byte_range(folder: Path) -> None:
    _, index, _ = parts_of(SHARDS[1])
    for chunk in index.chunks:
        (folder / SHARDS[1]).write_bytes(flipped(FILES[SHARDS[1]], (chunk.start + chunk.nbytes // 2) * 8))
        assert errors_of(validate(folder, level="shards")) == set()
        report = validate(folder, level="bytes")
        (found,) = report.findings
        assert found.code == "B-DIGEST"
        assert (found.where.tensor, found.where.rank) == (index.names[chunk.tensor], 1)
        assert found.where.range == (chunk.start, chunk.start + chunk.nbytes)


def test_bytes_between_payloads_are_checked_too(folder: Path) -> None:
    _, index, _ = parts_of(SHARDS[2])
    (folder / SHARDS[2]).write_bytes(flipped(FILES[SHARDS[2]], index.header_nbytes * 8))
    assert errors_of(validate(folder, level="bytes")) == {"S-FRAME"}


def test_only_the_damaged_blocks_of_a_large_chunk_are_named(tmp_path: Path) -> None:
    plan = builder.sample(1, tensors={"w": builder.TensorEntry("uint8", (50_000,), "replicated")},
                          objects={}, aliases={}, flat_groups={})  # fmt: skip
    files = builder.build(plan)
    start = builder.catalog(files).shards[0].index.chunks[0].start
    data = bytearray(files[SHARDS[0]])
    for block in (2, 3, 9):
        data[start + block * 4096 + 17] ^= 4
    folder = make.write(tmp_path / "c", {**files, SHARDS[0]: bytes(data)})
    found = validate(folder, level="bytes").findings
    assert [f.where.range for f in found] == [
        (start + 2 * 4096, start + 4 * 4096),
        (start + 9 * 4096, start + 10 * 4096),
    ]


@settings(max_examples=60)
@given(st.data())
def test_arbitrary_damage_never_raises_and_never_passes(tmp_path_factory: Any, data: Any) -> None:
    folder = make.write(tmp_path_factory.mktemp("c") / "step-00000007", FILES)
    name = data.draw(st.sampled_from(sorted(FILES)))
    old = FILES[name]
    at = data.draw(st.integers(0, len(old) - 1))
    junk = data.draw(st.binary(max_size=80))
    new = old[:at] + junk + old[at + data.draw(st.sampled_from([0, len(junk), 200])) :]
    (folder / name).write_bytes(new)
    report = validate(folder, level="bytes")
    assert bool(errors_of(report)) == (new != old)


# Shards that are not where they belong


@pytest.mark.parametrize("name", SHARDS)
def test_a_missing_shard_is_named_with_what_is_gone(folder: Path, name: str) -> None:
    (folder / name).unlink()
    report = validate(folder)
    assert (errors_of(report), files_of(report)) == ({"S-MISSING"}, {name})
    assert any(v.verdict == "lost" and "optimizer/master" in v.part for v in report.verdicts)


def test_nothing_but_private_state_is_lost_with_one_shard_where_two_copies_are_kept(tmp_path: Path) -> None:
    folder = make.checkpoint(tmp_path / "c", 3, copies=2)
    (folder / SHARDS[1]).unlink()
    report = validate(folder)
    lost = [v.part for v in report.verdicts if v.verdict == "lost"]
    # Only the split and flat tensors have one holder; what is replicated has its second copy elsewhere.
    assert sorted(lost) == ["state private to a rank", "tensor model/embed", "tensor optimizer/master"]
    assert "4 bytes of what cannot be read have another copy" in report.findings[0].message
    assert any("have another copy" in v.reason for v in report.verdicts if v.verdict == "lossless")


def test_swapped_shards_are_each_told_whose_they_are(folder: Path) -> None:
    (folder / SHARDS[0]).write_bytes(FILES[SHARDS[1]])
    (folder / SHARDS[1]).write_bytes(FILES[SHARDS[0]])
    report = validate(folder)
    assert (errors_of(report), files_of(report)) == ({"S-SAVE"}, {SHARDS[0], SHARDS[1]})
    assert "rank 0 of 3" in str(report.findings[0].expected)
    assert "rank 1 of 3" in str(report.findings[0].found)


def test_a_duplicated_shard_is_the_wrong_rank_where_it_lies(folder: Path) -> None:
    shutil.copy(folder / SHARDS[0], folder / SHARDS[2])
    report = validate(folder)
    assert (errors_of(report), files_of(report)) == ({"S-SAVE"}, {SHARDS[2]})


def test_an_extra_shard_is_an_error(folder: Path) -> None:
    shutil.copy(folder / SHARDS[0], folder / "rank-00003.shard")
    report = validate(folder)
    assert [(f.code, f.severity, f.where.file) for f in report.findings] == [("S-EXTRA", "error", "rank-00003.shard")]


@pytest.mark.parametrize("change", [{"save_id": OTHER_ID}, {"step": 8}, {"step": 70000, "save_id": OTHER_ID}])
def test_a_shard_of_another_save_is_stale_whatever_its_size(folder: Path, change: dict[str, Any]) -> None:
    (folder / SHARDS[2]).write_bytes(make.files(3, **change)[SHARDS[2]])
    report = validate(folder)
    assert (errors_of(report), files_of(report)) == ({"S-SAVE"}, {SHARDS[2]})


def test_a_shard_of_the_same_save_with_other_content_is_not_the_one_committed(folder: Path) -> None:
    plan = builder.sample(3)
    other = builder.build(builder.Plan(plan.manifest, plan.local, {**plan.values, "step": 9}))
    assert len(other[SHARDS[0]]) == len(FILES[SHARDS[0]])
    (folder / SHARDS[0]).write_bytes(other[SHARDS[0]])
    assert errors_of(validate(folder)) == {"S-INDEX"}


def test_a_manifest_of_another_save_finds_all_shards_stale(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(make.files(3, save_id=OTHER_ID)["manifest.json"])
    report = validate(folder)
    assert errors_of(report) == {"S-SAVE"}
    assert len(report.findings) == 3


def test_one_shard_entry_too_few_is_a_count_mismatch(folder: Path) -> None:
    make.write(folder, builder.edit(FILES, lambda d: d["shards"].pop()))
    report = validate(folder)
    assert errors_of(report) == {"W-COUNT"}
    assert report.level == "manifest"
    assert report.findings[0].found == "2, and none of rank 2"
    assert ("tensor model/embed", "lost") in {(v.part, v.verdict) for v in report.verdicts}


# The manifest


def test_a_manifest_cut_at_any_offset_is_refused(folder: Path) -> None:
    data = FILES["manifest.json"]
    for n in range(len(data)):
        (folder / "manifest.json").write_bytes(data[:n])
        report = validate(folder)
        assert errors_of(report) <= {"L-SIZE", "L-JSON", "L-TAIL", "L-UTF8"}, n
        assert (report.exit_code, report.level, files_of(report)) == (1, "lexical", {"manifest.json"}), n


def test_a_level_runs_only_if_the_one_before_it_passed(folder: Path) -> None:
    (folder / SHARDS[0]).unlink()
    make.write(folder, builder.edit(FILES, lambda d: d["shards"].pop()))
    report = validate(folder, level="bytes")
    assert (errors_of(report), report.level) == ({"W-COUNT"}, "manifest")
    make.write(folder, {**FILES, SHARDS[0]: FILES[SHARDS[0]][:-1], SHARDS[1]: flipped(FILES[SHARDS[1]], 4000)})
    report = validate(folder, level="bytes")
    assert (errors_of(report), report.level) == ({"S-NBYTES"}, "shards")


def test_a_folder_named_for_another_step_is_worth_a_warning(tmp_path: Path) -> None:
    report = validate(make.write(tmp_path / "step-00000008", FILES))
    assert [(f.code, f.severity) for f in report.findings] == [("C-STEP", "warning")]
    assert validate(make.write(tmp_path / "any name", FILES)).findings == ()


def test_a_pinned_digest_is_compared_and_says_what_it_does_not_cover(folder: Path) -> None:
    digest = manifests.parse(FILES["manifest.json"]).digest
    report = validate(folder, expect_digest=digest)
    assert [(f.code, f.severity) for f in report.findings] == [("D-PIN", "info")]
    assert validate(folder, expect_digest=digest.removeprefix("sha256:").upper()).exit_code == 0
    assert errors_of(validate(folder, expect_digest="0" * 64)) == {"D-EXPECT"}
    sure = make.write(folder.parent / "step-00000009", make.files(2, step=9, block="sha256"))
    assert validate(sure, expect_digest=manifests.parse((sure / "manifest.json").read_bytes()).digest).findings == ()


@pytest.mark.parametrize("block", ["xxh3-128", "crc32c", "blake3", "sha256"])
def test_every_digest_algorithm_finds_a_flipped_bit(tmp_path: Path, block: str) -> None:
    folder = make.checkpoint(tmp_path / "c", block=block)
    assert validate(folder, level="bytes").findings == ()
    data = (folder / SHARDS[1]).read_bytes()
    start = builder.catalog({f.name: f.read_bytes() for f in folder.iterdir()}).shards[1].index.chunks[0].start
    (folder / SHARDS[1]).write_bytes(flipped(data, start * 8))
    assert errors_of(validate(folder, level="bytes")) == {"B-DIGEST"}


# Things that are no files, and files that lie


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "dangling link"])
def test_what_is_no_regular_file_is_no_shard_and_is_never_waited_for(folder: Path, kind: str) -> None:
    place = folder / SHARDS[1]
    place.unlink()
    make_special(place, kind, FILES[SHARDS[1]])
    report = validate(folder, level="bytes")
    assert (errors_of(report), files_of(report)) == ({"S-FILE"}, {SHARDS[1]})


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "dangling link"])
def test_what_is_no_regular_file_is_no_manifest(folder: Path, kind: str) -> None:
    place = folder / "manifest.json"
    place.unlink()
    make_special(place, kind, FILES["manifest.json"])
    assert errors_of(validate(folder)) == {"C-MANIFEST"}


def make_special(place: Path, kind: str, data: bytes) -> None:
    """Put something at `place` that is no regular file."""
    if kind == "link":
        (place.parent.parent / "elsewhere").write_bytes(data)
        place.symlink_to(place.parent.parent / "elsewhere")
    elif kind == "dangling link":
        place.symlink_to("nowhere")
    elif kind == "folder":
        place.mkdir()
    else:
        os.mkfifo(place)


def test_a_manifest_above_its_limit_is_refused_without_being_read(folder: Path) -> None:
    os.truncate(folder / "manifest.json", (256 << 20) + 1)
    assert errors_of(validate(folder)) == {"L-SIZE"}


def entry_of(data: bytes) -> dict[str, Any]:
    """Return the manifest entry of a shard with whatever trailer it has."""
    trailer = shard.decode_trailer(data[-64:], len(data))
    table = data[trailer.index_offset : trailer.index_offset + trailer.index_nbytes]
    index = {
        "offset": trailer.index_offset,
        "nbytes": trailer.index_nbytes,
        "digest": builder.digest.sha256_text(table),
    }
    return {"nbytes": len(data), "index": index}


def with_index(change: Callable[[dict[str, Any]], Any]) -> dict[str, bytes]:
    """Return the sample with the index of rank 1 changed and every digest above it made right again."""
    name = SHARDS[1]
    data = FILES[name]
    trailer = shard.decode_trailer(data[-64:], len(data))
    table = builder.shard.msgpack.unpackb(data[trailer.index_offset : -64], strict_map_key=False)
    change(table)
    packed = builder.shard.msgpack.packb(table)
    made = shard.Trailer(trailer.index_offset, len(packed), builder.hashlib.sha256(packed).digest())
    new = data[: trailer.index_offset] + packed + shard.encode_trailer(made)
    return builder.edit({**FILES, name: new}, lambda d: d["shards"][1].update(entry_of(new)))


LIES: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("S-CODEC", lambda t: t.pop("names")),
    ("S-CODEC", lambda t: t.update(more=1)),
    ("S-CODEC", lambda t: t.update(header=[0, b""])),
    ("S-HEADER", lambda t: t.update(header=[t["header"][0] - 1, t["header"][1]])),
    ("S-HEADER", lambda t: t.update(header=[t["header"][0], bytes(16)])),
    ("S-ALIGN", lambda t: t["start"].__setitem__(0, t["start"][0] + 64)),
    ("S-CHUNK", lambda t: t["sizes"].__setitem__(0, [1 << 40, 1 << 40])),
    ("S-CODEC", lambda t: t["nbytes"].__setitem__(-1, 1 << 40)),
    ("S-CODEC", lambda t: t.update(digests=t["digests"] + bytes(16))),
    ("N-NAME", lambda t: t["names"].__setitem__(0, "a\nb")),
    ("T-MATCH", lambda t: t["dtypes"].__setitem__(0, "float16")),
]


@pytest.mark.parametrize(("rule", "change"), LIES, ids=[f"{i}-{rule}" for i, (rule, _) in enumerate(LIES)])
def test_an_index_that_lies_is_refused_before_anything_is_allocated(tmp_path: Path, rule: str, change: Any) -> None:
    report = validate(make.write(tmp_path / "c", with_index(change)), level="bytes")
    assert (errors_of(report), files_of(report)) == ({rule}, {SHARDS[1]})


# Runs, targets, and who may not look


def test_a_run_is_judged_by_its_newest_good_checkpoint(folder: Path) -> None:
    newer = make.write(folder.parent / "step-00000009", make.files(3, step=9, save_id=OTHER_ID))
    assert validate(folder.parent).step == 9
    (newer / SHARDS[0]).unlink()
    report = validate(folder.parent)
    assert (report.step, report.exit_code) == (7, 0)
    (found,) = report.findings
    assert (found.code, found.severity, found.where.file) == ("S-MISSING", "warning", f"step-00000009/{SHARDS[0]}")
    assert report.advice[0].argv[:2] == ("ckptspec", "validate")


def test_an_empty_run_and_one_where_all_are_bad_are_told_apart(folder: Path) -> None:
    (folder / SHARDS[0]).unlink()
    report = validate(folder.parent)
    assert (errors_of(report), report.exit_code, report.decision) == ({"S-MISSING"}, 1, "stop")
    shutil.rmtree(folder)
    report = validate(folder.parent)
    assert (errors_of(report), report.exit_code) == ({"C-EMPTY"}, 4)


def test_a_folder_without_a_commit_says_so(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    assert errors_of(validate(folder)) == {"C-MANIFEST"}
    staging = make.write(folder.parent / f".tmp-00000009-{OTHER_ID}", FILES)
    assert errors_of(validate(staging)) == {"C-STAGING"}


def test_damage_is_answered_with_the_newest_older_good_step(folder: Path) -> None:
    make.write(folder.parent / "step-00000003", make.files(3, step=3, save_id=OTHER_ID))
    make.write(folder.parent / "step-00000005", make.files(3, step=5, save_id="e" * 32))
    (folder.parent / "step-00000005" / SHARDS[0]).unlink()
    os.truncate(folder / SHARDS[0], 8)
    report = validate(folder)
    assert report.decision == "fallback"
    (back,) = [a for a in report.advice if a.id == "fallback"]
    assert (back.params["step"], back.cost.steps_lost, back.cost.seconds_lost) == (3, 4, 40)
    assert back.argv == ("ckptspec", "validate", str(folder.parent / "step-00000003"), "--level", "bytes")


def test_another_world_size_is_a_warning_and_an_error_where_exactness_is_asked_for(folder: Path) -> None:
    report = validate(folder, target=Target(4))
    assert (errors_of(report), report.decision, report.exit_code) == (set(), "reshard", 0)
    assert [f.code for f in validate(folder, target=Target(4), level="schema").findings] == ["R-WORLD"]
    report = validate(folder, target=Target(4), exact=True)
    assert (errors_of(report), report.decision, report.exit_code) == ({"R-WORLD"}, "stop", 1)
    assert validate(folder, target=Target(3), exact=True).findings == ()
    (folder / SHARDS[0]).unlink()
    assert errors_of(validate(folder, target=Target(4), exact=True)) == {"R-WORLD", "S-MISSING"}


def test_a_path_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        validate(tmp_path / "nowhere")


# What loading shares with the validator


def test_open_shard_gives_documents_or_says_which_file_is_wrong(folder: Path) -> None:
    _, m = load_manifest(folder)
    document = open_shard(str(folder), m.shards[1], m)
    assert document.header.rank == 1
    assert document.state["step"] == 7
    damage: list[tuple[bytes, str, type[errors.CkptspecError]]] = [
        (FILES[SHARDS[1]][:-1], "S-NBYTES", errors.IntegrityError),
        (flipped(FILES[SHARDS[1]], 8), "S-HEADER", errors.ShardError),
        (FILES[SHARDS[2]], "S-SAVE", errors.ShardError),
    ]
    for data, rule, kind in damage:
        (folder / SHARDS[1]).write_bytes(data)
        with pytest.raises(kind) as caught:
            open_shard(str(folder), m.shards[1], m)
        assert (caught.value.rule, caught.value.where.file, caught.value.where.rank) == (rule, SHARDS[1], 1)
    (folder / SHARDS[1]).unlink()
    with pytest.raises(errors.IntegrityError) as gone:
        open_shard(str(folder), m.shards[1], m)
    assert gone.value.rule == "S-MISSING"


def test_a_manifest_that_breaks_a_manifest_rule_is_not_loaded(folder: Path) -> None:
    make.write(folder, builder.edit(FILES, lambda d: d["shards"].pop()))
    with pytest.raises(errors.ManifestError) as caught:
        load_manifest(folder)
    assert caught.value.rule == "W-COUNT"


def test_validating_needs_neither_numpy_nor_torch_nor_rich(folder: Path) -> None:
    script = (
        "import sys, ckptspec\n"
        "report = ckptspec.validate(sys.argv[1], level='bytes')\n"
        "assert report.ok, report\n"
        "heavy = sorted({'torch', 'numpy', 'ml_dtypes', 'rich'} & set(sys.modules))\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
