// The official TypeScript SDK, unmodified, against the server named by S2_ACCOUNT_ENDPOINT and
// S2_BASIN_ENDPOINT. Exits with 0 and a line per behaviour when everything holds.
import assert from "node:assert/strict";
import {
  AppendInput,
  AppendRecord,
  BatchTransform,
  FencingTokenMismatchError,
  Producer,
  RangeNotSatisfiableError,
  S2,
  S2Environment,
  S2Error,
  SeqNumMismatchError,
} from "@s2-dev/streamstore";

// By default, an append that takes five seconds is repeated, and is in the stream twice.
const timeouts = { requestTimeoutMillis: 120_000, connectionTimeoutMillis: 120_000 };
const s2 = new S2({ ...S2Environment.parse(), accessToken: process.env.S2_ACCESS_TOKEN, ...timeouts });
const BASIN = "typescript-basin";
const text = (body) => AppendRecord.string({ body });

async function collect(session, count) {
  const bodies = [];
  for await (const record of session) {
    bodies.push(record.body);
    if (bodies.length === count) break;
  }
  return bodies;
}

const behaviours = {
  async "basins and streams are created, listed, configured and deleted"() {
    await s2.basins.create({ basin: BASIN });
    const basin = s2.basin(BASIN);
    await basin.streams.create({ stream: "a/b c", config: { retentionPolicy: { ageSecs: 60 } } });
    const listed = await basin.streams.list({ prefix: "a/" });
    assert.deepEqual(listed.streams.map((stream) => stream.name), ["a/b c"]);
    const config = await basin.streams.getConfig({ stream: "a/b c" });
    assert.equal(config.retentionPolicy.ageSecs, 60);
    await assert.rejects(basin.streams.create({ stream: "a/b c" }), (error) => error.status === 409);
    await basin.streams.delete({ stream: "a/b c" });
  },

  async "a unary append is read back as text and as bytes"() {
    const basin = s2.basin(BASIN);
    await basin.streams.create({ stream: "unary" });
    const stream = basin.stream("unary");
    const ack = await stream.append(
      AppendInput.create([
        AppendRecord.string({ body: "héllo", headers: [["k", "v"]] }),
        AppendRecord.bytes({ body: new Uint8Array([0, 255, 1]) }),
      ]),
    );
    assert.deepEqual([ack.start.seqNum, ack.end.seqNum, ack.tail.seqNum], [0, 2, 2]);
    const start = { start: { from: { seqNum: 0 } } };
    const strings = await stream.read(start);
    assert.equal(strings.records[0].body, "héllo");
    assert.deepEqual(strings.records[0].headers, [["k", "v"]]);
    const bytes = await stream.read(start, { as: "bytes" });
    assert.deepEqual([...bytes.records[1].body], [0, 255, 1]);
    assert.equal((await stream.checkTail()).tail.seqNum, 2);
  },

  async "conditions and positions that do not hold are told apart"() {
    const stream = s2.basin(BASIN).stream("unary");
    await assert.rejects(
      stream.append(AppendInput.create([text("x")], { matchSeqNum: 9 })),
      (error) => error instanceof SeqNumMismatchError && error.expectedSeqNum === 2,
    );
    await assert.rejects(
      stream.append(AppendInput.create([text("x")], { fencingToken: "no" })),
      FencingTokenMismatchError,
    );
    await assert.rejects(
      stream.read({ start: { from: { seqNum: 99 } } }),
      RangeNotSatisfiableError,
    );
    await assert.rejects(
      s2.basin(BASIN).stream("missing").append(AppendInput.create([text("x")])),
      (error) => error instanceof S2Error && error.code === "stream_not_found",
    );
  },

  async "an append session acknowledges in order, and a read session follows it"() {
    const basin = s2.basin(BASIN);
    await basin.streams.create({ stream: "session" });
    const stream = basin.stream("session");
    const reading = await stream.readSession({ start: { from: { seqNum: 0 } } });
    const read = collect(reading, 200);
    const session = await stream.appendSession();
    const tickets = [];
    for (let index = 0; index < 200; index += 1) {
      tickets.push(await session.submit(AppendInput.create([text(`${index}`)])));
    }
    const acks = await Promise.all(tickets.map((ticket) => ticket.ack()));
    assert.deepEqual(acks.map((ack) => ack.start.seqNum), [...Array(200).keys()]);
    await session.close();
    assert.deepEqual(await read, [...Array(200).keys()].map(String));
  },

  async "a producer batches records and acknowledges each"() {
    const basin = s2.basin(BASIN);
    await basin.streams.create({ stream: "producer" });
    const stream = basin.stream("producer");
    const producer = new Producer(new BatchTransform(), await stream.appendSession());
    const tickets = [];
    for (let index = 0; index < 50; index += 1) tickets.push(await producer.submit(text(`${index}`)));
    await producer.flush();
    const acks = await Promise.all(tickets.map((ticket) => ticket.ack()));
    assert.deepEqual(acks.map((ack) => ack.seqNum()), [...Array(50).keys()]);
    await producer.close();
  },

  // As npm's @s2-dev/resumable-stream does in single-use mode: one append session writes the records and,
  // in its last batch, the fence that says "done" and the trim of all before it. Who follows, and who
  // resumes right after it, still gets everything.
  async "a stream that ends by trimming itself reaches followers and those who resume"() {
    const basin = s2.basin(BASIN);
    await basin.streams.create({ stream: "single-use" });
    const stream = basin.stream("single-use");
    const until = async (session) => {
      const bodies = [];
      for await (const record of session) {
        const [[name, value] = []] = record.headers ?? [];
        const command = name === "" ? value : undefined;
        if (command === "fence" && record.body.startsWith("end-")) break;
        if (!command) bodies.push(record.body);
      }
      return bodies;
    };
    const start = { start: { from: { seqNum: 0 } } };
    const following = until(await stream.readSession(start));
    await stream.append(AppendInput.create([AppendRecord.fence("owner")]));
    const session = await stream.appendSession();
    const options = { fencingToken: "owner" };
    await session.submit(AppendInput.create([text("one"), text("two")], options));
    const last = [text("three"), AppendRecord.trim(5), AppendRecord.fence("end-1")];
    const ticket = await session.submit(AppendInput.create(last, options));
    await ticket.ack();
    await session.close();
    assert.deepEqual(await following, ["one", "two", "three"]);
    assert.deepEqual(await until(await stream.readSession(start)), ["one", "two", "three"]);
  },

  async "a mismatch in an append session ends it with that error"() {
    const stream = s2.basin(BASIN).stream("session");
    const session = await stream.appendSession();
    const ticket = await session.submit(AppendInput.create([text("x")], { matchSeqNum: 5 }));
    await assert.rejects(ticket.ack(), SeqNumMismatchError);
  },
};

for (const [name, behaviour] of Object.entries(behaviours)) {
  await behaviour();
  console.log(`ok ${name}`);
}
process.exit(0);
