"""The table of mutations: one broken guarantee each, with the check that must notice."""

from __future__ import annotations

from tests.mutants.mutation import (
    FAILED,
    Edit,
    Mutation,
    adversary,
    change,
    simulation,
    test,
)

#: What a simulation or an adversary says when acknowledged records are gone.
_LOST = (
    r"tail went back|is missing from a read|was acknowledged for|is lost|its tail had reached"
    r"|the tail of .* was \d+|acknowledged records are lost|missing from storage"
    r"|was record \d+ of append|ended before append|answered with 500 storage, unexplained"
)

_APPENDS = (
    Mutation(
        "ack-before-commit",
        "An append is acknowledged only when storage has it.",
        change(
            "store/log/committer.py",
            "                await self._engine.commit(batch)\n",
            "                self._late = asyncio.ensure_future(self._engine.commit(batch))\n",
        ),
        simulation(),
        _LOST,
    ),
    Mutation(
        "ack-before-flush",
        "A commit waits until the log of the database is flushed.",
        change(
            "store/engine/slatedb.py",
            "            sequence = await self._database.commit(batch.native)\n",
            """            late = self._database.commit(batch.native)
            self._late = asyncio.get_running_loop().call_later(0.5, asyncio.ensure_future, late)
            sequence = 0
""",
        ),
        adversary(),
        rf"{_LOST}|exists?, and (is|are) not listed",
    ),
    Mutation(
        "skip-fence",
        "An append with the wrong fencing token is refused.",
        change(
            "store/log/stream_log.py",
            "if token is not None and token != self._fencing_token:",
            "if token is not None and False:",
        ),
        adversary(),
        r"has the fencing token",
    ),
    Mutation(
        "ignore-match-seq-num",
        "An append with match_seq_num is stored at this seq_num or not at all.",
        change(
            "store/log/stream_log.py",
            "if expected is not None and expected != self._next_seq_num:",
            "if expected is not None and expected > self._next_seq_num:",
        ),
        adversary(),
        r"match_seq_num ignored|asked for \d+, is at",
    ),
    Mutation(
        "overtake-the-queue",
        "Appends to one stream are accepted in the order of the calls.",
        change(
            "store/append_queues.py",
            "        if queue is None:\n            mounted = self._supervisor.current\n",
            "        if queue is None or True:\n            mounted = self._supervisor.current\n",
        ),
        test("tests/store/log/test_append_queues.py"),
        FAILED,
    ),
    Mutation(
        "reuse-seq-num",
        "A seq_num is assigned once, also after a crash.",
        change(
            "store/log/stream_log.py",
            "tail=TailMark(self._next_seq_num, self._last_timestamp, self._last_arrival),",
            "tail=TailMark(int(self.durable.seq_num), self._last_timestamp, self._last_arrival),",
        ),
        simulation(),
        _LOST,
    ),
    Mutation(
        "believe-old-copy",
        "No copy of a stream's state is believed that a later commit did not update.",
        (
            Edit(
                "store/log/log_reader.py",
                "        self._trim_grace = trim_grace\n",
                "        self._trim_grace = trim_grace\n        self._copies: dict[int, bytes] = {}\n",
            ),
            Edit(
                "store/log/log_reader.py",
                "        state = rows.decode(value, StateRow) if value else StateRow()\n",
                "        value = self._copies.setdefault(row.id, value) if value else None\n"
                "        state = rows.decode(value, StateRow) if value else StateRow()\n",
            ),
        ),
        simulation(),
        _LOST,
    ),
    Mutation(
        "refuse-by-pending-state",
        "A refusal never tells of state that a crash could still undo.",
        change(
            "store/mount.py",
            "        await log.settled()\n",
            "        await asyncio.sleep(0)\n",
        ),
        test("tests/store/log/test_append.py"),
        FAILED,
    ),
    Mutation(
        "definite-refusal",
        "An append whose fate is unknown is not reported as refused.",
        change(
            "store/log/committer.py",
            "            else OutcomeUnknownError(\n",
            "            else StoreRecoveringError(\n",
        ),
        simulation("--store-only"),
        r"refused record",
    ),
    Mutation(
        "accept-producer-twice",
        "A producer that repeats an append does not store it twice.",
        change(
            "store/log/terms.py",
            "        return producer.seq <= former.seq\n",
            "        return producer.seq < former.seq\n",
        ),
        simulation(),
        r"is stored twice|was acknowledged at \d+ and is at",
    ),
    Mutation(
        "forget-producers",
        "A producer is recognized after a restart, too.",
        change(
            "store/log/stream_log.py",
            "            ops += self.terms.take_changes(self.id)\n",
            "            self.terms.take_changes(self.id)\n",
        ),
        adversary(),
        r"was accepted twice|of producer|is at seq_num \d+ and also at|producer_gap",
    ),
    Mutation(
        "timestamps-go-back",
        "Timestamps of a stream never decrease.",
        change(
            "store/log/stream_log.py",
            "config.timestamp_uncapped, now, self._last_timestamp\n",
            "config.timestamp_uncapped, now - first % 7, 0\n",
        ),
        adversary(),
        r"timestamps of .* decrease",
    ),
)

