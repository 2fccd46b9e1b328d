export default { test: { include: ["conformance.test.mjs"] } };
