"""Commands for basins, streams, access tokens and usage. Their JSON is a contract."""

from __future__ import annotations

import urllib.request
from pathlib import Path

from tests.cli.commands import Shell
from tests.interop.serving import serving

STREAM_CONFIG = {
    "storage_class": "express",
    "retention_policy": 604800,
    "timestamping": {"mode": "client-prefer", "uncapped": False},
    "delete_on_empty_min_age": 0,
}


def test_a_basin_from_its_creation_to_its_deletion(shell: Shell) -> None:
    name = "a-basin-for-its-verbs"
    created = shell.json(
        "create-basin", name, "--create-stream-on-append", "--retention-policy", "1d"
    )
    assert created["created_at"].endswith("Z")
    assert {**created, "created_at": "", "location": ""} == {
        "name": name, "location": "", "created_at": "", "deleted_at": None, "status": "created",
        "retention_policy": 86400,
    }  # fmt: skip

    config = shell.json("get-basin-config", f"s2://{name}")
    assert config["create_stream_on_append"] is True
    assert config["default_stream_config"]["retention_policy"] == 86400
    again = shell("create-basin", name, "--json")
    assert (again.status, again.error["code"]) == (1, "resource_already_exists")
    assert shell.json("create-basin", name, "--ensure")["status"] == "config-updated"
    assert shell.json("create-basin", name, "--ensure")["status"] == "config-unchanged"
    changed = shell.json("reconfigure-basin", name, "--create-stream-on-read",
                         "--stream-cipher", "aes-256-gcm")  # fmt: skip
    assert changed == {
        "default_stream_config": None, "stream_cipher": "aes-256-gcm",
        "create_stream_on_append": False, "create_stream_on_read": True,
    }  # fmt: skip
    assert "stream_cipher = aes-256-gcm" in shell.ok("get-basin-config", name).text

    listed = shell.ok("list-basins", "--prefix", "a-basin-for", "--json").objects
    assert [(info["name"], info["deleted_at"]) for info in listed] == [(name, None)]
    assert name in shell.ok("ls").text
    assert shell.json("delete-basin", name, "--yes") == {"name": name, "status": "deleting"}
    missing = shell("get-basin-config", "no-such-basin", "--json")
    assert (missing.status, missing.error["code"]) == (4, "basin_not_found")


def test_a_creation_says_how_long_records_are_kept(shell: Shell) -> None:
    basin = shell.ok("create-basin", "retention-basin")
    assert basin.text.endswith("  created  keeps records for 7d\n")
    assert basin.stderr == (
        "Records of streams created in 'retention-basin' are removed 7d after they arrive. "
        "To keep them: streamfold reconfigure-basin retention-basin --retention-policy infinite\n"
    )
    stream = shell.ok("create-stream", "retention-basin/week")
    assert stream.text.endswith("  created  keeps records for 7d\n")
    advised = "streamfold reconfigure-stream s2://retention-basin/week --retention-policy infinite"
    assert stream.stderr == (
        f"Records of the stream 'week' are removed 7d after they arrive. To keep them: {advised}\n"
    )
    shell.ok(*advised.split()[1:])
    asked = shell.ok("create-stream", "retention-basin/day", "--retention-policy", "1d")
    assert asked.text.endswith("  created  keeps records for 1d\n")
    assert asked.stderr == ""
    shell.ok("reconfigure-basin", "retention-basin", "--retention-policy", "infinite")
    inherited = shell.ok("create-stream", "retention-basin/always")
    assert inherited.text.endswith("  created  keeps records until they are trimmed\n")
    assert inherited.stderr == ""
    ensured = shell.json("create-stream", "retention-basin/always", "--ensure")
    assert ensured["retention_policy"] == "infinite"


def test_a_creation_succeeds_where_the_token_may_not_read_the_retention(tmp_path: Path) -> None:
    root_file = tmp_path / "root"
    root_file.write_text("a-root-token-of-this-test\n")
    with serving(
        "--host", "127.0.0.1", "--no-access-log", "--root-token-file", str(root_file)
    ) as exports:
        root = Shell({**exports, "S2_ACCESS_TOKEN": root_file.read_text()})
        root.ok("create-basin", "guarded-basin")
        token = root.json("issue-access-token", "maker", "--basins", "", "--streams", "",
                          "--ops", "create-stream")["access_token"]  # fmt: skip
        maker = Shell({**exports, "S2_ACCESS_TOKEN": token})
        created = maker.ok("create-stream", "guarded-basin/orders")
        assert created.text.endswith("  created  retention unknown\n")
        assert "The retention of the stream 'orders' could not be read: " in created.stderr
        assert maker.json("create-stream", "guarded-basin/more")["retention_policy"] is None