_READS = (
    Mutation(
        "serve-before-durable",
        "Readers see a record only when it is durable.",
        (
            Edit(
                "store/log/committer.py",
                "        batch = built.batch\n",
                """        batch = built.batch
        self._on_durable(commit.shares)
        for share in commit.shares:
            if share.chunks:
                share.log.durable = share.chunks[-1].end
""",
            ),
            Edit("store/log/committer.py", "            self._on_durable(commit.shares)\n", ""),
        ),
        simulation(),
        _LOST,
    ),
    Mutation(
        "follower-skips",
        "A follower gets every record, in order.",
        change(
            "store/log/recent_chunks.py",
            "            chunks.append(stream.chunks[index])\n",
            "            if index == first or index % 2:\n"
            "                chunks.append(stream.chunks[index])\n",
        ),
        simulation(),
        r"has gaps|a follower got|is missing",
    ),
)

_DELETIONS = (
    Mutation(
        "forget-close",
        "A closed stream takes no append, also after a restart.",
        change(
            "store/log/stream_log.py",
            "            closed=self.terms.closed,\n",
            "            closed=False,\n",
        ),
        test("tests/store/test_durable_streams_state_machine.py"),
        FAILED,
    ),
    Mutation(
        "drop-trim",
        "Trimmed records stay trimmed.",
        change(
            "store/log/stream_log.py",
            "            trim_point=self.trims.accepted,\n",
            "            trim_point=0,\n",
        ),
        simulation(),
        r"although it was trimmed|although they are not trimmed",
    ),
    Mutation(
        "trim-without-snapshot",
        "What a snapshot trims, the snapshot covers: both are stored together.",
        change(
            "store/catalog/snapshots.py",
            "            op = keys.snapshot(log.id, new.seq_num), rows.encode(row)\n",
            "            op = keys.snapshot(log.id, new.seq_num), rows.encode(row)\n"
            "            await self.mount.committer.write_with(log)\n",
        ),
        test("tests/store/test_interleavings.py"),
        FAILED,
    ),
    Mutation(
        "read-beyond-fork",
        "A fork has the records of its source up to the fork's point, and no others.",
        change(
            "store/read/seek.py",
            "return chunks.cut_before(chunks.clear(chunk, segment.stream_id, key), segment.end)",
            "return chunks.clear(chunk, segment.stream_id, key)",
        ),
        simulation(),
        r"has gaps|was acknowledged|is now|stored twice",
    ),
    Mutation(
        "forget-lineage",
        "A fork of a fork has the records of all its ancestors.",
        change(
            "store/read/seek.py",
            "return (*lineage, Segment(holder, end)) if end else ()",
            "return (Segment(holder, end),) if end else ()",
        ),
        simulation("--store-only"),
        r"is missing|missing from storage|cannot be read",
    ),
    Mutation(
        "forget-forks",
        "Records that a fork inherits stay until no fork needs them.",
        change(
            "store/upkeep/clean_up.py",
            "                needed = min(needed, await self._trimmed_to(fork_id, row))\n",
            "                await self._trimmed_to(fork_id, row)\n",
        ),
        simulation(),
        r"is missing|cannot be read|gaps",
    ),
    Mutation(
        "expire-too-much",
        "Retention removes only records that are old enough.",
        change(
            "store/read/seek.py",
            "Expiry(limit, max(first, chunk.first_seq_num), chunk.arrived_at, starts, arrivals)",
            "Expiry(limit, chunk.last_seq_num + 1, chunk.arrived_at, starts, arrivals)",
        ),
        simulation(),
        r"is missing",
    ),
    Mutation(
        "append-after-basin-deletion",
        "A deleted basin takes no append.",
        change(
            "store/mount.py",
            "                    log.delete_with_basin()\n",
            "                    pass\n",
        ),
        simulation(),
        r"took an append after its deletion",
    ),
    Mutation(
        "forget-in-listing",
        "A listing names every stream.",
        change(
            "store/catalog/listing.py",
            "return Page(tuple(items), has_more=next_item is not None)",
            "return Page(tuple(items), has_more=False)",
        ),
        adversary(),
        r"exists, and is not listed",
    ),
)

