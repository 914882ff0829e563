// Drives a server from its .proto alone: node drive.js ADDRESS INCLUDE_DIR... Prints what it was answered, as JSON.
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, ...includeDirs] = process.argv.slice(2);
const files = ["radixcache/v1/prefix_cache.proto", "google/rpc/status.proto", "google/rpc/error_details.proto"];
const types = loader.loadSync(files, { keepCase: true, longs: Number, defaults: true, oneofs: true, includeDirs });
const { PrefixCacheService } = grpc.loadPackageDefinition(types).radixcache.v1;
const client = new PrefixCacheService(address, grpc.credentials.createInsecure());

function call(verb, request) {
  return new Promise((resolve, reject) => {
    const deadline = Date.now() + 10_000;
    client[verb](request, { deadline }, (error, answer) => (error ? reject(error) : resolve(answer)));
  });
}

// What an error says: its code, the reason that the details name, and the numbers that come with it.
async function refusal(verb, request) {
  try {
    return { answer: await call(verb, request) };
  } catch (error) {
    const status = types["google.rpc.Status"].deserialize(error.metadata.get("grpc-status-details-bin")[0]);
    const info = types["google.rpc.ErrorInfo"].deserialize(status.details[0].value);
    return { code: grpc.status[error.code], domain: info.domain, reason: info.reason, numbers: info.metadata };
  }
}

function pack(tokens) {
  return Buffer.from(Uint32Array.from(tokens).buffer);
}

function unpack(bytes) {
  return Array.from({ length: bytes.length / 4 }, (_, number) => bytes.readUInt32LE(4 * number));
}

// A request from its match to its release; returns what was cached, its blocks, and those that a growth added.
async function listed(prompt) {
  const lease_id = "listed";
  const opened = await call("MatchPrefix", { token_ids: prompt, lease_id, max_tokens: 9, num_tokens: 10 });
  const grown = await call("Allocate", { lease_id, num_tokens: 13, id_format: "ID_FORMAT_REPEATED" });
  const inserted = await call("Insert", { lease_id, token_ids: prompt });
  await call("Release", { lease_id });
  return {
    cached: opened.num_cached_tokens,
    table: opened.block_table_ids,
    added: grown.added_block_ids,
    published: inserted.block_ids,
  };
}

async function packed(prompt) {
  const lease_id = "packed";
  const opened = await call("MatchPrefix", { tokens: pack(prompt), lease_id, max_tokens: 9, num_tokens: 10 });
  const grown = await call("Allocate", { lease_id, num_tokens: 13 });
  const inserted = await call("Insert", { lease_id, tokens: pack(prompt) });
  await call("Release", { lease_id });
  return {
    cached: opened.num_cached_tokens,
    table: unpack(opened.block_table),
    added: unpack(grown.added_blocks),
    published: unpack(inserted.blocks),
  };
}

// Two messages on a stream: one opens a lease and grows it, the other asks for too much, and ends it.
function session() {
  const stream = client.Session({ deadline: Date.now() + 10_000 });
  const lease_id = "session";
  const step = (...operations) => stream.write({ batch: { operations, engine_id: "node-0" } });
  return new Promise((resolve, reject) => {
    const answers = [];
    stream.on("data", (answer) => answers.push(answer.batch.results.map((item) => item.result)));
    stream.on("error", reject);
    stream.on("end", () => resolve(answers));
    step({ match_prefix: { lease_id, num_tokens: 4 } }, { allocate: { lease_id, num_tokens: 8 } });
    step({ allocate: { lease_id, num_blocks: 1000 } }, { release: { lease_id } });
    stream.end();
  });
}

async function main() {
  const prompt = [11, 12, 13, 14, 21, 22, 23, 24, 31, 32];
  const said = { listed: await listed(prompt), packed: await packed(prompt), session: await session() };
  said.unknown = await refusal("Release", { lease_id: "nobody" });
  said.exhausted = await refusal("MatchPrefix", { num_tokens: 1000 });
  said.invalid = await refusal("Probe", { tokens: Buffer.from([1, 2, 3]) });
  console.log(JSON.stringify(said));
}

main();