def test_a_bucket_with_a_name_that_s2_does_not_allow_is_used_like_any_basin(
    shell: Shell, variables: dict[str, str]
) -> None:
    stream = f"{variables['S2_ACCOUNT_ENDPOINT']}/shop/cart"
    request = urllib.request.Request(stream, b"one", {"content-type": "text/plain"}, method="PUT")
    urllib.request.urlopen(request, timeout=60).close()
    assert shell.ok("ls", "s2://shop").text.startswith("cart ")
    assert shell.ok("read", "s2://shop/cart").text == "one\n"
    shell.ok("append", "shop/cart", stdin=b"two\n")
    assert shell.json("check-tail", "shop/cart")["seq_num"] == 2
    shell.ok("reconfigure-stream", "shop/cart", "--retention-policy", "1d")
    assert shell.json("get-stream-config", "shop/cart")["retention_policy"] == 86400
    shell.ok("reconfigure-basin", "shop", "--create-stream-on-read")
    assert shell.json("get-basin-config", "shop")["create_stream_on_read"] is True
    shell.ok("get-basin-metrics", "shop", "storage")
    assert "shop" in shell.ok("list-basins", "--prefix", "sho").text
    shell.ok("delete-stream", "shop/cart", "--yes")
    shell.ok("delete-basin", "shop", "--yes")


def test_a_basin_with_a_wrong_name_is_refused_with_the_rule(shell: Shell) -> None:
    assert "has 2 characters: it must have 8 to 48" in shell("create-basin", "my").stderr
    assert "lower-case letters, digits and hyphens" in shell("create-basin", "My_Basin").stderr


def test_unknown_choices_are_refused_with_the_list_of_known_ones(
    shell: Shell, stream_uri: str
) -> None:
    refused = shell("create-stream", f"{stream_uri}-2", "--storage-class", "cheap", "--json")
    assert "choose from standard, express" in refused.error["message"]
    located = shell("create-basin", "far-away-basin", "--location", "aws:us-east-1", "--json")
    assert "choose from local:memory" in located.error["message"]
    sealed = shell("create-basin", "sealed-basin", "--stream-cipher", "rot13")
    assert "'aegis-256', 'aes-256-gcm'" in sealed.stderr


def test_a_stream_from_its_creation_to_its_deletion(shell: Shell, basin: str) -> None:
    stream_uri = f"s2://{basin}/orders/eu"
    created = shell.json("create-stream", stream_uri)
    assert {**created, "created_at": ""} == {
        "name": "orders/eu", "created_at": "", "deleted_at": None, "cipher": None,
        "status": "created", "retention_policy": 604800,
    }  # fmt: skip
    assert shell.json("get-stream-config", stream_uri) == STREAM_CONFIG
    assert "retention_policy = 7d\n" in shell.ok("get-stream-config", stream_uri).text
    again = shell("create-stream", stream_uri)
    assert "exists already: choose another name, or ensure it" in again.stderr
    assert "--ensure" in again.stderr
    changed = shell.json(
        "reconfigure-stream", stream_uri, "--retention-policy", "infinite", "--timestamping-mode",
        "arrival", "--timestamping-uncapped", "--delete-on-empty-min-age", "1h30m",
    )  # fmt: skip
    assert changed == {
        "storage_class": "express", "retention_policy": "infinite",
        "timestamping": {"mode": "arrival", "uncapped": True}, "delete_on_empty_min_age": 5400,
    }  # fmt: skip
    assert shell.json("create-stream", stream_uri, "--ensure")["status"] == "config-updated"
    nothing = shell("reconfigure-stream", stream_uri)
    assert (nothing.status, nothing.stderr.count("\n")) == (2, 1)

    for name in ("a", "b", "orders/us"):
        shell.ok("create-stream", f"{basin}/{name}")
    names = [info["name"] for info in shell.ok("list-streams", basin, "--json").objects]
    assert names == ["a", "b", "orders/eu", "orders/us"]
    some = shell.ok("list-streams", basin, "--start-after", "a", "--limit", "2", "--json").objects
    assert [info["name"] for info in some] == ["b", "orders/eu"]
    below = shell.ok("ls", f"s2://{basin}/orders/").text
    assert [line.split()[0] for line in below.splitlines()] == ["orders/eu", "orders/us"]

    assert shell.json("delete-stream", stream_uri, "--yes") == {
        "name": "orders/eu",
        "status": "deleting",
    }
    gone = shell("check-tail", stream_uri, "--json")
    assert (gone.status, gone.error["code"]) in (
        (1, "stream_deletion_pending"),
        (4, "stream_not_found"),
    )