_DISK = (
    Mutation(
        "skip-log-sync",
        "On local disk, an acknowledged append survives a power cut: its log is synced.",
        change(
            "store/engine/location.py",
            "    storage = Storage.local(str(folder), syncs_log=True)\n",
            "    storage = Storage.local(str(folder), syncs_log=False)\n",
        ),
        test(
            "tests/store/engine/test_power_cut.py::test_a_cut_between_any_two_syncs_loses_nothing"
        ),
        FAILED,
    ),
    Mutation(
        "skip-chunk-file-sync",
        "On local disk, a file of records survives a power cut: it is synced before it is named.",
        change(
            "blob/local_files.py",
            "        self._fsync(draft.descriptor)\n        self._secure_folder",
            "        self._secure_folder",
        ),
        test(
            "tests/store/engine/test_power_cut.py::test_a_cut_between_any_two_syncs_loses_nothing"
        ),
        FAILED,
    ),
    Mutation(
        "skip-checksum",
        "Damaged records are never returned as records.",
        change(
            "store/log/chunk_files.py",
            "        if len(payload) != part.size or crc32(payload) != part.checksum:\n",
            "        if len(payload) != part.size:\n",
        ),
        test("tests/store/log/test_chunk_file_reads.py"),
        FAILED,
    ),
    Mutation(
        "open-without-lock",
        "A store that is open is not opened by a second server.",
        change(
            "store/engine/process_locks.py",
            "    if not take_over:\n",
            "    if not take_over and not holder:\n",
        ),
        test("tests/store/engine/test_process_locks.py"),
        FAILED,
    ),
)

_SERVER = (
    Mutation(
        "forget-scope",
        "An access token is worth nothing on streams that it does not cover.",
        change(
            "model/grants.py",
            "            and _covered(self.streams, stream, needed=operation in _ON_STREAM)\n",
            "",
        ),
        test("tests/server/s2/test_sdk_access.py"),
        FAILED,
    ),
    Mutation(
        "uncounted-body",
        "Bodies that arrive take no more memory than their budget.",
        change(
            "server/http/request.py",
            "            await upload.reserve(declared)\n",
            "            pass\n",
        ),
        test(
            "tests/server/http/test_stalled_bodies.py"
            "::test_bodies_that_stall_cost_no_more_than_the_budget"
        ),
        FAILED,
    ),
    Mutation(
        "lose-wake",
        "A subscriber is woken for every record, also for those that come during a webhook.",
        change(
            "server/durable_streams/subscriptions/runner.py",
            "leases.acknowledge_all(draft.state, notified)",
            "leases.acknowledge_all(draft.state, entry.tails)",
        ),
        test(
            "tests/server/durable_streams/test_subscriptions_webhook.py"
            "::test_what_comes_before_an_answer_of_done_makes_the_next_wake"
        ),
        FAILED,
    ),
)

_ARCHIVES = (
    Mutation(
        "lose-event",
        "Each sink gets every event of an archive, also after failures.",
        change(
            "archive/events/delivery.py",
            """            try:
                await self._sink.send(event)
""",
            """            place = position_of(manifest, item.artifact)
            self._cursor.advance(event.event_id, place)
            try:
                await self._sink.send(event)
""",
        ),
        test("tests/archive/events/test_dispatcher_model.py"),
        FAILED,
    ),
    Mutation(
        "commit-without-swap",
        "Of two writers of an archive, one wins: a manifest is committed by compare-and-swap.",
        change(
            "archive/destinations/destination.py",
            "            return StoredManifest(\n"
            "                own, await self.blobs.put_if_match(MANIFEST_KEY, data, previous.etag)\n"
            "            )\n",
            "            await self.blobs.put(MANIFEST_KEY, data)\n"
            "            head = await self.blobs.head(MANIFEST_KEY)\n"
            "            return StoredManifest(own, head.etag or '')\n",
        ),
        test(
            "tests/archive/write/test_commit.py"
            "::test_a_late_swap_of_a_writer_that_was_replaced_has_no_effect"
        ),
        FAILED,
    ),
    Mutation(
        "apply-diff-twice",
        "A follower of an archive gets every change once.",
        change(
            "archive/read/change_feed.py",
            "                            self.position = _reached(item)\n",
            "                            self.position = self.position or _reached(item)\n",
        ),
        test("tests/archive/read/test_follower.py"),
        FAILED,
    ),
    Mutation(
        "replay-covered-record",
        "A state restored from a snapshot has every record once.",
        change(
            "follow/restore/replay.py",
            "        self.position = cursor\n",
            "        self.position = max(cursor - 1, 0)\n",
        ),
        test("tests/follow/test_restore.py"),
        FAILED,
    ),
)

