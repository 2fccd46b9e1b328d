"""Examples that end the help of each command. `tests/cli/test_help.py` parses every one."""

from __future__ import annotations

from typing import Final

#: Two examples per help text, keyed by the words after `streamfold` on the command line.
EXAMPLES: Final[dict[str, tuple[str, str]]] = {
    "serve": (
        "streamfold serve --local-root data --port 8080",
        "streamfold serve --bucket my-bucket --path streams --auth --root-token-file token",
    ),
    "mcp": (
        "streamfold mcp",
        "streamfold mcp --archive orders=s3://bucket/published/orders",
    ),
    "top": (
        "streamfold top",
        "streamfold top --once --json",
    ),
    "check": (
        "streamfold check data",
        "streamfold check s3://my-bucket/streams --json",
    ),
    "backup": (
        "streamfold backup data s3://my-bucket/backups --keep 7",
        "streamfold backup --list s3://my-bucket/backups",
    ),
    "restore": (
        "streamfold restore s3://my-bucket/backups data",
        "streamfold restore backups data --at 20260131T120000Z",
    ),
    "config": (
        "streamfold config set endpoint http://localhost:8080",
        "streamfold config use prod",
    ),
    "config list": (
        "streamfold config list",
        "streamfold config list --json",
    ),
    "config show": (
        "streamfold config show",
        "streamfold config show --context prod",
    ),
    "config get": (
        "streamfold config get endpoint",
        "streamfold config get endpoint --context prod",
    ),
    "config set": (
        "streamfold config set endpoint https://streams.example --context prod",
        "streamfold config set access_token - --context prod",
    ),
    "config use": (
        "streamfold config use prod",
        "streamfold config use default",
    ),
    "config delete": (
        "streamfold config delete prod",
        "streamfold config delete prod --json",
    ),
    "config unset": (
        "streamfold config unset access_token",
        "streamfold config unset access_token --context prod",
    ),
    "completion": (
        'eval "$(streamfold completion bash)"',
        "streamfold completion fish > ~/.config/fish/completions/streamfold.fish",
    ),
    "doctor": (
        "streamfold doctor",
        "streamfold doctor --local-root data",
    ),
    "append": (
        "echo hello | streamfold append my-basin/clicks",
        "streamfold append my-basin/clicks --input orders.jsonl --header type=order",
    ),
    "read": (
        "streamfold read my-basin/clicks --ago 15m --follow",
        "streamfold read my-basin/clicks --seq-num 1000 -n 20 --json",
    ),
    "tail": (
        "streamfold tail my-basin/clicks",
        "streamfold tail my-basin/clicks -n 100 --follow",
    ),
    "check-tail": (
        "streamfold check-tail my-basin/clicks",
        "streamfold check-tail my-basin/clicks --json",
    ),
    "trim": (
        "streamfold trim my-basin/clicks 1000",
        "streamfold trim my-basin/clicks 1000 --yes",
    ),
    "fence": (
        "streamfold fence my-basin/clicks writer-2",
        "streamfold fence my-basin/clicks writer-3 --fencing-token writer-2",
    ),
    "bench": (
        "streamfold bench",
        "streamfold bench my-basin --record-size 1KiB --target-mibps 20 --duration 60s",
    ),
    "apply": (
        "streamfold apply resources.json",
        "streamfold apply resources.json --dry-run",
    ),
    "diff": (
        "streamfold diff resources.json",
        "streamfold diff -f - < resources.json",
    ),
    "ls": (
        "streamfold ls",
        "streamfold ls my-basin/orders/",
    ),
    "list-streams": (
        "streamfold list-streams my-basin",
        "streamfold list-streams my-basin --prefix orders/ --limit 100",
    ),
    "create-stream": (
        "streamfold create-stream my-basin/clicks",
        "streamfold create-stream my-basin/clicks --ensure --retention-policy 30d",
    ),
    "get-stream-config": (
        "streamfold get-stream-config my-basin/clicks",
        "streamfold get-stream-config my-basin/clicks --json",
    ),
    "reconfigure-stream": (
        "streamfold reconfigure-stream my-basin/clicks --retention-policy infinite",
        "streamfold reconfigure-stream my-basin/clicks --delete-on-empty-min-age 1h",
    ),
    "delete-stream": (
        "streamfold delete-stream my-basin/clicks",
        "streamfold delete-stream my-basin/clicks --yes",
    ),
    "copy": (
        "streamfold copy my-basin/clicks other-basin/clicks --verify all",
        "streamfold copy my-basin other-basin --from-endpoint http://localhost:8081",
    ),
    "snapshot": (
        "streamfold snapshot take my-basin/clicks --fold counter --snapshots s3://bucket/clicks",
        "streamfold snapshot restore my-basin/clicks --fold counter --snapshots s3://bucket/clicks",
    ),
    "snapshot take": (
        "streamfold snapshot take my-basin/clicks --fold counter --snapshots s3://bucket/clicks",
        "streamfold snapshot take my-basin/prices --fold last-value --key-field item --trim",
    ),
    "snapshot restore": (
        "streamfold snapshot restore my-basin/clicks --fold counter --snapshots s3://bucket/clicks",
        "streamfold snapshot restore my-basin/prices --fold last-value --key-field item",
    ),
    "snapshot list": (
        "streamfold snapshot list my-basin/clicks --snapshots s3://bucket/clicks",
        "streamfold snapshot list my-basin/clicks --snapshots http://localhost:8080",
    ),
    "snapshot prune": (
        "streamfold snapshot prune my-basin/clicks --snapshots s3://bucket/clicks --keep 3",
        "streamfold snapshot prune my-basin/clicks --snapshots s3://bucket/clicks --max-age 7d",
    ),
    "snapshot plan": (
        "streamfold snapshot plan my-basin/clicks --snapshots s3://bucket/clicks",
        "streamfold snapshot plan my-basin/clicks --snapshots in-stream --json",
    ),
    "snapshot run": (
        "streamfold snapshot run my-basin/clicks --fold counter --snapshots s3://bucket/clicks",
        "streamfold snapshot run my-basin/prices --fold last-value --key-field item --age 1h",
    ),
    "publish": (
        "streamfold publish postgresql://me@localhost/shop --table public.orders --to archive",
        "streamfold publish postgresql://me@localhost/shop --table 'public.*' --to archive --once",
    ),
    "ingest": (
        "streamfold ingest tables --dsn postgresql://me@localhost/shop",
        "streamfold ingest postgres --dsn postgresql://me@localhost/shop --table public.orders "
        "--basin my-basin",
    ),
    "ingest postgres": (
        "streamfold ingest postgres --dsn postgresql://me@localhost/shop --table public.orders "
        "--basin my-basin",
        "streamfold ingest postgres --table 'public.*' --basin my-basin --password-file password",
    ),
    "ingest tables": (
        "streamfold ingest tables --dsn postgresql://me@localhost/shop",
        "streamfold ingest tables --password-file password --json",
    ),
    "ingest status": (
        "streamfold ingest status --dsn postgresql://me@localhost/shop",
        "streamfold ingest status --json",
    ),
    "ingest drop": (
        "streamfold ingest drop --dsn postgresql://me@localhost/shop",
        "streamfold ingest drop --dsn postgresql://me@localhost/shop --yes",
    ),
    "archive": (
        "streamfold archive ls archive",
        "streamfold archive sql archive/orders 'select count(*) from orders'",
    ),
    "archive ls": (
        "streamfold archive ls archive",
        "streamfold archive ls s3://bucket/published --json",
    ),
    "archive show": (
        "streamfold archive show archive/orders",
        "streamfold archive show archive/orders --at 2026-01-31T12:00:00Z",
    ),
    "archive verify": (
        "streamfold archive verify archive/orders",
        "streamfold archive verify archive/orders --deep",
    ),
    "archive restore": (
        "streamfold archive restore archive/orders",
        "streamfold archive restore archive/orders --output orders.parquet",
    ),
    "archive diff": (
        "streamfold archive diff archive/orders 1000",
        "streamfold archive diff archive/orders 1000 --until 2000",
    ),
    "archive follow": (
        "streamfold archive follow archive/orders",
        "streamfold archive follow archive/orders --since 1000 --poll 5s",
    ),
    "archive sql": (
        "streamfold archive sql archive/orders 'select count(*) from orders'",
        "streamfold archive sql archive/orders 'from orders limit 10' --at 2026-01-31T12:00:00Z",
    ),
    "archive gc": (
        "streamfold archive gc archive/orders --keep-epochs 2 --dry-run",
        "streamfold archive gc archive/orders archive/users --max-age 30d",
    ),
    "archive pin": (
        "streamfold archive pin archive/orders audit --for 30d --reason 'yearly audit'",
        "streamfold archive pin archive/orders audit --remove",
    ),
    "archive export": (
        "streamfold archive export archive/orders s3://bucket/copy",
        "streamfold archive export archive/orders orders-delta --delta",
    ),
    "snapshotter": (
        "streamfold snapshotter validate --config snapshotter.toml",
        "streamfold snapshotter run --config snapshotter.toml",
    ),
    "snapshotter run": (
        "streamfold snapshotter run --config snapshotter.toml",
        "streamfold snapshotter run --config snapshotter.toml --master 'local[2]' --verbose",
    ),
    "snapshotter validate": (
        "streamfold snapshotter validate --config snapshotter.toml",
        "streamfold snapshotter validate --config snapshotter.toml --json",
    ),
    "snapshotter pack": (
        "streamfold snapshotter pack job",
        "streamfold snapshotter pack job --json",
    ),
    "list-basins": (
        "streamfold list-basins",
        "streamfold list-basins --prefix team- --limit 100",
    ),
    "create-basin": (
        "streamfold create-basin my-basin --retention-policy infinite",
        "streamfold create-basin my-basin --ensure --create-stream-on-append",
    ),
    "get-basin-config": (
        "streamfold get-basin-config my-basin",
        "streamfold get-basin-config my-basin --json",
    ),
    "reconfigure-basin": (
        "streamfold reconfigure-basin my-basin --retention-policy 30d",
        "streamfold reconfigure-basin my-basin --no-create-stream-on-append",
    ),
    "delete-basin": (
        "streamfold delete-basin my-basin",
        "streamfold delete-basin my-basin --yes",
    ),
    "issue-access-token": (
        "streamfold issue-access-token reader --basins '' --streams '' "
        "--op-group-perms basin=r,stream=r",
        "streamfold issue-access-token writer --basins =my-basin --streams orders/ "
        "--ops append,check-tail --expires-in 30d",
    ),
    "list-access-tokens": (
        "streamfold list-access-tokens",
        "streamfold list-access-tokens --prefix team- --json",
    ),
    "revoke-access-token": (
        "streamfold revoke-access-token reader",
        "streamfold revoke-access-token reader --json",
    ),
    "get-account-metrics": (
        "streamfold get-account-metrics active-basins",
        "streamfold get-account-metrics account-ops --interval minute",
    ),
    "get-basin-metrics": (
        "streamfold get-basin-metrics my-basin storage",
        "streamfold get-basin-metrics my-basin append-throughput --interval minute",
    ),
    "get-stream-metrics": (
        "streamfold get-stream-metrics my-basin/clicks storage",
        "streamfold get-stream-metrics my-basin/clicks storage --start 2026-01-31T12:00:00Z",
    ),
}