def test_usage_is_shown_by_account_basin_and_stream(shell: Shell, stream_uri: str) -> None:
    basin = stream_uri.split("/")[2]
    shell.ok("append", stream_uri, stdin=b"a\nb\n")
    active = shell.json("get-account-metrics", "active-basins")
    assert (active["kind"], active["name"]) == ("label", "active-basins")
    assert basin in active["values"]
    appends = shell.ok("get-basin-metrics", basin, "append-ops", "--json").objects
    assert all(series["unit"] == "operations" for series in appends)
    assert sum(value for series in appends for _, value in series["values"]) == 1
    storage = shell.json("get-stream-metrics", stream_uri, "storage")
    assert (storage["kind"], storage["unit"]) == ("gauge", "bytes")
    assert "storage (bytes)" in shell.ok("get-stream-metrics", stream_uri, "storage").text
    assert shell("get-basin-metrics", basin, "nonsense").status == 2


def test_access_tokens_are_issued_used_listed_and_revoked(tmp_path: Path) -> None:
    root_file, token_file = tmp_path / "root", tmp_path / "token"
    root_file.write_text("a-root-token-of-this-test\n")
    with serving(
        "--host", "127.0.0.1", "--no-access-log", "--root-token-file", str(root_file)
    ) as exports:
        root = Shell({**exports, "S2_ACCESS_TOKEN": root_file.read_text()})
        root.ok("create-basin", "guarded-basin", "--create-stream-on-append")
        issued = root.json(
            "issue-access-token", "ci", "--basins", "", "--streams", "=orders",
            "--op-group-perms", "stream=rw,basin=r", "--ops", "list-basins", "--expires-in", "1d",
        )  # fmt: skip
        assert issued["id"] == "ci"
        token_file.write_text(issued["access_token"])
        plain = root.ok("issue-access-token", "ro", "--basins", "=guarded-basin",
                        "--op-group-perms", "basin=r").text  # fmt: skip
        assert plain.startswith("sf_")

        caller = Shell(exports)
        shown = ("--token-file", str(token_file))
        assert caller("ls", "--json").error["code"] == "authn"
        without = Shell({key: exports[key] for key in exports if key != "S2_ACCESS_TOKEN"})
        assert "asks for an access token, and none was given" in without("ls").stderr
        assert "guarded-basin" in caller.ok("ls", *shown).text
        caller.ok("append", "guarded-basin/orders", *shown, stdin=b"x\n")
        denied = caller("append", "guarded-basin/other", *shown, "--json", stdin=b"x\n")
        assert (denied.status, denied.error["code"]) == (1, "permission_denied")

        ci, ro = root.ok("list-access-tokens", "--json").objects
        assert ci.pop("expires_at").endswith("Z")
        assert ci == {
            "id": "ci", "auto_prefix_streams": False,
            "scope": {
                "basins": {"prefix": ""}, "streams": {"exact": "orders"}, "access_tokens": None,
                "op_groups": {"account": None, "basin": "read", "stream": "read-write"},
                "ops": ["list-basins"],
            },
        }  # fmt: skip
        assert (ro["id"], ro["expires_at"]) == ("ro", None)
        assert "does not expire" in root.ok("list-access-tokens", "--prefix", "r").text
        assert root.json("revoke-access-token", "ci") == {"id": "ci", "status": "revoked"}
        assert caller("ls", *shown, "--json").error["code"] == "authn"
        assert root("revoke-access-token", "ci").status == 4
