"""Creations, deletions, forks and snapshots of streams."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field

from streamfold.testing.adversary.client import Answer, Client, LostError
from streamfold.testing.adversary.ledger import (
    BrokenPromiseError,
    Existence,
    Ledger,
    Life,
    OperationOutcome,
    SnapshotPublication,
    StreamHistory,
)
from streamfold.testing.adversary.reading import JSON, outcome_of, stream_headers
from streamfold.testing.adversary.writers import Writers


@dataclass
class Lifecycle:
    """Creates, replaces, forks and deletes streams and basins, and records what exists."""

    ledger: Ledger
    client: Client
    writers: Writers
    #: Basins that certainly exist. A missing one is created again.
    basins: set[str] = field(default_factory=set)

    async def _ensure_basin(self, basin: str, *, creates: bool) -> bool:
        if basin in self.basins:
            return True
        config = {
            "create_stream_on_append": creates,
            "default_stream_config": {"retention_policy": {"infinite": {}}},
        }
        content = json.dumps({"basin": basin, "config": config}).encode()
        answer = await self.client.exchange("POST", "/v1/basins", JSON, content)
        if answer.status == 201 or answer.code == "resource_already_exists":
            self.basins.add(basin)
        return basin in self.basins

    async def create(self, history: StreamHistory) -> None:
        """Create the stream. Without an answer, its existence is uncertain."""
        if not await self._ensure_basin(history.basin, creates=history.creates):
            return
        if history.changing or history.existence is not Existence.GONE:
            return
        if history.creates:
            await self._create_by_append(history)
        elif history.json:
            await self._change(history, "PUT", f"/{history.basin}/{history.name}", JSON, b"")
        else:
            config: dict[str, object] = {"stream": history.name}
            if history.age is not None:
                config["config"] = {"retention_policy": {"age": history.age}}
            body = json.dumps(config).encode()
            headers = {"s2-basin": history.basin} | JSON
            await self._change(history, "POST", "/v1/streams", headers, body)

    async def _change(
        self,
        history: StreamHistory,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        source: tuple[Life, int] | None = None,
    ) -> None:
        """Send a creation and record its effect."""
        born_ms = self.ledger.clock.wall_ms()
        born = history.begin_change(f"creation begins: {method} {path} {headers}")
        outcome, text = OperationOutcome.UNKNOWN, "no answer"
        try:
            answer = await self.client.exchange(method, path, headers, body)
            outcome, text = outcome_of(answer), str(answer)
            existed = answer.status == 200 or answer.code == "resource_already_exists"
            if existed or answer.code == "other":
                raise BrokenPromiseError(
                    history, f"{history} does not exist, and its creation answers {answer}"
                )
        except LostError as error:
            outcome = OperationOutcome.UNKNOWN if error.sent else OperationOutcome.REFUSED
            raise
        finally:
            history.end_change(f"creation {outcome}: {text}")
            if outcome is OperationOutcome.KEPT:
                life = history.be_born(born, born_ms, source)
                life.answered_ms = self.ledger.clock.wall_ms()
            elif outcome is OperationOutcome.UNKNOWN:
                history.be_born(born, born_ms, source)
                history.existence = Existence.UNSETTLED

    async def _create_by_append(self, history: StreamHistory) -> None:
        born_ms = self.ledger.clock.wall_ms()
        born = history.begin_change("an append creates it")
        append = self.ledger.begin(history, self.client.target.generation, 1, 10)
        try:
            await self.writers.append_s2(history, append)
        finally:
            history.end_change(f"creation by append {append.outcome}")
            if append.outcome is OperationOutcome.KEPT:
                append.life = history.be_born(born, born_ms)
                append.life.answered_ms = self.ledger.clock.wall_ms()
                append.life.tail = append.length
            elif append.outcome is not OperationOutcome.REFUSED:
                history.be_born(born, born_ms)
                history.existence = Existence.UNSETTLED

    async def delete(self, history: StreamHistory, dice: random.Random) -> bool:
        """Delete the stream if it certainly exists. Returns whether that was acknowledged."""
        if history.living is None or history.forking or self.writers.producing(history):
            return False
        history.begin_change("deletion begins", deletes=True)
        outcome, text = OperationOutcome.UNKNOWN, "no answer"
        try:
            answer = await self._send_deletion(history, dice)
            outcome, text = outcome_of(answer), str(answer)
        except LostError as error:
            outcome = OperationOutcome.UNKNOWN if error.sent else OperationOutcome.REFUSED
            raise
        finally:
            history.end_change(f"deletion {outcome}: {text}")
            if outcome is OperationOutcome.KEPT:
                history.die()
                self.ledger.totals.deletions += 1
                if history.creates:
                    # Concurrent appends may have created it again.
                    history.existence = Existence.UNSETTLED
            elif outcome is OperationOutcome.UNKNOWN:
                history.existence = Existence.UNSETTLED
        return outcome is OperationOutcome.KEPT

    async def _send_deletion(self, history: StreamHistory, dice: random.Random) -> Answer:
        if history.json and dice.random() < 0.5:
            return await self.client.exchange("DELETE", f"/{history.basin}/{history.name}")
        path = f"/v1/streams/{history.name}"
        return await self.client.exchange("DELETE", path, {"s2-basin": history.basin})

    async def replace(self, history: StreamHistory, dice: random.Random) -> None:
        """Delete and create a stream concurrently."""
        if history.living is None or history.age is not None or history.forking:
            return
        born_ms = self.ledger.clock.wall_ms()
        born = history.begin_change("deletion and creation begin at once", deletes=True)
        headers = {"s2-basin": history.basin} | JSON
        body = json.dumps({"stream": history.name}).encode()
        try:
            answers = await asyncio.gather(
                self._send_deletion(history, dice),
                self.client.exchange("POST", "/v1/streams", headers, body),
                return_exceptions=True,
            )
        finally:
            history.end_change("deletion and creation are over")
            history.existence = Existence.UNSETTLED
        history.note(f"deletion: {answers[0]}; creation: {answers[1]}")
        deletion, creation = (
            outcome_of(answer) if isinstance(answer, Answer) else OperationOutcome.UNKNOWN
            for answer in answers
        )
        if creation is OperationOutcome.KEPT:
            history.die()
            history.be_born(born, born_ms).answered_ms = self.ledger.clock.wall_ms()
        elif deletion is OperationOutcome.KEPT and creation is OperationOutcome.REFUSED:
            history.die()
        elif deletion is OperationOutcome.REFUSED and creation is OperationOutcome.REFUSED:
            history.existence = Existence.ALIVE

    async def delete_basin(self, basin: str) -> None:
        """Delete a whole basin. Once acknowledged, its streams are gone."""
        if basin not in self.basins:
            return
        histories = [h for h in self.ledger.histories.values() if h.basin == basin]
        if any(history.changing for history in histories):
            return
        self.basins.discard(basin)
        for history in histories:
            history.begin_change("deletion of the basin begins", deletes=True)
        outcome = OperationOutcome.UNKNOWN
        try:
            answer = await self.client.exchange("DELETE", f"/v1/basins/{basin}")
            outcome = outcome_of(answer)
        except LostError as error:
            outcome = OperationOutcome.UNKNOWN if error.sent else OperationOutcome.REFUSED
            raise
        finally:
            for history in histories:
                history.end_change(f"deletion of the basin {outcome}")
                if outcome is OperationOutcome.KEPT:
                    history.die()
                elif outcome is OperationOutcome.UNKNOWN:
                    history.existence = Existence.UNSETTLED
            self.ledger.totals.deletions += outcome is OperationOutcome.KEPT

    async def fork(self, source: StreamHistory, target: StreamHistory, dice: random.Random) -> None:
        """Fork a Durable Stream at an existing position."""
        life = source.living
        usable = target.existence is Existence.GONE and not target.changing
        if life is None or target is source or not usable:
            return
        position = dice.randint(life.first, life.tail)
        headers = {
            "stream-forked-from": f"/{source.basin}/{source.name}",
            "stream-fork-offset": f"{position:016d}_{0:016d}",
        }
        path = f"/{target.basin}/{target.name}"
        source.forking += 1
        try:
            await self._change(target, "PUT", path, headers, b"", (life, position))
        finally:
            source.forking -= 1
        self.ledger.totals.forks += target.existence is Existence.ALIVE

    async def publish(self, history: StreamHistory, dice: random.Random) -> None:
        """Publish a snapshot, which may trim the records that it covers."""
        life, changes = history.living, history.changes
        if life is None or history.age is not None:
            return
        sent = [s.position for s in life.snapshots if s.outcome is not OperationOutcome.REFUSED]
        newest = max(sent, default=life.first)
        if newest > life.tail:
            return
        position = dice.randint(max(newest, life.first), life.tail)
        self.ledger.publications += 1
        snapshot = SnapshotPublication(
            self.ledger.publications,
            position,
            dice.random() < 0.3,
            self.client.target.generation,
            life,
        )
        life.snapshots.append(snapshot)
        history.note(f"snapshot {snapshot.id} at {position}, trims: {snapshot.trims}")
        headers = stream_headers(history.basin)
        headers["stream-trim-on-snapshot"] = "true" if snapshot.trims else "false"
        path = f"/v1/streams/{history.name}/snapshot/{position}"
        outcome, text = OperationOutcome.UNKNOWN, "no answer"
        try:
            answer = await self.client.exchange(
                "PUT", path, headers, snapshot.content(), generation=snapshot.generation
            )
            outcome, text = outcome_of(answer), str(answer)
            self.ledger.totals.snapshots += outcome is OperationOutcome.KEPT
        except LostError as error:
            outcome = OperationOutcome.UNKNOWN if error.sent else OperationOutcome.REFUSED
            raise
        finally:
            if history.changes != changes and outcome is OperationOutcome.KEPT:
                outcome = OperationOutcome.UNKNOWN  # it may belong to another life
            snapshot.outcome = outcome
            history.note(f"snapshot {snapshot.id} {outcome}: {text}")
