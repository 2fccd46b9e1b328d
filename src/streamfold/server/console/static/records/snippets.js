// Commands that do elsewhere what the page shows.

import { endpoint, streamPath } from "../api.js";

/** A text as one word of a POSIX shell. */
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
/** A text as a literal of Python, which JSON's strings are. */
const literal = (text) => JSON.stringify(text);

const auth = (guarded) => (guarded ? ' -H "authorization: Bearer $S2_ACCESS_TOKEN"' : "");

/** How to read the record at `seqNum` by curl, by the command line and in Python. */
export function readSnippets(basin, stream, seqNum, guarded) {
  const where = endpoint();
  return {
    curl: `curl ${quoted(`${where}/${streamPath(stream)}/records?seq_num=${seqNum}&count=1`)} -H ${quoted(`s2-basin: ${basin}`)}${auth(guarded)}`,
    cli: `streamfold read ${quoted(`s2://${basin}/${stream}`)} --endpoint ${quoted(where)} --seq-num ${seqNum} -n 1`,
    python: [
      "import asyncio, os",
      "from s2_sdk import S2, Endpoints, ReadLimit, SeqNum",
      "",
      "async def main():",
      `    here = ${literal(where)}`,
      '    async with S2(os.environ.get("S2_ACCESS_TOKEN", "ignored"), endpoints=Endpoints(account=here, basin=here)) as s2:',
      `        stream = s2.basin(${literal(basin)}).stream(${literal(stream)})`,
      `        batch = await stream.read(start=SeqNum(${seqNum}), limit=ReadLimit(count=1))`,
      "        print(batch.records)",
      "",
      "asyncio.run(main())",
      "",
    ].join("\n"),
  };
}
