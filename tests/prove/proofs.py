"""The long proofs, one row each: a new proof is one more row."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Proof(Protocol):
    """One row: what `python -m tests.prove NAME` runs."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the programs that must be installed."""
        ...

    def command(self, seed: int, short: bool) -> str:
        """Return the command that repeats the proof, as somebody would type it."""
        ...

    def arguments(self, seed: int, short: bool, report: Path) -> list[str]:
        """Return what runs in a process of its own and leaves its figures in a file."""
        ...

    def environment(self, seed: int, short: bool) -> dict[str, str]: ...


@dataclass(frozen=True, slots=True)
class Program:
    """A module that appends its figures to the file given with `--report`.

    `{seed}` in the command stands for a fresh seed; `long` and `short` are its sizes.
    """

    name: str
    module: str
    long: str
    short: str
    needs: tuple[str, ...] = ()

    def command(self, seed: int, short: bool) -> str:
        sizes = self.short if short else self.long
        return f"python -m {self.module} {sizes}".format(seed=seed).strip()

    def arguments(self, seed: int, short: bool, report: Path) -> list[str]:
        _, *options = shlex.split(self.command(seed, short))
        return [sys.executable, *options, "--report", str(report)]

    def environment(self, seed: int, short: bool) -> dict[str, str]:
        return {}


@dataclass(frozen=True, slots=True)
class ProofTests:
    """Tests that take larger loads and fresh seeds from STREAMFOLD_PROVE; short, they run as in CI."""

    name: str
    paths: str
    needs: tuple[str, ...] = ()

    def command(self, seed: int, short: bool) -> str:
        size = " --short" if short else f" --seed {seed}"
        return f"python -m tests.prove{size} {self.name}"

    def arguments(self, seed: int, short: bool, report: Path) -> list[str]:
        chosen = [] if short else ["--timeout", "0", "--hypothesis-seed", str(seed)]
        plain = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        return [sys.executable, "-m", "pytest", *plain, *chosen, *self.paths.split()]

    def environment(self, seed: int, short: bool) -> dict[str, str]:
        return {} if short else {"STREAMFOLD_PROVE": str(seed)}


PROOFS: tuple[Proof, ...] = (
    Program(
        "simulation",
        "streamfold.testing.simulation",
        long="--first {seed} --seeds 3000",
        short="--first {seed} --seeds 30",
    ),
    Program(
        "kills",
        "tests.store.crash",
        long="--seed {seed} --kills 1000",
        short="--seed {seed} --kills 3",
    ),
    Program(
        "adversary-local",
        "streamfold.testing.adversary",
        long="--seed {seed} --rounds 1 --ends 1000 --acks 3000000 --seconds 0.4",
        short="--seed {seed} --rounds 3",
    ),
    Program(
        "adversary-s3",
        "streamfold.testing.adversary",
        long="--seed {seed} --rounds 60 --storage s3",
        short="--seed {seed} --rounds 2 --storage s3",
    ),
    Program(
        "linearizability-local",
        "streamfold.testing.linearizability",
        long="run --seed {seed} --operations 1010000 --streams 24 --stream-operations 200 --seconds 8",
        short="run --seed {seed} --operations 1000 --stream-operations 100 --seconds 1",
    ),
    Program(
        "linearizability-s3",
        "streamfold.testing.linearizability",
        long="run --seed {seed} --operations 30000 --stream-operations 200 --storage s3",
        short="run --seed {seed} --operations 300 --streams 4 --stream-operations 50 --storage s3",
    ),
    # From a checkout of s2-verification: make install-go
    Program(
        "linearizability-both-judges",
        "streamfold.testing.linearizability",
        long="run --seed {seed} --operations 100000 --stream-operations 200 --porcupine 1",
        short="run --seed {seed} --operations 1000 --stream-operations 100 --porcupine 1",
        needs=("s2-porcupine",),
    ),
    ProofTests(
        "porcupine",
        "tests/testing/linearizability/prove_porcupine.py",
        needs=("s2-porcupine",),
    ),
    Program("mutations", "tests.mutants", long="", short="skip-fence drop-trim"),
    Program(
        "hostile-input",
        "tests.hostile",
        long="--seed {seed} --inputs 1000000",
        short="--seed {seed} --inputs 20000",
    ),
    Program(
        "soak",
        "bench.soak",
        long="--minutes 30 --noisy",
        short="--minutes 1 --overload 1 --recovery 1 --idle 1 --noisy",
    ),
    ProofTests(
        "state-machines",
        "tests/store/test_state_machine.py tests/store/test_durable_streams_state_machine.py",
    ),
    ProofTests("power-cuts", "tests/store/engine/test_power_cut.py"),
    ProofTests(
        "stops-and-take-overs",
        "tests/server/test_acknowledged_is_kept.py tests/store/test_writer_fencing.py "
        "tests/server/durable_streams/test_snapshot_size.py",
    ),
    ProofTests("million-streams", "tests/store/test_many_streams.py"),
    ProofTests(
        "snapshot-and-follow",
        "tests/follow/test_interleavings.py tests/follow/test_faults.py",
    ),
    ProofTests(
        "models",
        "tests/server/durable_streams/test_subscriptions_random.py "
        "tests/archive/events/test_dispatcher_model.py tests/store/usage/test_usage_storage.py "
        "tests/store/upkeep/test_due_ranges.py",
    ),
    ProofTests("snapshotter-kills", "tests/spark/snapshotter/test_kills.py"),
    Program(
        "publish-kills",
        "tests.ingest.publish_kills",
        long="--seed {seed} --kills 30",
        short="--seed {seed} --kills 4",
    ),
    ProofTests(
        "ingest",
        "tests/ingest/test_kills.py tests/ingest/test_faults.py tests/ingest/test_failover.py "
        "tests/ingest/test_large_transactions.py tests/ingest/test_replication.py "
        "tests/ingest/test_change_writer.py tests/ingest/test_publish.py",
    ),
    ProofTests(
        "attacks",
        "tests/server/durable_streams/test_fuzz.py "
        "tests/server/test_loop_lag.py tests/server/http/test_unread_answers.py "
        "tests/server/http/test_silent_connections.py tests/server/http/test_stalled_bodies.py "
        "tests/server/http/test_response_shares.py tests/server/console/test_records.py",
    ),
    ProofTests("native-codec", "tests/records/prove_codec.py", needs=("cargo",)),
    ProofTests("exit-status", "tests/cli/test_exit_status.py"),
    ProofTests(
        "deployment-files",
        "tests/deploy/prove_chart.py tests/deploy/prove_unit.py",
        needs=("helm", "systemd-analyze"),
    ),
    ProofTests("shell-completion", "tests/cli/prove_completion.py", needs=("zsh", "fish")),
    # LAREDO_SOURCE=CHECKOUT where Go's proxy does not have Laredo
    ProofTests("laredo", "tests/interop/prove_laredo.py"),
)
