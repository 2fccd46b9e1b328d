"""Records through the command line: formats, conditions, starts and limits."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from tests.cli.commands import Shell


def test_lines_become_records_and_records_lines(shell: Shell, stream_uri: str) -> None:
    reported = shell.ok(
        "append", stream_uri, "--header", "source=test", stdin=b"one\n\nthree"
    ).stderr
    assert reported.startswith("acknowledged: 3 records in")
    assert "seq_num 0 to 2" in reported
    assert shell.ok("read", stream_uri).stdout == b"one\n\nthree\n"
    first, _, last = shell.ok("read", stream_uri, "--json").objects
    assert first.pop("timestamp") > 0
    assert first == {"seq_num": 0, "headers": [["source", "test"]], "body": "one"}
    assert last["body"] == "three"


def test_an_append_reports_as_json_what_was_acknowledged(shell: Shell, stream_uri: str) -> None:
    ack = shell.json("append", stream_uri, stdin=b"a\nb\n")
    assert (ack["records"], ack["batches"]) == (2, 1)
    assert (ack["start"]["seq_num"], ack["end"]["seq_num"], ack["tail"]["seq_num"]) == (0, 2, 2)
    assert shell.json("append", stream_uri, stdin=b"") == {
        "records": 0, "batches": 0, "start": None, "end": None, "tail": None,
    }  # fmt: skip


def test_a_header_has_the_bytes_that_were_given(shell: Shell, stream_uri: str) -> None:
    given = os.fsdecode(b"k\xff=v\xfe")
    shell.ok("append", stream_uri, "--header", given, stdin=b"x\n")
    (found,) = shell.ok("read", stream_uri, "--format", "base64").objects
    assert found["headers"] == [
        [base64.b64encode(b"k\xff").decode(), base64.b64encode(b"v\xfe").decode()]
    ]


def test_a_tail_has_any_timestamp_that_a_client_chose(shell: Shell, basin: str) -> None:
    uri = f"s2://{basin}/stamped"
    shell.ok("create-stream", uri, "--timestamping-uncapped")
    shell.ok("append", uri, "--format", "json", stdin=b'{"timestamp": 9000000000000000000}\n')
    assert shell.ok("check-tail", uri).text == "seq_num 1, timestamp 9000000000000000000\n"


def test_a_file_is_read_instead_of_standard_input(
    shell: Shell, stream_uri: str, tmp_path: Path
) -> None:
    (tmp_path / "lines").write_bytes(b"from\na file\n")
    shell.ok("append", stream_uri, "--input", str(tmp_path / "lines"), stdin=b"ignored\n")
    assert shell.ok("read", stream_uri).stdout == b"from\na file\n"


def test_records_of_any_bytes_are_copied_without_loss(shell: Shell, basin: str) -> None:
    source, copy = f"{basin}/source", f"{basin}/copy"
    for stream_uri in (source, copy):
        shell.ok("create-stream", stream_uri, "--timestamping-uncapped")
    shell.ok(
        "append", source, "--format", "json",
        stdin=b'{"body": "\xc3\xa4\\n", "headers": [["a", "b"]], "timestamp": 5000}\n',
    )  # fmt: skip
    raw = base64.b64encode(bytes(range(256))).decode()
    shell.ok("append", source, "--format", "base64", stdin=f'{{"body": "{raw}"}}\n'.encode())
    lines = shell.ok("read", source, "--format", "base64").stdout
    shell.ok("append", copy, "--format", "base64", stdin=lines)
    assert shell.ok("read", copy, "--format", "base64").stdout == lines
    assert shell.ok("read", copy).stdout == "ä\n\n".encode() + bytes(range(256)) + b"\n"
    first = shell.ok("read", copy, "--json").objects[0]
    assert first == {"seq_num": 0, "timestamp": 5000, "headers": [["a", "b"]], "body": "ä\n"}


def test_json_marks_records_that_are_not_text_and_an_append_takes_the_mark(
    shell: Shell, basin: str
) -> None:
    source, copy = f"{basin}/marked", f"{basin}/marked-copy"
    for stream_uri in (source, copy):
        shell.ok("create-stream", stream_uri, "--timestamping-uncapped")
    shell.ok("append", source, "--header", "kind=image", stdin=b"text\n\xff\x00\n")
    text, binary = shell.ok("read", source, "--json").objects
    assert "encoding" not in text
    assert (text["body"], text["headers"]) == ("text", [["kind", "image"]])
    assert (binary["encoding"], base64.b64decode(binary["body"])) == ("base64", b"\xff\x00")
    assert [base64.b64decode(part) for part in binary["headers"][0]] == [b"kind", b"image"]
    lines = shell.ok("read", source, "--json").stdout
    shell.ok("append", copy, "--format", "json", stdin=lines)
    assert shell.ok("read", copy, "--json").stdout == lines


def test_the_format_has_the_name_that_s2_gives_it(shell: Shell, stream_uri: str) -> None:
    shell.ok("append", stream_uri, "--format", "json-base64", stdin=b'{"body": "AAE="}\n')
    lines = shell.ok("read", stream_uri, "--format", "json-base64").stdout
    assert lines == shell.ok("read", stream_uri, "--format", "base64").stdout
    assert b'"body":"AAE="' in lines
    assert "'text', 'json', 'json-base64'" in shell("read", stream_uri, "--format", "yaml").stderr


@pytest.mark.parametrize(
    ("record_format", "line", "complaint"),
    [
        ("json", b'{"body": 5}', "line 2 of the input is not a record"),
        ("json", b'{"boddy": "x"}', "line 2 of the input is not a record"),
        ("base64", b'{"body": "###"}', "line 2 of the input is not a record"),
        ("text", b"x" * (1 << 20), "line 2 of the input has 1048584 metered bytes"),
    ],
    # pytest puts the id into the environment, which must not hold a megabyte.
    ids=["body", "field", "base64", "size"],
)
def test_a_line_that_is_not_a_record_ends_the_append_and_is_named(
    shell: Shell, stream_uri: str, record_format: str, line: bytes, complaint: str
) -> None:
    good = b"{}" if record_format != "text" else b"good"
    ended = shell(
        "append", stream_uri, "--format", record_format, stdin=good + b"\n" + line + b"\n"
    )
    assert ended.status == 1
    assert complaint in ended.stderr


def test_conditions_that_do_not_hold_end_with_status_3(shell: Shell, stream_uri: str) -> None:
    shell.ok("append", stream_uri, "--match-seq-num", "0", stdin=b"x\n" * 2500)
    late = shell("append", stream_uri, "--match-seq-num", "0", "--json", stdin=b"x\n")
    assert (late.status, late.error["code"]) == (3, "seq_num_mismatch")
    assert "2500" in late.error["message"]
    fenced = shell.json("fence", stream_uri, "writer-1")
    assert fenced["start"]["seq_num"] == 2500
    for verb in (
        ("append", stream_uri),
        ("trim", stream_uri, "1", "--yes"),
        ("fence", stream_uri, "writer-2"),
    ):
        refused = shell(*verb, "--fencing-token", "writer-0", "--json", stdin=b"x\n")
        assert (refused.status, refused.error["code"]) == (3, "fencing_token_mismatch")
    shell.ok("append", stream_uri, "--fencing-token", "writer-1", stdin=b"x\n")
    both = shell("append", stream_uri, "--match-seq-num", "1", "--at-least-once", stdin=b"x\n")
    assert both.status == 2
    assert shell.json("check-tail", stream_uri)["seq_num"] == 2502


def test_a_trim_hides_what_is_before_it_when_its_grace_is_over(
    shell: Shell, stream_uri: str
) -> None:
    shell.ok("append", stream_uri, stdin=b"a\nb\nc\n")
    assert shell.json("trim", stream_uri, "2", "--yes")["end"]["seq_num"] == 4
    read = shell.ok("read", stream_uri)
    assert read.text == "c\n"
    assert read.stderr == "record 3 is a command: trim 2\n"


def test_a_read_starts_and_ends_where_its_options_say(shell: Shell, stream_uri: str) -> None:
    shell.ok("reconfigure-stream", stream_uri, "--timestamping-uncapped")
    lines = b"".join(b'{"body": "%d", "timestamp": %d}\n' % (n, n * 1000) for n in range(10))
    shell.ok("append", stream_uri, "--format", "json", stdin=lines)

    def read(*options: str) -> str:
        return "".join(shell.ok("read", stream_uri, *options).text.split())

    assert read() == "0123456789"
    assert read("--seq-num", "7") == "789"
    assert read("--seq-num", "10") == ""
    assert read("--seq-num", "99", "--clamp") == ""
    assert read("--timestamp", "1970-01-01T00:00:08Z") == "89"
    assert read("--timestamp", "8001") == "9"
    assert read("--tail-offset", "3") == "789"
    assert read("--ago", "1h") == ""
    assert read("-n", "2") == "01"
    assert read("--limit-bytes", "30") == "012"
    assert read("--until", "3000") == "012"
    assert read("--seq-num", "4", "--limit-count", "3", "--follow") == "456"
    assert shell.ok("tail", stream_uri, "-n", "2").text == "8\n9\n"
    assert shell.ok("tail", stream_uri, "-n", "0").text == ""
    beyond = shell("read", stream_uri, "--seq-num", "11", "--json")
    assert (beyond.status, beyond.error["code"]) == (1, "position_unwritten")
    assert shell("read", stream_uri, "--seq-num", "1", "--ago", "1h").status == 2
    assert shell("read", stream_uri, "--json", "--format", "text").status == 2


def test_an_empty_stream_is_read_as_nothing(shell: Shell, stream_uri: str) -> None:
    assert shell.ok("read", stream_uri).stdout == b""
    assert shell.ok("tail", stream_uri).stdout == b""
    assert shell.json("check-tail", stream_uri) == {"seq_num": 0, "timestamp": 0}
    assert shell.ok("check-tail", stream_uri).text == "seq_num 0\n"


def test_an_encrypted_stream_needs_its_key(shell: Shell, tmp_path: Path) -> None:
    shell.ok("create-basin", "encrypted-basin", "--stream-cipher", "aegis-256")
    stream_uri = "encrypted-basin/secrets"
    assert shell.json("create-stream", stream_uri)["cipher"] == "aegis-256"
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text(base64.b64encode(bytes(32)).decode() + "\n")
    wrong.write_text(base64.b64encode(bytes([1] * 32)).decode())
    assert shell("append", stream_uri, stdin=b"x\n").status == 1
    shell.ok("append", stream_uri, "--encryption-key-file", str(right), stdin=b"hidden\n")
    assert shell.ok("read", stream_uri, "--encryption-key-file", str(right)).text == "hidden\n"
    other = shell("read", stream_uri, "--encryption-key-file", str(wrong), "--json")
    assert (other.status, other.error["code"]) == (1, "decryption_failed")