#: What finding 1 was: a stop stores a copy of the state of each stream that is not in use, and a change
#: of the stream deletes its copy. Whether copies are read first, or not at all, depends on a flag that
#: another read may change meanwhile: then a copy is neither used nor deleted.
_FINDING_1 = (
    Edit(
        "store/mount.py",
        "        await self.committer.drain()\n",
        """        await self.committer.drain()
        self._left |= {ref: log.copy() for ref, log in self._logs.items() if log.idle}
        with suppress(StreamfoldError):
            await self.committer.write(list(self._left.values()))
""",
    ),
    Edit(
        "store/mount.py",
        "        self._logs: OrderedDict[StreamRef, StreamLog] = OrderedDict()\n",
        """        self._logs: OrderedDict[StreamRef, StreamLog] = OrderedDict()
        self._left: dict[StreamRef, Op] = {}
""",
    ),
    Edit(
        "store/mount.py",
        "            if log.idle:\n",
        "            if log.idle:\n                self._left[ref] = log.copy()\n",
    ),
    Edit(
        "store/mount.py",
        "            self._logs[ref] = outcome\n",
        "            self._logs[ref] = outcome\n            self._left.pop(ref, None)\n",
    ),
    Edit("store/log/stream_log.py", '        "basin",\n', '        "basin",\n        "copied",\n'),
    Edit(
        "store/log/stream_log.py",
        "        self.leases = 0\n",
        "        self.leases = 0\n        self.copied = False\n",
    ),
    Edit(
        "store/log/stream_log.py",
        "        for rows_of_caller in attached:\n            ops += rows_of_caller.rows\n",
        """        for rows_of_caller in attached:
            ops += rows_of_caller.rows
        if self.copied and (pending or ops):
            ops.append((self.copy()[0], None))
            self.copied = False
""",
    ),
    Edit(
        "store/log/stream_log.py",
        "    def _state_row(self) -> StateRow:\n",
        """    def copy(self) -> Op:
        return b"\\x00copy" + keys.state(self.id), rows.encode(self._state_row())

    def _state_row(self) -> StateRow:
""",
    ),
    Edit(
        "store/log/log_reader.py",
        "        self._trim_grace = trim_grace\n",
        "        self._trim_grace = trim_grace\n        self._copies_likely = True\n",
    ),
    Edit(
        "store/log/log_reader.py",
        "            states = [keys.state(row.id) for row in streams.values()]\n",
        """            states = [keys.state(row.id) for row in streams.values()]
            named = [b"\\x00copy" + key for key in states]
            copies: list[bytes | None] = [None] * len(states)
            if self._copies_likely:
                copies = await self._engine.get_many(named) if named else []
""",
    ),
    Edit(
        "store/log/log_reader.py",
        "            values = await self._engine.get_many(states) if states else []\n",
        """            values = await self._engine.get_many(states) if states else []
            if not self._copies_likely:
                copies = await self._engine.get_many(named) if named else []
            self._copies_likely = sum(map(bool, copies)) > len(refs) // 2
            values = [copy or value for copy, value in zip(copies, values, strict=True)]
""",
    ),
    Edit(
        "store/log/log_reader.py",
        "        return [logs[ref] for ref in refs]\n",
        """        for ref, copy in zip(streams, copies, strict=True):
            if copy and isinstance(log := logs[ref], StreamLog):
                log.copied = True
        return [logs[ref] for ref in refs]
""",
    ),
)

_FINDINGS = (
    Mutation(
        "finding-1-simulated",
        "A stored copy of a stream's state never outlives that state: finding 1, in simulated time.",
        _FINDING_1,
        simulation(),
        rf"{_LOST}|was taken although it was closed",
    ),
    Mutation(
        "finding-1-attacked",
        "The same, on a real server.",
        _FINDING_1,
        # Of everything that clients and machines do, only this brings the two reads together often.
        adversary("--operations", "append,herd,read nothing", "--faults", "kill,stop"),
        _LOST,
    ),
)

MUTATIONS = (*_APPENDS, *_READS, *_DELETIONS, *_DISK, *_SERVER, *_ARCHIVES, *_FINDINGS)
