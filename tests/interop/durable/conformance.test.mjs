// The protocol's own suite, as published. Its command cannot find its tests; this file is the way in.
import { runConformanceTests } from "@durable-streams/server-conformance-tests";

runConformanceTests({
  baseUrl: process.env.STREAMFOLD_URL,
  longPollTimeoutMs: 3000,
  subscriptions: true,
});
